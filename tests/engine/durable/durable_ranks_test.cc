// Durable stores of several ranks, as threads: each has files of its own, and all go on from the
// last commit that every rank has.
#include <csignal>
#include <filesystem>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/store/store_files.h"
#include "engine/store/store_survey.h"
#include "tests/engine/exactness_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/process_with_files.h"

namespace sluice::test {
namespace {

Config durable_config(const TempDirectory& directory, const std::string& name, std::uint32_t stage,
                      OverlapPolicy policy) {
  Config config = sharded_config(directory.path(), stage, /*uses_nvme=*/stage != 1, DType::kBf16);
  config.storage.state = {.name = name, .commit_every = 1 + stage % 2};
  config.optimizer.overlap = policy;
  config.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 1;
  return config;
}

void expect_no_failure(const std::vector<RankRun>& runs) {
  for (const RankRun& run : runs) ASSERT_EQ(run.failure, "");
}

// The first engines end without close(), with a commit under way.
TEST(DurableRanks, GoOnFromTheLastCommitOfAll) {
  const TempDirectory directory;
  for (const std::uint32_t stage : {0u, 1u, 3u}) {
    for (const OverlapPolicy policy :
         {OverlapPolicy::kDeferred, OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
      if (policy == OverlapPolicy::kSpeculative && stage == 1) continue;  // no shadows
      const std::string name = fmt::format("stage-{}-{}", stage, name_of(policy));
      SCOPED_TRACE(name);
      const std::uint32_t count = 2 + stage % 2;
      const Config config = durable_config(directory, name, stage, policy);
      ToyOptions options{.steps = 3, .rank_count = count};
      expect_no_failure(run_ranks(count, config, options));
      options.steps = 4;
      const std::vector<RankRun> runs = run_ranks(count, config, options);
      expect_no_failure(runs);
      const std::uint64_t step = runs[0].result.reports.back().step;
      EXPECT_GE(step, 5u);  // 3 steps, of which the last commit may be one or two behind
      EXPECT_LE(step, 7u);
      options.steps = static_cast<std::uint32_t>(step);
      const ToyResult expected = toy_oracle(config, options);
      for (const RankRun& run : runs) EXPECT_TRUE(run.result.state == expected.state);
    }
  }
}

// As after a power cut that took the last commit of one of them.
TEST(DurableRanks, ARankThatIsAheadGoesBack) {
  const TempDirectory directory;
  const TempDirectory before;
  Config config = durable_config(directory, "run", 3, OverlapPolicy::kDeferred);
  config.storage.state.commit_every = 1;
  const auto copy_rank = [](const std::string& from, const std::string& to, const char* rank) {
    for (const auto& entry : std::filesystem::directory_iterator(from)) {
      const std::string name = entry.path().filename();
      if (name.find(rank) == std::string::npos) continue;
      std::filesystem::copy_file(entry.path(), to + "/" + name,
                                 std::filesystem::copy_options::overwrite_existing);
    }
  };
  for (const char* const rank : {".r0.", ".r1."}) {
    SCOPED_TRACE(rank);
    config.storage.state.name = std::string("behind") + rank[2];
    ToyOptions options{.steps = 3, .rank_count = 2};
    const RankConditions closing{.closes = true};
    expect_no_failure(run_ranks(2, config, options, closing));
    copy_rank(directory.path(), before.path(), rank);
    options.steps = 1;
    expect_no_failure(run_ranks(2, config, options, closing));
    copy_rank(before.path(), directory.path(), rank);
    options.steps = 3;  // one of which is made again
    const std::vector<RankRun> runs = run_ranks(2, config, options, closing);
    expect_no_failure(runs);
    EXPECT_EQ(runs[0].result.reports.back().step, 6u);
    options.steps = 6;
    const ToyResult expected = toy_oracle(config, options);
    for (const RankRun& run : runs) EXPECT_TRUE(run.result.state == expected.state);
  }
}

TEST(DurableRanks, AnotherNumberOfRanksIsNamed) {
  const TempDirectory directory;
  const Config config = durable_config(directory, "run", 3, OverlapPolicy::kDeferred);
  expect_no_failure(run_ranks(3, config, {.steps = 2, .rank_count = 3}));
  const std::vector<RankRun> fewer = run_ranks(2, config, {.steps = 2, .rank_count = 2});
  EXPECT_NE(fewer[0].failure.find("ranks was 3 and is 2"), std::string::npos) << fewer[0].failure;
  const std::vector<RankRun> more = run_ranks(4, config, {.steps = 2, .rank_count = 4});
  EXPECT_NE(more[3].failure.find(".r3.commit0"), std::string::npos) << more[3].failure;
  for (const RankRun& run : run_ranks(3, config, {.steps = 2, .rank_count = 3}))
    EXPECT_EQ(run.failure, "");
}

TEST(DurableRanks, EachMissingFileIsNamedAndNothingIsChanged) {
  const TempDirectory directory;
  const Config config = durable_config(directory, "run", 3, OverlapPolicy::kDeferred);
  expect_no_failure(run_ranks(2, config, {.steps = 3, .rank_count = 2}));
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    if (entry.path().extension() != ".lock") files.push_back(entry.path());
  ASSERT_EQ(files.size(), 6u);  // data and two records of each rank
  for (const std::filesystem::path& file : files) {
    const std::filesystem::path aside = directory.path() + "/aside";
    std::filesystem::rename(file, aside);
    std::string said;
    for (const RankRun& run : run_ranks(2, config, {.steps = 1, .rank_count = 2})) {
      EXPECT_NE(run.failure, "");
      said += run.failure;
    }
    EXPECT_NE(said.find(file.filename().string()), std::string::npos) << said;
    std::filesystem::rename(aside, file);
  }
  expect_no_failure(run_ranks(2, config, {.steps = 1, .rank_count = 2}));
}

// Only the first of a job's ranks on a host has the store's lock. That rank has been killed, and
// another one lives on, which may write again later.
TEST(DurableRanks, ARankThatLivesOnKeepsItsFiles) {
  const TempDirectory directory;
  const Config config = durable_config(directory, "run", 3, OverlapPolicy::kDeferred);
  expect_no_failure(run_ranks(2, config, {.steps = 2, .rank_count = 2}, {.closes = true}));
  const StoreId id = read_store_mark(directory.path(), "run").value().id;
  ProcessWithFiles other([&] {
    auto* const files = new StoreFiles(StoreFiles::open_records(
        {.directories = {directory.path()}, .name = "run", .id = id, .rank = 1}));
    files->open_data(1);
    FileLocks locks(1);
    files->lock(locks);
    return files->data()[0].descriptor();
  });
  ::kill(other.pid(), SIGSTOP);
  const std::vector<RankRun> runs = run_ranks(2, config, {.steps = 1, .rank_count = 2});
  EXPECT_NE(runs[0].failure, "");
  const std::string process = fmt::format("process {} on ", other.pid());
  EXPECT_NE(runs[1].failure.find("is in use by " + process), std::string::npos) << runs[1].failure;
  EXPECT_EQ(survey_store("run", {directory.path()}).holder.find(process), 0u);
  expect_error(ErrorCode::kInput, [&] { (void)remove_store("run", {directory.path()}); });
  other.kill();
  other.end_transfer();
  const std::vector<RankRun> again = run_ranks(2, config, {.steps = 1, .rank_count = 2});
  expect_no_failure(again);
  EXPECT_EQ(again[0].result.reports.back().step, 3u);
}

// All of them find it, and one of them removes it.
TEST(DurableRanks, AnUnfinishedStoreGoes) {
  const TempDirectory directory;
  const Config config = durable_config(directory, "run", 3, OverlapPolicy::kDeferred);
  for (int i = 0; i < 8; ++i) {
    expect_no_failure(run_ranks(3, config, {.steps = 1, .rank_count = 3}, {.closes = true}));
    StoreMark mark = read_store_mark(directory.path(), "run").value();
    mark.stage = StoreStage::kCreating;
    StoreLock(directory.path(), "run", "").set_mark(mark);
    const std::vector<RankRun> runs =
        run_ranks(3, config, {.steps = 1, .rank_count = 3}, {.closes = true});
    expect_no_failure(runs);
    EXPECT_EQ(runs[0].result.reports.back().step, 1u);
    (void)remove_store("run", {directory.path()});
  }
}

// Two ranks on two hosts: each has a path of its own.
class DurableHosts : public testing::Test {
 protected:
  DurableHosts() {
    for (const std::uint32_t host : {0u, 1u}) std::filesystem::create_directory(path_of(host));
    const std::vector<RankRun> runs = run(2);
    for (const RankRun& one : runs) EXPECT_EQ(one.failure, "");
    made_ = read_store_mark(path_of(0), "run").value();
    EXPECT_EQ(made_.stage, StoreStage::kMade);
  }

  std::string path_of(std::uint32_t host) const {
    return fmt::format("{}/{}", directory_.path(), host);
  }
  std::vector<RankRun> run(std::uint32_t steps) {
    const RankConditions conditions{
        .closes = true,
        .change = [this](std::uint32_t rank, Config& own) { own.storage.paths = {path_of(rank)}; }};
    return run_ranks(2, durable_config(directory_, "run", 3, OverlapPolicy::kDeferred),
                     {.steps = steps, .rank_count = 2}, conditions);
  }
  void set_mark(std::uint32_t host, const StoreMark& mark) {
    StoreLock(path_of(host), "run", "").set_mark(mark);
  }
  void remove_files(std::uint32_t host) {
    const StorePath path = look_at_path(path_of(host), "run");
    remove_store_files(std::span(&path, 1), made_.id);
  }

  const TempDirectory directory_;
  StoreMark made_;
};

TEST_F(DurableHosts, AKillBetweenTheirLastMarksLosesNothing) {
  for (const std::uint32_t host : {0u, 1u}) {
    set_mark(host, {.stage = StoreStage::kCreating, .id = made_.id});
    for (const RankRun& one : run(1)) {
      ASSERT_EQ(one.failure, "");
      EXPECT_EQ(one.result.reports.back().step, 3u + host);
    }
    EXPECT_EQ(read_store_mark(path_of(host), "run").value(), made_);
  }
}

TEST_F(DurableHosts, AKillBetweenTheirFirstFilesIsForgotten) {
  for (const std::uint32_t host : {0u, 1u})
    set_mark(host, {.stage = StoreStage::kCreating, .id = made_.id});
  remove_files(1);
  for (const RankRun& one : run(1)) {
    ASSERT_EQ(one.failure, "");
    EXPECT_EQ(one.result.reports.back().step, 1u);
  }
  for (const std::uint32_t host : {0u, 1u})
    for (const StorePath::File& file : look_at_path(path_of(host), "run").files)
      EXPECT_NE(file.id, made_.id) << file.name;
}

TEST_F(DurableHosts, AHostThatLacksTheStoreIsNamed) {
  remove_files(1);
  set_mark(1, {});
  for (const RankRun& one : run(1)) {
    EXPECT_NE(one.failure.find("but rank 1 on "), std::string::npos) << one.failure;
    EXPECT_NE(one.failure.find("has no file of it"), std::string::npos) << one.failure;
  }
  EXPECT_FALSE(look_at_path(path_of(0), "run").files.empty());
}

TEST_F(DurableHosts, TwoStoresOfOneNameAreNamed) {
  const std::string aside = directory_.path() + "/aside";
  std::filesystem::rename(path_of(1), aside);
  std::filesystem::create_directory(path_of(1));
  remove_files(0);
  set_mark(0, {});
  for (const RankRun& one : run(1)) ASSERT_EQ(one.failure, "");
  std::filesystem::remove_all(path_of(1));
  std::filesystem::rename(aside, path_of(1));
  for (const RankRun& one : run(1))
    EXPECT_NE(one.failure.find("has another one of that name"), std::string::npos) << one.failure;
}

}  // namespace
}  // namespace sluice::test
