// Forks a process of several threads.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace sluice::test {

// Whether no other thread of this process runs. The function is also true for threads that wait for
// a drive.
inline bool others_sleep() {
  DIR* const tasks = ::opendir("/proc/self/task");
  if (tasks == nullptr) return true;
  bool do_sleep = true;
  while (const dirent* const entry = ::readdir(tasks)) {
    const std::string name = entry->d_name;
    if (name[0] == '.' || std::atoi(name.c_str()) == ::gettid()) continue;
    std::ifstream file("/proc/self/task/" + name + "/stat");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    const std::size_t state = text.rfind(") ");  // of a thread that has ended, there is none
    do_sleep = do_sleep && (state == text.npos || text[state + 2] != 'R');
  }
  ::closedir(tasks);
  return do_sleep;
}

// Like fork(), when the other threads sleep. The allocator of AddressSanitizer does not take its
// locks for a fork, as glibc's does: if another thread allocates meanwhile, the first allocation of
// the child waits without end.
inline pid_t fork_quietly() {
  for (int tries = 0; tries < 1000 && !others_sleep(); ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ::fork();
}

}  // namespace sluice::test
