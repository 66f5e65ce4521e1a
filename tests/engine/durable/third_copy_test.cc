// A durable store that was made with two copies of the state, and a policy that wants three: its
// data files grow, and training has the same bits; where there is no room, nothing is changed.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>

#include <fmt/format.h>

#include "tests/engine/exactness_cases.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class ThirdCopy : public testing::Test {
 protected:
  ThirdCopy() {
    for (const char* name : {"/a", "/b"}) {
      paths_.push_back(directory_.path() + name);
      fs::create_directory(paths_.back());
    }
  }

  Config config(OverlapPolicy policy) const {
    Config config = toy_config(paths_[0]);
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.storage.block_elements = 4096;
    config.storage.paths = paths_;
    config.storage.weights = {1, 3};
    config.storage.state = {.name = "run-7", .commit_every = 2};
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = bound_that_bites_sometimes(1);
    return config;
  }
  ToyResult train(OverlapPolicy policy, std::uint32_t steps, bool closes = true) const {
    const Config with = config(policy);
    const ModelSpec model = toy_model({1});
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    Engine engine(with, model, *device);
    ToyResult result = run_toy(engine, model, *device, with, {.steps = steps, .frozen_units = {1}});
    if (closes) engine.close();
    return result;
  }
  static StateBytes expected(const Config& config, std::uint32_t steps) {
    return toy_oracle(config, {.steps = steps, .frozen_units = {1}}).state;
  }
  void open_only(OverlapPolicy policy) const {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const Engine engine(config(policy), toy_model({1}), *device);
  }

  // Every file but the locks, which say who looked last.
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> all;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory_.path())) {
      if (!entry.is_regular_file() || entry.path().extension() == ".lock") continue;
      all[entry.path()] = file_text(entry.path());
    }
    return all;
  }
  std::uint64_t data_bytes() const {
    std::uint64_t bytes = 0;
    for (const auto& [name, content] : contents())
      if (name.find(".data") != std::string::npos) bytes += content.size();
    return bytes;
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

TEST_F(ThirdCopy, ComesWhereThePolicyWantsIt) {
  (void)train(OverlapPolicy::kDeferred, 3);
  const std::uint64_t two_copies = data_bytes();
  (void)train(OverlapPolicy::kSpeculative, 4);
  const std::uint64_t three_copies = data_bytes();
  EXPECT_GT(three_copies, two_copies + two_copies / 3);
  EXPECT_LT(three_copies, two_copies + two_copies / 2 + 64_KiB);
  EXPECT_TRUE(train(OverlapPolicy::kDeferred, 2).state ==
              expected(config(OverlapPolicy::kDeferred), 9));
  EXPECT_TRUE(train(OverlapPolicy::kSpeculative, 2).state ==
              expected(config(OverlapPolicy::kDeferred), 11));
  EXPECT_EQ(data_bytes(), three_copies);
}

// As by an application that finds, behind the opening, that it cannot go on from the store.
TEST_F(ThirdCopy, ThatNoCommitNamesIsGivenBack) {
  (void)train(OverlapPolicy::kDeferred, 3);
  const auto before = contents();
  open_only(OverlapPolicy::kSpeculative);
  EXPECT_TRUE(contents() == before);
  (void)train(OverlapPolicy::kSpeculative, 1);  // its first commit is of the second step
  EXPECT_TRUE(train(OverlapPolicy::kSpeculative, 2).state ==
              expected(config(OverlapPolicy::kDeferred), 6));
}

// A record that might name it keeps it.
TEST_F(ThirdCopy, StaysWhereARecordIsDamaged) {
  (void)train(OverlapPolicy::kDeferred, 3);
  const std::uint64_t two_copies = data_bytes();
  {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const Engine engine(config(OverlapPolicy::kSpeculative), toy_model({1}), *device);
    for (const auto& [name, content] : contents()) {
      if (name.find(".commit0") == std::string::npos) continue;
      std::fstream file(name, std::ios::in | std::ios::out | std::ios::binary);
      for (std::size_t at = 300; at < content.size(); at += 4096) {
        file.seekp(static_cast<std::streamoff>(at));
        file.put(static_cast<char>(content[at] ^ 1));
      }
    }
  }
  EXPECT_GT(data_bytes(), two_copies);
}

// A run that is killed before its first commit: the record still names two copies of each plane.
TEST_F(ThirdCopy, ThatNoCommitNamesIsMadeAgainAndTakesNoMore) {
  (void)train(OverlapPolicy::kDeferred, 3);
  for (const auto& [name, content] : contents())
    if (name.find(".data") != std::string::npos)
      fs::resize_file(name, align_up(content.size() + content.size() / 2, 4_KiB));
  const std::uint64_t three_copies = data_bytes();
  open_only(OverlapPolicy::kSpeculative);
  EXPECT_EQ(data_bytes(), three_copies);
  open_only(OverlapPolicy::kSpeculative);
  EXPECT_EQ(data_bytes(), three_copies);
  (void)train(OverlapPolicy::kDeferred, 1);
  EXPECT_TRUE(train(OverlapPolicy::kSpeculative, 4, /*closes=*/false).state ==
              expected(config(OverlapPolicy::kDeferred), 8));
  EXPECT_EQ(data_bytes(), three_copies);
}

// The limit lets the smaller file grow, which comes first, and not the larger one.
TEST_F(ThirdCopy, WithoutRoomIsRefusedAndNothingIsChanged) {
  (void)train(OverlapPolicy::kDeferred, 3);
  const auto before = contents();
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::uint64_t largest = 0;
  for (const auto& [name, content] : before)
    if (name.find(".data") != std::string::npos)
      largest = std::max<std::uint64_t>(largest, content.size());
  for (const std::uint64_t room : {largest, largest + 4_KiB}) {
    const rlimit limit{.rlim_cur = room, .rlim_max = old_limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const std::string words =
        expect_error(ErrorCode::kNoSpace, [&] { open_only(OverlapPolicy::kSpeculative); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    EXPECT_NE(words.find(directory_.path()), std::string::npos) << words;
    EXPECT_NE(words.find(" bytes)"), std::string::npos) << words;
    EXPECT_TRUE(contents() == before) << room;
  }
  std::signal(SIGXFSZ, old_handler);
  EXPECT_TRUE(train(OverlapPolicy::kDeferred, 1).state ==
              expected(config(OverlapPolicy::kDeferred), 4));
}

TEST(ThirdCopyOfRanks, ComesOnEveryRank) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, /*uses_nvme=*/true, DType::kBf16);
  config.storage.state = {.name = "run", .commit_every = 1};
  config.optimizer.clip_norm = bound_that_bites_sometimes(1);
  std::uint32_t done = 0;
  for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative,
                                     OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
    SCOPED_TRACE(name_of(policy));
    config.optimizer.overlap = policy;
    ToyOptions options{.steps = 2, .rank_count = 2};
    const std::vector<RankRun> runs = run_ranks(2, config, options, {.closes = true});
    done += options.steps;
    options.steps = done;
    const ToyResult expected = toy_oracle(config, options);
    for (const RankRun& run : runs) {
      ASSERT_EQ(run.failure, "");
      EXPECT_TRUE(run.result.state == expected.state);
    }
  }
}

}  // namespace
}  // namespace sluice::test
