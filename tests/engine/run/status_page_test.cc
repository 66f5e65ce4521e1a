// The status page: what a reader gets from a writer that lives, has gone, or was stopped in the
// middle of it, and what it refuses.
#include "engine/run/status_page.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include <sluice/error.h>
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

class StatusPageTest : public testing::Test {
 protected:
  std::string own_path() const { return folder_ + "/" + std::to_string(::getpid()); }

  // The only page there is.
  FoundPage found() const {
    const std::vector<FoundPage> pages = read_status_pages(folder_);
    EXPECT_EQ(pages.size(), 1u);
    return pages.empty() ? FoundPage{} : pages.front();
  }

  // A page that a process made which has been killed since. Returns its number.
  std::string leave_a_page(std::uint64_t step) const {
    const pid_t child = ::fork();
    if (child == 0) {
      StatusPage page(folder_);
      RunStatus status{};
      status.step = step;
      page.write(status);
      ::kill(::getpid(), SIGKILL);
    }
    int state = 0;
    ::waitpid(child, &state, 0);
    EXPECT_TRUE(WIFSIGNALED(state));
    return std::to_string(child);
  }

  // Changes bytes of a page where it lies.
  void change(const std::string& name, off_t at, const std::string& bytes) const {
    const int file = ::open((folder_ + "/" + name).c_str(), O_RDWR);
    EXPECT_EQ(::pwrite(file, bytes.data(), bytes.size(), at), static_cast<ssize_t>(bytes.size()));
    ::close(file);
  }

  test::TempDirectory temp_;
  const std::string folder_ = temp_.file("sluice");
};

constexpr off_t kFormatAt = 8;
constexpr off_t kSequenceAt = 16;
constexpr off_t kStatusAt = 32;

