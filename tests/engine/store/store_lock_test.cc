// Locks among real processes, which are killed.
#include "engine/store/store_lock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include "tests/support/expect_error.h"
#include "tests/support/paused_child.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// A forked process that does `body`, tells so, and lives until it is killed.
class Child {
 public:
  explicit Child(const std::function<void()>& body) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      body();
      (void)!::write(ends[1], "x", 1);
      while (true) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ends[0], &byte, 1), 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Child() { kill(); }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

TEST(StoreLock, TheSecondIsToldWhoTheFirstIs) {
  const TempDirectory directory;
  const Child first([&] { new StoreLock(directory.path(), "run", ""); });
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { const StoreLock second(directory.path(), "run", ""); });
  EXPECT_NE(message.find("process " + std::to_string(first.pid())), std::string::npos) << message;
  const StoreLock other(directory.path(), "run-2", "");  // another store
}

TEST(StoreLock, EndsWithItsProcessAndNotWithItsWorkers) {
  const TempDirectory directory;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Child first([&] {
    new StoreLock(directory.path(), "run", "");
    if (::fork() != 0) return;
    const pid_t worker = ::getpid();  // it tells itself: its fork has ended then
    (void)!::write(ends[1], &worker, sizeof(worker));
    while (true) ::pause();
  });
  pid_t worker = 0;
  ASSERT_EQ(::read(ends[0], &worker, sizeof(worker)), static_cast<ssize_t>(sizeof(worker)));
  expect_error(ErrorCode::kInput, [&] { const StoreLock early(directory.path(), "run", ""); });
  first.kill();
  EXPECT_EQ(::kill(worker, 0), 0);  // lives on
  EXPECT_NO_THROW(EXPECT_TRUE(StoreLock(directory.path(), "run", "").is_own()));
  ::kill(worker, SIGKILL);  // whatever has been found: it would hold this program's output
}

// Neither for the moment in which a child is being forked nor as long as the child lives.
TEST(StoreLock, GivenBackIsNotHeldByChildrenForkedMeanwhile) {
  const TempDirectory directory;
  std::atomic<bool> is_over = false;
  std::thread forker([&] {
    std::vector<PausedChild> children;
    for (int i = 0; i < 300 && !is_over; ++i) children.emplace_back();
    is_over = true;
  });
  std::string message;
  while (!is_over) {
    try {
      const StoreLock lock(directory.path(), "run", "");
    } catch (const Error& error) {
      message = error.what();
      is_over = true;
    }
  }
  forker.join();
  EXPECT_EQ(message, "");
}

TEST(StoreLock, ProcessesOfOneJobShareIt) {
  const TempDirectory directory;
  const Child first([&] {
    auto* lock = new StoreLock(directory.path(), "run", "job-1");
    lock->set_mark({.stage = StoreStage::kCreating, .id = {7}});
  });
  const StoreLock second(directory.path(), "run", "job-1");
  EXPECT_FALSE(second.is_own());
  EXPECT_EQ(second.mark(), (StoreMark{.stage = StoreStage::kCreating, .id = {7}}));
  expect_error(ErrorCode::kInput, [&] { const StoreLock third(directory.path(), "run", "job-2"); });
}

TEST(StoreLock, TheMarkStays) {
  const TempDirectory directory;
  const StoreMark mark{.stage = StoreStage::kMade, .id = {1, 2, 0xff}};
  EXPECT_FALSE(read_store_mark(directory.path(), "run"));
  { StoreLock(directory.path(), "run", "").set_mark(mark); }
  EXPECT_EQ(read_store_mark(directory.path(), "run"), mark);
  EXPECT_EQ(StoreLock(directory.path(), "run", "").mark(), mark);
}

TEST(StoreLock, AFileOfSomebodyElseIsLeftAlone) {
  const TempDirectory directory;
  std::ofstream(directory.file("run.lock")) << "mine\n";
  expect_error(ErrorCode::kDamaged, [&] { const StoreLock lock(directory.path(), "run", ""); });
  std::ifstream file(directory.file("run.lock"));
  std::string text;
  std::getline(file, text);
  EXPECT_EQ(text, "mine");
  expect_error(ErrorCode::kInput,
               [&] { const StoreLock lock(directory.path() + "/none", "run", ""); });
}

// Beside files of the store, it is the store's own, and its mark is lost.
TEST(StoreLock, ADamagedMarkBesideFilesOfTheStoreIsLost) {
  const TempDirectory directory;
  std::ofstream(directory.file("run.lock")) << std::string(512, '\0');
  expect_error(ErrorCode::kDamaged, [&] { const StoreLock lock(directory.path(), "run", ""); });
  std::ofstream(directory.file("run." + std::string(32, '0') + ".r0.data0")).flush();
  StoreLock lock(directory.path(), "run", "");
  EXPECT_EQ(lock.mark(), StoreMark());
  lock.set_mark({.stage = StoreStage::kMade, .id = {7}});
  EXPECT_EQ(read_store_mark(directory.path(), "run").value().id, StoreId{7});
}

TEST(StoreLock, AnotherVersionIsLeftAlone) {
  const TempDirectory directory;
  std::ofstream(directory.file("run." + std::string(32, '0') + ".r0.data0")).flush();
  std::ofstream(directory.file("run.lock")) << "sluice store 2\nstage: made\n";
  const std::string words = expect_error(
      ErrorCode::kUnsupported, [&] { const StoreLock lock(directory.path(), "run", ""); });
  EXPECT_NE(words.find("another version (sluice store 2)"), std::string::npos) << words;
  std::ifstream file(directory.file("run.lock"));
  std::string text;
  std::getline(file, text);
  EXPECT_EQ(text, "sluice store 2");
}

}  // namespace
}  // namespace sluice::test
