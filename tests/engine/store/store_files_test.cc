// A store's files on real file systems: creation killed after each of its steps, and paths that are
// missing afterwards.
#include "engine/store/store_files.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>

#include <gtest/gtest.h>

#include <sluice/units.h>
#include "engine/store/commit_opening.h"
#include "tests/engine/store/commit_samples.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kSlotBytes = 16384;

class StoreFilesOnDisk : public ::testing::Test {
 protected:
  StoreFilesOnDisk() {
    for (const char* path : {"a", "b", "c"}) {
      paths_.push_back(directory_.file(path));
      std::filesystem::create_directory(paths_.back());
    }
  }

  StoreFiles opened(const StoreId& id) const {
    StoreFiles files = StoreFiles::open_records(options(id));
    files.open_data(3);
    return files;
  }

  StoreFiles::Options options(const StoreId& id) const {
    return {.directories = paths_, .name = "run", .id = id, .rank = 0};
  }
  StoreFinding found() const {
    std::vector<StorePath> all;
    for (const std::string& path : paths_) all.push_back(look_at_path(path, "run"));
    return find_store("run", all);
  }
  std::size_t file_count() const {
    std::size_t count = 0;
    for (const std::string& path : paths_) count += look_at_path(path, "run").files.size();
    return count;
  }

