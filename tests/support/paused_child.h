// A forked child that sleeps until it is killed, such as the worker of a data loader, and what it
// has inherited, as /proc shows it.
//
// Thread rule: one thread per object.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace sluice::test {

// Returns what each descriptor of the process refers to, by the descriptor's number.
inline std::map<std::string, std::string> descriptors_of(pid_t process) {
  std::map<std::string, std::string> found;
  const std::string folder = "/proc/" + std::to_string(process) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code gone;  // the one with which this function looks
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && target.find("/proc/") != 0) found[entry.path().filename().string()] = target;
  }
  return found;
}

inline std::string maps_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/maps");
  return {std::istreambuf_iterator<char>(file), {}};
}

class PausedChild {
 public:
  // When the constructor returns, the fork has ended in the child, too.
  PausedChild() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    EXPECT_GE(pid_, 0);
    if (pid_ == 0) {
      (void)!::write(ends[1], "x", 1);
      ::close(ends[0]);
      ::close(ends[1]);
      while (true) ::pause();
    }
    ::close(ends[1]);
    char byte = 0;
    EXPECT_EQ(::read(ends[0], &byte, 1), 1);
    EXPECT_EQ(::read(ends[0], &byte, 1), 0);  // it has closed its ends
    ::close(ends[0]);
  }
  PausedChild(PausedChild&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  PausedChild& operator=(PausedChild&&) = delete;
  ~PausedChild() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

}  // namespace sluice::test
