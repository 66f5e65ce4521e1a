// These test cases check the duties of every implementation of Collectives. A test case is a
// function that each rank runs on its own device. With one factory, all ranks are threads of this
// process. With another factory, each process is one rank
// (tests/gpu/ranks/local_collectives_test.cc, mpi_collectives_test.cc). The values are computed
// from rank and index. Plain loops in this file compute the expected results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sluice/collectives.h>
#include <sluice/units.h>
#include "tests/contract/collectives_contract_fixture.h"
#include "tests/contract/collectives_group_cases.h"
#include "tests/contract/collectives_stress_cases.h"
#include "tests/support/campaign.h"

namespace sluice {

// Implementations move data in pieces. The lists of shard sizes contain values that are close to
// the size of a piece.
constexpr std::uint64_t kShardBytes[] = {0, 1, 255, 4096, 16_KiB, 16_KiB + 1, 70'001, 9_MiB + 13};
constexpr std::uint64_t kShardElementsMax = 600'000;
constexpr std::uint64_t kShardElements[] = {
    0, 1, 63, 4096, 4097, 32'769, 65'537, 100'003, kShardElementsMax};

TEST_P(CollectivesContract, AllGatherPutsEveryRanksBytesInRankOrder) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    for (const std::uint64_t shard : kShardBytes) {
      std::vector<std::byte> expected(shard * ranks.rank_count());
      for (std::uint32_t rank = 0; rank < ranks.rank_count(); ++rank)
        for (std::uint64_t i = 0; i < shard; ++i) expected[rank * shard + i] = rank_byte(rank, i);
      for (const bool is_in_place : {false, true}) {
        RankArray target(device, shard * ranks.rank_count());
        RankArray source(device, shard);
        std::byte* own =
            is_in_place ? target.host().data() + ranks.rank() * shard : source.host().data();
        if (shard != 0) std::memcpy(own, &expected[ranks.rank() * shard], shard);
        (is_in_place ? target : source).push(stream.id());
        ranks.all_gather(
            {.target = target.data(),
             .source = is_in_place ? target.data() + ranks.rank() * shard : source.data(),
             .shard_bytes = shard,
             .subject = "gathered"},
            stream.id());
        target.pull(stream.id());
        const std::byte* const actual = target.host().data();
        if (expected.empty() || std::memcmp(actual, expected.data(), expected.size()) == 0)
          continue;
        const auto at = std::mismatch(expected.begin(), expected.end(), actual).first;
        FAIL() << at - expected.begin() << " of " << ranks.rank_count() << " x " << shard;
      }
    }
  });
}

TEST_P(CollectivesContract, ReduceScatterAddsInRankOrderAndRoundsOnce) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const std::pair<DType, DType> types[] = {
        {DType::kFp32, DType::kFp32}, {DType::kBf16, DType::kBf16}, {DType::kFp16, DType::kFp16},
        {DType::kBf16, DType::kFp32}, {DType::kFp16, DType::kFp32}, {DType::kFp32, DType::kBf16}};
    for (const auto& [source_type, target_type] : types) {
      for (const std::uint64_t shard : kShardElements) {
        if (shard == kShardElementsMax && size_of(source_type) != size_of(target_type)) continue;
        const bool is_in_place = source_type == target_type && shard % 2 == 1;
        const std::uint64_t count = shard * ranks.rank_count();
        RankArray source(device, count * size_of(source_type));
        RankArray target(device, shard * size_of(target_type));
        for (std::uint64_t i = 0; i < count; ++i)
          save_value(source_type, source.host().data(), i, rank_value(ranks.rank(), i));
        source.push(stream.id());
        const std::uint64_t own = ranks.rank() * shard;
        std::byte* const result =
            is_in_place ? source.data() + own * size_of(source_type) : target.data();
        ranks.reduce_scatter({.target = result,
                              .target_type = target_type,
                              .source = source.data(),
                              .source_type = source_type,
                              .shard_elements = shard,
                              .subject = "reduced"},
                             stream.id());
        RankArray& holder = is_in_place ? source : target;
        holder.pull(stream.id());
        for (std::uint64_t i = 0; i < shard; ++i) {
          const float actual =
              load_value(target_type, holder.host().data(), is_in_place ? own + i : i);
          const float sum = expected_sum(source_type, target_type, ranks.rank_count(), own + i);
          if (actual == sum) continue;
          FAIL() << actual << " is not " << sum << ": " << name_of(source_type) << " to "
                 << name_of(target_type) << ", " << i << " of " << shard;
        }
      }
    }
  });
}

