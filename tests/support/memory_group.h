// A control group with a memory limit, for tests of the behavior at the limit. A test forks a
// child, and the child enters the group. This object removes the group after the child has ended.
#pragma once

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace sluice::test {

class MemoryGroup {
 public:
  explicit MemoryGroup(std::uint64_t limit_bytes) {
    for (const auto& [parent, limit] : parents()) {
      const std::string folder = parent + "/sluice-memory-test-" + std::to_string(::getpid());
      if (::mkdir(folder.c_str(), 0755) != 0) continue;
      if (std::ofstream(folder + limit) << limit_bytes << std::flush) {
        folder_ = folder;
        return;
      }
      ::rmdir(folder.c_str());
    }
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;
  ~MemoryGroup() {
    if (exists()) ::rmdir(folder_.c_str());
  }

  // Returns whether the group could be made. Only root can make a group. The hierarchy of groups
  // must be writable.
  bool exists() const { return !folder_.empty(); }

  // The function runs `body` in a child that is in the group. Returns the text that `body` returns.
  // If the child fails, the result begins with "status N".
  std::string run(const std::function<std::string()>& body) const {
    std::array<int, 2> pipe{};
    if (::pipe(pipe.data()) != 0) return "no pipe";
    const pid_t child = ::fork();
    if (child == 0) {
      std::string said = "could not enter the group";
      if (std::ofstream(folder_ + "/cgroup.procs") << ::getpid() << std::flush) said = body();
      const bool is_whole = ::write(pipe[1], said.data(), said.size()) == std::ssize(said);
      ::_exit(is_whole ? 0 : 1);
    }
    ::close(pipe[1]);
    std::string said;
    std::array<char, 4096> piece{};
    for (ssize_t count; (count = ::read(pipe[0], piece.data(), piece.size())) > 0;)
      said.append(piece.data(), static_cast<std::size_t>(count));
    ::close(pipe[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0 ? said : "status " + std::to_string(status) + " " + said;
  }

 private:
  // Returns the folders in which this process may make groups. Each folder comes with the name of
  // the file that has the limit.
  static std::vector<std::pair<std::string, std::string>> parents() {
    std::vector<std::pair<std::string, std::string>> found;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::string number, controllers, path;
      std::getline(std::getline(fields, number, ':'), controllers, ':');
      std::getline(fields, path);
      if (controllers == "memory") {
        found.emplace_back("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes");
        found.emplace_back("/sys/fs/cgroup/memory", "/memory.limit_in_bytes");
      } else if (controllers.empty()) {
        found.emplace_back("/sys/fs/cgroup", "/memory.max");
      }
    }
    return found;
  }

  std::string folder_;
};

}  // namespace sluice::test