  // The work of an engine, in its steps.
  std::vector<std::function<void()>> creation(const StoreId& id) {
    std::vector<std::function<void()>> steps;
    for (const std::string& path : paths_)
      steps.push_back([this, path] { locks_.emplace_back(path, "run", ""); });
    for (std::size_t i = 0; i < paths_.size(); ++i)
      steps.push_back(
          [this, i, id] { locks_[i].set_mark({.stage = StoreStage::kCreating, .id = id}); });
    steps.push_back([this, id] {
      const std::uint64_t sizes[] = {64_KiB, 32_KiB, 4_KiB};
      files_ = StoreFiles::create(options(id), sizes, kSlotBytes);
    });
    steps.push_back([this] { files_->name_data(); });
    steps.push_back([this] { files_->name_records(); });
    for (std::size_t i = 0; i < paths_.size(); ++i)
      steps.push_back(
          [this, i, id] { locks_[i].set_mark({.stage = StoreStage::kMade, .id = id}); });
    return steps;
  }
  void create(const StoreId& id) {
    for (const auto& step : creation(id)) step();
    locks_.clear();
    files_.reset();
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
  std::vector<StoreLock> locks_;
  std::optional<StoreFiles> files_;
};

TEST_F(StoreFilesOnDisk, CreationMayBeKilledAfterAnyStep) {
  std::set<StorePresence> seen;
  const std::size_t steps = creation({}).size();
  for (std::size_t done = 0; done <= steps; ++done) {
    const StoreId id = random_store_id();
    const pid_t child = ::fork();
    if (child == 0) {
      const auto all = creation(id);
      for (std::size_t i = 0; i < done; ++i) all[i]();
      ::raise(SIGKILL);
    }
    ::waitpid(child, nullptr, 0);
    const StoreFinding finding = found();
    seen.insert(finding.presence);
    if (finding.presence == StorePresence::kMade) {
      EXPECT_EQ(finding.id, id);
      EXPECT_EQ(file_count(), 5u);
      EXPECT_EQ(opened(id).data()[1].size_bytes(), 32_KiB);
    } else {
      EXPECT_LE(done, steps - 3);
    }
    // The next one begins anew, whatever was left.
    std::vector<StorePath> all;
    for (const std::string& path : paths_) all.push_back(look_at_path(path, "run"));
    remove_store_files(all, id);
    EXPECT_EQ(file_count(), 0u) << done;
    for (const std::string& path : paths_) std::filesystem::remove(path + "/run.lock");
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST_F(StoreFilesOnDisk, AMissingPathIsNamedAndNothingIsChanged) {
  const StoreId id = random_store_id();
  create(id);
  EXPECT_EQ(found().presence, StorePresence::kMade);
  for (const std::string& path : paths_) {
    std::filesystem::rename(path, path + ".away");  // unmounted: the folder below is empty
    std::filesystem::create_directory(path);
    const std::string message = expect_error(ErrorCode::kInput, [&] { (void)found(); });
    EXPECT_NE(message.find(path + " "), std::string::npos) << message;
    EXPECT_TRUE(std::filesystem::is_empty(path));
    std::filesystem::remove(path);
    std::filesystem::rename(path + ".away", path);
  }
  // Only its files are gone.
  std::vector<StorePath> one{look_at_path(paths_[2], "run")};
  remove_store_files(one, id);
  expect_error(ErrorCode::kInput, [&] { (void)found(); });
  const std::string message = expect_error(ErrorCode::kInput, [&] { (void)opened(id); });
  EXPECT_NE(message.find(".r0.data2"), std::string::npos) << message;
}

TEST_F(StoreFilesOnDisk, TwoStoresOfOneNameAreAnError) {
  create(random_store_id());
  const std::string away = directory_.file("away");
  std::filesystem::rename(paths_[1], away);
  std::filesystem::create_directory(paths_[1]);
  StoreLock(paths_[1], "run", "").set_mark({.stage = StoreStage::kMade, .id = {1}});
  const std::string message = expect_error(ErrorCode::kInput, [&] { (void)found(); });
  EXPECT_NE(message.find("another store of that name"), std::string::npos) << message;
}

TEST_F(StoreFilesOnDisk, NothingWasMadeWhereOnlyMarksWereSet) {
  StoreLock(paths_[0], "run", "").set_mark({.stage = StoreStage::kCreating, .id = {1}});
  EXPECT_EQ(found().presence, StorePresence::kNone);
  // A second creation had other paths, and ended in the same way.
  StoreLock(paths_[1], "run", "").set_mark({.stage = StoreStage::kCreating, .id = {2}});
  EXPECT_EQ(found().presence, StorePresence::kNone);
}

// A creation was killed, and has lost its marks, too, by removal or by damage. The store is made
// once rank 0's records, with its first commit, have their names.
TEST_F(StoreFilesOnDisk, LostMarksMakeNoStoreOfWhatIsHalfMade) {
  const StoreId id = random_store_id();
  const std::uint64_t sizes[] = {64_KiB, 32_KiB, 4_KiB};
  const auto lose_marks = [&](bool is_damaged) {
    for (const std::string& path : paths_) {
      std::filesystem::remove(path + "/run.lock");
      if (is_damaged) std::ofstream(path + "/run.lock") << std::string(512, '\0');
    }
  };
  const auto expect_refused = [&] {
    for (const bool is_damaged : {false, true}) {
      lose_marks(is_damaged);
      const std::string words = expect_error(ErrorCode::kInput, [&] { (void)found(); });
      EXPECT_NE(words.find("no whole run.lock"), std::string::npos) << words;
    }
  };
  StoreFiles files = StoreFiles::create(options(id), sizes, kSlotBytes);
  EXPECT_EQ(found().presence, StorePresence::kNone);
  files.name_data();
  expect_refused();
  StoreFiles::Options rank_1 = options(id);
  rank_1.rank = 1;
  StoreFiles others = StoreFiles::create(rank_1, sizes, kSlotBytes);
  const auto queue = make_sync_queue({});
  const auto commit = [&](const StoreFiles& of, std::uint32_t rank) {
    const CommitRecord record{
        .store_id = id, .rank = rank, .rank_count = 2, .generation = 1, .file_count = 3};
    const CommitFiles all = of.commit_files();
    write_commit(*queue, all, commit_sequence(3), 0, record);
  };
  others.name_data();
  commit(others, 1);
  others.name_records();
  expect_refused();
  commit(files, 0);
  expect_refused();
  files.name_records();
  for (const bool is_damaged : {false, true}) {
    lose_marks(is_damaged);
    EXPECT_EQ(found().presence, StorePresence::kMade);
    EXPECT_EQ(found().id, id);
    EXPECT_EQ(found().lost_marks, paths_);
  }
  // As in the middle of a removal.
  std::filesystem::remove(paths_[0] + "/run." + text_of(id) + ".r0.commit0");
  expect_refused();
}

TEST_F(StoreFilesOnDisk, OneLostMarkIsMadeUpForByAnotherThatSaysMade) {
  const StoreId id = random_store_id();
  create(id);
  std::filesystem::remove(paths_[1] + "/run.lock");
  EXPECT_EQ(found().presence, StorePresence::kMade);
  EXPECT_EQ(found().lost_marks, std::vector<std::string>{paths_[1]});
  for (const std::size_t path : {0u, 2u})
    StoreLock(paths_[path], "run", "").set_mark({.stage = StoreStage::kCreating, .id = id});
  const std::string words = expect_error(ErrorCode::kInput, [&] { (void)found(); });
  EXPECT_NE(words.find(paths_[1] + " has files"), std::string::npos) << words;
}

// The paths may come in another order; records and data are found, by real drives' queues.
TEST_F(StoreFilesOnDisk, CommitsAreFoundInAnyOrderOfPaths) {
  const StoreId id = random_store_id();
  create(id);
  const auto queue = make_thread_queue({.depth = 4});
  {
    const StoreFiles files = opened(id);
    const CommitFiles all = files.commit_files();
    EXPECT_EQ(all.slot_bytes, kSlotBytes);
    EXPECT_FALSE(CommitOpening(*queue, all).newest());
    std::mutex mutex;
    std::condition_variable came;
    std::vector<std::function<void()>> messages;
    CommitWriter writer(*queue, all, [&](std::function<void()> message) {
      const std::scoped_lock lock(mutex);
      messages.push_back(std::move(message));
      came.notify_one();
    });
    const std::uint64_t bytes = encode_commit(sample_commit(4, 1, 9), writer.buffer());
    std::optional<Error> failure;
    writer.begin(commit_sequence(3), 0, bytes, 9, [&](const auto& error) { failure = error; });
    while (!writer.is_idle()) {
      std::unique_lock lock(mutex);
      came.wait(lock, [&] { return !messages.empty(); });
      const auto message = messages.back();
      messages.pop_back();
      lock.unlock();
      message();
    }
    ASSERT_FALSE(failure) << failure->what();
    EXPECT_EQ(queue->counters().flush_requests, 5u);
  }
  std::ranges::rotate(paths_, paths_.begin() + 1);
  const StoreFiles files = opened(id);
  const CommitFiles all = files.commit_files();
  EXPECT_EQ(all.data[0].drive, 2u);
  EXPECT_EQ(all.twins[0].drive, 2u);
  EXPECT_EQ(all.twins[1].drive, 0u);
  EXPECT_EQ(CommitOpening(*queue, all).offer().newest, 9u);
}

TEST_F(StoreFilesOnDisk, ANameThatIsTakenIsNotReplaced) {
  const StoreId id = random_store_id();
  create(id);
  const std::uint64_t sizes[] = {4_KiB, 4_KiB, 4_KiB};
  StoreFiles again = StoreFiles::create(options(id), sizes, kSlotBytes);
  expect_error(ErrorCode::kInput, [&] { again.name_data(); });
  EXPECT_EQ(opened(id).data()[0].size_bytes(), 64_KiB);
}

}  // namespace
}  // namespace sluice::test
