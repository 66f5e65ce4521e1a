// Stores whose ranks have different commits, or have lost their files, as `sluice state` sees them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include <sluice/error.h>
#include "engine/store/store_survey.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class StoreSurveyOfRanks : public testing::Test {
 protected:
  StoreSurveyOfRanks() {
    config_ = sharded_config(directory_.path(), 3, /*uses_nvme=*/true, DType::kBf16);
    config_.storage.state = {.name = "run"};
    config_.optimizer.overlap = OverlapPolicy::kDeferred;
    fs::create_directory(aside());
  }

  std::string aside() const { return outside_.path() + "/aside"; }
  void train(std::uint32_t steps) const {
    const ToyOptions options{.steps = steps, .rank_count = 2};
    for (const RankRun& run : run_ranks(2, config_, options, {.closes = true}))
      ASSERT_EQ(run.failure, "");
  }
  static void copy_files(const std::string& from, const std::string& to, const std::string& part) {
    for (const auto& entry : fs::directory_iterator(from)) {
      const std::string name = entry.path().filename();
      if (name.find(part) != std::string::npos)
        fs::copy_file(entry.path(), to + "/" + name, fs::copy_options::overwrite_existing);
    }
  }
  std::vector<std::string> directories() const { return {directory_.path()}; }
  StoreSurvey survey() const { return survey_store("run", directories()); }

  // Flips a bit of a plane that the record names.
  void damage(const SurveyedRank& rank, const CommitRecord& record) const {
    for (const auto& entry : fs::directory_iterator(directory_.path())) {
      const std::string part = ".r" + std::to_string(rank.rank) + ".data0";
      if (entry.path().string().find(part) == std::string::npos) continue;
      const CommitPlane& plane = record.planes.front();
      const auto at = static_cast<std::streamoff>(plane.copies[plane.named_copy].offset_bytes + 5);
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const auto byte = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(byte);
    }
  }

  TempDirectory directory_;
  TempDirectory outside_;
  Config config_;
};

// Rank 0 is ahead, as after a power cut. A run would read the commit before.
TEST_F(StoreSurveyOfRanks, ReadsTheCommitThatARunContinuesFrom) {
  train(3);
  copy_files(directory_.path(), aside(), ".r1.");
  train(1);
  copy_files(aside(), directory_.path(), ".r1.");
  const StoreSurvey store = survey();
  ASSERT_EQ(store.ranks.size(), 2u);
  EXPECT_EQ(store.step, 3u);
  const SurveyedRank& ahead = store.ranks[0];
  EXPECT_EQ(ahead.newest.step, 4u);
  EXPECT_EQ(ahead.of_step(store.step).step, 3u);
  EXPECT_EQ(find_disagreement(store), "");
  for (const SurveyedRank& rank : store.ranks)
    EXPECT_TRUE(find_damaged_planes(store, rank).empty());
  damage(ahead, ahead.newest);  // which no run would read
  EXPECT_TRUE(find_damaged_planes(store, ahead).empty());
  damage(ahead, ahead.of_step(3));
  EXPECT_EQ(find_damaged_planes(store, ahead).size(), 1u);
}

TEST_F(StoreSurveyOfRanks, RanksWithoutACommonStepAreNamed) {
  train(3);
  copy_files(directory_.path(), aside(), ".r1.");
  train(4);
  copy_files(aside(), directory_.path(), ".r1.");
  const StoreSurvey store = survey();
  EXPECT_FALSE(store.step.has_value());
  EXPECT_EQ(find_disagreement(store),
            "the ranks have no step in common (rank 0: 7 or 6; rank 1: 3 or 2)");
}

TEST_F(StoreSurveyOfRanks, TellsDamageFromWhatCannotBeRead) {
  train(2);
  const StoreSurvey whole = survey();
  const auto file_of = [&](const std::string& part) {
    for (const auto& entry : fs::directory_iterator(directory_.path()))
      if (entry.path().string().find(part) != std::string::npos) return entry.path();
    return fs::path();
  };
  const fs::path data = file_of(".r0.data0");
  const std::uintmax_t size = fs::file_size(data);
  fs::resize_file(data, 4096);
  const std::vector<std::string> lines = find_damaged_planes(whole, whole.ranks[0]);
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines.back().find("has 4096 B, but should reach to"), std::string::npos) << lines[0];
  fs::resize_file(data, size);
  const fs::path records = file_of(".r1.commit0");
  const auto rank_1 = [&] {
    StoreSurvey store = survey();
    return store.ranks.size() == 2 ? store.ranks[1] : SurveyedRank();
  };
  fs::rename(records, aside() + "/away");
  fs::create_directory(records);
  EXPECT_NE(rank_1().problem.find("is not a regular file"), std::string::npos) << rank_1().problem;
  EXPECT_FALSE(rank_1().is_damaged);
  fs::remove(records);
  fs::rename(aside() + "/away", records);
  fs::resize_file(records, 4096);
  EXPECT_TRUE(rank_1().is_damaged) << rank_1().problem;
}

