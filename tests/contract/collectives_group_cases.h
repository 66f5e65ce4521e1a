// Cases of the collectives contract (collectives_contract.h) with sequences of some of the ranks.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include <sluice/collectives.h>
#include "tests/contract/collectives_contract_fixture.h"

namespace sluice {

// Parts of the ranks open different numbers of sequences on their own, as engines of parts do. They
// open one sequence together after that.
TEST_P(CollectivesContract, PartsMayOpenUnequalNumbers) {
  run([](Collectives& ranks, Device& device) {
    std::vector<std::uint32_t> all, part;
    for (std::uint32_t i = 0; i < ranks.rank_count(); ++i) {
      all.push_back(i);
      if ((i == 0) == (ranks.rank() == 0)) part.push_back(i);
    }
    const auto members = ranks.open(part);
    const Stream stream(device, "test");
    RankArray word(device, sizeof(std::uint64_t));
    const auto sum_is = [&](Collectives& opened, std::uint64_t own, std::uint64_t expected) {
      std::memcpy(word.host().data(), &own, sizeof own);
      word.push(stream.id());
      opened.all_reduce_integers({.data = word.data(), .sum_count = 1, .subject = "a word"},
                                 stream.id());
      word.pull(stream.id());
      std::uint64_t sum = 0;
      std::memcpy(&sum, word.host().data(), sizeof sum);
      EXPECT_EQ(sum, expected);
    };
    std::vector<std::unique_ptr<Collectives>> own;
    for (std::uint32_t i = 0; ranks.rank() != 0 && i < 3; ++i) {
      own.push_back(members->open(std::vector<std::uint32_t>(
          all.begin(), all.begin() + static_cast<std::ptrdiff_t>(part.size()))));
      sum_is(*own.back(), 1, part.size());
    }
    const auto together = ranks.open(all);
    sum_is(*together, ranks.rank() + 1, ranks.rank_count() * (ranks.rank_count() + 1) / 2);
  });
}

}  // namespace sluice
