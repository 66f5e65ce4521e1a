// Units that belong to one rank each: nothing of them is gathered or reduced, each counts once in
// the norm, and ranks announce what they like. The oracle has all units of all ranks, in one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include "engine/checkpoint/store_source.h"
#include "tests/engine/ranks/local_unit_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/side_by_side.h"
#include "tests/support/toy_computation.h"

namespace sluice::test {
namespace {

// The bytes of each tensor's state, by name.
std::map<std::string, StateBytes> by_tensor(const ModelSpec& model, const Config& config,
                                            const StateBytes& state) {
  std::map<std::string, StateBytes> tensors;
  std::size_t begin = 0;
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      const std::size_t bytes =
          tensor.element_count() * (size_of(config.precision.parameters) + 3 * sizeof(float));
      const auto first = state.begin() + static_cast<std::ptrdiff_t>(begin);
      tensors[tensor.name] = StateBytes(first, first + static_cast<std::ptrdiff_t>(bytes));
      begin += bytes;
    }
  }
  EXPECT_EQ(begin, state.size());
  return tensors;
}

// The uses of each unit saw the oracle's parameters, in the same order. Units are used in other
// orders.
void expect_sights(const RankModel& model, const ToySights& actual, const ToySights& expected) {
  std::map<std::uint32_t, std::vector<std::uint64_t>> seen, wanted;
  for (const ToySight& sight : actual) {
    EXPECT_EQ(sight.digest, sight.digest_at_end);
    seen[index_of(model.whole[index_of(sight.unit)])].push_back(sight.digest);
  }
  for (const ToySight& sight : expected)
    if (model.own[index_of(sight.unit)]) wanted[index_of(sight.unit)].push_back(sight.digest);
  EXPECT_TRUE(seen == wanted);
}

// The bytes of the gradients that ranks add up in a step.
std::uint64_t reduced_bytes(const RankModel& model, const Config& config, const ToyOptions& options,
                            const ToyUses& uses) {
  std::uint64_t bytes = 0;
  std::vector<bool> is_counted(model.model.units.size(), false);
  for (const ToyUse& use : uses) {
    const UnitSpec& unit = model.model.units[index_of(use.unit)];
    if (use.pass != Pass::kBackward || unit.is_local) continue;
    const bool reduces_each = options.reduces_each || unit.is_announced;
    if (is_counted[index_of(use.unit)] && !reduces_each) continue;
    is_counted[index_of(use.unit)] = true;
    for (const TensorSpec& tensor : unit.tensors)
      bytes += tensor.element_count() * size_of(config.precision.gradients);
  }
  return bytes;
}

// A training whose experts are spread over ranks.
struct LocalTraining {
  std::uint32_t ranks = 2;
  std::uint64_t seed = 1;
  ToyOptions options;  // of the model with all units, for the oracle

  explicit LocalTraining(std::uint32_t count, std::uint64_t of_seed, std::uint32_t micro_batches,
                         std::uint32_t stage)
      : ranks(count), seed(of_seed), options(routed_options(of_seed)) {
    options.micro_batches = micro_batches;
    options.reduces_each = stage >= 2 || micro_batches == 1;
    options.rank_count = count;
    // At least one rank computes in each use; with a local unit, only its own.
    options.computes = [count, of_seed](std::uint32_t rank, const ToyUse& use) {
      if (const auto owner = owner_of(use.unit, count)) return rank == *owner;
      std::mt19937_64 choice(of_seed + use.number % 0x100000 * 64);
      const std::uint64_t bits = choice();
      return rank == bits % count || (bits >> (32 + rank) & 1) != 0;
    };
  }

  RankModel model(std::uint32_t rank) const { return model_of_rank(options, rank, ranks); }
  ToyUses uses(const RankModel& model, std::uint32_t rank, std::uint64_t step,
               const ToyUses& planned) const {
    ToyUses all = planned;
    route(seed, step, all);
    return uses_of_rank(model, rank, ranks, seed + step, all);
  }
  RankConditions conditions() const {
    RankConditions conditions{.delay_us_max = 100, .seed = seed};
    conditions.change_toy = [this](std::uint32_t rank, ModelSpec& spec, ToyOptions& own) {
      const RankModel of_rank = model(rank);
      spec = of_rank.model;
      own.change = [this, of_rank, rank](std::uint64_t step, ToyUses& planned) {
        planned = uses(of_rank, rank, step, planned);
      };
      own.computes = [this, of_rank](std::uint32_t which, const ToyUse& use) {
        return options.computes(which, {of_rank.whole[index_of(use.unit)], use.pass, use.number});
      };
    };
    return conditions;
  }
  std::vector<RankRun> run(const Config& config, const RankConditions& conditions) const {
    return run_ranks(ranks, config, options, conditions);
  }
  void expect(const Config& config, const std::vector<RankRun>& runs,
              const ToyResult& oracle) const {
    const auto expected = by_tensor(toy_model_of(options), config, oracle.state);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(fmt::format("seed {}, rank {} of {}", seed, rank, ranks));
      ASSERT_EQ(runs[rank].failure, "");
      const RankModel of_rank = model(rank);
      const ToyResult& result = runs[rank].result;
      for (const auto& [name, bytes] : by_tensor(of_rank.model, config, result.state))
        EXPECT_TRUE(bytes == expected.at(name)) << name;
    }
  }
};

