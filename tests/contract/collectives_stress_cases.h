// Cases of the collectives contract (collectives_contract.h) with many operations at the same time.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <sluice/collectives.h>
#include "tests/contract/collectives_contract_fixture.h"
#include "tests/support/campaign.h"

namespace sluice {

// There are three sequences. In each sequence, hundreds of operations of random kinds and sizes are
// under way at the same time. The delays of the operations differ between ranks. The data of each
// operation is prepared and checked on the operation's stream.
TEST_P(CollectivesContract, ManyOperationsUnderWayKeepTheirData) {
  run([](Collectives& ranks, Device& device) {
    const std::uint32_t n = ranks.rank_count();
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < n; ++i) all.push_back(i);
    const test::Campaign seeds = test::campaign(1);
    constexpr std::uint64_t kCountMax = 150'000;  // elements of a shard
    struct Sequence {
      Sequence(Device& device, std::unique_ptr<Collectives> own, std::uint64_t size_bytes)
          : opened(std::move(own)), stream(device, "sequence"), data(device, size_bytes) {}
      std::unique_ptr<Collectives> opened;
      Stream stream;
      RankArray data;
      std::uint64_t wrong = 0;  // elements
    };
    std::vector<std::unique_ptr<Sequence>> sequences;
    for (int i = 0; i < 3; ++i)
      sequences.push_back(
          std::make_unique<Sequence>(device, ranks.open(all), kCountMax * n * sizeof(float)));
    std::mt19937 random(static_cast<std::uint32_t>(seeds.first_seed));
    std::mt19937 own_random(static_cast<std::uint32_t>(seeds.first_seed + 1000 * ranks.rank()));
    for (std::uint64_t operation = 0; operation < 300 * seeds.cases; ++operation) {
      Sequence& sequence = *sequences[random() % sequences.size()];
      const StreamId stream = sequence.stream.id();
      const std::uint64_t limit = random() % 30 == 0 ? kCountMax : random() % 8 == 0 ? 40'000 : 500;
      const std::uint64_t shard = 1 + random() % limit;
      const auto salt = static_cast<std::uint32_t>(random());
      const auto kind = random() % 3;
      const std::uint64_t delay_us = own_random() % 20 == 0 ? own_random() % 300 : 0;
      float* const host = sequence.data.host().as<float>();
      device.call_host(stream, [=, rank = ranks.rank()] {
        if (delay_us != 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        for (std::uint64_t i = 0; i < shard * n; ++i) host[i] = rank_value(rank, i, salt);
      });
      std::byte* const data = sequence.data.data();
      std::byte* const own = data + ranks.rank() * shard * sizeof(float);
      device.copy(data, sequence.data.host().data(), shard * n * sizeof(float), stream);
      if (kind == 0) {
        sequence.opened->all_gather({.target = data,
                                     .source = own,
                                     .shard_bytes = shard * sizeof(float),
                                     .subject = "random"},
                                    stream);
      } else if (kind == 1) {
        sequence.opened->reduce_scatter(
            {.target = own, .source = data, .shard_elements = shard, .subject = "random"}, stream);
      } else {
        sequence.opened->all_reduce({.data = data, .element_count = shard * n, .subject = "random"},
                                    stream);
      }
      device.copy(sequence.data.host().data(), data, shard * n * sizeof(float), stream);
      device.call_host(stream, [=, rank = ranks.rank(), wrong = &sequence.wrong] {
        for (std::uint64_t i = 0; i < shard * n; ++i) {
          const auto owner = static_cast<std::uint32_t>(i / shard);
          if (kind == 1 && owner != rank) continue;
          const float expected = kind == 0 ? rank_value(owner, i, salt)
                                           : expected_sum(DType::kFp32, DType::kFp32, n, i, salt);
          *wrong += host[i] != expected ? 1 : 0;
        }
      });
    }
    for (const auto& sequence : sequences) {
      device.synchronize(sequence->stream.id());
      EXPECT_EQ(sequence->wrong, 0u) << "seed " << seeds.first_seed;
    }
  });
}

}  // namespace sluice
