// Folders of checkpoints: what has its name is whole, and one process writes at a time.
#include "engine/checkpoint/checkpoint_folder.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"

namespace {

std::function<void()> before_lock;  // what another process does just before the next lock

}  // namespace

// Stands before that of libc.
extern "C" int flock(int descriptor, int operation) noexcept {
  if (before_lock && (operation & LOCK_EX) != 0) std::exchange(before_lock, nullptr)();
  return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
}

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

// Returns whether there is one note, which has these words.
bool is_note(const std::vector<std::string>& notes, const std::string& words) {
  return notes.size() == 1 && notes[0].find(words) != std::string::npos;
}

class CheckpointFolder : public testing::Test {
 protected:
  // Returns the notes.
  std::vector<std::string> save(std::uint64_t step, std::uint32_t keep = 0,
                                CheckpointKin kin = CheckpointKin::kSameState) {
    NewCheckpoint fresh(root_);
    fresh.create("data", "begins", 10);
    CheckpointFile file(fresh.folder(), "data");
    AlignedBuffer room(kPageBytes, "the test");
    file.write(6, std::as_bytes(std::span("here")).first(4), room.span());
    file.sync();
    (void)fresh.commit(step, keep, [kin](const std::string&) { return kin; });
    return fresh.notes();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const CheckpointName& name : list_checkpoints(root_)) all.push_back(name.text());
    return all;
  }
  std::string latest() const { return fs::read_symlink(root_ + "/latest").string(); }
  using Names = std::vector<std::string>;

  const TempDirectory directory_;
  const std::string root_ = directory_.file("checkpoints");
};

TEST_F(CheckpointFolder, OldOnesGoAndLatestFollows) {
  EXPECT_EQ(names(), Names{});
  for (const std::uint64_t step : {2u, 4u, 6u}) {
    save(step, 2);
    EXPECT_EQ(latest(), fmt::format("step-{:09}", step));
  }
  EXPECT_EQ(names(), (Names{"step-000000006", "step-000000004"}));
  EXPECT_EQ(file_text(root_ + "/latest/data"), "beginshere");
  save(8);
  EXPECT_EQ(names().size(), 3u);
}

