// A durable store: training that goes on from its last commit has the bits of training that never
// stopped, under whatever placement and policy; and what keeps a store from being opened is named.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/commit_audit.h"
#include "tests/support/expect_error.h"
#include "tests/support/flush_fault.h"
#include "tests/support/memory_source.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {
constexpr std::size_t kCaseCount = std::size(kCases);

class DurableEngine : public testing::Test {
 protected:
  DurableEngine() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      std::filesystem::create_directory(paths_.back());
    }
  }

  Config config(const Case& placement, OverlapPolicy policy, std::uint32_t commit_every) const {
    Config config = toy_config(paths_[0]);
    placement.change(config);
    if (config.memory.host_bytes) *config.memory.host_bytes += 200_KiB;  // commit buffers
    config.storage.block_elements = 4096;
    config.storage.paths = paths_;
    config.storage.state = {.name = "run-7", .commit_every = commit_every};
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = 0;  // so that every policy may be tried
    return config;
  }
  Config config() const { return config(kCases[4], OverlapPolicy::kDeferred, 1); }

  struct Run {
    explicit Run(const Config& config, bool is_gpu = false, const ToyOptions& options = {})
        : model(toy_model(options.frozen_units)),
          device(make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                   .has_own_memory = is_gpu})),
          engine(std::in_place, config, model, *device) {}
    ModelSpec model;
    std::unique_ptr<HostDevice> device;
    std::optional<Engine> engine;
  };

  ToyResult run(const Config& config, const ToyOptions& options, bool is_gpu = false,
                bool closes = true) {
    Run run(config, is_gpu, options);
    ToyResult result = run_toy(*run.engine, run.model, *run.device, config, options);
    if (closes) run.engine->close();
    return result;
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

TEST_F(DurableEngine, GoesOnUnderAnyOtherPlacementWithTheSameBits) {
  constexpr OverlapPolicy kAll[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                    OverlapPolicy::kEager};
  for (std::size_t i = 0; i < kCaseCount; ++i) {
    const Case& from = kCases[i];
    const Case& to = kCases[(7 * i + 3) % kCaseCount];
    SCOPED_TRACE(from.name + " to " + to.name);
    const auto commit_every = static_cast<std::uint32_t>(1 + i % 3);
    const Config before = config(from, kAll[i % 3], commit_every);
    const Config after = config(to, kAll[(i + 1) % 3], 1 + (commit_every + 1) % 3);
    const ToyResult expected = toy_oracle(before, {.steps = 9, .evaluate = true});
    (void)run(before, {.steps = 5, .evaluate = true}, from.is_gpu);
    const ToyResult second = run(after, {.steps = 4, .evaluate = true}, to.is_gpu);
    EXPECT_EQ(second.reports.back().step, 9u);
    EXPECT_TRUE(second.state == expected.state);
    for (const std::string& path : paths_) {
      for (const auto& entry : std::filesystem::directory_iterator(path))
        std::filesystem::remove(entry.path());
    }
  }
}

// A process that ends without close() loses what came after the last commit, and no more.
TEST_F(DurableEngine, WithoutCloseItGoesOnFromTheLastCommit) {
  for (const std::uint32_t commit_every : {1u, 3u}) {
    const Config with = config(kCases[4], OverlapPolicy::kDeferred, commit_every);
    std::uint64_t step = 0;
    for (const std::uint32_t steps : {4u, 3u, 5u}) {
      (void)run(with, {.steps = steps}, false, /*closes=*/false);
      step += steps;
      Run again(with);
      const std::uint64_t committed = again.engine->committed_step().value();
      EXPECT_LE(committed, step);
      EXPECT_GE(committed + commit_every + 1, step);  // the last may have been under way
      EXPECT_EQ(committed % commit_every, 0u);
      step = committed;
    }
    const ToyResult expected = toy_oracle(with, {.steps = static_cast<std::uint32_t>(step) + 2});
    EXPECT_TRUE(run(with, {.steps = 2}).state == expected.state);
    for (const std::string& path : paths_) std::filesystem::remove_all(path);
    for (const std::string& path : paths_) std::filesystem::create_directory(path);
  }
}

TEST_F(DurableEngine, SpeculativeUpdatesTakeCopiesThatNoCommitNames) {
  for (const std::uint32_t commit_every : {1u, 2u}) {
    for (const double clip_norm : {kNeverBites, bound_that_bites_sometimes(1), 1.0}) {
      SCOPED_TRACE(testing::Message() << commit_every << " " << clip_norm);
      Config with = config(kCases[4], OverlapPolicy::kSpeculative, commit_every);
      with.optimizer.clip_norm = clip_norm;
      with.storage.state.name = fmt::format("speculative-{}-{}", commit_every, clip_norm);
      const ToyResult expected = toy_oracle(with, {.steps = 7});
      (void)run(with, {.steps = 4});
      EXPECT_TRUE(run(with, {.steps = 3}).state == expected.state);
    }
  }
}

TEST_F(DurableEngine, FrozenUnitsHaveOneCopyAndStayAsTheyAre) {
  const ToyOptions options{.steps = 3, .frozen_units = {1, 4}};
  for (const std::size_t index : {std::size_t{1}, std::size_t{4}, std::size_t{0}}) {
    Config with = config(kCases[index], OverlapPolicy::kDeferred, 1);
    with.storage.state.name = "frozen-" + kCases[index].name;
    ToyOptions all = options;
    all.steps = 6;
    const ToyResult expected = toy_oracle(with, all);
    (void)run(with, options);
    with.placement = kCases[4].name == kCases[index].name
                         ? Config::Placement{TierChoice::kHost, TierChoice::kHost}
                         : Config::Placement{TierChoice::kNvme, TierChoice::kNvme};
    EXPECT_TRUE(run(with, options).state == expected.state);
  }
}

TEST_F(DurableEngine, CommitNowCommitsAStepThatIsNotDue) {
  const Config with = config(kCases[1], OverlapPolicy::kDeferred, 100);
  {
    Run first(with);
    (void)run_toy(*first.engine, first.model, *first.device, with, {.steps = 3});
    EXPECT_EQ(first.engine->committed_step(), 0u);
    first.engine->commit_now();
    EXPECT_EQ(first.engine->committed_step(), 3u);
    first.engine->commit_now();  // nothing has changed
    EXPECT_EQ(first.engine->committed_step(), 3u);
  }
  EXPECT_TRUE(run(with, {.steps = 2}).state == toy_oracle(with, {.steps = 5}).state);
}

TEST_F(DurableEngine, ASecondEngineIsRefused) {
  const Config with = config();
  const Run first(with);
  const std::string words = expect_error(ErrorCode::kInput, [&] { const Run second(with); });
  EXPECT_NE(words.find("is in use by process " + std::to_string(::getpid())), std::string::npos)
      << words;
}

TEST_F(DurableEngine, InitializeDoesNotReplaceWhatThereIs) {
  (void)run(config(), {.steps = 2});
  Run again(config());
  EXPECT_EQ(again.engine->committed_step(), 2u);
  const std::string words =
      expect_error(ErrorCode::kInvalidArgument, [&] { again.engine->initialize(toy_values()); });
  EXPECT_NE(words.find("holds the state of step 2"), std::string::npos) << words;
  EXPECT_EQ(again.engine->open_or_create(toy_values()).step, 2u);
}

TEST_F(DurableEngine, OpenOrCreateIsTheFirstCallAndNeedsValues) {
  for (const bool is_new : {true, false}) {
    Run opened(config());
    const std::string words = expect_error(ErrorCode::kInvalidArgument,
                                           [&] { (void)opened.engine->open_or_create({}); });
    EXPECT_NE(words.find("the function that gives the initial values is empty"), std::string::npos)
        << words;
    EXPECT_EQ(opened.engine->open_or_create(toy_values()).is_new, is_new);
    expect_error(ErrorCode::kInvalidArgument,
                 [&] { (void)opened.engine->open_or_create(toy_values()); });
    opened.engine->close();
  }
}

TEST_F(DurableEngine, RestoreTakesThePlaceOfWhatThereIs) {
  const Config with = config();
  (void)run(with, {.steps = 2});
  Config scratch = with;
  scratch.storage.state = {};
  Run other(scratch);
  (void)run_toy(*other.engine, other.model, *other.device, scratch, {.steps = 5});
  MemorySource source(*other.engine);
  {
    Run again(with);
    again.engine->restore(source, "behind step 5");
    again.engine->close();
  }
  EXPECT_TRUE(run(with, {.steps = 1}).state == toy_oracle(with, {.steps = 6}).state);
}

TEST_F(DurableEngine, RestoreIsRefusedWhereFrozenUnitsAreInTheCommit) {
  const ToyOptions options{.steps = 2, .frozen_units = {1}};
  (void)run(config(), options);
  Run again(config(), false, options);
  MemorySource source(*again.engine);
  const std::string words =
      expect_error(ErrorCode::kUnsupported, [&] { again.engine->restore(source); });
  EXPECT_NE(words.find("\"run-7\" keeps frozen units in one copy"), std::string::npos) << words;
  EXPECT_EQ(again.engine->open_or_create(toy_values()).step, 2u);
}

TEST_F(DurableEngine, WhatCannotGoOnIsNamedAndNothingIsChanged) {
  (void)run(config(), {.steps = 2});
  const auto refused = [&](const Config& other, ErrorCode code, const std::string& expected) {
    const std::string words = expect_error(code, [&] { const Run run(other); });
    EXPECT_NE(words.find(expected), std::string::npos) << words;
  };
  Config other = config();
  other.storage.block_elements = 8192;
  refused(other, ErrorCode::kInput, "storage.block_elements was 4096 and is 8192");
  other = config();
  other.precision.parameters = DType::kFp32;
  refused(other, ErrorCode::kInput, "precision.parameters was bf16 and is fp32");
  other = config();
  other.optimizer.state = OptimizerState::k8bit;
  refused(other, ErrorCode::kInput, "optimizer.state was fp32 and is 8bit");
  other = config();
  other.storage.paths.pop_back();
  refused(other, ErrorCode::kInput, ".r0.commit1 not found in " + paths_[0]);
  const std::string words = expect_error(ErrorCode::kInput, [&] {
    const ToyOptions frozen{.frozen_units = {1}};
    const Run run(config(), false, frozen);
  });
  EXPECT_NE(words.find("frozen units"), std::string::npos) << words;
  EXPECT_TRUE(run(config(), {.steps = 2}).state == toy_oracle(config(), {.steps = 4}).state);
}

TEST_F(DurableEngine, RoundedMomentsGoOn) {
  for (const OptimizerState state : {OptimizerState::k8bit, OptimizerState::kBf16}) {
    Config rounded = config();
    rounded.optimizer.state = state;
    rounded.storage.state.name = name_of(state);
    (void)run(rounded, {.steps = 2});
    EXPECT_TRUE(run(rounded, {.steps = 2}).state == toy_oracle(rounded, {.steps = 4}).state);
  }
}

TEST_F(DurableEngine, NumbersThatHaveChangedAreAcceptedKnowingly) {
  (void)run(config(), {.steps = 2});
  Config other = config();
  other.optimizer.adam.beta2 = 0.75;
  {
    Run refused(other);
    const std::string words = expect_error(
        ErrorCode::kInput, [&] { (void)refused.engine->open_or_create(toy_values()); });
    EXPECT_NE(words.find("and is 0.75"), std::string::npos) << words;
  }
  {
    Run accepted(other);
    const OpenedState opened =
        accepted.engine->open_or_create(toy_values(), {.accepts_changes = true});
    EXPECT_EQ(opened.changes.size(), 1u);
    Step step = accepted.engine->begin_step({.learning_rate = 1e-2});
    const Stream stream(*accepted.device, "compute");
    walk_step(step, accepted.model, *accepted.engine, *accepted.device, stream, other, 1);
    (void)step.finish();
    accepted.engine->close();
  }
  Run again(other);  // it is the store's own now
  EXPECT_TRUE(again.engine->open_or_create(toy_values()).changes.empty());
}

// Every byte that a commit names counts: a flipped bit is found when the block is read.
TEST_F(DurableEngine, FlippedBitsAreFound) {
  for (const std::size_t index : {std::size_t{1}, std::size_t{4}}) {
    Config with = config(kCases[index], OverlapPolicy::kDeferred, 1);
    with.storage.state.name = "flipped-" + kCases[index].name;
    (void)run(with, {.steps = 2});
    for (const std::string& path : paths_) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        if (entry.path().string().find(with.storage.state.name) == std::string::npos ||
            entry.path().string().find(".data") == std::string::npos)
          continue;
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        for (std::uint64_t at = 17; at < entry.file_size(); at += 4096) {
          file.seekg(static_cast<std::streamoff>(at));
          const auto byte = static_cast<char>(file.get() ^ 4);
          file.seekp(static_cast<std::streamoff>(at));
          file.put(byte);
        }
      }
    }
    const std::string words =
        expect_error(ErrorCode::kDamaged, [&] { (void)run(with, {.steps = 1}); });
    EXPECT_NE(words.find("checksum"), std::string::npos) << words;
  }
}

