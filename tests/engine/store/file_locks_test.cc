// The locks on a store's files among real processes, which are killed while transfers are under
// way.
#include "engine/store/file_locks.h"

#include <fcntl.h>
#include <sys/file.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include "engine/store/store_files.h"
#include "tests/support/expect_error.h"
#include "tests/support/process_with_files.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr double kLongSeconds = 3600;  // nothing here waits so long

class StoreFileLocks : public testing::Test {
 protected:
  StoreFileLocks() {
    const std::uint64_t bytes[] = {8192};
    StoreFiles files = StoreFiles::create(options(), bytes, 4096);
    files.name_data();
    files.name_records();
  }

  StoreFiles::Options options() const {
    return {.directories = {directory_.path()}, .name = "run", .id = {1}, .rank = 0};
  }
  StoreFiles opened() const {
    StoreFiles files = StoreFiles::open_records(options());
    files.open_data(1);
    return files;
  }
  std::string data() const { return opened().data()[0].name(); }
  static void lock(const StoreFiles& files, double limit_s) {
    FileLocks locks(limit_s);
    files.lock(locks);
  }
  // Opens and locks the files, as a rank does, and never closes them. Returns the data file.
  std::function<int()> rank() const {
    return [this] {
      auto* const files = new StoreFiles(opened());
      lock(*files, kLongSeconds);
      return files->data()[0].descriptor();
    };
  }

  TempDirectory directory_;
};

TEST_F(StoreFileLocks, ALivingProcessIsNamedAtOnce) {
  ProcessWithFiles other(rank());
  for (const int signal : {0, SIGSTOP}) {
    ::kill(other.pid(), signal);
    const std::string words =
        expect_error(ErrorCode::kInput, [&] { lock(opened(), kLongSeconds); });
    EXPECT_NE(words.find("process " + std::to_string(other.pid()) + " on "), std::string::npos)
        << words;
    EXPECT_NE(words.find("run."), std::string::npos) << words;
  }
  EXPECT_EQ(file_user(data()).find("process " + std::to_string(other.pid())), 0u);
  EXPECT_EQ(file_user(data()).find("ended"), std::string::npos);
}

TEST_F(StoreFileLocks, TheLastTransferOfAKilledProcessIsAwaited) {
  ProcessWithFiles other(rank());
  other.kill();
  const StoreFiles files = opened();
  EXPECT_NE(::flock(files.data()[0].descriptor(), LOCK_EX | LOCK_NB), 0);
  EXPECT_NE(file_user(data()).find("has ended"), std::string::npos) << file_user(data());
  std::atomic<bool> is_over = false;
  std::thread kernel([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    is_over = true;
    other.end_transfer();
  });
  FileLocks locks(kLongSeconds);
  files.lock(locks);
  EXPECT_TRUE(is_over);
  kernel.join();
  EXPECT_NE(locks.note().find("for the last transfers"), std::string::npos) << locks.note();
  EXPECT_NE(locks.note().find(data()), std::string::npos) << locks.note();
}

TEST_F(StoreFileLocks, ATransferThatDoesNotEndIsNamedAfterTheLimit) {
  ProcessWithFiles other(rank());
  const std::string process = "process " + std::to_string(other.pid());
  other.kill();
  const std::string words = expect_error(ErrorCode::kTimeout, [&] { lock(opened(), 0.2); });
  EXPECT_NE(words.find(data()), std::string::npos) << words;
  EXPECT_NE(words.find(process), std::string::npos) << words;
  EXPECT_NE(words.find("after 0.2 s"), std::string::npos) << words;
}

// As a data loader's worker, which may outlive the process that started it.
TEST_F(StoreFileLocks, EndWithTheirProcessAndNotWithItsWorkers) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ProcessWithFiles other([&] {
    const int file = rank()();
    if (::fork() == 0) {
      const pid_t worker = ::getpid();  // it tells itself: its fork has ended then
      (void)!::write(ends[1], &worker, sizeof worker);
      while (true) ::pause();
    }
    return file;
  });
  pid_t worker = 0;
  ASSERT_EQ(::read(ends[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  other.kill();
  other.end_transfer();
  EXPECT_EQ(::kill(worker, 0), 0);  // lives on
  EXPECT_NO_THROW(lock(opened(), 0.2));
  ::kill(worker, SIGKILL);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(StoreFileLocks, EveryFileHasOne) {
  for (const StorePath::File& file : look_at_path(directory_.path(), "run").files) {
    const std::string path = directory_.path() + "/" + file.name;
    ProcessWithFiles other([&] {
      const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
      (void)::flock(descriptor, LOCK_EX);
      return descriptor;
    });
    const std::string words = expect_error(ErrorCode::kInput, [&] { lock(opened(), 0.2); });
    EXPECT_NE(words.find(path), std::string::npos) << words;
  }
}

// From the moment at which it has a name.
TEST_F(StoreFileLocks, ANewFileHasOne) {
  const ProcessWithFiles other([&] {
    StoreFiles::Options own = options();
    own.id = {2};
    const std::uint64_t bytes[] = {8192};
    auto* const files = new StoreFiles(StoreFiles::create(own, bytes, 4096));
    files->name_data();
    return files->data()[0].descriptor();
  });
  FileLocks locks(kLongSeconds);
  const StorePath path = look_at_path(directory_.path(), "run");
  const std::string words =
      expect_error(ErrorCode::kInput, [&] { await_users(std::span(&path, 1), locks); });
  EXPECT_NE(words.find(std::to_string(other.pid())), std::string::npos) << words;
}

TEST_F(StoreFileLocks, CopiesOfAFileShareIt) {
  std::vector<DirectFile> shared;
  {
    const StoreFiles files = opened();
    lock(files, kLongSeconds);
    shared = files.shared_data();
    lock(files, kLongSeconds);  // again
  }
  expect_error(ErrorCode::kInput, [&] { lock(opened(), kLongSeconds); });
  shared.clear();
  EXPECT_NO_THROW(lock(opened(), 0.2));
}

TEST_F(StoreFileLocks, ReadersNeedNone) {
  const StoreFiles files = opened();
  lock(files, kLongSeconds);
  StoreFiles::Options reading = options();
  reading.access = FileAccess::kRead;
  StoreFiles reader = StoreFiles::open_records(reading);
  EXPECT_NO_THROW(reader.open_data(1));
}

}  // namespace
}  // namespace sluice::test
