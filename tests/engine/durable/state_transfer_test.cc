// Durable stores that become portable checkpoints, and those that become stores of other ranks:
// the state is the same in every bit, and training goes on as if it had been there from the start.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "engine/checkpoint/checkpoint_export.h"
#include "engine/checkpoint/store_source.h"
#include "engine/durable/new_store.h"
#include "engine/store/store_survey.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/process_with_files.h"

namespace sluice::test {
namespace {

// One source for ranks that are threads.
class SharedSource final : public StateSource {
 public:
  explicit SharedSource(StateSource& source) : source_(source) {}
  StatePosition position() const override { return source_.position(); }
  void prepare(const StateDescription& wanted) override {
    const std::scoped_lock lock(mutex_);
    source_.prepare(wanted);
  }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    const std::scoped_lock lock(mutex_);
    source_.read(tensor, kind, first_element, values);
  }

 private:
  std::mutex mutex_;
  StateSource& source_;
};

// Fails behind so many elements.
class FailingSource final : public StateSource {
 public:
  FailingSource(StateSource& source, std::uint64_t elements)
      : source_(source), elements_(elements) {}
  StatePosition position() const override { return source_.position(); }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    if (values.size() > elements_) throw Error(ErrorCode::kIo, "the source has failed");
    elements_ -= values.size();
    source_.read(tensor, kind, first_element, values);
  }

 private:
  StateSource& source_;
  std::uint64_t elements_;
};

// Fails as soon as `is_late` says so.
class LateFailure final : public StateSource {
 public:
  LateFailure(StateSource& source, std::function<bool()> is_late)
      : source_(source), is_late_(std::move(is_late)) {}
  StatePosition position() const override {
    if (is_late_()) throw Error(ErrorCode::kIo, "the source has failed late");
    return source_.position();
  }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    source_.read(tensor, kind, first_element, values);
  }

 private:
  StateSource& source_;
  const std::function<bool()> is_late_;
};

class StateTransfer : public testing::Test {
 protected:
  StateTransfer() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      std::filesystem::create_directory(paths_.back());
    }
  }

  Config config_of(const std::string& name, std::uint32_t stage, DType dtype) const {
    Config config = sharded_config(paths_[0], stage, /*uses_nvme=*/stage != 1, dtype);
    config.storage.paths = paths_;
    config.storage.state = {.name = name};
    config.optimizer.overlap = OverlapPolicy::kDeferred;
    return config;
  }

  // Trains, or looks where 0 steps are asked for, on so many ranks over the config's store.
  static std::vector<RankRun> run(std::uint32_t ranks, const Config& config, ToyOptions options) {
    options.rank_count = ranks;
    std::vector<RankRun> runs = run_ranks(ranks, config, options, {.closes = true});
    for (const RankRun& run : runs) EXPECT_EQ(run.failure, "");
    return runs;
  }

  std::string export_store(const std::string& name) {
    StoreSource source(name, paths_);
    return export_checkpoint(source, source.run().model, source.run().config,
                             directory_.path() + "/" + name + "-kept", {}, source.application())
        .path;
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

TEST_F(StateTransfer, AStoreMovesToAnyNumberOfRanksAndGoesOn) {
  struct Move {
    std::uint32_t ranks_from, stage_from, ranks_to, stage_to;
    DType dtype;
    std::vector<std::uint32_t> frozen_units = {};
  };
  const Move moves[] = {{2, 3, 3, 1, DType::kBf16},
                        {3, 1, 1, 3, DType::kFp32},
                        {1, 3, 2, 0, DType::kFp16},
                        {2, 0, 4, 3, DType::kBf16, {1, 4}},
                        {4, 2, 2, 3, DType::kFp32, {1}}};
  for (std::size_t i = 0; i < std::size(moves); ++i) {
    const Move& move = moves[i];
    const std::string from_name = fmt::format("from-{}", i);
    SCOPED_TRACE(from_name);
    const Config from = config_of(from_name, move.stage_from, move.dtype);
    Config to = config_of(fmt::format("to-{}", i), move.stage_to, move.dtype);
    to.storage.block_elements = 8192;
    to.storage.paths = {paths_[1], paths_[0]};
    ToyOptions options{.steps = 3, .frozen_units = move.frozen_units};
    const StateBytes before = run(move.ranks_from, from, options)[0].result.state;

    const OpenCheckpoint checkpoint = open_checkpoint(export_store(from_name));
    EXPECT_EQ(checkpoint.source->position().step, 3u);
    const ModelSpec model = toy_model(move.frozen_units);
    EXPECT_EQ(make_store(to, model, move.ranks_to, *checkpoint.source, checkpoint.application).step,
              3u);
    options.steps = 0;
    for (const RankRun& run : run(move.ranks_to, to, options))
      EXPECT_TRUE(run.result.state == before);

    SharedSource source(*checkpoint.source);
    options.steps = 2;
    Config other = to;
    other.storage.state = {};
    ToyOptions restored = options;
    restored.source = &source;
    const StateBytes expected = run(move.ranks_to, other, restored)[0].result.state;
    const std::vector<RankRun> after = run(move.ranks_to, to, options);
    EXPECT_EQ(after[0].result.reports.back().step, 5u);
    for (const RankRun& run : after) EXPECT_TRUE(run.result.state == expected);
  }
}

// The source itself, without a checkpoint in between; one rank is ahead, as after a power cut.
TEST_F(StateTransfer, AStoreIsASourceAsOfTheStepThatAllRanksHave) {
  const Config config = config_of("run", 3, DType::kBf16);
  const StateBytes before = run(2, config, {.steps = 3})[0].result.state;
  std::filesystem::create_directory(directory_.path() + "/aside");
  for (const std::string& path : paths_) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const std::string name = entry.path().filename();
      if (name.find(".r1.") != std::string::npos)
        std::filesystem::copy_file(entry.path(), directory_.path() + "/aside/" + name);
    }
  }
  run(2, config, {.steps = 1});
  for (const std::string& path : paths_) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const std::string name = entry.path().filename();
      if (name.find(".r1.") != std::string::npos)
        std::filesystem::copy_file(directory_.path() + "/aside/" + name, entry.path(),
                                   std::filesystem::copy_options::overwrite_existing);
    }
  }
  StoreSource source("run", paths_);
  EXPECT_EQ(source.position().step, 3u);
  Config other = config_of("", 3, DType::kBf16);
  SharedSource shared(source);
  for (const RankRun& run : run(3, other, {.steps = 0, .source = &shared}))
    EXPECT_TRUE(run.result.state == before);
}