TEST_F(DurableEngine, AFileThatHasBeenCutIsNamed) {
  (void)run(config(), {.steps = 2});
  std::string cut;
  for (const auto& entry : std::filesystem::directory_iterator(paths_[1])) {
    if (entry.path().string().find(".data1") == std::string::npos) continue;
    cut = entry.path();
    std::filesystem::resize_file(cut, 8192);
  }
  const std::string words = expect_error(ErrorCode::kDamaged, [&] { const Run run(config()); });
  EXPECT_NE(words.find(cut), std::string::npos) << words;
  EXPECT_NE(words.find("8192 B"), std::string::npos) << words;
}

// The requests to the queue, in order, for every placement and policy.
TEST_F(DurableEngine, RecordsNameWhatIsFlushedAndNothingNamedIsWrittenAgain) {
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
    for (auto i = static_cast<std::size_t>(policy) % 3; i < kCaseCount; i += 3) {
      const auto commit_every = static_cast<std::uint32_t>(1 + i % 2);
      Config with = config(kCases[i], policy, commit_every);
      with.storage.state.name = fmt::format("audit-{}-{}", name_of(policy), kCases[i].name);
      SCOPED_TRACE(with.storage.state.name);
      if (policy == OverlapPolicy::kSpeculative)
        with.optimizer.clip_norm = bound_that_bites_sometimes(1);
      CommitAudit audit;
      {
        const ModelSpec model = toy_model();
        const auto device =
            make_host_device({.memory_bytes = with.memory.device_bytes.value_or(64_MiB),
                              .has_own_memory = kCases[i].is_gpu});
        Engine engine = EngineOverQueue::make(with, model, *device, [&](auto queue) {
          return make_audit_queue(std::move(queue), audit);
        });
        (void)run_toy(engine, model, *device, with, {.steps = 6});
        engine.close();
      }
      EXPECT_EQ(audit.violations, std::vector<std::string>());
      EXPECT_EQ(audit.records, 1 + 6 / commit_every);
      EXPECT_GT(audit.stores, 6u);
    }
  }
}

