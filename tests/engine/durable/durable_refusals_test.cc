// Durable stores that cannot be opened: each error names the file, the field, what is
// expected and found, and the command that helps; and no byte on the drive has changed.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <span>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/store/commit_choice.h"
#include "engine/store/commit_format.h"
#include "engine/store/store_survey.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/memory_source.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

const std::string kRemedy(kStoreRemedy);

using Contents = std::map<std::string, std::string>;

// Every file but the locks, which say who looked last.
Contents contents_below(const std::string& folder) {
  Contents all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file() || entry.path().extension() == ".lock") continue;
    all[entry.path()] = file_text(entry.path());
  }
  return all;
}

class DurableRefusals : public testing::Test {
 protected:
  DurableRefusals() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      fs::create_directory(paths_.back());
    }
    config_ = toy_config(paths_[0]);
    config_.storage.paths = paths_;
    config_.storage.state.name = "run-7";
    train(config_);
  }

  void train(const Config& config) const {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    Engine engine(config, toy_model(), *device);
    (void)run_toy(engine, toy_model(), *device, config, {.steps = 3});
    engine.close();
  }

  Contents contents() const { return contents_below(directory_.path()); }
  std::string file_with(const std::string& part) const {
    for (const auto& [name, bytes] : contents())
      if (name.find(part) != std::string::npos) return name;
    ADD_FAILURE() << part;
    return {};
  }

  void expect_words(const std::string& message, const std::vector<std::string>& words) const {
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in " << message;
  }
  void expect_refused(ErrorCode code, const std::vector<std::string>& words, const Config& config,
                      const ModelSpec& model = toy_model()) const {
    const Contents before = contents();
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    expect_words(expect_error(code, [&] { const Engine engine(config, model, *device); }), words);
    EXPECT_TRUE(contents() == before);
  }
  // Both twins of both slots.
  void change_records(const std::function<void(std::string& file)>& change) const {
    for (const char* const twin : {".commit0", ".commit1"}) {
      const std::string name = file_with(twin);
      std::string bytes = contents().at(name);
      change(bytes);
      std::ofstream(name, std::ios::binary | std::ios::trunc) << bytes;
    }
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
  Config config_;
};

TEST_F(DurableRefusals, ATruncatedRecord) {
  change_records([](std::string& file) { file.resize(100); });
  expect_refused(ErrorCode::kDamaged,
                 {file_with(".commit0"), "has 100 B", "same whole pages", kRemedy}, config_);
}

TEST_F(DurableRefusals, ADamagedRecord) {
  change_records([](std::string& file) {
    for (std::size_t slot = 0; slot < kCommitSlots; ++slot) {
      char& byte = file[slot * file.size() / kCommitSlots + offsetof(CommitHeader, step)];
      byte = static_cast<char>(byte ^ 1);
    }
  });
  expect_refused(
      ErrorCode::kDamaged,
      {file_with(".commit0"), file_with(".commit1"), "its checksum is 0x", "is expected", kRemedy},
      config_);
}

// With the checksum of its bytes, as another version of the program writes it.
TEST_F(DurableRefusals, ARecordOfAnotherVersion) {
  change_records([](std::string& file) {
    for (std::size_t slot = 0; slot < kCommitSlots; ++slot) {
      char* const bytes = file.data() + slot * file.size() / kCommitSlots;
      CommitHeader header;
      std::memcpy(&header, bytes, sizeof header);
      header.version = 9;
      header.checksum = commit_checksum(
          header, std::as_bytes(std::span(bytes, header.length_bytes)).subspan(sizeof header));
      std::memcpy(bytes, &header, sizeof header);
    }
  });
  expect_refused(ErrorCode::kUnsupported,
                 {file_with(".commit0"), "it has version 9", "knows 1", "`sluice state export`"},
                 config_);
}

// Whole records of this model, whose planes are of another one.
TEST_F(DurableRefusals, ARecordWhosePlanesDoNotFit) {
  const auto change_planes = [&](const std::function<void(CommitRecord&)>& change) {
    change_records([&](std::string& file) {
      const std::size_t slot_bytes = file.size() / kCommitSlots;
      for (std::size_t slot = 0; slot < kCommitSlots; ++slot) {
        const auto bytes =
            std::as_writable_bytes(std::span(file)).subspan(slot * slot_bytes, slot_bytes);
        CommitReading reading = decode_commit(bytes);
        if (reading.state != CommitState::kWhole) continue;
        change(reading.record);
        encode_commit(reading.record, bytes);
      }
    });
  };
  std::size_t count = 0;
  change_planes([&](CommitRecord& record) {
    record.planes.pop_back();
    count = record.planes.size();
  });
  expect_refused(ErrorCode::kDamaged,
                 {"\"run-7\"", fmt::format("its record's plane {} does not fit", count), kRemedy},
                 config_);
  change_planes([](CommitRecord& record) { record.planes[0].length_bytes -= 4; });
  expect_refused(ErrorCode::kDamaged, {"its record's plane 0 does not fit the model's block 0"},
                 config_);
}