TEST_P(CollectivesContract, AllReduceGivesEveryRankTheSameSums) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const std::uint64_t count : kShardElements) {
        RankArray data(device, count * size_of(type));
        for (std::uint64_t i = 0; i < count; ++i)
          save_value(type, data.host().data(), i, rank_value(ranks.rank(), i));
        data.push(stream.id());
        ranks.all_reduce(
            {.data = data.data(), .type = type, .element_count = count, .subject = "reduced"},
            stream.id());
        data.pull(stream.id());
        for (std::uint64_t i = 0; i < count; ++i) {
          const float actual = load_value(type, data.host().data(), i);
          const float sum = expected_sum(type, type, ranks.rank_count(), i);
          if (actual == sum) continue;
          FAIL() << actual << " is not " << sum << ": " << name_of(type) << " " << i << " of "
                 << count;
        }
      }
    }
  });
}

// The sums wrap around, and the minima treat the words as unsigned values. Each result is the input
// of the next operation. So this case detects an implementation that reads words after the words
// have changed.
TEST_P(CollectivesContract, IntegersAddUpAndTheLeastIsFound) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const auto word = [](std::uint32_t rank, std::uint64_t i) {
      const std::uint64_t key = (i + 1) * 0x9e3779b97f4a7c15u + rank * 0xd1b54a32d192ed03u;
      return i % 3 == 0 ? key : i % 3 == 1 ? key >> 63 : ~(key >> 8);
    };
    const std::pair<std::uint64_t, std::uint64_t> counts[] = {
        {0, 0}, {1, 0}, {0, 1}, {23, 9}, {8192, 5}, {3, 20'000}, {150'000, 150'000}};
    for (const auto& [sums, minima] : counts) {
      const std::uint64_t count = sums + minima;
      RankArray data(device, count * sizeof(std::uint64_t));
      auto* const words = reinterpret_cast<std::uint64_t*>(data.host().data());
      for (std::uint64_t i = 0; i < count; ++i) words[i] = word(ranks.rank(), i);
      data.push(stream.id());
      for (int round = 0; round < 2; ++round)
        ranks.all_reduce_integers(
            {.data = data.data(), .sum_count = sums, .minimum_count = minima, .subject = "counted"},
            stream.id());
      data.pull(stream.id());
      for (std::uint64_t i = 0; i < count; ++i) {
        std::uint64_t expected = word(0, i);
        for (std::uint32_t rank = 1; rank < ranks.rank_count(); ++rank)
          expected = i < sums ? expected + word(rank, i) : std::min(expected, word(rank, i));
        if (i < sums) expected *= ranks.rank_count();
        if (words[i] != expected) FAIL() << i << " of " << sums << " and " << minima;
      }
    }
  });
}

TEST_P(CollectivesContract, BroadcastCopiesFromAnyRoot) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    for (std::uint32_t root = 0; root < ranks.rank_count(); ++root) {
      for (const std::uint64_t size : kShardBytes) {
        RankArray data(device, size);
        for (std::uint64_t i = 0; i < size; ++i) data.host().data()[i] = rank_byte(ranks.rank(), i);
        data.push(stream.id());
        ranks.broadcast(
            {.data = data.data(), .size_bytes = size, .root = root, .subject = "broadcast"},
            stream.id());
        data.pull(stream.id());
        for (std::uint64_t i = 0; i < size; ++i)
          if (data.host().data()[i] != rank_byte(root, i)) FAIL() << i << " from " << root;
      }
    }
  });
}

// A root needs nothing from the other ranks, so the root may be ahead of slow ranks.
TEST_P(CollectivesContract, BroadcastsInARowKeepTheirData) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    constexpr std::uint64_t kSize = 5000;
    RankArray data(device, kSize);
    std::byte* const host = data.host().data();
    std::uint64_t wrong = 0;
    for (std::uint32_t round = 0; round < 40; ++round) {
      device.call_host(stream.id(), [=, is_root = ranks.rank() == 0] {
        if (!is_root) std::this_thread::sleep_for(std::chrono::microseconds(500));
        for (std::uint64_t i = 0; i < kSize; ++i) host[i] = rank_byte(is_root ? round : 1000, i);
      });
      data.push(stream.id());
      ranks.broadcast({.data = data.data(), .size_bytes = kSize, .subject = "in a row"},
                      stream.id());
      device.copy(host, data.data(), kSize, stream.id());
      device.call_host(stream.id(), [=, &wrong] {
        for (std::uint64_t i = 0; i < kSize; ++i) wrong += host[i] != rank_byte(round, i) ? 1 : 0;
      });
    }
    device.synchronize(stream.id());
    EXPECT_EQ(wrong, 0u);
  });
}

