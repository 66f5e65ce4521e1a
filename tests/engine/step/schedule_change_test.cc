// Computation that leaves its schedule: units left out, used again, out of order, steps that end
// early. Each costs a wait; the bits are those of the oracle, which does the same in plain arrays.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <string_view>
#include <thread>
#include <tuple>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/run/task_thread.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Numbers of uses that are not planned.
constexpr std::uint64_t kExtra = 1000;

std::size_t position_of(const ToyUses& uses, std::uint32_t unit, Pass pass) {
  const auto found = std::ranges::find_if(
      uses, [&](const ToyUse& use) { return use.unit == UnitId{unit} && use.pass == pass; });
  return static_cast<std::size_t>(found - uses.begin());
}

void erase(ToyUses& uses, std::uint32_t unit, Pass pass) {
  std::erase_if(uses,
                [&](const ToyUse& use) { return use.unit == UnitId{unit} && use.pass == pass; });
}

struct Change {
  std::string name;
  void (*apply)(std::uint64_t step, ToyUses& uses);
  // A unit is used after its last backward use of the schedule.
  bool reopens = false;
};

void PrintTo(const Change& value, std::ostream* out) {
  *out << value.name;
}

const Change kChanges[] = {
    {"a_unit_left_out",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 2 || step == 4) {
         erase(uses, 2, Pass::kForward);
         erase(uses, 2, Pass::kBackward);
       }
     }},
    {"only_its_backward_left_out",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 2) erase(uses, 3, Pass::kBackward);
     }},
    {"another_order_in_forward",
     [](std::uint64_t step, ToyUses& uses) {
       if (step >= 2) std::reverse(uses.begin() + 1, uses.begin() + 5);
     }},
    {"another_order_in_backward",
     [](std::uint64_t step, ToyUses& uses) {
       const std::size_t begin = position_of(uses, 5, Pass::kBackward);
       if (step == 2) std::swap(uses[begin + 1], uses[begin + 2]);
       if (step == 3) std::swap(uses[begin + 3], uses[begin]);
     }},
    {"a_unit_used_again_in_forward",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 2) uses.insert(uses.begin() + 4, {UnitId{1}, Pass::kForward, kExtra});
     }},
    {"an_early_end",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 3) uses.resize(uses.size() - 3);
     }},
    {"a_unit_used_again_in_backward",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 2 || step == 4)
         uses.insert(uses.end() - 1, {UnitId{4}, Pass::kBackward, kExtra});
     },
     /*reopens=*/true},
    {"a_unit_used_again_at_the_end",
     [](std::uint64_t step, ToyUses& uses) {
       if (step >= 2) uses.push_back({UnitId{4}, Pass::kBackward, kExtra});
     },
     /*reopens=*/true},
    {"forward_after_the_last_backward",
     [](std::uint64_t step, ToyUses& uses) {
       if (step == 2) uses.insert(uses.end() - 1, {UnitId{4}, Pass::kForward, kExtra});
     },
     /*reopens=*/true},
};

struct PolicyCase {
  std::string name;
  OverlapPolicy policy = OverlapPolicy::kSerial;
  double clip_norm = 1;
};

void PrintTo(const PolicyCase& value, std::ostream* out) {
  *out << value.name;
}

const PolicyCase kPolicyCases[] = {{"serial", OverlapPolicy::kSerial, 1},
                                   {"deferred", OverlapPolicy::kDeferred, 1},
                                   {"eager", OverlapPolicy::kEager, 0},
                                   {"speculative", OverlapPolicy::kSpeculative, 1e9},
                                   {"auto_with_nothing_to_take_back", OverlapPolicy::kAuto, 0}};

class ScheduleChange
    : public testing::TestWithParam<std::tuple<Change, PolicyCase, std::uint32_t>> {
 protected:
  ScheduleChange() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 300_KiB;
    const PolicyCase& policy = std::get<1>(GetParam());
    config_.optimizer.overlap = policy.policy;
    config_.optimizer.clip_norm = policy.clip_norm;
    options_ = {.steps = 5,
                .micro_batches = std::get<2>(GetParam()),
                .leases = std::get<2>(GetParam()) == 1 ? 2u : 1u,
                .change = std::get<0>(GetParam()).apply};
    // A unit that is held when the schedule changes may lie in the way; here is room around it.
    if (options_.leases == 2) config_.memory.device_bytes = 420_KiB;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ToyOptions options_;
};

