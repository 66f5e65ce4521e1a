// Compares a run of the toy training with its oracle. The comparison covers the state at the end,
// and the loaded activations. Every use of a step or an evaluation finds parameters on the device.
// The comparison covers these parameters, too. The functions are pure.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>

#include <sluice/error.h>
#include "tests/support/toy_training.h"

namespace sluice::test {

inline testing::AssertionResult same_sights(const ToySights& actual, const ToySights& expected) {
  if (actual.size() != expected.size())
    return testing::AssertionFailure()
           << actual.size() << " uses were seen, not " << expected.size();
  const auto wrong = std::mismatch(actual.begin(), actual.end(), expected.begin());
  if (wrong.first == actual.end()) return testing::AssertionSuccess();
  const auto count = std::inner_product(
      actual.begin(), actual.end(), expected.begin(), std::size_t{0}, std::plus<>(),
      [](const ToySight& left, const ToySight& right) { return left == right ? 0u : 1u; });
  const auto of = [](const ToySight& sight) {
    return testing::Message() << "unit " << index_of(sight.unit) << " (" << name_of(sight.pass)
                              << ", version " << sight.version << ")";
  };
  return testing::AssertionFailure()
         << count << " of " << actual.size() << " uses found other parameters than the oracle's"
         << "; the first is use " << wrong.first - actual.begin() << ", " << of(*wrong.first)
         << ", expected of " << of(*wrong.second) << "; at the beginning of its lease they are "
         << (wrong.first->digest == wrong.second->digest ? "right" : "wrong") << ", at its end "
         << (wrong.first->digest_at_end == wrong.second->digest_at_end ? "right" : "wrong");
}

inline testing::AssertionResult same_training(const ToyResult& actual, const ToyResult& expected) {
  // memcmp() is used here, because the vectors' own comparison takes one byte at a time.
  if (actual.state.size() != expected.state.size() ||
      std::memcmp(actual.state.data(), expected.state.data(), actual.state.size()) != 0)
    return testing::AssertionFailure() << "the state at the end is not the oracle's";
  if (actual.activations_wrong != 0 || actual.activations_seen != expected.activations_seen)
    return testing::AssertionFailure()
           << actual.activations_wrong << " of " << actual.activations_seen
           << " activations are not what was saved, of " << expected.activations_seen
           << " that there are";
  return same_sights(actual.sights, expected.sights);
}

// Returns whether `error` has this cause: an unexpected use needs a place, but the leased units
// leave no room. With several leases, the engine cannot avoid this error.
inline bool leases_lie_in_the_way(const Error& error) {
  return error.code() == ErrorCode::kOutOfMemory &&
         std::string(error.what()).find("beside the units still leased") != std::string::npos;
}

}  // namespace sluice::test
