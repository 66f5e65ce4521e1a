// Everything at once: a random engine (placement, budgets down to the least that works, buffers,
// policy, clipping, precision, optimizer, micro-batches, frozen units, announced units, storage, a
// durable store, steps that are dropped, a save beside steps, leases held at once, streams, ranks,
// activations that the engine keeps), computation that may leave its schedule, and delays before
// every task of every flow. Always the oracle's bits, in the leases too, never a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/config/config_text.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/placement.h"
#include "engine/plan/sharding.h"
#include "tests/engine/checkpoint/save_beside.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/engine/step/announce_cases.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_computation.h"
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
    draw_ranks();
    // On a GPU the choice may be "auto", which takes what the budget leaves.
    is_gpu_ = random_() % 3 == 0;
    do draw_homes();
    while (!are_homes_allowed());
    config_.memory.host_bytes = any({1_KiB, 1_MiB, 2_MiB, 16_MiB});
    config_.memory.device_bytes = any({1_KiB, 700_KiB, 1_MiB});
    if (is_gpu_) config_.memory.device_bytes = any({1_KiB, 1_MiB, 1400_KiB, 2_MiB, 4_MiB});
    // The ranks' buffers are there before there is a plan.
    if (options_.rank_count > 1 && config_.memory.device_bytes == 1_KiB)
      config_.memory.device_bytes = 128_KiB;
    config_.optimizer.overlap = any({OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative});
    const bool is_eager = config_.optimizer.overlap == OverlapPolicy::kEager;
    config_.optimizer.clip_norm = is_eager ? 0 : any({0.0, 1e-3, 160.0, 1e9});
    if (random_() % 2 == 0) config_.optimizer.lanes = any({1u, 2u, 7u});
    config_.storage.backend = any({IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync});
    config_.storage.queue_depth = any({1u, 3u, 32u});
    config_.storage.block_elements = any({4096u, 8192u, 65536u});
    config_.storage.verify = any({Verify::kFull, Verify::kSample, Verify::kOff});
    if (random_() % 3 == 0) {
      config_.storage.paths.push_back(path + "/second");
      std::filesystem::create_directory(config_.storage.paths[1]);
    }
    config_.threads = any({1u, 2u});
    options_.steps = 4;
    options_.micro_batches = any({1u, 2u, 3u});
    options_.order = any({MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical});
    options_.evaluate = random_() % 3 == 0;
    if (random_() % 3 == 0) options_.frozen_units = any({std::vector<std::uint32_t>{0}, {1, 3}});
    options_.leases = any({1u, 2u, 3u});
    options_.streams = any({1u, 1u, 2u, 3u});
    options_.has_own_memory = is_gpu_;
    const bool shares_gradients = config_.sharding.stage >= 2 && config_.sharding.group_ranks != 1;
    options_.reduces_each = shares_gradients || options_.micro_batches == 1 ||
                            options_.order == MicroBatchOrder::kVertical;
    draw_activations();
    const bool may_leave = !is_eager && options_.rank_count == 1 && !options_.has_boundaries;
    if (random_() % 2 == 0 && may_leave) leave_schedule(seed);
    if (random_() % 3 == 0) config_.memory.unified = UnifiedMemory::kOff;
    if (random_() % 4 == 0) config_.optimizer.update_on = UpdateProcessor::kDevice;
    draw_optimizer();
    if (random_() % 3 == 0 && !options_.change && !options_.has_boundaries) draw_experts(seed);
    if (random_() % 4 == 0 && options_.rank_count == 1)
      config_.storage.state = {.name = "fuzz", .commit_every = any({1u, 2u, 3u})};
    drops_steps_ = random_() % 3 == 0 && !is_eager && options_.rank_count == 1;
    if (random_() % 4 == 0 && options_.rank_count == 1) config_.memory.save_buffers = any({1u, 4u});
  }

  void run() {
    grow_budgets();
    const ToyResult expected = toy_oracle(config_, options_);
    // With long delays, work under a lease often runs until long after the lease has ended.
    const std::uint32_t delay_us_max = any({50u, 150u, 2000u});
    const RankConditions conditions{.delay_us_max = delay_us_max,
                                    .seed = random_(),
                                    .io_delay_us_max = any({200u, 200u, 3000u})};
    if (options_.rank_count > 1) {
      compare(run_ranks(options_.rank_count, config_, options_, conditions), expected);
    } else {
      compare({run_alone(conditions)}, expected);
      if (was_refused_) return;
      if (!config_.storage.state.name.empty()) expect_state_opens(expected.state);
      if (saves_beside()) expect_saved_state();
    }
  }

  std::string describe() const {
    return fmt::format(
        "{} ranks, {}, {} leases, {} streams, frozen units {}, evaluates {}, {} micro-batches {}, "
        "{} experts, drops steps {}, config {}",
        options_.rank_count, is_gpu_ ? "memory of its own" : "memory of the host", options_.leases,
        options_.streams, fmt::join(options_.frozen_units, " "), options_.evaluate,
        options_.micro_batches, name_of(options_.order), options_.experts, drops_steps_,
        config_text(config_));
  }
  std::uint32_t ranks() const { return options_.rank_count; }
  std::uint32_t leases() const { return options_.leases; }
  bool has_activations_on_storage() const {
    return config_.activations.home == ActivationHome::kNvme;
  }

  // Ended with an error that says why.
  bool was_refused() const { return was_refused_; }

 private:
  static constexpr std::uint32_t kSavedStep = 2;
  bool saves_beside() const { return config_.memory.save_buffers != 0; }

  template <typename T>
  T any(std::initializer_list<T> choices) {
    return std::data(choices)[random_() % choices.size()];
  }

  void draw_ranks() {
    options_.rank_count = any({1u, 1u, 1u, 2u, 2u, 3u});
    if (options_.rank_count == 1) return;
    config_.sharding.stage = static_cast<std::uint32_t>(random_() % 4);
    config_.sharding.keep_gathered_bytes = any({0_KiB, 4_KiB, 64_KiB});
    if (random_() % 4 == 0) config_.sharding.group_ranks = any({1u, options_.rank_count});
  }

  void draw_homes() {
    using enum TierChoice;
    config_.placement = {.parameters = any({kAuto, kHost, kNvme, kNvme}),
                         .optimizer = any({kAuto, kHost, kNvme, kNvme}),
                         .gradients = any({kAuto, kHost, kNvme, kDevice})};
    if (random_() % 6 == 0) config_.placement = {.optimizer = kDevice};
    if (is_gpu_ && random_() % 2 == 0) config_.placement = {};
  }
  bool are_homes_allowed() const {
    try {
      check_homes(config_.sharding, options_.rank_count, config_.placement);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  void draw_activations() {
    if (random_() % 2 == 0) return;
    using enum ActivationHome;
    options_.has_boundaries = true;
    config_.activations = {.home = any({kRecompute, kHost, kNvme, kNvme}),
                           .micro_batches = options_.micro_batches,
                           .order = options_.order};
  }

  RankRun run_alone(const RankConditions& conditions) {
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config_.memory.device_bytes, .has_own_memory = is_gpu_}),
        conditions.seed, conditions.delay_us_max);
    const ModelSpec model = toy_model_of(options_);
    Engine engine =
        EngineOverQueue::make(config_, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = conditions.seed,
                                                     .delay_us_max = conditions.io_delay_us_max});
        });
    ToyOptions options = options_;
    options.after_step = [&](Engine& same, std::uint64_t step) {
      if (saves_beside() && step == kSavedStep)
        same.begin_save(config_.storage.paths[0] + "/saved", {});
      if (drops_steps_) drop_step(same, *device, step);
      if (saves_beside() && step == options_.steps) saved_ = same.finish_save().value().path;
    };
    RankRun run;
    run.host_bytes = placement_of(engine).host_bytes();
    try {
      run.result = run_toy(engine, model, *device, config_, options);
      engine.close();
    } catch (const Error& error) {
      run.failure = error.what();
    }
    run.device_bytes = device->allocated_bytes();
    return run;
  }

  // The checkpoint that was written beside later steps.
  void expect_saved_state() {
    ToyOptions options = options_;
    options.steps = kSavedStep;
    EXPECT_TRUE(state_in(saved_, config_, options) == toy_oracle(config_, options).state)
        << describe();
  }

  // A step that is left before its end, here and there, while its work still runs.
  void drop_step(Engine& engine, HostDevice& device, std::uint64_t step) {
    const ModelSpec model = validated(toy_model_of(options_));
    ToyUses uses = planned_uses(model, options_.micro_batches, options_.order);
    uses.resize(1 + step * 5 % (uses.size() - 1));
    const Stream stream(device, "dropped");
    Step dropped = engine.begin_step({.learning_rate = options_.learning_rate,
                                      .micro_batches = options_.micro_batches,
                                      .order = options_.order});
    walk_step(dropped, uses, engine, device, stream, config_);
  }

  // Another engine finds the state in the durable store.
  void expect_state_opens(const StateBytes& state) {
    const auto device =
        make_host_device({.memory_bytes = *config_.memory.device_bytes, .has_own_memory = is_gpu_});
    Engine engine(config_, toy_model_of(options_), *device);
    (void)engine.open_or_create(toy_values());
    EXPECT_TRUE(read_state(engine) == state) << describe();
  }

  void compare(const std::vector<RankRun>& runs, const ToyResult& expected) {
    was_refused_ =
        options_.change && options_.leases > 1 && std::ranges::any_of(runs, [](const RankRun& run) {
          return run.failure.find("beside the units still leased") != std::string::npos;
        });
    for (const RankRun& run : runs) {
      EXPECT_LE(run.host_bytes, *config_.memory.host_bytes);
      EXPECT_LE(run.device_bytes, *config_.memory.device_bytes);
      if (was_refused_) continue;
      EXPECT_EQ(run.failure, "");
      EXPECT_TRUE(same_training(run.result, expected)) << describe();
    }
  }

  void draw_optimizer() {
    using enum OptimizerKind;
    if (random_() % 3 == 0) config_.optimizer.kind = any({kAdam, kLion, kAdagrad, kSgd});
    config_.optimizer.state = any({OptimizerState::kFp32, OptimizerState::kFp32,
                                   OptimizerState::kBf16, OptimizerState::k8bit});
    config_.optimizer.untouched =
        any({UntouchedPolicy::kUpdate, UntouchedPolicy::kSkip, UntouchedPolicy::kLazy});
    config_.optimizer.lazy_max = any({1u, 2u, 1000u});
    if (random_() % 3 == 0)
      config_.optimizer.groups = {{.tensors = {"*.bias"}, .learning_rate_factor = 0.5}};
  }

  void draw_experts(std::uint64_t seed) {
    options_.experts = kExperts;
    // Several ranks use announced units in the order of the model, and not in that of a whole pass.
    options_.announces_ahead = options_.rank_count == 1 && random_() % 2 == 0;
    options_.change = [seed](std::uint64_t step, ToyUses& uses) { route(seed, step, uses); };
    if (options_.rank_count == 1) return;
    // At least one rank computes in each use.
    options_.computes = [seed, ranks = options_.rank_count](std::uint32_t rank, const ToyUse& use) {
      std::mt19937_64 choice(seed + use.number % 0x100000 * 64);
      const std::uint64_t bits = choice();
      return rank == bits % ranks || (bits >> (32 + rank) & 1) != 0;
    };
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

  // The message that refuses the budgets, or nothing.
  std::string refusal() const {
    if (options_.rank_count > 1) {
      ToyOptions none = options_;
      none.steps = 0;
      std::string failure;
      for (const RankRun& run : run_ranks(options_.rank_count, config_, none)) {
        if (failure.empty() || run.failure.find("the smallest that works") != std::string::npos)
          failure = run.failure;
      }
      return failure;
    }
    const auto device =
        make_host_device({.memory_bytes = *config_.memory.device_bytes, .has_own_memory = is_gpu_});
    try {
      const Engine engine(config_, toy_model_of(options_), *device);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  // Budgets that are too small become the smallest that work, as the error names them.
  void grow_budgets() {
    std::string message;
    for (int attempt = 0; attempt < 4; ++attempt) {
      message = refusal();
      if (message.empty()) return;
      const std::string before = "the smallest that works is \"";
      const std::size_t found = message.find(before);
      ASSERT_NE(found, std::string::npos) << message;
      const std::size_t begin = found + before.size();
      const std::uint64_t bytes =
          parse_size(message.substr(begin, message.find('"', begin) - begin));
      // Where a rank repeats what another one has failed with, more stands before.
      const bool is_device = message.find("memory.device = ") < found;
      (is_device ? config_.memory.device_bytes : config_.memory.host_bytes) = bytes;
    }
    FAIL() << "the budgets that errors name do not work: " << message;
  }

  std::mt19937_64 random_;
  Config config_;
  ToyOptions options_;
  bool is_gpu_ = false;
  bool drops_steps_ = false;
  bool was_refused_ = false;
  std::string saved_;  // folder of the checkpoint
};

TEST(SchedulerFuzz, AnyEngineUnderAnyDelaysGivesTheOraclesBits) {
  const std::vector<std::uint64_t> seeds = seeds_of(campaign(60));
  const TaskDelays delays(seeds.front(), 60);
  std::atomic<std::size_t> refused = 0;
  std::atomic<std::size_t> with_ranks = 0;
  std::atomic<std::size_t> with_activations = 0;
  std::atomic<std::size_t> with_all = 0;  // several ranks, several leases, activations on storage
  side_by_side(seeds, [&](std::uint64_t seed) {
    const std::string name = "seed " + std::to_string(seed);
    const testing::ScopedTrace trace(__FILE__, __LINE__, name);
    const Watchdog watchdog(std::chrono::seconds(300), name);
    const TempDirectory directory;
    RandomJob job(seed, directory.path());
    job.run();
    refused += job.was_refused() ? 1 : 0;
    with_ranks += job.ranks() > 1 ? 1 : 0;
    with_activations += job.has_activations_on_storage() ? 1 : 0;
    with_all += job.ranks() > 1 && job.leases() > 1 && job.has_activations_on_storage() ? 1 : 0;
  });
  EXPECT_LE(refused, seeds.size() / 4 + 1) << "too few jobs come to their end";
  if (seeds.size() >= 60) {  // fewer are asked for by hand
    EXPECT_GE(with_ranks, seeds.size() / 4);
    EXPECT_GE(with_activations, seeds.size() / 8);
    EXPECT_GE(with_all, seeds.size() / 20);
  }
}

}  // namespace
}  // namespace sluice::test