// A call of all_reduce() does not wait for its stream. Later work on the stream waits for the
// operation.
TEST_P(CollectivesContract, OperationsRunInTheOrderOfTheirStream) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const Event done(device);
    constexpr std::uint64_t kCount = 4096;
    RankArray data(device, kCount * sizeof(float));
    RankArray copy(device, kCount * sizeof(float));
    for (std::uint64_t i = 0; i < kCount; ++i)
      save_value(DType::kFp32, data.host().data(), i, rank_value(ranks.rank(), i));
    Gate gate;
    gate.block(device, stream.id());
    data.push(stream.id());
    ranks.all_reduce({.data = data.data(), .element_count = kCount, .subject = "ordered"},
                     stream.id());
    device.copy(copy.data(), data.data(), kCount * sizeof(float), stream.id());
    device.record(done.id(), stream.id());
    EXPECT_FALSE(device.is_complete(done.id()));
    gate.open();
    copy.pull(stream.id());
    for (std::uint64_t i = 0; i < kCount; ++i)
      ASSERT_EQ(load_value(DType::kFp32, copy.host().data(), i),
                expected_sum(DType::kFp32, DType::kFp32, ranks.rank_count(), i));
  });
}

// Rank 0 is held back, so the other ranks stay in the barrier. All ranks pass a barrier in a second
// sequence, and then rank 0 is released.
TEST_P(CollectivesContract, BarrierWaitsForEveryRank) {
  run([](Collectives& ranks, Device& device) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < ranks.rank_count(); ++i) all.push_back(i);
    const auto second = ranks.open(all);
    const Stream held(device, "held");
    const Stream stream(device, "test");
    const Event passed(device);
    Gate gate;
    if (ranks.rank() == 0) gate.block(device, held.id());
    ranks.barrier("held", held.id());
    device.record(passed.id(), held.id());
    EXPECT_FALSE(device.is_complete(passed.id()) && ranks.rank_count() > 1);
    second->barrier("everybody has looked", stream.id());
    device.synchronize(stream.id());
    gate.open();
    device.synchronize(held.id());
    EXPECT_TRUE(device.is_complete(passed.id()));
  });
}

// The case uses three sequences of small and large operations. Each sequence has its own order, and
// each rank may interleave the sequences differently.
TEST_P(CollectivesContract, SequencesDoNotWaitForEachOther) {
  run([](Collectives& ranks, Device& device) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < ranks.rank_count(); ++i) all.push_back(i);
    struct Sequence {
      std::uint64_t count;
      std::unique_ptr<Collectives> opened;
      Stream stream;
      RankArray data;
    };
    const auto sequence_of = [&](std::uint64_t count) {
      return Sequence{.count = count,
                      .opened = ranks.open(all),
                      .stream = Stream(device, "sequence"),
                      .data = RankArray(device, count * sizeof(float))};
    };
    std::array<Sequence, 3> sequences{sequence_of(50'000), sequence_of(300), sequence_of(700'000)};
    for (std::uint32_t round = 0; round < 8; ++round) {
      for (std::uint32_t s = 0; s < sequences.size(); ++s) {
        Sequence& sequence = sequences[s];
        for (std::uint64_t i = 0; i < sequence.count; ++i)
          save_value(DType::kFp32, sequence.data.host().data(), i,
                     rank_value(ranks.rank(), i, 3 * round + s));
        sequence.data.push(sequence.stream.id());
      }
      for (std::uint32_t i = 0; i < sequences.size(); ++i) {
        Sequence& sequence = sequences[(i + ranks.rank()) % sequences.size()];
        sequence.opened->all_reduce({.data = sequence.data.data(),
                                     .element_count = sequence.count,
                                     .subject = "interleaved"},
                                    sequence.stream.id());
      }
      for (std::uint32_t s = 0; s < sequences.size(); ++s) {
        Sequence& sequence = sequences[s];
        sequence.data.pull(sequence.stream.id());
        for (std::uint64_t i = 0; i < sequence.count; ++i) {
          const float actual = load_value(DType::kFp32, sequence.data.host().data(), i);
          const float sum =
              expected_sum(DType::kFp32, DType::kFp32, ranks.rank_count(), i, 3 * round + s);
          if (actual != sum) FAIL() << actual << " is not " << sum << ": " << i << " of " << s;
        }
      }
    }
  });
}