TEST_F(DurableEngine, AFlushThatFailsOrHangsStopsTheRunAndTheStoreStaysAtTheCommitBefore) {
  for (const int error : {EIO, ENOSPC, 0}) {
    // Four flushes a commit: of two data files, and of each twin.
    for (const int passed : {8, 9, 10, 11}) {
      SCOPED_TRACE(testing::Message() << error << " behind " << passed);
      Config with = config();
      with.storage.state.name = fmt::format("flush-{}-{}", error, passed);
      with.storage.timeout_s = error == 0 ? 2 : 60;  // a loaded machine is no drive that hangs
      const ModelSpec model = toy_model();
      {
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        Engine engine =
            EngineOverQueue::make(with, model, *device, [&](std::unique_ptr<IoQueue> queue) {
              return std::make_unique<FlushFault>(std::move(queue), error, passed);
            });
        const std::string words =
            expect_error(error == 0 ? ErrorCode::kTimeout : ErrorCode::kIo, [&] {
              (void)run_toy(engine, model, *device, with, {.steps = 6});
              engine.close();
            });
        EXPECT_NE(words.find("flush of " + directory_.path()), std::string::npos) << words;
        EXPECT_NE(words.find("for the commit of step 2"), std::string::npos) << words;
      }
      Run again(with);
      const std::uint64_t step = again.engine->committed_step().value();
      // Once it may be there or not: a record that could not be flushed may be whole.
      EXPECT_TRUE(step == 1 || (step == 2 && passed >= 10) || error == 0) << step;
      again.engine.reset();
      const auto rest = static_cast<std::uint32_t>(6 - step);
      EXPECT_TRUE(run(with, {.steps = rest}).state == toy_oracle(with, {.steps = 6}).state);
    }
  }
}

