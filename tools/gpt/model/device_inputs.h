// Copies the tokens and targets of a micro-batch to the device, through page-locked memory. For the
// backward pass, the class also copies a list of the positions in the batch, sorted by token. If
// several positions have the same token, these positions are in ascending order.
//
// Thread rule: one thread at a time. Each copy is enqueued on the caller's stream.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/device.h>
#include "base/aligned_buffer.h"
#include "tools/gpt/model/batch_shape.h"

namespace sluice::gpt {

class DeviceInputs {
 public:
  // `device` must outlive the object.
  // Fails with kOutOfMemory if there is not enough memory.
  DeviceInputs(const GptConfig& config, BatchShape shape, Device& device);
  DeviceInputs(const DeviceInputs&) = delete;
  DeviceInputs& operator=(const DeviceInputs&) = delete;
  ~DeviceInputs();

  // Returns how many 32-bit numbers each micro-batch has on the device.
  static std::uint64_t count(const GptConfig& config, BatchShape shape) {
    return 3 * shape.rows() + config.vocabulary + 1;
  }
  // `place` must be device memory with room for count() numbers per micro-batch. Must be called
  // once.
  void put_at(std::uint32_t* place) { place_ = place; }

  // Copies the inputs of one training micro-batch to the device. Also copies the sorted list of
  // positions. The caller may free the memory of the spans when the call has returned.
  void bring_for_training(std::uint32_t micro_batch, std::span<const std::uint32_t> tokens,
                          std::span<const std::uint32_t> targets, StreamId stream);
  // Copies the inputs of one evaluation batch to the device, unless the device already has these
  // inputs. If there are fewer tokens than in a micro-batch, token 0 fills up the rest. An
  // evaluation uses the place of micro-batch 0.
  void bring(std::uint32_t batch, std::span<const std::uint32_t> tokens,
             std::span<const std::uint32_t> targets, StreamId stream);
  // The caller gives the number `batch` to another batch. So the next bring() of this number copies
  // its inputs again.
  void renew(std::uint32_t batch);

  const std::uint32_t* tokens(std::uint32_t micro_batch) const { return place_of(micro_batch); }
  const std::uint32_t* targets(std::uint32_t micro_batch) const {
    return place_of(micro_batch) + rows_;
  }
  // order() lists the positions of the batch, sorted by the token at each position. The positions
  // of a token t start at the index begin()[t] of order().
  const std::uint32_t* order(std::uint32_t micro_batch) const {
    return place_of(micro_batch) + 2 * rows_;
  }
  const std::uint32_t* begin(std::uint32_t micro_batch) const {
    return place_of(micro_batch) + 3 * rows_;
  }

 private:
  std::uint32_t* stage(std::span<const std::uint32_t> tokens,
                       std::span<const std::uint32_t> targets);
  void send(std::uint32_t micro_batch, std::uint64_t count, StreamId stream);
  std::uint32_t* place_of(std::uint32_t micro_batch) const {
    return place_ + micro_batch * (3 * rows_ + vocabulary_ + 1);
  }

  const std::uint64_t rows_;
  const std::uint64_t vocabulary_;
  Device& device_;
  std::uint32_t* place_ = nullptr;
  AlignedBuffer host_;                  // page-locked
  Event uploaded_;                      // after this event, `host_` may be overwritten
  std::optional<std::uint32_t> batch_;  // the evaluation batch with inputs on the device
};

}  // namespace sluice::gpt
