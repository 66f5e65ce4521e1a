// Tasks in places, each on its own thread, and what a failure of one ends.
#include "engine/store/block_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include <sluice/error.h>
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

TEST(BlockPlacesTest, RunAtOnceAndStopAfterAFailure) {
  BlockPlaces places(3);
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  for (std::uint32_t i = 0; i < 30; ++i) {
    places.await(i % 3);
    places.start(i % 3, [&] {
      most = std::max(most.load(), ++running);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      --running;
    });
  }
  places.finish();
  EXPECT_GE(most, 2);
  EXPECT_LE(most, 3);
  std::atomic<int> later = 0;
  places.start(0, [] { throw Error(ErrorCode::kIo, "first"); });
  expect_error(ErrorCode::kIo, [&] { places.await(0); });
  places.start(1, [&] { ++later; });
  EXPECT_EQ(expect_error(ErrorCode::kIo, [&] { places.finish(); }), "first");
  EXPECT_EQ(later, 0);
}

}  // namespace
}  // namespace sluice::test
