#include "base/at_once.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace sluice {
namespace {

TEST(AtOnce, EachNumberIsCalledOnce) {
  for (const std::size_t count : {0u, 1u, 2u, 100u}) {
    std::vector<std::atomic<int>> calls(count);
    for_each_at_once(count, [&](std::size_t i) { ++calls[i]; });
    for (const std::atomic<int>& number : calls) EXPECT_EQ(number.load(), 1);
  }
}

TEST(AtOnce, AnExceptionLeavesAfterTheOthersHaveReturned) {
  std::atomic<int> under_way = 0;
  const auto run = [&](std::size_t i) {
    ++under_way;
    const bool fails = i == 3;
    --under_way;
    if (fails) throw std::runtime_error("three");
  };
  EXPECT_THROW(for_each_at_once(20, run), std::runtime_error);
  EXPECT_EQ(under_way.load(), 0);
}

}  // namespace
}  // namespace sluice