// Such a folder is a user's: a checkpoint that was put aside, or another program's.
TEST_F(CheckpointFolder, OnlyNamesThatItWouldGiveAreCheckpoints) {
  for (const CheckpointName& name :
       {CheckpointName{}, {.step = 3}, {.step = 3, .revision = 12}, {.step = 12'345'678'901}})
    EXPECT_EQ(checkpoint_name_from(name.text()), name);
  for (const std::string text : {"step-3", "step-0000000003", "step-000000003.0",
                                 "step-000000003.01", "step-3.1", "step-000000003.old", "step-"})
    EXPECT_EQ(checkpoint_name_from(text), std::nullopt) << text;
  save(2);
  save(3);
  fs::create_directory(root_ + "/step-3");
  save(4, 2);
  EXPECT_EQ(names(), (Names{"step-000000004", "step-000000003"}));
  EXPECT_TRUE(fs::exists(root_ + "/step-3"));
}

TEST_F(CheckpointFolder, AStepThatIsSavedAgainReplacesTheOldOne) {
  save(3);
  save(3);
  EXPECT_EQ(names(), Names{"step-000000003.1"});
  EXPECT_EQ(latest(), "step-000000003.1");
  save(3);
  EXPECT_EQ(names(), Names{"step-000000003.2"});
}

TEST_F(CheckpointFolder, AnotherStateOfTheSameStepStays) {
  save(3);
  EXPECT_TRUE(is_note(save(3, 0, CheckpointKin::kSameModel),
                      "step-000000003\" is of another state of this step, and stays"));
  EXPECT_EQ(names(), (Names{"step-000000003.1", "step-000000003"}));
  EXPECT_EQ(latest(), "step-000000003.1");
  save(5, 2, CheckpointKin::kSameModel);  // it counts as one of two
  EXPECT_EQ(names(), (Names{"step-000000005", "step-000000003.1"}));
}

TEST_F(CheckpointFolder, AnotherModelStays) {
  save(3);
  for (const std::uint64_t step : {3u, 4u})
    EXPECT_TRUE(is_note(save(step, 1, CheckpointKin::kForeign), "is of another model, and stays") ||
                step == 4);
  EXPECT_EQ(names(), (Names{"step-000000004", "step-000000003.1", "step-000000003"}));
}

TEST_F(CheckpointFolder, AnotherModelDoesNotCount) {
  for (const std::uint64_t step : {3u, 4u, 5u}) save(step);
  NewCheckpoint fresh(root_);
  (void)fresh.commit(6, 2, [](const std::string& path) {
    return path.ends_with("5") ? CheckpointKin::kForeign : CheckpointKin::kSameModel;
  });
  EXPECT_EQ(names(), (Names{"step-000000006", "step-000000005", "step-000000004"}));
  EXPECT_TRUE(fresh.notes().empty());
}

TEST_F(CheckpointFolder, ADamagedOneStaysAndDoesNotCount) {
  for (const std::uint64_t step : {3u, 4u, 5u}) save(step);
  for (const std::uint32_t keep : {2u, 0u}) {
    NewCheckpoint fresh(root_);
    (void)fresh.commit(5, keep, [](const std::string& path) {
      return path.ends_with("5") ? CheckpointKin::kDamaged : CheckpointKin::kSameModel;
    });
    EXPECT_TRUE(fs::exists(root_ + "/step-000000005"));
    EXPECT_TRUE(fs::exists(root_ + "/step-000000004"));
    EXPECT_FALSE(fs::exists(root_ + "/step-000000003"));
    ASSERT_FALSE(fresh.notes().empty());
    EXPECT_NE(fresh.notes().back().find("step-000000005\" is damaged, and stays"),
              std::string::npos)
        << fresh.notes().back();
  }
}

TEST_F(CheckpointFolder, ALockFileThatIsSomethingElseStaysAsItIs) {
  const std::string precious = directory_.file("precious");
  std::ofstream(precious) << "precious";
  fs::create_directory(root_);
  const auto refused = [&] {
    const std::string words =
        expect_error(ErrorCode::kInput, [&] { const CheckpointLock lock(root_); });
    EXPECT_NE(words.find("is not a lock file of Sluice"), std::string::npos) << words;
    EXPECT_EQ(file_text(precious), "precious");
    fs::remove(root_ + "/.lock");
  };
  fs::create_symlink(precious, root_ + "/.lock");
  refused();
  fs::create_hard_link(precious, root_ + "/.lock");
  refused();
  ASSERT_EQ(::mkfifo((root_ + "/.lock").c_str(), 0600), 0);
  refused();
  save(1);
}

// One that was passed over may be all right on another day.
TEST_F(CheckpointFolder, NewerOnesStay) {
  save(9);
  save(5, 1);
  EXPECT_EQ(names(), (Names{"step-000000009", "step-000000005"}));
  EXPECT_EQ(latest(), "step-000000005");
}

TEST_F(CheckpointFolder, WhatIsNotCommittedLeavesNothing) {
  save(1);
  {
    NewCheckpoint fresh(root_);
    fresh.create("data", "", 5);
    EXPECT_EQ(names(), Names{"step-000000001"});
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 3);  // and "latest" and ".lock"
  const NewCheckpoint fresh(root_);
  expect_error(ErrorCode::kNoSpace, [&] { fresh.create("data", "", 1ull << 61); });
}

// Runs `body` in a process of its own. Returns whether it ended well.
bool holds_in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int state = 0;
  ::waitpid(child, &state, 0);
  return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

bool can_lock_in_child(const std::string& root) {
  return holds_in_child([&] {
    try {
      const CheckpointLock lock(root);
      return true;
    } catch (const Error&) {
      return false;
    }
  });
}

// A run that is refused has the lock, and saves nothing.
TEST_F(CheckpointFolder, WhatWasMadeForAnUnusedLockGoesWithIt) {
  const std::string parent = directory_.file("parent");
  { const CheckpointLock lock(parent + "/a/b/"); }
  EXPECT_FALSE(fs::exists(parent));
  fs::create_directory(parent);
  {
    const CheckpointLock lock(parent);
    std::optional<CheckpointLock> second(std::in_place, parent + "/a/../a");
    std::ofstream(parent + "/a/notes") << "precious";
    second.reset();
    EXPECT_TRUE(fs::exists(parent + "/a/.lock")) << "the folder is in use by somebody";
    fs::remove_all(parent + "/a");
  }
  EXPECT_TRUE(fs::is_empty(parent)) << "the folder was there before";
  std::ofstream(parent + "/.lock") << "host other, process 1";
  { const CheckpointLock lock(parent); }
  EXPECT_TRUE(fs::exists(parent + "/.lock")) << "so was this file";
}

// A user removes the folder of a run that does not end, and begins another one there.
TEST_F(CheckpointFolder, ALockThatEndsLeavesTheFolderThatAnotherHasMade) {
  const std::string folder = directory_.file("parent/run");
  std::optional<CheckpointLock> old(std::in_place, folder);
  fs::remove_all(directory_.file("parent"));
  {
    const CheckpointLock lock(folder);  // of a new file: as in another process
    old.reset();
    EXPECT_TRUE(fs::exists(folder + "/.lock"));
  }
  EXPECT_FALSE(fs::exists(directory_.file("parent")));
}

// The last owner may remove the file, and the folder, between the opening and the lock.
TEST_F(CheckpointFolder, ALockOfARemovedFileIsNone) {
  for (const char* const removed : {"/.lock", ""}) {
    before_lock = [&] { fs::remove_all(root_ + removed); };
    const CheckpointLock lock(root_);
    EXPECT_FALSE(can_lock_in_child(root_)) << removed;
  }
}

TEST_F(CheckpointFolder, OneProcessWritesAndClearsWhatAnotherLeft) {
  save(1);
  fs::create_directory(root_ + "/.new-0123456789abcdef");
  std::ofstream(root_ + "/.new-0123456789abcdef/data") << "half";
  {
    const CheckpointLock lock(root_);
    EXPECT_TRUE(
        is_note(lock.notes(), ".new-0123456789abcdef\" was never finished, and has been removed"));
    const auto is_refused = [&](const std::string& owner) {
      return holds_in_child([&] {
        try {
          const CheckpointLock second(root_);
        } catch (const Error& error) {
          return error.code() == ErrorCode::kInput &&
                 std::string(error.what()).find(owner) != std::string::npos;
        }
        return false;
      });
    };
    EXPECT_TRUE(is_refused(std::to_string(::getpid())));
    fs::resize_file(root_ + "/.lock", 0);  // as between the lock and its text
    EXPECT_TRUE(is_refused("another process (which has just begun)"));
    // Objects of one process share it, also after one of them has ended.
    EXPECT_TRUE(CheckpointLock(root_ + "/../checkpoints").notes().empty());
    EXPECT_EQ(save(2), Names{});
    EXPECT_FALSE(can_lock_in_child(root_));
  }
  EXPECT_TRUE(holds_in_child([&] { return CheckpointLock(root_).notes().empty(); }));
  EXPECT_EQ(names(), (Names{"step-000000002", "step-000000001"}));
}

// Children, such as the workers of a data loader, live on for a while after their parent.
TEST_F(CheckpointFolder, AChildDoesNotKeepTheLockOfItsParent) {
  std::optional<CheckpointLock> lock(std::in_place, root_);
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (void)!::write(told[1], "x", 1);
    for (;;) ::pause();
  }
  char word = 0;
  ASSERT_EQ(::read(told[0], &word, 1), 1);
  lock.reset();
  EXPECT_TRUE(holds_in_child([&] { return CheckpointLock(root_).notes().empty(); }));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_F(CheckpointFolder, ASaveRemovesWhatAKilledOneLeftAndSaysSo) {
  fs::create_directories(root_ + "/.new-0123456789abcdef");
  EXPECT_TRUE(is_note(save(1), ".new-0123456789abcdef\" was never finished"));
  EXPECT_FALSE(fs::exists(root_ + "/.new-0123456789abcdef"));
}

// Users' files may begin in the same way.
TEST_F(CheckpointFolder, OnlyNamesAndFoldersOfCheckpointsAreRemoved) {
  const std::string suffix = "0123456789abcdef";
  const std::vector<std::string> kept{
      ".old-data", ".old-step-000000001",   ".old-step-000000001-copy", ".old-" + suffix,
      ".new-data", ".new-0123456789ABCDEF", ".new-" + suffix + "0"};
  for (const std::string& name : kept) {
    fs::create_directories(root_ + "/" + name);
    std::ofstream(root_ + "/" + name + "/model.safetensors") << "precious";
  }
  fs::create_directories(root_ + "/.new-ffffffffffffffff/src");  // no checkpoint has folders
  std::ofstream(root_ + "/.old-step-000000002-" + suffix) << "a file";
  fs::create_directory_symlink(".old-data", root_ + "/.new-00000000000000ff");
  EXPECT_EQ(save(1), Names{});
  for (const std::string& name : kept)
    EXPECT_EQ(file_text(root_ + "/" + name + "/model.safetensors"), "precious") << name;
  EXPECT_TRUE(fs::exists(root_ + "/.new-ffffffffffffffff/src"));
  EXPECT_TRUE(fs::exists(root_ + "/.old-step-000000002-" + suffix));
  EXPECT_TRUE(fs::is_symlink(root_ + "/.new-00000000000000ff"));
  fs::create_directory(root_ + "/.old-step-000000003.12-" + suffix);
  EXPECT_TRUE(is_note(save(2), ".old-step-000000003.12-"));
  fs::create_symlink("step-000000001", root_ + "/.new-latest");
  EXPECT_TRUE(is_note(save(3), ".new-latest\" was never finished"));
}

// As `cp -rL` makes it. The checkpoint has its name by then.
TEST_F(CheckpointFolder, ALinkThatCannotBeReplacedIsANote) {
  fs::create_directories(root_ + "/latest/kept");
  for (const std::uint64_t step : {1u, 2u, 3u})
    EXPECT_TRUE(is_note(save(step, 2), "latest\" failed"));
  EXPECT_EQ(names(), (Names{"step-000000003", "step-000000002"}));
  fs::remove_all(root_ + "/latest");
  EXPECT_EQ(save(4, 2), Names{});
  EXPECT_EQ(latest(), "step-000000004");
}

// As where another user has put a file into it. Nor is that one's lock file this user's to write.
TEST_F(CheckpointFolder, AnOldOneThatCannotBeRemovedIsANote) {
  save(1);
  ASSERT_EQ(::chmod((root_ + "/step-000000001").c_str(), 0555), 0);
  constexpr uid_t kOther = 65534;
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(directory_.path().c_str(), kOther, kOther), 0);
    ASSERT_EQ(::chown(root_.c_str(), kOther, kOther), 0);
  }
  EXPECT_TRUE(holds_in_child([&] {
    if (::geteuid() == 0 && ::seteuid(kOther) != 0) return false;
    const std::string words = "cannot be removed: ";
    return is_note(save(2, 1), "removal of") && is_note(save(3, 2), words) &&
           is_note(save(4, 2), words);
  }));
  EXPECT_EQ(names(), (Names{"step-000000004", "step-000000003"}));
  for (const fs::directory_entry& entry : fs::directory_iterator(root_))
    if (entry.is_directory() && !entry.is_symlink())
      fs::permissions(entry.path(), fs::perms::owner_all);
  EXPECT_TRUE(is_note(save(5), "is what is left of a removed checkpoint, and has been removed"));
}

TEST_F(CheckpointFolder, ModesAreThoseThatTheProcessAllows) {
  const mode_t before = ::umask(077);
  save(1);
  (void)::umask(before);
  const auto mode = [&](const std::string& name) {
    return fs::status(root_ + "/step-000000001" + name).permissions();
  };
  EXPECT_EQ(mode(""), fs::perms::owner_all);
  EXPECT_EQ(mode("/data"), fs::perms::owner_read | fs::perms::owner_write);
}

}  // namespace
}  // namespace sluice::test
