// Collectives in two levels, over ranks that are threads.
#include "gpu/ranks/two_level_collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"

namespace sluice::test {
namespace {

using Body = std::function<void(TwoLevelCollectives& ranks, Device& device, StreamId stream)>;

void run_nodes(std::uint32_t nodes, std::uint32_t node_ranks, const Body& body) {
  LocalWorld world(nodes * node_ranks, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < nodes * node_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 16_MiB});
      const auto whole = world.join(rank, *device);
      {
        TwoLevelCollectives ranks(*whole, node_ranks, *device);
        const Stream stream(*device, "test");
        body(ranks, *device, stream.id());
        device->synchronize(stream.id());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class TwoLevel : public testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {
 protected:
  std::uint32_t nodes() const { return std::get<0>(GetParam()); }
  std::uint32_t node_ranks() const { return std::get<1>(GetParam()); }
  std::uint32_t count() const { return nodes() * node_ranks(); }
};

// Every rank's shard lands in its place, whether the source lies there already or elsewhere.
TEST_P(TwoLevel, GathersEveryShardIntoItsPlace) {
  constexpr std::uint64_t kShardBytes = 48;
  for (const bool is_in_place : {true, false}) {
    run_nodes(nodes(), node_ranks(), [&](auto& ranks, Device& device, StreamId stream) {
      DeviceBuffer target(device, count() * kShardBytes, "target");
      DeviceBuffer apart(device, kShardBytes, "source");
      std::byte* const source =
          is_in_place ? target.data() + ranks.rank() * kShardBytes : apart.data();
      std::memset(source, static_cast<int>(ranks.rank()) + 1, kShardBytes);
      DeviceBuffer shards(device, nodes() * kShardBytes, "shards");
      ranks.use_for_gathers({shards.data(), shards.size_bytes()});
      for (int round = 0; round < 2; ++round)
        ranks.all_gather({.target = target.data(),
                          .source = source,
                          .shard_bytes = kShardBytes,
                          .subject = "shards"},
                         stream);
      device.synchronize(stream);
      for (std::uint64_t i = 0; i < count() * kShardBytes; ++i)
        ASSERT_EQ(target.data()[i], static_cast<std::byte>(i / kShardBytes + 1))
            << "byte " << i << " on rank " << ranks.rank();
    });
  }
}

// An addend whose sum depends on the order: the rounding of 1 + 2^-24 shows where it was added.
float addend(std::uint32_t rank, std::uint64_t i) {
  constexpr float kTiny = 0x1p-24f;
  return (rank + i) % 3 == 0 ? 1.0f : kTiny * static_cast<float>(rank % 5 + 1);
}

// The order that the header promises.
float expected_sum(std::uint32_t nodes, std::uint32_t node_ranks, std::uint64_t i) {
  float sum = 0;
  for (std::uint32_t node = 0; node < nodes; ++node) {
    float of_node = addend(node * node_ranks, i);
    for (std::uint32_t r = 1; r < node_ranks; ++r) of_node += addend(node * node_ranks + r, i);
    sum = node == 0 ? of_node : sum + of_node;
  }
  return sum;
}

TEST_P(TwoLevel, AddsInsideNodesAndThenOverThem) {
  constexpr std::uint64_t kShard = 37;
  for (const bool is_scatter : {true, false}) {
    run_nodes(nodes(), node_ranks(), [&](auto& ranks, Device& device, StreamId stream) {
      const std::uint64_t elements = count() * kShard;
      DeviceBuffer data(device, elements * sizeof(float), "gradients");
      DeviceBuffer sums(device, nodes() * kShard * sizeof(float), "sums");
      ranks.use_for_sums({sums.data(), sums.size_bytes()});
      auto* const values = reinterpret_cast<float*>(data.data());
      for (std::uint64_t i = 0; i < elements; ++i) values[i] = addend(ranks.rank(), i);
      float* const own = values + ranks.rank() * kShard;
      if (is_scatter) {
        ranks.reduce_scatter({.target = reinterpret_cast<std::byte*>(own),
                              .source = data.data(),
                              .shard_elements = kShard,
                              .subject = "gradients"},
                             stream);
      } else {
        ranks.all_reduce({.data = data.data(), .element_count = elements, .subject = "gradients"},
                         stream);
      }
      device.synchronize(stream);
      const std::uint64_t begin = is_scatter ? ranks.rank() * kShard : 0;
      const std::uint64_t end = is_scatter ? begin + kShard : elements;
      for (std::uint64_t i = begin; i < end; ++i)
        ASSERT_EQ(values[i], expected_sum(nodes(), node_ranks(), i))
            << "element " << i << " on rank " << ranks.rank();
    });
  }
}

TEST_P(TwoLevel, IntegersAndBroadcastsReachEveryRank) {
  run_nodes(nodes(), node_ranks(), [&](auto& ranks, Device& device, StreamId stream) {
    DeviceBuffer data(device, 2 * sizeof(std::uint64_t), "words");
    auto* const words = reinterpret_cast<std::uint64_t*>(data.data());
    for (std::uint32_t root = 0; root < count(); ++root) {
      words[0] = 1 + ranks.rank();
      words[1] = 100 - ranks.rank();
      ranks.all_reduce_integers(
          {.data = data.data(), .sum_count = 1, .minimum_count = 1, .subject = "words"}, stream);
      device.synchronize(stream);
      ASSERT_EQ(words[0], count() * (count() + 1) / 2);
      ASSERT_EQ(words[1], 100 - (count() - 1));
      words[0] = ranks.rank();
      ranks.broadcast({.data = data.data(), .size_bytes = 8, .root = root, .subject = "a word"},
                      stream);
      device.synchronize(stream);
      ASSERT_EQ(words[0], root) << "on rank " << ranks.rank();
    }
  });
}

TEST_P(TwoLevel, ABarrierEndsWhenAllHaveBegunIt) {
  std::atomic<std::uint32_t> begun = 0;
  run_nodes(nodes(), node_ranks(), [&](auto& ranks, Device& device, StreamId stream) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * ranks.rank()));
    ++begun;
    ranks.barrier("all", stream);
    device.synchronize(stream);
    EXPECT_EQ(begun, count()) << "on rank " << ranks.rank();
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoLevel,
                         testing::Values(std::tuple(2u, 2u), std::tuple(2u, 3u), std::tuple(3u, 2u),
                                         std::tuple(4u, 2u), std::tuple(2u, 4u),
                                         std::tuple(3u, 3u)),
                         [](const auto& shape) {
                           return std::to_string(std::get<0>(shape.param)) + "nodes_of_" +
                                  std::to_string(std::get<1>(shape.param));
                         });

}  // namespace
}  // namespace sluice::test