TEST_F(StateTransfer, WhatEachRankHadToSayGoesAlong) {
  const Config from = config_of("from", 3, DType::kBf16);
  run(1, from, {.steps = 1});
  StoreSource source("from", paths_);
  const Config to = config_of("to", 3, DType::kBf16);
  const std::vector<std::string> texts{"first", "second"};
  (void)make_store(to, toy_model(), 3, source, texts);
  EXPECT_EQ(StoreSource("to", paths_).application(),
            (std::vector<std::string>{"first", "second", "first"}));
}

// Initial values and files of other programs have no loss scale.
TEST_F(StateTransfer, AStoreBeginsWithTheLossScaleThatAnEngineWouldHave) {
  Config moving = config_of("moving", 3, DType::kFp16);
  moving.precision.loss_scale = {.static_scale = 0, .initial_scale_power = 12};
  const InitialValues values = toy_values();
  InitialSource initial(values);
  (void)make_store(moving, toy_model(), 2, initial, {});
  const LossScaleState first{.scale = 4096, .hysteresis_left = 2};
  StoreSource source("moving", paths_);
  EXPECT_EQ(source.position().loss_scale, first);

  Config fixed = config_of("fixed", 3, DType::kFp16);
  fixed.precision.loss_scale.static_scale = 8;
  (void)make_store(fixed, toy_model(), 2, source, {});
  StoreSource without("fixed", paths_);
  EXPECT_EQ(without.position().loss_scale, std::nullopt);
  Config again = moving;
  again.storage.state.name = "again";
  again.precision.loss_scale.initial_scale_power = 5;
  (void)make_store(again, toy_model(), 1, without, {});
  EXPECT_EQ(StoreSource("again", paths_).position().loss_scale->scale, 32);
  again.storage.state.name = "gone-on";
  (void)make_store(again, toy_model(), 1, source, {});
  EXPECT_EQ(StoreSource("gone-on", paths_).position().loss_scale, first);
}

// As after a kill between the names of the data files and those of the records.
TEST_F(StateTransfer, WhatAKilledMoveHasLeftGoes) {
  run(1, config_of("from", 3, DType::kBf16), {.steps = 1});
  StoreSource source("from", paths_);
  const Config to = config_of("to", 3, DType::kBf16);
  {
    const StoreId id = random_store_id();
    std::vector<StoreLock> locks;
    for (const std::string& path : paths_) {
      locks.emplace_back(path, "to", "");
      locks.back().set_mark({.stage = StoreStage::kCreating, .id = id});
    }
    const std::uint64_t bytes[] = {4096, 4096};
    StoreFiles files =
        StoreFiles::create({.directories = paths_, .name = "to", .id = id}, bytes, 4096);
    files.name_data();
  }
  EXPECT_EQ(survey_store("to", paths_).presence, StorePresence::kAbandoned);
  (void)make_store(to, toy_model(), 1, source, source.application());
  const StoreSurvey made = survey_store("to", paths_);
  EXPECT_EQ(made.presence, StorePresence::kMade);
  EXPECT_EQ(made.step, 1u);
  ASSERT_EQ(made.ranks.size(), 1u);
  EXPECT_TRUE(find_damaged_planes(made, made.ranks[0]).empty());
}

