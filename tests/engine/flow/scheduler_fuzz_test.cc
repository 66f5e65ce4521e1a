// Everything at once: a random engine (placement, budgets down to the least that works, buffers,
// policy, clipping, precision, micro-batches, frozen units, storage, leases held at once, streams),
// computation that may leave its schedule, and delays before every task of every flow. Always the
// oracle's bits, never a hang.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/placement.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class RandomJob {
 public:
  RandomJob(std::uint64_t seed, const std::string& path)
      : random_(seed), config_(toy_config(path)) {
    config_.precision = any({Config::Precision{DType::kBf16, DType::kBf16},
                             Config::Precision{DType::kBf16, DType::kFp32},
                             Config::Precision{DType::kFp32, DType::kFp32},
                             Config::Precision{DType::kFp16, DType::kFp16}});
    config_.placement.parameters =
        any({TierChoice::kAuto, TierChoice::kHost, TierChoice::kNvme, TierChoice::kNvme});
    config_.placement.optimizer =
        any({TierChoice::kAuto, TierChoice::kHost, TierChoice::kNvme, TierChoice::kNvme});
    config_.placement.gradients =
        any({TierChoice::kAuto, TierChoice::kHost, TierChoice::kNvme, TierChoice::kDevice});
    // On a GPU the choice may be "auto", which takes what the budget leaves.
    is_gpu_ = random_() % 3 == 0;
    if (random_() % 6 == 0) config_.placement = {.optimizer = TierChoice::kDevice};
    if (is_gpu_ && random_() % 2 == 0) config_.placement = {};
    config_.memory.host_bytes = any({1_KiB, 1_MiB, 2_MiB, 16_MiB});
    config_.memory.device_bytes = any({1_KiB, 700_KiB, 1_MiB});
    if (is_gpu_) config_.memory.device_bytes = any({1_KiB, 1_MiB, 1400_KiB, 2_MiB, 4_MiB});
    config_.optimizer.overlap = any({OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative});
    const bool is_eager = config_.optimizer.overlap == OverlapPolicy::kEager;
    config_.optimizer.clip_norm = is_eager ? 0 : any({0.0, 1e-3, 160.0, 1e9});
    if (random_() % 2 == 0) config_.optimizer.lanes = any({1u, 2u, 7u});
    config_.storage.backend = any({IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync});
    config_.storage.queue_depth = any({1u, 3u, 32u});
    config_.storage.block_elements = any({4096u, 8192u, 65536u});
    config_.storage.verify = any({Verify::kFull, Verify::kSample, Verify::kOff});
    if (random_() % 3 == 0) config_.storage.paths.push_back(path);
    config_.threads = any({1u, 2u});
    options_.steps = 4;
    options_.micro_batches = any({1u, 2u, 3u});
    options_.order = any({MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical});
    options_.evaluate = random_() % 3 == 0;
    if (random_() % 3 == 0) options_.frozen_units = any({std::vector<std::uint32_t>{0}, {1, 3}});
    options_.leases = any({1u, 2u, 3u});
    options_.streams = any({1u, 1u, 2u, 3u});
    if (random_() % 2 == 0 && !is_eager) leave_schedule(seed);
  }

  void run() {
    grow_budgets();
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config_.memory.device_bytes, .has_own_memory = is_gpu_}),
        random_(), 150);
    const ModelSpec model = toy_model(options_.frozen_units, options_.leases);
    const ToyResult expected = toy_oracle(config_, options_);
    const TaskDelays delays(random_(), 60);
    Engine engine(config_, model, *device, [&](std::unique_ptr<IoQueue> queue) {
      return make_fault_queue(std::move(queue), {.seed = random_(), .delay_us_max = 200});
    });
    try {
      EXPECT_TRUE(same_training(run_toy(engine, model, *device, config_, options_), expected))
          << name_of(config_.optimizer.overlap) << ", " << engine.placement().lanes.count
          << " lanes, " << engine.placement().parameter_slots.count << " slots";
    } catch (const Error& error) {
      was_refused_ = options_.change && options_.leases > 1 && leases_lie_in_the_way(error);
      EXPECT_TRUE(was_refused_) << error.what();
    }
    EXPECT_LE(engine.placement().host_bytes(), *config_.memory.host_bytes);
    EXPECT_LE(device->allocated_bytes(), *config_.memory.device_bytes);
  }

  // Ended with an error that says why.
  bool was_refused() const { return was_refused_; }

 private:
  template <typename T>
  T any(std::initializer_list<T> choices) {
    return std::data(choices)[random_() % choices.size()];
  }

  // Uses left out, used twice or swapped, every other step as the one before.
  void leave_schedule(std::uint64_t seed) {
    options_.change = [seed](std::uint64_t step, ToyUses& uses) {
      std::mt19937_64 choice(seed * 100 + step / 2);
      for (std::uint64_t change = choice() % 4; change-- > 0;) {
        const auto at = uses.begin() + static_cast<std::ptrdiff_t>(choice() % (uses.size() - 1));
        switch (choice() % 3) {
          case 0: uses.erase(at); break;
          case 1: std::swap(*at, uses[choice() % uses.size()]); break;
          default: uses.insert(at, {at->unit, at->pass, 1000 + change});
        }
      }
    };
  }

  // Budgets that are too small become the smallest that work, as the error names them.
  void grow_budgets() {
    for (int attempt = 0; attempt < 4; ++attempt) {
      const auto device = make_host_device(
          {.memory_bytes = *config_.memory.device_bytes, .has_own_memory = is_gpu_});
      try {
        const Engine engine(config_, toy_model(options_.frozen_units, options_.leases), *device);
        return;
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
        const std::string message = error.what();
        const std::string before = "the smallest that works is \"";
        const std::size_t begin = message.find(before) + before.size();
        const std::uint64_t bytes =
            parse_size(message.substr(begin, message.find('"', begin) - begin));
        (message.starts_with("memory.device") ? config_.memory.device_bytes
                                              : config_.memory.host_bytes) = bytes;
      }
    }
    FAIL() << "the budgets that errors name do not work";
  }

  std::mt19937_64 random_;
  Config config_;
  ToyOptions options_;
  bool is_gpu_ = false;
  bool was_refused_ = false;
};

TEST(SchedulerFuzz, AnyEngineUnderAnyDelaysGivesTheOraclesBits) {
  const std::vector<std::uint64_t> seeds = seeds_of(campaign(60));
  std::uint64_t refused = 0;
  for (const std::uint64_t seed : seeds) {
    const std::string name = "seed " + std::to_string(seed);
    const testing::ScopedTrace trace(__FILE__, __LINE__, name);
    const Watchdog watchdog(std::chrono::seconds(120), name);
    const TempDirectory directory;
    RandomJob job(seed, directory.path());
    job.run();
    if (testing::Test::HasFailure()) return;
    refused += job.was_refused() ? 1 : 0;
  }
  EXPECT_LE(refused, seeds.size() / 4 + 1) << "too few jobs come to their end";
}

}  // namespace
}  // namespace sluice::test