// The even ranks form one group, and the odd ranks form another group. Both groups are in reverse
// order. So rank 0 of a group is the member whose original rank is the largest.
TEST_P(CollectivesContract, GroupsOfRanksAreOnTheirOwn) {
  run([](Collectives& ranks, Device& device) {
    std::vector<std::uint32_t> group;
    for (std::uint32_t i = 0; i < ranks.rank_count(); ++i)
      if (i % 2 == ranks.rank() % 2) group.insert(group.begin(), i);
    const auto members = ranks.open(group);
    const auto own =
        static_cast<std::uint32_t>(std::ranges::find(group, ranks.rank()) - group.begin());
    ASSERT_EQ(members->rank_count(), group.size());
    ASSERT_EQ(members->rank(), own);
    const Stream stream(device, "test");
    constexpr std::uint64_t kShard = 5000;
    RankArray target(device, kShard * group.size());
    RankArray source(device, kShard);
    for (std::uint64_t i = 0; i < kShard; ++i) source.host().data()[i] = rank_byte(ranks.rank(), i);
    source.push(stream.id());
    members->all_gather({.target = target.data(),
                         .source = source.data(),
                         .shard_bytes = kShard,
                         .subject = "a group"},
                        stream.id());
    target.pull(stream.id());
    for (std::uint64_t i = 0; i < kShard * group.size(); ++i)
      ASSERT_EQ(target.host().data()[i], rank_byte(group[i / kShard], i % kShard));
  });
}

// Every rank runs the same random program, and also computes the values that the program should
// produce.
TEST_P(CollectivesContract, RandomProgramsGiveTheirValues) {
  run([](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const std::uint32_t n = ranks.rank_count();
    const test::Campaign seeds = test::campaign(3);
    for (std::uint64_t seed = seeds.first_seed; seed < seeds.first_seed + seeds.cases; ++seed) {
      std::mt19937 random(static_cast<std::uint32_t>(seed));
      const std::uint64_t shard = 1 + random() % 40'000;
      const std::uint64_t count = shard * n;
      std::vector<std::vector<float>> model(n, std::vector<float>(count));
      for (std::uint32_t rank = 0; rank < n; ++rank)
        for (std::uint64_t i = 0; i < count; ++i) model[rank][i] = rank_value(rank, i);
      RankArray data(device, count * sizeof(float));
      std::memcpy(data.host().data(), model[ranks.rank()].data(), count * sizeof(float));
      data.push(stream.id());
      for (int operation = 0; operation < 12; ++operation) {
        const std::uint64_t shard_bytes = shard * sizeof(float);
        std::byte* const own = data.data() + ranks.rank() * shard_bytes;
        const auto sum_of = [&](std::uint64_t i) {
          float sum = model[0][i];
          for (std::uint32_t rank = 1; rank < n; ++rank) sum += model[rank][i];
          return sum;
        };
        const auto root = static_cast<std::uint32_t>(random() % n);
        switch (random() % 3) {
          case 0:
            ranks.all_gather({.target = data.data(),
                              .source = own,
                              .shard_bytes = shard_bytes,
                              .subject = "random"},
                             stream.id());
            for (std::uint32_t rank = 0; rank < n; ++rank)
              for (std::uint64_t i = 0; i < count; ++i) model[rank][i] = model[i / shard][i];
            break;
          case 1:
            ranks.reduce_scatter({.target = own,
                                  .source = data.data(),
                                  .shard_elements = shard,
                                  .subject = "random"},
                                 stream.id());
            for (std::uint64_t i = 0; i < count; ++i) model[i / shard][i] = sum_of(i);
            break;
          default:
            ranks.broadcast({.data = data.data(),
                             .size_bytes = count * sizeof(float),
                             .root = root,
                             .subject = "random"},
                            stream.id());
            for (std::uint32_t rank = 0; rank < n; ++rank) model[rank] = model[root];
        }
      }
      data.pull(stream.id());
      ASSERT_EQ(std::memcmp(data.host().data(), model[ranks.rank()].data(), count * sizeof(float)),
                0)
          << "seed " << seed;
    }
  });
}

}  // namespace sluice