// The first rank of a job, which had the locks, has been killed, and another rank lives on.
TEST_F(StateTransfer, AStoreThatAProcessIsMakingStays) {
  run(1, config_of("from", 3, DType::kBf16), {.steps = 1});
  StoreSource source("from", paths_);
  const Config to = config_of("to", 3, DType::kBf16);
  const StoreId id = random_store_id();
  for (const std::string& path : paths_)
    StoreLock(path, "to", "").set_mark({.stage = StoreStage::kCreating, .id = id});
  ProcessWithFiles other([&] {
    const std::uint64_t bytes[] = {4096, 4096};
    auto* const files = new StoreFiles(
        StoreFiles::create({.directories = paths_, .name = "to", .id = id}, bytes, 4096));
    files->name_data();
    return files->data()[1].descriptor();
  });
  const std::string process = fmt::format("is in use by process {} on ", other.pid());
  const std::string words =
      expect_error(ErrorCode::kInput, [&] { (void)make_store(to, toy_model(), 1, source, {}); });
  EXPECT_NE(words.find(process), std::string::npos) << words;
  const RankRun refused = run_ranks(1, to, {.steps = 1})[0];
  EXPECT_NE(refused.failure.find(process), std::string::npos) << refused.failure;
  EXPECT_EQ(look_at_path(paths_[1], "to").files.size(), 1u);
  other.kill();
  other.end_transfer();
  run(1, to, {.steps = 1});
}

TEST_F(StateTransfer, WhatCannotMoveIsNamedAndNothingIsLeft) {
  const Config from = config_of("from", 3, DType::kBf16);
  run(2, from, {.steps = 2});
  const auto refused = [&](ErrorCode code, const std::string& words, const auto& body) {
    const std::string said = expect_error(code, body);
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  refused(ErrorCode::kInput, "there is no store \"other\"", [&] { StoreSource("other", paths_); });
  {
    StoreSource source("from", paths_);
    refused(ErrorCode::kInput, "is in use by process", [&] { StoreSource("from", paths_); });
    refused(ErrorCode::kInput, "in use",
            [&] { (void)make_store(from, toy_model(), 2, source, {}); });
    Config other = config_of("to", 3, DType::kFp32);
    refused(ErrorCode::kInput, "\"precision\" is bf16, but the config asks for fp32",
            [&] { (void)make_store(other, toy_model(), 2, source, {}); });
    other = config_of("to", 3, DType::kBf16);
    refused(ErrorCode::kInput, "\"model.",
            [&] { (void)make_store(other, toy_model({1}), 2, source, {}); });
    FailingSource failing(source, 20'000);
    refused(ErrorCode::kIo, "the source has failed",
            [&] { (void)make_store(other, toy_model(), 2, failing, {}); });
    EXPECT_EQ(survey_store("to", paths_).presence, StorePresence::kNone);
    const auto has_files = [&](const std::string& path) {
      return !look_at_path(path, "to").files.empty();
    };
    LateFailure late(source, [&] { return has_files(paths_[0]); });
    refused(ErrorCode::kIo, "the source has failed late",
            [&] { (void)make_store(other, toy_model(), 2, late, {}); });
    for (const std::string& path : paths_) EXPECT_FALSE(has_files(path)) << path;
    EXPECT_EQ(survey_store("to", paths_).presence, StorePresence::kNone);
    (void)make_store(other, toy_model(), 2, source, {});
    refused(ErrorCode::kInput, "there is a store \"to\"",
            [&] { (void)make_store(other, toy_model(), 2, source, {}); });
  }
  std::string missing;
  for (const auto& entry : std::filesystem::directory_iterator(paths_[1]))
    if (entry.path().string().find("from.") != std::string::npos &&
        entry.path().string().find(".r1.data1") != std::string::npos)
      missing = entry.path();
  std::filesystem::rename(missing, directory_.path() + "/aside");
  refused(ErrorCode::kInput, std::filesystem::path(missing).filename(),
          [&] { StoreSource("from", paths_); });
  std::filesystem::rename(directory_.path() + "/aside", missing);
  std::fstream file(missing, std::ios::in | std::ios::out | std::ios::binary);
  for (std::uint64_t at = 17; at < std::filesystem::file_size(missing); at += 4096) {
    file.seekg(static_cast<std::streamoff>(at));
    const auto byte = static_cast<char>(file.get() ^ 4);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }
  file.close();
  refused(ErrorCode::kDamaged, "checksum", [&] { (void)export_store("from"); });
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/from-kept"));
}

}  // namespace
}  // namespace sluice::test