TEST_P(ScheduleChange, CostsAWaitAndNoBit) {
  if (std::get<0>(GetParam()).reopens && config_.optimizer.clip_norm == 0) {
    // The eager policy may have updated the unit by then, and nothing brings the old one back.
    try {
      (void)run_toy(config_, options_);
      FAIL() << "the unit had been updated";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("declare the use in ModelSpec::backward_order"),
                std::string::npos)
          << error.what();
    }
    return;
  }
  const ToyResult oracle = toy_oracle(config_, options_);
  const ToyResult result = run_toy(config_, options_);
  EXPECT_TRUE(same_training(result, oracle));
  std::uint32_t changes = 0;
  for (std::size_t step = 0; step < result.reports.size(); ++step) {
    EXPECT_EQ(result.reports[step].gradient_norm, oracle.reports[step].gradient_norm) << step;
    changes += result.reports[step].schedule_changes;
  }
  EXPECT_GT(changes, 0u);
}

INSTANTIATE_TEST_SUITE_P(All, ScheduleChange,
                         testing::Combine(testing::ValuesIn(kChanges),
                                          testing::ValuesIn(kPolicyCases), testing::Values(1u, 3u)),
                         [](const auto& value) {
                           return std::get<0>(value.param).name + "_" +
                                  std::get<1>(value.param).name + "_" +
                                  std::to_string(std::get<2>(value.param));
                         });