TEST_F(DurableRefusals, ARecordOfAnotherStore) {
  Config other = config_;
  other.storage.state.name = "other";
  train(other);
  const auto twin_of = [&](const std::string& name) {
    for (const auto& [file, bytes] : contents())
      if (fs::path(file).filename().string().starts_with(name) && file.ends_with(".commit1"))
        return file;
    return std::string();
  };
  std::ofstream(twin_of("run-7"), std::ios::binary | std::ios::trunc)
      << contents().at(twin_of("other"));
  expect_refused(
      ErrorCode::kInput,
      {".commit1", "is of store ", "rank 0 of 1", "bring the files of one store together"},
      config_);
}

TEST_F(DurableRefusals, AnotherModelOrPrecision) {
  ModelSpec other = toy_model();
  other.units[1].tensors[0].shape[0] += 1;
  const std::vector<std::string> remedies = {file_with(".commit0"), "`sluice state inspect`",
                                             "choose another storage.state.name"};
  expect_refused(ErrorCode::kInput, remedies, config_, other);
  expect_refused(ErrorCode::kInput, {"another model", "names and shapes was of hash", "and is of"},
                 config_, other);
  Config wide = config_;
  wide.precision.parameters = DType::kFp32;
  expect_refused(ErrorCode::kInput, remedies, wide);
  expect_refused(ErrorCode::kInput,
                 {"precision.parameters was bf16 and is fp32", "`sluice state export`",
                  "`sluice train --resume-from store:NAME --convert`"},
                 wide);
}

TEST_F(DurableRefusals, AMissingDrive) {
  const std::string aside = directory_.path() + "/aside";
  for (const std::string& path : paths_) {
    fs::rename(path, aside);
    fs::create_directory(path);  // a mount point without its drive
    expect_refused(ErrorCode::kInput,
                   {path, "does not know it", "mount the missing path", "`sluice state remove`"},
                   config_);
    fs::remove_all(path);
    fs::rename(aside, path);
  }
  train(config_);
}

// Ranks on two hosts: each has a path of its own, and they have changed places.
TEST(DurableRefusalsOfRanks, ARankIsToldWhichRanksFilesLieWhere) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, /*uses_nvme=*/true, DType::kBf16);
  config.storage.state.name = "run-7";
  for (const char* const name : {"/0", "/1"}) fs::create_directory(directory.path() + name);
  const auto on = [&](bool are_swapped) {
    return RankConditions{
        .closes = true, .change = [&directory, are_swapped](std::uint32_t rank, Config& own) {
          own.storage.paths = {
              fmt::format("{}/{}", directory.path(), are_swapped ? 1 - rank : rank)};
        }};
  };
  const ToyOptions options{.steps = 2, .rank_count = 2};
  for (const RankRun& run : run_ranks(2, config, options, on(false))) ASSERT_EQ(run.failure, "");
  const std::vector<RankRun> swapped = run_ranks(2, config, options, on(true));
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const std::string& said = swapped[rank].failure;
    for (const std::string& word :
         {fmt::format(".r{}.commit0", rank), fmt::format("{}/{}", directory.path(), 1 - rank),
          std::string(" has the files of rank 0;"), std::string(" has the files of rank 1"),
          std::string("start each rank on the host that has its files")})
      EXPECT_NE(said.find(word), std::string::npos) << word << " in " << said;
  }
  for (const RankRun& run : run_ranks(2, config, options, on(false))) EXPECT_EQ(run.failure, "");
}

// A store of four ranks on three paths, after ten steps.
TEST(DurableRefusalsOfRanks, EachPathIsMissingOnce) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, /*uses_nvme=*/true, DType::kBf16);
  config.storage.state = {.name = "run-7", .commit_every = 3};
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  config.storage.paths.clear();
  for (const char* const name : {"/a", "/b", "/c"}) {
    config.storage.paths.push_back(directory.path() + name);
    fs::create_directory(config.storage.paths.back());
  }
  const auto run = [&](std::uint32_t steps) {
    return run_ranks(4, config, {.steps = steps, .rank_count = 4}, {.closes = true});
  };
  for (const RankRun& rank : run(10)) ASSERT_EQ(rank.failure, "");
  const TempDirectory elsewhere;
  const std::string aside = elsewhere.path() + "/aside";
  for (const std::string& path : config.storage.paths) {
    for (const bool has_mount_point : {true, false}) {
      SCOPED_TRACE(testing::Message() << path << " " << has_mount_point);
      const Contents whole = contents_below(path);
      fs::rename(path, aside);
      if (has_mount_point) fs::create_directory(path);
      const Contents before = contents_below(directory.path());
      for (const RankRun& rank : run(1))
        EXPECT_NE(rank.failure.find(path), std::string::npos) << rank.failure;
      EXPECT_TRUE(contents_below(directory.path()) == before);
      fs::remove_all(path);
      fs::rename(aside, path);
      EXPECT_TRUE(contents_below(path) == whole);
    }
  }
  for (const RankRun& rank : run(1)) {
    ASSERT_EQ(rank.failure, "");
    EXPECT_EQ(rank.result.reports.back().step, 11u);
  }
}