class LocalUnits : public testing::TestWithParam<std::uint32_t> {};

TEST_P(LocalUnits, TheBitsAreThoseOfOneRankWithAllUnits) {
  const std::uint32_t stage = GetParam();
  side_by_side(seeds_of(campaign(6)), [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, random() % 2 == 0, DType::kBf16);
    if (stage == 3) config.memory.device_bytes = 500_KiB + random() % 4 * 60_KiB;
    if (random() % 2 == 0) config.sharding.keep_gathered_bytes = 8_KiB;
    config.optimizer.overlap =
        random() % 2 == 0 ? OverlapPolicy::kSpeculative : OverlapPolicy::kDeferred;
    config.optimizer.clip_norm = random() % 2 == 0 ? 1e9 : 1;
    config.optimizer.untouched = UntouchedPolicy{static_cast<std::uint8_t>(random() % 3)};
    const auto ranks = static_cast<std::uint32_t>(2 + random() % 2);
    const LocalTraining training(ranks, seed, static_cast<std::uint32_t>(1 + random() % 2), stage);
    const std::vector<RankRun> runs = training.run(config, training.conditions());
    const ToyResult oracle = toy_oracle(config, training.options);
    training.expect(config, runs, oracle);
    for (std::uint32_t rank = 0; rank < ranks && !testing::Test::HasFailure(); ++rank) {
      const RankModel model = training.model(rank);
      expect_sights(model, runs[rank].result.sights, oracle.sights);
      for (std::size_t i = 0; i < oracle.reports.size(); ++i) {
        const StepReport& report = runs[rank].result.reports[i];
        EXPECT_EQ(report.gradient_norm, oracle.reports[i].gradient_norm);
        EXPECT_EQ(report.clip_factor, oracle.reports[i].clip_factor);
        EXPECT_EQ(report.schedule_changes, 0u);
        const ToyUses planned = planned_uses(validated(model.model), training.options.micro_batches,
                                             MicroBatchOrder::kHorizontal);
        const ToyUses uses = training.uses(model, rank, i + 1, planned);
        EXPECT_EQ(report.rank_traffic.reduced_bytes,
                  reduced_bytes(model, config, training.options, uses));
        EXPECT_EQ(report.announced_uses, std::ranges::count_if(uses, [&](const ToyUse& use) {
                    return model.model.units[index_of(use.unit)].is_announced;
                  }));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, LocalUnits, testing::Values(0u, 1u, 2u, 3u),
                         [](const auto& value) { return "stage" + std::to_string(value.param); });

// Checkpoints of two ranks after their second step, under every policy for units that are not used.
class SavedLocalUnits : public testing::TestWithParam<std::uint32_t> {
 protected:
  Config config_of(const std::string& path) const {
    Config config = sharded_config(path, GetParam(), true, DType::kBf16);
    config.optimizer.clip_norm = 1;
    config.optimizer.untouched = UntouchedPolicy{static_cast<std::uint8_t>(GetParam() % 3)};
    config.memory.save_buffers = 2;
    return config;
  }
  // Trains to the end, and saves on the way, between two steps or beside the third.
  std::vector<RankRun> save(const LocalTraining& training, const Config& config, bool beside) {
    RankConditions conditions = training.conditions();
    conditions.change_toy = [this, beside, of_training = conditions.change_toy](
                                std::uint32_t rank, ModelSpec& model, ToyOptions& options) {
      of_training(rank, model, options);
      options.after_step = [this, beside, rank](Engine& engine, std::uint64_t step) {
        const SaveOptions own{.application = std::to_string(rank)};
        if (step == 2 && beside) engine.begin_save(directory_.path(), own);
        if (step == 3 && beside) paths_[rank] = engine.finish_save().value().path;
        if (step == 2 && !beside) paths_[rank] = engine.save(directory_.path(), own).path;
      };
    };
    return training.run(config, conditions);
  }
  // The same, from the checkpoint on.
  std::vector<RankRun> restore(const LocalTraining& training, const Config& config) {
    RankConditions conditions = training.conditions();
    std::vector<OpenCheckpoint> opened(training.ranks);
    conditions.change_toy = [&, of_training = conditions.change_toy](
                                std::uint32_t rank, ModelSpec& model, ToyOptions& options) {
      of_training(rank, model, options);
      opened[rank] = open_checkpoint(paths_[0]);
      EXPECT_EQ(opened[rank].application, (std::vector<std::string>{"0", "1"}));
      options.source = opened[rank].source.get();
    };
    return training.run(config, conditions);
  }

  const TempDirectory directory_;
  std::string paths_[2];
};

TEST_P(SavedLocalUnits, GoOnWithTheSameBitsAndByNameOnOtherRanks) {
  const Config config = config_of(directory_.path());
  for (const bool beside : {false, true}) {
    SCOPED_TRACE(beside);
    LocalTraining training(2, 5, 1, GetParam());
    training.options.steps = 5;
    const ToyResult oracle = toy_oracle(config, training.options);
    training.expect(config, save(training, config, beside), oracle);
    EXPECT_EQ(paths_[0], paths_[1]);
    training.options.steps = 3;
    training.expect(config, restore(training, config), oracle);
    // The names say whose state it is, so other ranks may have the experts.
    training.options.steps = 2;
    const ToyResult saved = toy_oracle(config, training.options);
    LocalTraining three(3, 5, 1, GetParam());
    three.options.steps = 0;
    three.expect(config, restore(three, config), saved);
    const OpenCheckpoint opened = open_checkpoint(paths_[0]);
    Config alone = toy_config(directory_.path());
    alone.optimizer = config.optimizer;
    ToyOptions none = training.options;
    none.steps = 0;
    none.rank_count = 1;
    none.source = opened.source.get();
    EXPECT_TRUE(run_toy(alone, none).state == saved.state);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, SavedLocalUnits, testing::Values(0u, 1u, 2u, 3u),
                         [](const auto& value) { return "stage" + std::to_string(value.param); });

// One rank's expert that the checkpoint does not have. All ranks hear of it before they read.
TEST_P(SavedLocalUnits, OtherExpertsAreRefusedOnEveryRank) {
  const Config config = config_of(directory_.path());
  LocalTraining training(2, 5, 1, GetParam());
  training.options.steps = 2;
  training.expect(config, save(training, config, false), toy_oracle(config, training.options));
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      ModelSpec model = training.model(rank).model;
      if (rank == 1) model.units.back().tensors[0].name = "another";
      Engine engine(config, model, *device, collectives.get());
      const OpenCheckpoint opened = open_checkpoint(paths_[0]);
      const std::string words =
          expect_error(ErrorCode::kInput, [&] { engine.restore(*opened.source); });
      EXPECT_NE(words.find("no tensor \"another\""), std::string::npos) << words;
      engine.initialize(toy_values());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each rank's store has its own units. No single state holds those of all ranks.
TEST(DurableLocalUnits, StoresContinueAndAreNotExported) {
  const TempDirectory directory;
  for (const std::uint32_t stage : {0u, 3u}) {
    SCOPED_TRACE(stage);
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.storage.state = {.name = fmt::format("stage-{}", stage), .commit_every = 1};
    config.optimizer.clip_norm = 1;
    LocalTraining training(2, 5, 1, stage);
    training.options.steps = 2;
    RankConditions conditions = training.conditions();
    conditions.closes = true;
    for (std::uint32_t turn = 0; turn < 2; ++turn)
      for (const RankRun& run : training.run(config, conditions)) ASSERT_EQ(run.failure, "");
    training.options.steps = 1;
    const std::vector<RankRun> runs = training.run(config, conditions);
    training.options.steps = 5;
    training.expect(config, runs, toy_oracle(config, training.options));
    const std::string words = expect_error(ErrorCode::kUnsupported, [&] {
      const StoreSource source(config.storage.state.name, {directory.path()});
    });
    EXPECT_NE(words.find("unit \"expert.0\" is local to rank 0"), std::string::npos) << words;
    EXPECT_NE(words.find("continue the run with 2 ranks"), std::string::npos) << words;
  }
}

}  // namespace
}  // namespace sluice::test