TEST_F(StatusPageTest, IsReadWhileItsWriterLives) {
  {
    StatusPage page(folder_);
    RunStatus status{};
    status.phase = RunPhase::kTraining;
    status.step = 7;
    status.loss = 2.5;
    page.write(status);
    struct stat info {};
    ASSERT_EQ(::stat(own_path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    const FoundPage read = found();
    EXPECT_TRUE(read.is_alive);
    ASSERT_TRUE(read.status) << read.problem;
    EXPECT_EQ(read.status->pid, static_cast<std::uint32_t>(::getpid()));
    EXPECT_EQ(read.status->step, 7u);
    EXPECT_EQ(read.status->loss, 2.5);
    EXPECT_LE(read.status->started_unix_ns, read.status->updated_unix_ns);
    EXPECT_EQ(found().status->step, 7u) << "reading removes nothing";
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(StatusPageTest, OfAKilledProcessIsShownOnceAndRemoved) {
  const std::string name = leave_a_page(3);
  const FoundPage read = found();
  EXPECT_EQ(read.name, name);
  EXPECT_FALSE(read.is_alive);
  ASSERT_TRUE(read.status) << read.problem;
  EXPECT_EQ(read.status->step, 3u);
  EXPECT_TRUE(read_status_pages(folder_).empty());
}

// A child has the parent's file, and so its lock, until it ends or executes another program.
TEST_F(StatusPageTest, OfAKilledProcessIsGoneWhileItsChildRuns) {
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    StatusPage page(folder_);
    const pid_t child = ::fork();
    if (child == 0) {
      page.write({});  // changes nothing
      (void)!::write(told[1], "x", 1);
      for (;;) ::pause();
    }
    (void)!::write(told[1], &child, sizeof child);
    for (;;) ::pause();
  }
  char from_both[sizeof(pid_t) + 1];
  std::size_t count = 0;
  while (count < sizeof from_both) {
    const ssize_t read = ::read(told[0], from_both + count, sizeof from_both - count);
    ASSERT_GT(read, 0);
    count += static_cast<std::size_t>(read);
  }
  // Either may have written first.
  pid_t child = 0;
  std::memcpy(&child, from_both + (from_both[0] == 'x' ? 1 : 0), sizeof child);
  EXPECT_TRUE(found().is_alive);
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_EQ(::kill(child, 0), 0);
  const FoundPage read = found();
  EXPECT_FALSE(read.is_alive);
  EXPECT_EQ(read.name, std::to_string(parent));
  ::kill(child, SIGKILL);
  ::close(told[0]);
  ::close(told[1]);
}

TEST_F(StatusPageTest, AChildThatEndsLeavesItsParentsPage) {
  StatusPage page(folder_);
  const pid_t child = ::fork();
  if (child == 0) {
    page.write({});
    page.~StatusPage();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(found().is_alive);
}

TEST_F(StatusPageTest, TornIsNamed) {
  StatusPage page(folder_);
  change(std::to_string(::getpid()), kSequenceAt, "\x01");
  EXPECT_EQ(found().problem, "is torn: its writer has stopped in the middle of it");
  EXPECT_FALSE(found().status);
}

TEST_F(StatusPageTest, DamagedIsNamed) {
  StatusPage page(folder_);
  change(std::to_string(::getpid()), kStatusAt + 100, "x");
  EXPECT_EQ(found().problem, "is damaged: its checksum is wrong");
}

TEST_F(StatusPageTest, ForeignIsNamedAndLeft) {
  const auto problem_of = [&](const std::string& name, const auto& spoil) {
    const std::string left = name.empty() ? leave_a_page(1) : name;
    spoil(folder_ + "/" + left);
    const std::string problem = found().problem;
    EXPECT_TRUE(std::filesystem::remove(folder_ + "/" + left)) << "was removed: " << problem;
    return problem;
  };
  EXPECT_EQ(
      problem_of("",
                 [&](const std::string& path) { change(path.substr(folder_.size() + 1), 0, "X"); }),
      "is not a status page");
  EXPECT_EQ(problem_of("",
                       [&](const std::string& path) {
                         change(path.substr(folder_.size() + 1), kFormatAt, "\x09");
                       }),
            "is of another version of Sluice (format 9, version 100)");
  EXPECT_EQ(problem_of("", [](const std::string& path) { ::chmod(path.c_str(), 0644); }),
            "is open to others (mode 644)");
  EXPECT_EQ(problem_of("", [](const std::string& path) { ::truncate(path.c_str(), 100); }),
            "has 100 bytes instead of 4096");
  EXPECT_EQ(problem_of("123",
                       [](const std::string& path) {
                         std::filesystem::create_symlink("/etc/passwd", path);
                       }),
            "is a symbolic link");
  EXPECT_EQ(problem_of("124", [](const std::string& path) { ::mkfifo(path.c_str(), 0600); }),
            "is not a regular file");
  if (::geteuid() == 0) {
    EXPECT_EQ(problem_of("", [](const std::string& path) { ::chown(path.c_str(), 65534, 65534); }),
              "belongs to user 65534");
  }
}

TEST_F(StatusPageTest, OfAnotherNumberIsNotTrusted) {
  StatusPage page(folder_);
  const std::string other = folder_ + "/1";
  std::filesystem::copy_file(own_path(), other);
  ::chmod(other.c_str(), 0600);
  const std::vector<FoundPage> pages = read_status_pages(folder_);
  ASSERT_EQ(pages.size(), 2u);
  EXPECT_EQ(pages[0].problem, "says that it is of process " + std::to_string(::getpid()));
}

TEST_F(StatusPageTest, OtherFilesAreLeft) {
  std::filesystem::create_directory(folder_);
  std::ofstream(folder_ + "/notes") << "text";
  std::ofstream(folder_ + "/12.new") << "text";
  EXPECT_TRUE(read_status_pages(folder_).empty());
  EXPECT_TRUE(read_status_pages(folder_ + "/gone").empty());
}

TEST_F(StatusPageTest, ReplacesADeadOneOfItsNumber) {
  std::filesystem::create_directory(folder_);
  std::ofstream(own_path()) << "left by a process of this number";
  const StatusPage page(folder_);
  EXPECT_TRUE(found().status);
}

// In another process namespace, a process may have the same number.
TEST_F(StatusPageTest, OfALiveProcessIsLeftToIt) {
  StatusPage page(folder_);
  RunStatus status{};
  status.step = 5;
  page.write(status);
  try {
    const StatusPage other(folder_);
    ADD_FAILURE() << "the page was replaced";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a live process of this number has it"),
              std::string::npos)
        << error.what();
  }
  ASSERT_TRUE(found().status);
  EXPECT_EQ(found().status->step, 5u);
}

TEST_F(StatusPageTest, AnotherProcesssPageIsNotRemoved) {
  {
    const StatusPage page(folder_);
    std::ofstream(folder_ + "/other") << "another process's page";
    std::filesystem::rename(folder_ + "/other", own_path());
  }
  EXPECT_TRUE(std::filesystem::exists(own_path()));
}

TEST_F(StatusPageTest, OfAProcessThatEndsIsNoKilledOnes) {
  std::atomic<bool> is_ended{false};
  std::thread writer([&] {
    while (!is_ended) StatusPage{folder_}.write({});
  });
  int seen = 0;
  for (int i = 0; i < 300000 && seen < 1000; ++i) {
    for (const FoundPage& page : read_status_pages(folder_)) {
      ++seen;
      EXPECT_TRUE(page.is_alive) << page.problem;
      EXPECT_EQ(page.problem, "");
    }
  }
  is_ended = true;
  writer.join();
  EXPECT_GT(seen, 0);
}

TEST_F(StatusPageTest, AFolderThatCannotBeReadIsNamed) {
  std::ofstream(folder_) << "text";
  try {
    (void)read_status_pages(folder_);
    ADD_FAILURE() << "a file was read as a folder";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what())
                  .find("cannot read the status pages in \"" + folder_ + "\": Not a directory"),
              0u)
        << error.what();
  }
}

TEST_F(StatusPageTest, WithoutAFolderIsNone) {
  StatusPage page("");
  EXPECT_FALSE(page.is_there());
  page.write({});
  std::ofstream(temp_.file("file")) << "text";
  EXPECT_THROW(StatusPage(temp_.file("file")), Error);
  EXPECT_THROW(StatusPage(temp_.file("no/such/folder")), Error);
}

// Every status that is read is one that was written: its two numbers belong together.
TEST_F(StatusPageTest, IsNeverReadHalfWritten) {
  StatusPage page(folder_);
  std::atomic<bool> is_ended{false};
  std::thread writer([&] {
    for (std::uint64_t step = 1; !is_ended; ++step) {
      RunStatus status{};
      status.step = step;
      status.tiers[kTiers - 1].in_use_bytes = step;  // at the other end
      page.write(status);
    }
  });
  // A writer that is held up gets time to begin.
  std::uint64_t last = 0;
  for (int i = 0; i < 300 || (last == 0 && i < 30000); ++i) {
    const FoundPage read = found();
    if (!read.status) continue;  // the writer was held up for long: said so, not trusted
    EXPECT_EQ(read.status->step, read.status->tiers[kTiers - 1].in_use_bytes);
    EXPECT_GE(read.status->step, last);
    last = read.status->step;
  }
  is_ended = true;
  writer.join();
  EXPECT_GT(last, 0u);
}

TEST(RunStatus, TheLongestWaitIsOneWithAReason) {
  RunStatus status{};
  EXPECT_EQ(status.longest_wait(), TraceReason::kNone);
  status.wait_ns[static_cast<std::size_t>(TraceReason::kNone)] = 9;
  EXPECT_EQ(status.longest_wait(), TraceReason::kNone);
  status.wait_ns[static_cast<std::size_t>(TraceReason::kNorm)] = 2;
  status.wait_ns[static_cast<std::size_t>(TraceReason::kUpdateRead)] = 3;
  EXPECT_EQ(status.longest_wait(), TraceReason::kUpdateRead);
}

}  // namespace
}  // namespace sluice