// Creations that were cut short: one has left files, and another one only a mark.
TEST_F(StoreSurveyOfRanks, AMarkWithoutFilesIsInNoRemovalsWay) {
  const std::vector<std::string> paths{directory_.path(), aside()};
  const auto mark = [&](std::size_t path, std::uint8_t number) {
    StoreLock(paths[path], "run", "").set_mark({.stage = StoreStage::kCreating, .id = {number}});
  };
  mark(0, 1);
  mark(1, 2);
  EXPECT_EQ(survey_store("run", paths).presence, StorePresence::kNone);
  const std::string words =
      expect_error(ErrorCode::kInput, [&] { (void)remove_store("run", paths); });
  EXPECT_NE(words.find("there is no store \"run\""), std::string::npos) << words;
  const std::uint64_t bytes[] = {4096};
  {
    StoreFiles files = StoreFiles::create(
        {.directories = {paths[0]}, .name = "run", .id = {1}, .rank = 0}, bytes, 4096);
    files.name_data();
    const std::string user =
        expect_error(ErrorCode::kInput, [&] { (void)remove_store("run", paths); });
    EXPECT_NE(user.find("run.01"), std::string::npos) << user;
    EXPECT_NE(user.find("is in use by process"), std::string::npos) << user;
  }
  EXPECT_EQ(remove_store("run", paths).file_bytes, 4096u);
  EXPECT_EQ(survey_store("run", paths).presence, StorePresence::kNone);
  EXPECT_TRUE(look_at_path(paths[0], "run").files.empty());
}

TEST_F(StoreSurveyOfRanks, ARemovalThatFailsAtOnceLeavesTheStore) {
  train(2);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory_.path()))
    if (entry.path().extension() != ".lock") files.push_back(entry.path());
  for (const fs::path& file : files) {  // folders cannot be unlinked
    fs::rename(file, fs::path(aside()) / file.filename());
    fs::create_directory(file);
  }
  const std::string words =
      expect_error(ErrorCode::kIo, [&] { (void)remove_store("run", directories()); });
  EXPECT_TRUE(words.ends_with("; nothing was removed")) << words;
  for (const fs::path& file : files) {
    fs::remove(file);
    fs::rename(fs::path(aside()) / file.filename(), file);
  }
  train(1);
  EXPECT_EQ(survey().step, 3u);
}

TEST_F(StoreSurveyOfRanks, ARemovalThatFailsHalfwayHasLostTheStore) {
  train(2);
  const fs::path last =
      directory_.path() + "/" + look_at_path(directory_.path(), "run").files.back().name;
  fs::remove(last);
  fs::create_directory(last);  // folders cannot be unlinked
  const std::string words =
      expect_error(ErrorCode::kIo, [&] { (void)remove_store("run", directories()); });
  EXPECT_TRUE(
      words.ends_with("some files are removed already, so the store is lost; remove it "
                      "again"))
      << words;
  EXPECT_EQ(survey().presence, StorePresence::kAbandoned);
  fs::remove(last);
  std::ofstream(last).flush();
  (void)remove_store("run", directories());
  EXPECT_EQ(survey().presence, StorePresence::kNone);
}

TEST_F(StoreSurveyOfRanks, RanksWithoutFilesAreNamed) {
  train(2);
  EXPECT_TRUE(absent_ranks(survey()).empty());
  for (const auto& entry : fs::directory_iterator(directory_.path()))
    if (entry.path().string().find(".r0.") != std::string::npos) fs::remove(entry.path());
  EXPECT_EQ(absent_ranks(survey()), std::vector<std::uint32_t>{0});
}

}  // namespace
}  // namespace sluice::test