// The factor of the next step's loss.
TEST_F(DurableEngine, TheLossScaleGoesOn) {
  Config with = config();
  with.precision = {.parameters = DType::kFp16, .gradients = DType::kFp16};
  with.precision.loss_scale = {.static_scale = 0, .initial_scale_power = 3, .window = 2};
  const auto next_scale = [&](Run& run) {
    const Step step = run.engine->begin_step({.learning_rate = 1e-2});
    return step.loss_scale();
  };
  double scale = 0;
  {
    Run first(with);
    (void)run_toy(*first.engine, first.model, *first.device, with, {.steps = 5});
    scale = next_scale(first);
    first.engine->close();
  }
  EXPECT_NE(scale, 8);
  Run second(with);
  (void)second.engine->open_or_create(toy_values());
  EXPECT_EQ(next_scale(second), scale);
}

TEST_F(DurableEngine, ScratchHasNothingToCommit) {
  Config with = config();
  with.storage.state = {};
  Run scratch(with);
  scratch.engine->initialize(toy_values());
  EXPECT_FALSE(scratch.engine->committed_step().has_value());
  expect_error(ErrorCode::kInvalidArgument, [&] { scratch.engine->commit_now(); });
  expect_error(ErrorCode::kInvalidArgument,
               [&] { (void)scratch.engine->open_or_create(toy_values()); });
}

}  // namespace
}  // namespace sluice::test
