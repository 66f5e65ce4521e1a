// A directory for one test, under $TMPDIR or /tmp. The destructor removes the directory with its
// contents. Set TMPDIR to a directory on the drive to be tested. Thread rule: constant after
// construction.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace sluice::test {

class TempDirectory {
 public:
  TempDirectory() {
    const char* parent = std::getenv("TMPDIR");
    path_ =
        std::string(parent != nullptr && *parent != '\0' ? parent : "/tmp") + "/sluice-test-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr)
      throw std::filesystem::filesystem_error("mkdtemp", path_,
                                              std::error_code(errno, std::generic_category()));
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace sluice::test
