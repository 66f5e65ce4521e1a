// A fixture for tests that set and read the state of an engine. The state lies on storage. The
// header has the model, state values that differ between tensors and elements, and a queue that
// records the reads.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "io/io_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {

inline constexpr std::uint64_t kBlockElements = 4096;

// Returns a model with tensors that begin and end inside of blocks. The second tensor has a dozen
// blocks.
inline ModelSpec long_model() {
  ModelSpec model;
  model.units = {
      {.name = "a",
       .tensors = {{.name = "a.bias", .shape = {513}},
                   {.name = "a.weight", .shape = {12 * kBlockElements + 77}},
                   {.name = "a.tail", .shape = {3 * kBlockElements}}}},
      {.name = "b", .tensors = {{.name = "b.weight", .shape = {5 * kBlockElements - 1}}}}};
  return model;
}

inline Config config_with(const std::string& path, std::uint32_t lanes) {
  Config config = toy_config(path);
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.block_elements = kBlockElements;
  config.optimizer.lanes = lanes;
  return config;
}

inline float value_of(const TensorPlace& tensor, StateKind kind, std::uint64_t element) {
  return static_cast<float>((element * 7 + index_of(tensor.id) * 1013) % 8191 + 1) *
         (kind == StateKind::kMaster   ? 1e-3f
          : kind == StateKind::kExpAvg ? 1e-4f
                                       : 1e-5f);
}

class Formula : public StateSource {
 public:
  StatePosition position() const override { return {.step = 5}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
            std::span<float> values) override {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(tensor, kind, first + i);
  }
};

// This struct records the places that an engine reads. A test can also hold back the reads of the
// engine.
struct Reads {
  struct Place {
    int descriptor = -1;
    std::uint64_t offset_bytes = 0;
  };

  void clear() {
    const std::scoped_lock lock(mutex);
    places.clear();
  }
  std::vector<Place> all() {
    const std::scoped_lock lock(mutex);
    return places;
  }
  std::size_t count() { return all().size(); }

  // Guarded by mutex.
  std::mutex mutex;
  std::vector<Place> places;
  bool holds = false;                // whether new requests are held back
  std::uint64_t held_bytes_min = 0;  // shorter requests are not held back
  std::vector<IoRequest*> held;
};

class WatchedReads final : public IoQueue {
 public:
  WatchedReads(std::unique_ptr<IoQueue> queue, Reads& reads)
      : queue_(std::move(queue)), reads_(reads) {}
  void submit(std::span<IoRequest* const> requests) override {
    std::vector<IoRequest*> passed;
    {
      const std::scoped_lock lock(reads_.mutex);
      for (const IoRequest* request : requests) {
        if (request->kind == IoKind::kRead)
          reads_.places.push_back({request->descriptor, request->offset_bytes});
      }
      for (IoRequest* const request : requests) {
        const bool is_held = reads_.holds && request->length_bytes >= reads_.held_bytes_min;
        (is_held ? reads_.held : passed).push_back(request);
      }
    }
    if (!passed.empty()) queue_->submit(passed);
  }
  void release() {
    std::vector<IoRequest*> held;
    {
      const std::scoped_lock lock(reads_.mutex);
      reads_.holds = false;
      held.swap(reads_.held);
    }
    queue_->submit(held);
  }
  void wait_idle() override { queue_->wait_idle(); }
  IoCounters counters() const override { return queue_->counters(); }
  std::string_view name() const override { return queue_->name(); }

 private:
  std::unique_ptr<IoQueue> queue_;
  Reads& reads_;
};

class StateAccessTest : public testing::Test {
 protected:
  Engine& make(std::uint32_t lanes, OptimizerState state = OptimizerState::kFp32) {
    Config config = config_with(directory_.path(), lanes);
    config.optimizer.state = state;
    engine_.reset(new Engine(EngineOverQueue::make(
        config, long_model(), *device_, [this](std::unique_ptr<IoQueue> queue) {
          auto watched = std::make_unique<WatchedReads>(std::move(queue), reads_);
          queue_ = watched.get();
          return watched;
        })));
    return *engine_;
  }
  void expect_values(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
                     std::uint64_t count) {
    std::vector<float> values(count);
    engine_->read_state(tensor.id, kind, first, std::as_writable_bytes(std::span(values)));
    for (std::uint64_t i = 0; i < count; ++i)
      ASSERT_EQ(values[i], value_of(tensor, kind, first + i)) << tensor.name << " " << first + i;
  }

  TempDirectory directory_;
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Reads reads_;
  WatchedReads* queue_ = nullptr;  // of engine_
  std::unique_ptr<Engine> engine_;
};

}  // namespace sluice::test
