// Calls with units that belong to one rank each: what each rank may do alone, and what is refused.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <thread>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include "tests/engine/ranks/local_unit_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

// Two engines on two ranks, each driven by `drive(rank, engine, device, stream)`.
void on_two_ranks(const Config& config, const auto& model_of, const auto& drive) {
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = config.memory.device_bytes.value()});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model_of(rank), *device, collectives.get());
      engine.initialize(toy_values());
      const Stream stream(*device, "test");
      drive(rank, engine, *device, stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class TwoRanksOfLocalUnits : public testing::Test {
 protected:
  TwoRanksOfLocalUnits() { config_.memory.device_bytes = 600_KiB; }

  static ModelSpec model(std::uint32_t rank) {
    return model_of_rank(routed_options(1), rank, 2).model;
  }
  static std::vector<UnitId> local_units(const ModelSpec& model) {
    std::vector<UnitId> units;
    for (std::uint32_t i = 0; i < model.units.size(); ++i)
      if (model.units[i].is_local) units.push_back(UnitId{i});
    return units;
  }
  // Makes one engine per rank, whose constructors have to fail, and returns rank 0's message.
  std::string refused(const auto& model_of) const {
    LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
    std::vector<std::string> words(2);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = make_host_device({.memory_bytes = 600_KiB});
        const auto collectives = world.join(rank, *device);
        words[rank] = expect_error(ErrorCode::kRanks, [&] {
          const Engine engine(config_, model_of(rank), *device, collectives.get());
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(words[0], words[1]);
    return words[0];
  }

  const TempDirectory directory_;
  Config config_ = sharded_config(directory_.path(), 3, true, DType::kBf16);
};

// Rank 1 announces nothing in some evaluations and steps, and rank 0 leaves some halfway.
TEST_F(TwoRanksOfLocalUnits, RanksAnnounceWhatTheyLike) {
  on_two_ranks(
      config_, model,
      [this](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
        const ModelSpec own = model(rank);
        const std::vector<UnitId> local = local_units(own);
        ASSERT_EQ(local.size(), 3u);
        for (std::uint32_t round = 0; round < 6; ++round) {
          {
            Inference inference = engine.begin_inference();
            (void)inference.acquire(UnitId{0}, stream);
            if (rank == 0 || round % 2 == 0) {
              EXPECT_EQ(inference.announce(local), local);
              for (std::uint32_t use = 0; use < (round + rank) % 4; ++use)
                (void)inference.acquire(local[use], stream);
            }
            if (rank == round % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
          Step step = engine.begin_step({.learning_rate = 1e-3});
          if (rank == round % 2) {
            EXPECT_EQ(step.announce({&local[1], 1}, Pass::kForward), std::vector<UnitId>{local[1]});
            (void)step.acquire(local[1], Pass::kForward, stream);
          }
          walk_step(step, own, engine, device, stream, config_, 1);
          EXPECT_EQ(step.finish().step, round + 1);
        }
      });
}

// A value that is not finite, in the gradient of one rank's own unit.
TEST_F(TwoRanksOfLocalUnits, AnOverflowSkipsTheStepOnAllRanks) {
  for (const std::uint32_t stage : {0u, 3u}) {
    SCOPED_TRACE(stage);
    Config config = sharded_config(directory_.path(), stage, stage == 3, DType::kBf16);
    config.memory.device_bytes = 4_MiB;
    config.optimizer.non_finite = NonFinitePolicy::kSkip;
    on_two_ranks(config, model,
                 [&](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
                   const ModelSpec own = model(rank);
                   const UnitId unit = local_units(own)[2];
                   for (std::uint32_t i = 0; i < 3; ++i) {
                     Step step = engine.begin_step({.learning_rate = 1e-3});
                     walk_step(step, own, engine, device, stream, config, 1);
                     if (rank == 1 && i < 2) {
                       (void)step.announce({&unit, 1}, Pass::kBackward);
                       const Lease lease = step.acquire(unit, Pass::kBackward, stream);
                       auto* const gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
                       device.launch(stream.id(), [gradient, bits = i == 0 ? 0x7f80 : 0x3f80] {
                         gradient[5] = static_cast<std::uint16_t>(bits);
                       });
                     }
                     const StepReport report = step.finish();
                     EXPECT_EQ(report.skipped, i == 0);
                     EXPECT_EQ(report.step, i);
                   }
                 });
  }
}

// The slots that ranks reduce in are the same on all ranks, whatever local units come between. NCCL
// needs that for registered memory.
TEST_F(TwoRanksOfLocalUnits, ReductionsHaveTheSameSlotsOnAllRanks) {
  std::vector<std::vector<std::ptrdiff_t>> places(2);
  on_two_ranks(config_, model,
               [&](std::uint32_t rank, Engine& engine, HostDevice&, const Stream& stream) {
                 const ModelSpec own = validated(model(rank));
                 const std::vector<UnitId> local = local_units(own);
                 const std::byte* first = nullptr;
                 for (std::uint32_t i = 0; i < 3; ++i) {
                   Step step = engine.begin_step({.learning_rate = 1e-3});
                   for (const UnitId unit : own.forward_order)
                     (void)step.acquire(unit, Pass::kForward, stream);
                   for (const UnitId unit : own.backward_order) {
                     if (rank == 0 && index_of(unit) % 2 == 1) {
                       (void)step.announce({&local[i], 1}, Pass::kBackward);
                       (void)step.acquire(local[i], Pass::kBackward, stream);
                     }
                     const Lease lease = step.acquire(unit, Pass::kBackward, stream);
                     if (first == nullptr) first = lease.gradient(0);
                     places[rank].push_back(lease.gradient(0) - first);
                   }
                   (void)step.finish();
                 }
               });
  EXPECT_EQ(places[0], places[1]);
}

TEST_F(TwoRanksOfLocalUnits, AnnouncementsOfBothKindsAreRefused) {
  on_two_ranks(
      config_, model,
      [this](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
        const ModelSpec own = model(rank);
        const std::vector<UnitId> both = {UnitId{kFirstExpert}, local_units(own)[0]};
        Step step = engine.begin_step({.learning_rate = 1e-3});
        const std::string words = expect_error(ErrorCode::kInvalidArgument,
                                               [&] { (void)step.announce(both, Pass::kForward); });
        const std::string expected = fmt::format(
            "\"expert.1\" and \"expert.{}\" is local to this rank; announce local units in a call "
            "of "
            "their own",
            3 * rank);
        EXPECT_NE(words.find(expected), std::string::npos) << words;
        walk_step(step, own, engine, device, stream, config_, 1);  // as if nothing had been said
        EXPECT_EQ(step.finish().step, 1u);
      });
}

TEST_F(TwoRanksOfLocalUnits, UnitsThatDoNotGoTogetherAreRefused) {
  const std::string shapes = refused([](std::uint32_t rank) {
    ModelSpec own = model(rank);
    if (rank == 1) own.units.back().tensors[0].shape[0] += 1;
    return own;
  });
  EXPECT_NE(shapes.find("\"expert.12\" of rank 0 and \"expert.15\" of rank 1"), std::string::npos)
      << shapes;
  EXPECT_NE(shapes.find("give the units of one place the same shapes"), std::string::npos);
  const std::string counts = refused([](std::uint32_t rank) {
    ModelSpec own = model(rank);
    if (rank == 1) own.units.pop_back();
    return own;
  });
  EXPECT_NE(counts.find("rank 0 has 3 local units, and rank 1 has 2"), std::string::npos) << counts;
  for (const bool is_unit : {true, false}) {
    const std::string names = refused([is_unit](std::uint32_t rank) {
      ModelSpec own = model(rank);
      (is_unit ? own.units.back().name : own.units.back().tensors[1].name) = "twice";
      return own;
    });
    EXPECT_NE(names.find(fmt::format("the local {} twice is one of rank 0 and of rank 1",
                                     is_unit ? "unit" : "tensor")),
              std::string::npos)
        << names;
  }
}

// Only its rank reads a local unit, at any time.
TEST_F(TwoRanksOfLocalUnits, ARankReadsItsUnitsAlone) {
  on_two_ranks(config_, model, [](std::uint32_t rank, Engine& engine, HostDevice&, const Stream&) {
    if (rank == 1) return;
    const std::string name = "expert.6.w";
    std::vector<float> values(95 * 97);
    engine.read_state(engine.tensor(name), StateKind::kMaster, 0,
                      std::as_writable_bytes(std::span(values)));
    std::vector<float> expected(values.size());
    const TensorPlace place{.name = name};
    toy_values()(place, 0, expected);
    EXPECT_EQ(values, expected);
    EXPECT_THROW((void)engine.tensor("expert.3.w"), Error);
  });
}

// One rank has all units, so they are announced ones like others, and a checkpoint holds them.
TEST(OneRankWithLocalUnits, HasNoOthers) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement.parameters = config.placement.optimizer = TierChoice::kNvme;
  config.memory.device_bytes = 400_KiB;
  ModelSpec model = toy_model_of(routed_options(1));
  model.units[kFirstExpert].is_local = true;
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "test");
  const std::vector<UnitId> both = {UnitId{kFirstExpert + 1}, UnitId{kFirstExpert}};
  Step step = engine.begin_step({.learning_rate = 1e-3});
  EXPECT_EQ(step.announce(both, Pass::kForward), both);
  for (const UnitId unit : both) (void)step.acquire(unit, Pass::kForward, stream);
  walk_step(step, model, engine, *device, stream, config, 1);
  EXPECT_EQ(step.finish().step, 1u);
  EXPECT_EQ(engine.save(directory.path(), {}).step, 1u);
}

}  // namespace
}  // namespace sluice::test
