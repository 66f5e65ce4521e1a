// The function runs several cases of a randomized test at the same time. Most of the time, such
// cases only wait for random delays. So several cases together take only slightly more time than
// one case alone. Thread rule: one thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace sluice::test {

// The function calls `body(seed)` for each of the seeds, on `threads` threads. After a failure, no
// further case begins. The failure messages of `body` have to name the seed. If `body` throws, the
// test fails with a message that names the seed.
template <class Body>
void side_by_side(const std::vector<std::uint64_t>& seeds, const Body& body,
                  std::size_t threads = 4) {
  std::atomic<std::size_t> next = 0;
  const auto run = [&] {
    for (std::size_t i = next++; i < seeds.size() && !testing::Test::HasFailure(); i = next++) {
      try {
        body(seeds[i]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "seed " << seeds[i] << ": " << error.what();
      }
    }
  };
  std::vector<std::thread> others(std::min(threads, seeds.size()));
  for (std::thread& other : others) other = std::thread(run);
  for (std::thread& other : others) other.join();
}

}  // namespace sluice::test