class ScheduleChangeTest : public testing::Test {
 protected:
  ScheduleChangeTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 300_KiB;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

// A change that has been seen once is expected: it costs nothing the next time.
TEST_F(ScheduleChangeTest, TheNextStepIsExpectedToGoAsThisOneWent) {
  const ToyOptions options{.steps = 4, .change = [](std::uint64_t step, ToyUses& uses) {
                             if (step >= 2) std::reverse(uses.begin(), uses.begin() + 6);
                           }};
  const ToyResult result = run_toy(config_, options);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
  EXPECT_EQ(result.reports[0].schedule_changes, 0u);
  EXPECT_GT(result.reports[1].schedule_changes, 0u);
  EXPECT_NE(result.reports[1].notes.at(0).find("not used as scheduled"), std::string::npos);
  EXPECT_EQ(result.reports[2].schedule_changes, 0u);
  EXPECT_EQ(result.reports[3].schedule_changes, 0u);
}

TEST_F(ScheduleChangeTest, AUnitWithoutAGradientIsSaidAndHasZeros) {
  const ToyOptions options{
      .steps = 1, .change = [](std::uint64_t, ToyUses& uses) { erase(uses, 3, Pass::kBackward); }};
  const ToyResult result = run_toy(config_, options);
  ASSERT_EQ(result.reports[0].notes.size(), 2u);
  EXPECT_NE(result.reports[0].notes[1].find("1 of 6 units were not used in backward"),
            std::string::npos)
      << result.reports[0].notes[1];
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
}

TEST_F(ScheduleChangeTest, AutoIsNotEagerOnceTheScheduleHasChanged) {
  config_.optimizer.overlap = OverlapPolicy::kAuto;
  config_.optimizer.clip_norm = 0;
  const ToyOptions options{.steps = 3, .change = [](std::uint64_t step, ToyUses& uses) {
                             if (step == 1) erase(uses, 2, Pass::kForward);
                           }};
  const ToyResult result = run_toy(config_, options);
  EXPECT_EQ(result.reports[0].policy, OverlapPolicy::kEager);
  EXPECT_EQ(result.reports[1].policy, OverlapPolicy::kDeferred);
}

// Whatever computation does in whatever order, with up to three leases held on up to two streams, a
// tight window and delays in every flow: the bits are the oracle's.
TEST_F(ScheduleChangeTest, RandomUsesUnderDelays) {
  const std::vector<std::uint64_t> seeds = seeds_of(campaign(60));
  std::atomic<std::size_t> refused = 0;
  side_by_side(seeds, [&](std::uint64_t seed) {
    Config config = config_;
    std::mt19937_64 random(seed);
    constexpr OverlapPolicy kAll[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                      OverlapPolicy::kSpeculative};
    config.optimizer.overlap = kAll[random() % 3];
    config.optimizer.clip_norm = random() % 2 == 0 ? 1e9 : 1;
    config.optimizer.lanes = 1 + random() % 5;
    const auto leases = static_cast<std::uint32_t>(1 + random() % 3);
    config.memory.device_bytes = 260_KiB + (leases - 1) * 120_KiB + random() % 8 * 40_KiB;
    const ToyOptions options{
        .steps = 5,
        .micro_batches = static_cast<std::uint32_t>(1 + random() % 3),
        .evaluate = random() % 2 == 0,
        .streams = static_cast<std::uint32_t>(1 + random() % 2),
        .change = [seed](std::uint64_t step, ToyUses& uses) {
          std::mt19937_64 choice(seed * 100 + step / 2);  // every other step is as the one before
          for (std::uint64_t change = choice() % 6; change-- > 0;) {
            const std::size_t at = choice() % uses.size();
            switch (choice() % 3) {
              case 0: uses.erase(uses.begin() + static_cast<std::ptrdiff_t>(at)); break;
              case 1: std::swap(uses[at], uses[choice() % uses.size()]); break;
              default:
                uses.insert(
                    uses.begin() + static_cast<std::ptrdiff_t>(at),
                    {UnitId{static_cast<std::uint32_t>(choice() % 6)},
                     choice() % 2 == 0 ? Pass::kForward : Pass::kBackward, kExtra + change});
            }
          }
        }};
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config.memory.device_bytes}), seed, 50);
    const ModelSpec model = toy_model({}, leases);
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = seed, .delay_us_max = 100});
        });
    try {
      const ToyResult result = run_toy(engine, model, *device, config, options);
      EXPECT_TRUE(same_training(result, toy_oracle(config, options))) << "seed " << seed;
    } catch (const Error& error) {
      ++refused;
      EXPECT_TRUE(leases > 1 && leases_lie_in_the_way(error)) << error.what() << ", seed " << seed;
    }
  });
  EXPECT_LE(refused, seeds.size() / 4 + 1) << "too few jobs come to their end";
}

// Large units that the declared order keeps apart, under the smallest budget that works: no place
// for both at once. The engine says so, and goes on when there is one again.
TEST_F(ScheduleChangeTest, WhatDoesNotFitBesideTheLeasesIsRefused) {
  ModelSpec model;
  for (const std::uint64_t elements : {30'000u, 2'000u, 30'000u, 2'000u}) {
    const std::string name = "u" + std::to_string(model.units.size());
    model.units.push_back({.name = name, .tensors = {{.name = name + ".w", .shape = {elements}}}});
  }
  model.concurrent_leases = 2;
  const auto train = [&](std::uint64_t device_bytes, bool is_tight) {
    config_.memory.device_bytes = device_bytes;
    const auto device = make_host_device({.memory_bytes = device_bytes});
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    for (int number = 0; number < 2; ++number) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      Lease first = step.acquire(UnitId{0}, Pass::kForward, stream);
      if (is_tight && number == 0) {
        const std::string message = expect_error(ErrorCode::kOutOfMemory, [&] {
          (void)step.acquire(UnitId{2}, Pass::kForward, stream);
        });
        EXPECT_NE(message.find("cannot hold unit 2"), std::string::npos) << message;
        EXPECT_NE(message.find("raise memory.device"), std::string::npos) << message;
      }
      first.release();
      const ToyUses rest{{UnitId{2}, Pass::kForward, 1},  {UnitId{1}, Pass::kForward, 2},
                         {UnitId{3}, Pass::kForward, 3},  {UnitId{3}, Pass::kBackward, 4},
                         {UnitId{2}, Pass::kBackward, 5}, {UnitId{1}, Pass::kBackward, 6},
                         {UnitId{0}, Pass::kBackward, 7}};
      walk_step(step, rest, engine, *device, stream, config_);
      (void)step.finish();
    }
    engine.drain();
    return read_state(engine);
  };
  config_.memory.device_bytes = 4_KiB;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const std::string message =
      expect_error(ErrorCode::kOutOfMemory, [&] { const Engine engine(config_, model, *device); });
  const std::size_t begin = message.find("the smallest that works is \"");
  ASSERT_NE(begin, std::string::npos) << message;
  const std::uint64_t smallest = std::stoull(message.substr(begin + 28)) << 10;
  EXPECT_TRUE(train(smallest, /*is_tight=*/true) == train(1_MiB, /*is_tight=*/false));
}

