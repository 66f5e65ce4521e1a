// The fixture of the IoQueue contract. The fixture makes the queue under test, and the files that
// the queue works on. The cases are in io_queue_contract.h.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include "base/unique_fd.h"
#include "io/io_queue.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {

struct IoQueueFactory {
  const char* name;
  std::unique_ptr<IoQueue> (*make)(const IoQueueOptions&);
};

// GoogleTest prints this name in its list of tests. By default, GoogleTest would print an address,
// which changes with every run.
inline void PrintTo(const IoQueueFactory& factory, std::ostream* stream) {
  *stream << factory.name;
}

class IoQueueContract : public ::testing::TestWithParam<IoQueueFactory> {
 protected:
  void SetUp() override {
    try {
      (void)GetParam().make({.depth = 1});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      GTEST_SKIP() << error.what();
    }
  }

  static std::unique_ptr<IoQueue> make_queue(std::uint32_t depth = 8) {
    return GetParam().make({.depth = depth});
  }

  // Opens a file of `size_bytes` for transfers through the page cache. Such transfers need no
  // alignment.
  UniqueFd open_plain(std::uint64_t size_bytes, int flags = O_RDWR) {
    const std::string path = directory_.file("plain");
    UniqueFd file(::open(path.c_str(), flags | O_CREAT | O_CLOEXEC, 0600));
    EXPECT_TRUE(file);
    EXPECT_EQ(::truncate(path.c_str(), static_cast<off_t>(size_bytes)), 0);
    return file;
  }

  static void fill_random(std::span<std::byte> target, std::mt19937_64& random) {
    for (std::byte& byte : target) byte = static_cast<std::byte>(random());
  }

  TempDirectory directory_;
};

inline bool equal(std::span<const std::byte> left, std::span<const std::byte> right) {
  return std::ranges::equal(left, right);
}

}  // namespace sluice::test