// A source that ranks as threads share.
class SourceOfAll final : public StateSource {
 public:
  explicit SourceOfAll(StateSource& source) : source_(source) {}
  StatePosition position() const override { return source_.position(); }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    const std::scoped_lock lock(mutex_);
    source_.read(tensor, kind, first_element, values);
  }

 private:
  std::mutex mutex_;
  StateSource& source_;
};

// After a crash between the ranks' commits, each would have a state of that step, but not the same.
TEST(DurableRefusalsOfRanks, ACommitOfTheSameStepIsNotReplaced) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, /*uses_nvme=*/true, DType::kBf16);
  config.storage.state = {.name = "run"};
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  const auto run = [&](const ToyOptions& options) {
    return run_ranks(2, config, options, {.closes = true});
  };
  for (const RankRun& rank : run({.steps = 3, .rank_count = 2})) ASSERT_EQ(rank.failure, "");
  Config scratch = config;
  scratch.storage.state = {};
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine other(scratch, toy_model(), *device);
  (void)run_toy(other, toy_model(), *device, scratch, {.steps = 5});
  MemorySource whole(other);
  SourceOfAll source(whole);
  for (const std::uint64_t step : {3u, 2u}) {  // the last commit, and the one before
    whole.set_position({.step = step});
    for (const RankRun& rank : run({.steps = 0, .rank_count = 2, .source = &source})) {
      EXPECT_NE(rank.failure.find(fmt::format("has a commit of step {} already", step)),
                std::string::npos)
          << rank.failure;
    }
  }
  whole.set_position({.step = 5});
  for (const RankRun& rank : run({.steps = 1, .rank_count = 2, .source = &source})) {
    ASSERT_EQ(rank.failure, "");
    EXPECT_EQ(rank.result.reports.back().step, 6u);
  }
  for (const RankRun& rank : run({.steps = 0, .rank_count = 2})) EXPECT_EQ(rank.failure, "");
}

// Commits of steps 2 and 4, a state of step 3 over them, its step 4: rank 1 has not had the last
// commit, and still has the record of the first step 4.
TEST(DurableRefusalsOfRanks, ARestoredStateIsNotMixedWithTheOneThatItReplaced) {
  const TempDirectory directory;
  const TempDirectory aside;
  Config config = sharded_config(directory.path(), 3, /*uses_nvme=*/true, DType::kBf16);
  config.storage.state = {.name = "run", .commit_every = 2};
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  const auto run = [&](const ToyOptions& options) {
    return run_ranks(2, config, options, {.closes = true});
  };
  const auto copy_rank_1 = [](const std::string& from, const std::string& to) {
    for (const auto& entry : std::filesystem::directory_iterator(from)) {
      const std::string name = entry.path().filename();
      if (name.find(".r1.") != std::string::npos)
        std::filesystem::copy_file(entry.path(), to + "/" + name,
                                   std::filesystem::copy_options::overwrite_existing);
    }
  };
  for (const RankRun& rank : run({.steps = 4, .rank_count = 2})) ASSERT_EQ(rank.failure, "");
  Config scratch = config;
  scratch.storage.state = {};
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine other(scratch, toy_model(), *device);
  (void)run_toy(other, toy_model(), *device, scratch, {.steps = 5});
  MemorySource whole(other);
  whole.set_position({.step = 3});
  SourceOfAll source(whole);
  for (const RankRun& rank : run({.steps = 0, .rank_count = 2, .source = &source}))
    ASSERT_EQ(rank.failure, "");
  copy_rank_1(directory.path(), aside.path());
  const std::vector<RankRun> expected = run({.steps = 1, .rank_count = 2});
  copy_rank_1(aside.path(), directory.path());
  EXPECT_EQ(survey_store("run", config.storage.paths).step, 3u);
  const std::vector<RankRun> again = run({.steps = 1, .rank_count = 2});
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(again[rank].failure, "");
    EXPECT_EQ(again[rank].result.reports.back().step, 4u);
    EXPECT_TRUE(again[rank].result.state == expected[rank].result.state);
  }
}

}  // namespace
}  // namespace sluice::test