// Units that are used forward once more behind their last gradient: copies to the device and the
// worker take so long that tentative updates find their blocks in slots that are being copied. They
// wait.
TEST_F(ScheduleChangeTest, AnUpdateWaitsForTheCopyOfItsSlot) {
  config_.optimizer.overlap = OverlapPolicy::kSpeculative;
  config_.optimizer.clip_norm = 1e9;
  config_.memory.host_bytes = 16_MiB;
  config_.storage.block_elements = 4096;
  const ToyOptions options{.steps = 3, .change = [](std::uint64_t, ToyUses& uses) {
                             for (const std::uint32_t unit : {5u, 4u, 3u, 2u, 1u, 5u, 4u})
                               uses.push_back({UnitId{unit}, Pass::kForward, kExtra + unit});
                           }};
  const auto device =
      make_host_device({.memory_bytes = 300_KiB, .copy_bytes_per_second = 4'000'000});
  const ModelSpec model = toy_model();
  Engine engine(config_, model, *device);
  TaskThread::set_before_task([] {
    char name[16] = {};
    (void)::pthread_getname_np(::pthread_self(), name, sizeof name);
    if (std::string_view(name) == "sluice-work")
      std::this_thread::sleep_for(std::chrono::milliseconds(4));
  });
  const ToyResult result = run_toy(engine, model, *device, config_, options);
  TaskThread::set_before_task(nullptr);
  EXPECT_TRUE(same_training(result, toy_oracle(config_, options)));
}

// An inference may go its own way too.
TEST_F(ScheduleChangeTest, AnInferenceInAnotherOrder) {
  const auto device = make_host_device({.memory_bytes = 300_KiB});
  Engine engine(config_, toy_model(), *device);
  const ToyOptions options{.steps = 2};
  const ToyResult result = run_toy(engine, toy_model(), *device, config_, options);
  const Stream stream(*device, "compute");
  for (int round = 0; round < 2; ++round) {
    Inference inference = engine.begin_inference();
    for (const std::uint32_t unit : {5u, 3u, 3u, 0u, 4u}) {
      const Lease lease = inference.acquire(UnitId{unit}, stream);
      const TensorPlace& tensor = layout_of(engine).tensors_of(UnitId{unit})[0];
      std::vector<std::byte> seen(tensor.element_count * 2);
      device->launch(stream.id(), [&seen, from = lease.parameter(0)] {
        std::copy_n(from, seen.size(), seen.begin());
      });
      device->synchronize(stream.id());
      std::size_t begin = 0;
      for (const TensorPlace& other : engine.tensors()) {
        if (other.id == tensor.id) break;
        begin += other.element_count * (2 + 3 * sizeof(float));
      }
      EXPECT_TRUE(std::equal(seen.begin(), seen.end(),
                             result.state.begin() + static_cast<std::ptrdiff_t>(begin)))
          << "unit " << unit << " in round " << round;
    }
  }
}

TEST_F(ScheduleChangeTest, AStepWithoutBackwardIsRefused) {
  const auto device = make_host_device({.memory_bytes = 300_KiB});
  Engine engine(config_, toy_model(), *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1});
  (void)step.acquire(UnitId{0}, Pass::kForward, stream);
  try {
    (void)step.finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("no unit has been through backward"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace sluice::test
