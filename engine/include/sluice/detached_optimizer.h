// An optimizer for applications that keep parameters and gradients themselves, in host memory or on
// a GPU. A PyTorch program is an example. The optimizer keeps moments and exact fp32 masters in
// host memory or on storage, and each update streams this state through the CPU. Before the first
// update, the application only has to declare its tensors. An update lists the tensors that have a
// gradient, in any order. Each listed tensor has its own step and hyperparameters.
//
//   DetachedOptimizer optimizer(config, {{.name = "weight", .element_count = 1 << 20}});
//   optimizer.begin(updates);  // the state is read, updated and written in the background
//   optimizer.wait(0);         // "weight" has its new value
//   optimizer.wait_all();      // everything has, and every moment is home
//
// Thread rule: one thread at a time.
// Invariants: the bits of a result do not depend on where the state is, or on how the state is
// divided into blocks. An fp32 parameter is its own master. For a 16-bit parameter, the optimizer
// keeps a master and the 16 bits that were last made from the master. If the application has
// changed the parameter since the last update, the new value becomes the master.
// Failure: a failed transfer stops the optimizer permanently, and every later call throws the same
// error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/device.h>
#include <sluice/dtype.h>
#include <sluice/export.h>
#include <sluice/optimizer.h>
#include <sluice/state.h>

namespace sluice {

struct DetachedOverQueue;

struct DetachedTensor {
  std::string name;
  std::uint64_t element_count = 0;  // may be 0, for example for a rank's share of a small tensor
  DType parameter = DType::kFp32;
  bool is_on_device = false;  // parameter and gradient are in the memory of the optimizer's device
};

// One step of one tensor. The parameter and the gradient are contiguous in memory. After begin() is
// called, the optimizer owns the tensor's parameter and gradient until wait() returns for the
// tensor. During this time, the optimizer writes the parameter and reads the gradient. If the
// tensor is on a device, `parameter` and `gradient` are device addresses.
struct DetachedUpdate {
  std::uint32_t tensor = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFp32;
  std::uint64_t step = 1;    // the tensor's step, counted from 1; for the bias correction
  double learning_rate = 0;  // in the range of fp32
  AdamOptions adam;          // sluice/optimizer.h lists the options of each optimizer
  double momentum = 0;
  double gradient_scale = 1;  // multiplies the gradient
};

struct DetachedReport {
  // The counts below begin when the optimizer is made.
  std::uint64_t read_bytes = 0;         // from storage
  std::uint64_t write_bytes = 0;        // to storage
  std::uint64_t updated_elements = 0;   // elements whose update is complete
  std::uint64_t adopted_elements = 0;   // 16-bit values that the application had changed
  std::uint64_t non_finite_blocks = 0;  // blocks that an update left with an infinity or a NaN
  std::string non_finite_tensor;        // the tensor of the first such block
  // The sizes below are planned sizes.
  // The number of bytes in host memory. These bytes hold state, the lanes for state on storage, and
  // data from the device.
  std::uint64_t host_bytes = 0;
  std::uint64_t storage_bytes = 0;    // the bytes on storage
  std::uint64_t pass_read_bytes = 0;  // read by an update of all tensors; as many are written
};

class SLUICE_EXPORT DetachedOptimizer {
 public:
  // The optimizer takes optimizer.type, optimizer.state, optimizer.rounding_seed,
  // placement.optimizer, memory.host, storage and run.threads from `config`. Small tensors stay in
  // host memory, even under placement "nvme". The state begins with zero moments.
  // Fails with:
  // - kConfig: the config is not valid, names a durable store, or asks for placement "device".
  // - kOutOfMemory: memory.host is too small. The message names the smallest value that works.
  // - kInvalidArgument: the list of tensors is not valid.
  // - kInput, kNoSpace or kUnsupported: the files of the state cannot be made.
  DetachedOptimizer(const Config& config, std::vector<DetachedTensor> tensors);
  // Does the same as the other constructor, but some of the tensors are on `device`. The gradients
  // and parameters of these tensors are copied to page-locked host memory block by block. The
  // updated parameters are copied back.
  // `device` must outlive the optimizer.
  // Also fails if Device::register_host_memory() fails.
  DetachedOptimizer(const Config& config, std::vector<DetachedTensor> tensors, Device& device);
  // The destructor stops the updates that are under way. After the destructor, a parameter may be
  // only partly updated if wait() has not returned for its tensor.
  ~DetachedOptimizer();
  DetachedOptimizer(const DetachedOptimizer&) = delete;
  DetachedOptimizer& operator=(const DetachedOptimizer&) = delete;

  // Starts `updates` in the given order. The new updates run after the updates that are already
  // under way.
  // Fails with:
  // - kInvalidArgument: an update is not valid, or its tensor is on a device. The message names the
  //   tensor and the value, and the call changes nothing.
  // - The first failure, if there was one.
  void begin(std::span<const DetachedUpdate> updates);
  // Does the same as the other begin(), but also accepts tensors on the device. At the time of the
  // call, `stream` may have unfinished work. The optimizer waits for the end of this work before it
  // reads a tensor on the device. `stream` is a stream of the optimizer's device. The call is
  // refused if the optimizer was made without a device.
  void begin(std::span<const DetachedUpdate> updates, StreamId stream);
  // The call returns when the parameter of `tensor` has the result of every update that has begun.
  // The parameter and the gradient then belong to the application again.
  // Fails with:
  // - kInvalidArgument: there is no such tensor.
  // - The first failure, if there was one.
  void wait(std::uint32_t tensor);
  // Does the same as wait(), for all tensors.
  void wait_parameters();
  // Does the same as wait_parameters(), and also waits until all state is back at its home.
  void wait_all();
  // The number of tensors whose parameter still lacks the result of an update that has begun.
  std::uint32_t pending_tensors();

  // Copies elements of a tensor's state to `target`, beginning with element `first_element`. The
  // copies are fp32 numbers. `kParameter` and `kMaster` exist only for 16-bit parameters, and are
  // zero before the first update. `kParameter` gives the 16 bits that were last made from the
  // master. Moments that the optimizer does not keep are read as zero. If updates of the tensor are
  // under way, the call first waits for these updates.
  // Fails with kInvalidArgument if the tensor, the kind or the range does not exist. Other
  // failures, such as kIo, come from the transfers.
  void read(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> target);
  // Sets elements of a tensor's state, beginning with element `first_element`. A call that sets a
  // master also sets the 16 bits that the optimizer keeps for the parameter. At the next update,
  // the application's parameter has to hold the 16 bits that the optimizer keeps. If the
  // application's parameter holds other bits, the parameter's value becomes the master.
  // Moments in bf16 are rounded to nearest. Moments in 8 bits are encoded in groups of 256
  // elements, counted from the beginning of the tensor. If a call sets only a part of a group, the
  // other elements of the group may change.
  // Fails in the same cases as read(). Also fails with kInvalidArgument, and sets nothing, if:
  // - `kind` is kParameter, or names a moment that the optimizer does not keep.
  // - An exp_avg_sq is negative.
  void write(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
             std::span<const float> source);

  DetachedReport report();
  // Returns the lines of text for the user since the last call. They name choices that were
  // necessary because of this machine, reads that were repeated, and transfers that were slow. They
  // also name each tensor whose state is no longer finite, once.
  std::vector<std::string> take_notes();

 private:
  friend struct DetachedOverQueue;  // for tests
  struct Parts;
  explicit DetachedOptimizer(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace sluice
