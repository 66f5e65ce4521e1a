// A durable store: training that goes on from its last commit has the bits of training that never
// stopped, under whatever placement and policy; and what keeps a store from being opened is named.
#include "tests/engine/durable/durable_engine.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>

#include <fmt/format.h>

#include "engine/store/store_files.h"
#include "engine/store/store_lock.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/process_with_files.h"

namespace sluice::test {
namespace {

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

// As a kill between the marks of two paths leaves it. A path whose mark says "creating" would be
// taken for abandoned, and its files removed, if it were once the only one that is given.
TEST_F(DurableEngine, OpeningCompletesTheMarksOfItsPaths) {
  const Config job = config();
  (void)run(job, {.steps = 2});
  StoreMark mark = read_store_mark(paths_[1], "run-7").value();
  ASSERT_EQ(mark.stage, StoreStage::kMade);
  mark.stage = StoreStage::kCreating;
  StoreLock(paths_[1], "run-7", "").set_mark(mark);
  (void)run(job, {.steps = 1});
  EXPECT_EQ(read_store_mark(paths_[1], "run-7").value().stage, StoreStage::kMade);
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
    const std::string words =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)opened.engine->open_or_create({}); });
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

TEST_F(DurableEngine, RestoreBringsItsOwnNumbers) {
  Config before = config();
  before.optimizer.adam.beta2 = 0.75;
  (void)run(before, {.steps = 2});
  Config scratch = config();
  scratch.storage.state = {};
  Run other(scratch);
  (void)run_toy(*other.engine, other.model, *other.device, scratch, {.steps = 5});
  MemorySource source(*other.engine);
  {
    Run again(config());
    again.engine->restore(source);
    again.engine->close();
  }
  {
    Run refused(before);
    const std::string words = expect_error(
        ErrorCode::kInput, [&] { (void)refused.engine->open_or_create(toy_values()); });
    EXPECT_NE(words.find("and is 0.75"), std::string::npos) << words;
  }
  Run own(config());
  EXPECT_TRUE(own.engine->open_or_create(toy_values()).changes.empty());
}

TEST_F(DurableEngine, RestoreIsRefusedWhereFrozenUnitsAreInTheCommit) {
  const ToyOptions options{.steps = 2, .frozen_units = {1}};
  Run first(config(), false, options);
  (void)run_toy(*first.engine, first.model, *first.device, config(), options);
  MemorySource source(*first.engine);
  first.engine.reset();
  Run again(config(), false, options);
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

TEST_F(DurableEngine, LostMarksAreWrittenAgain) {
  (void)run(config(), {.steps = 2});
  const StoreMark made = read_store_mark(paths_[0], "run-7").value();
  std::uint32_t steps = 2;
  for (const std::size_t lost : {0, 1, 2}) {  // 2: both
    for (const bool is_damaged : {false, true}) {
      std::size_t count = 0;
      for (std::size_t path = 0; path < 2; ++path) {
        if (lost != 2 && path != lost) continue;
        const std::string file = paths_[path] + "/run-7.lock";
        std::filesystem::remove(file);
        if (is_damaged) std::ofstream(file) << "sluice st";
        ++count;
      }
      Run next(config());
      EXPECT_EQ(std::ranges::count_if(next.engine->notes(),
                                      [](const std::string& note) {
                                        return note.find("run-7.lock was missing or damaged") !=
                                               std::string::npos;
                                      }),
                count);
      const ToyResult result =
          run_toy(*next.engine, next.model, *next.device, config(), {.steps = 1});
      next.engine->close();
      EXPECT_TRUE(result.state == toy_oracle(config(), {.steps = ++steps}).state);
      for (const std::string& path : paths_) EXPECT_EQ(read_store_mark(path, "run-7"), made);
    }
  }
}

// The process of a run that was killed is gone, and the kernel still writes what it had asked for.
TEST_F(DurableEngine, TheLastTransfersOfAKilledRunAreAwaited) {
  (void)run(config(), {.steps = 2});
  const StoreId id = read_store_mark(paths_[0], "run-7").value().id;
  ProcessWithFiles killed([&] {
    auto* const files = new StoreFiles(
        StoreFiles::open_records({.directories = paths_, .name = "run-7", .id = id}));
    files->open_data(2);
    FileLocks locks(1);
    files->lock(locks);
    return files->data()[1].descriptor();
  });
  const std::string words = expect_error(ErrorCode::kInput, [&] { const Run early(config()); });
  EXPECT_NE(words.find(fmt::format("process {} on ", killed.pid())), std::string::npos) << words;
  killed.kill();
  Config impatient = config();
  impatient.storage.timeout_s = 0.1;
  expect_error(ErrorCode::kTimeout, [&] { const Run late(impatient); });
  std::atomic<bool> is_over = false;
  std::thread kernel([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    is_over = true;
    killed.end_transfer();
  });
  Run next(config());
  EXPECT_TRUE(is_over);
  kernel.join();
  const std::vector<std::string> notes = next.engine->notes();
  EXPECT_TRUE(std::ranges::any_of(notes, [](const std::string& note) {
    return note.find("for the last transfers of a process that has ended") != std::string::npos;
  }));
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

// The factor of the next step's loss. A zero with a sign is a zero.
TEST_F(DurableEngine, TheLossScaleGoesOn) {
  Config with = config();
  with.precision = {.parameters = DType::kFp16, .gradients = DType::kFp16};
  with.precision.loss_scale = {.static_scale = -0.0, .initial_scale_power = 3, .window = 2};
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

TEST_F(DurableEngine, AMovingLossScaleBehindAStaticOneStartsAnew) {
  Config other = config();
  other.precision = {.parameters = DType::kFp16, .gradients = DType::kFp16};
  (void)run(other, {.steps = 1});
  other.precision.loss_scale.static_scale = 0;
  Run moving(other);
  (void)moving.engine->open_or_create(toy_values(), {.accepts_changes = true});
  EXPECT_EQ(moving.engine->position().loss_scale,
            (LossScaleState{.scale = 65536, .hysteresis_left = 2}));
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
