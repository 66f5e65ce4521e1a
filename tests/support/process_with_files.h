// A process that has opened files, and that is killed while a transfer in the kernel still holds
// one of them. The test has that open file itself, in the kernel's place.
//
// Thread rule: one thread per object.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>

#include <gtest/gtest.h>

#include "base/unique_fd.h"

namespace sluice::test {

class ProcessWithFiles {
 public:
  // `open` runs in the process, and returns one of the open files.
  explicit ProcessWithFiles(const std::function<int()>& open) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      pass(ends[1], open());
      while (true) ::pause();
    }
    ::close(ends[1]);
    file_ = UniqueFd(taken(ends[0]));
    ::close(ends[0]);
  }
  ProcessWithFiles(const ProcessWithFiles&) = delete;
  ProcessWithFiles& operator=(const ProcessWithFiles&) = delete;
  ~ProcessWithFiles() { kill(); }

  pid_t pid() const { return pid_; }
  // The transfer stays under way.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void end_transfer() { file_ = UniqueFd(); }

 private:
  struct Letter {
    char byte = 'x';
    iovec part{};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    Letter() {
      part = {.iov_base = &byte, .iov_len = 1};
      header.msg_iov = &part;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof control;
    }
  };

  static void pass(int socket, int file) {
    Letter letter;
    cmsghdr* const entry = CMSG_FIRSTHDR(&letter.header);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(entry), &file, sizeof file);
    (void)::sendmsg(socket, &letter.header, 0);
  }
  static int taken(int socket) {
    Letter letter;
    EXPECT_EQ(::recvmsg(socket, &letter.header, MSG_CMSG_CLOEXEC), 1);
    const cmsghdr* const entry = CMSG_FIRSTHDR(&letter.header);
    int file = -1;
    if (entry != nullptr) std::memcpy(&file, CMSG_DATA(entry), sizeof file);
    EXPECT_GE(file, 0);
    return file;
  }

  pid_t pid_ = 0;
  UniqueFd file_;
};

}  // namespace sluice::test
