// Durable stores of several ranks, as threads: each has files of its own, and all go on from the
// last commit that every rank has.
#include <gtest/gtest.h>

#include <filesystem>

#include <fmt/format.h>

#include "tests/engine/exactness_cases.h"
#include "tests/engine/ranks/rank_threads.h"

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

}  // namespace
}  // namespace sluice::test
