// Ranks over sockets, as threads of one process with a connection each.
// Thread rule: one thread per object.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sluice/host_device.h>
#include <sluice/units.h>
#include "gpu/ranks/socket_collectives.h"
#include "tests/contract/collectives_contract_fixture.h"

namespace sluice {

inline constexpr const char* kHere = "127.0.0.1";

struct Doors {
  explicit Doors(std::uint32_t count) {
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      doors.push_back(std::make_unique<SocketDoor>(kHere, rank, count));
      endpoints.push_back(doors.back()->endpoint().text());
    }
  }

  std::vector<std::unique_ptr<SocketDoor>> doors;
  std::vector<std::string> endpoints;
};

inline void run_threads(std::uint32_t rank_count, const HostCollectivesOptions& options,
                        const RankBody& body) {
  const Doors meeting(rank_count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 256_MiB});
      SocketWorld world(options, *meeting.doors[rank], meeting.endpoints);
      EXPECT_EQ(world.neighbor_count(), rank_count - 1);
      const auto collectives = world.join(*device);
      EXPECT_EQ(collectives->name(), "sockets");
      body(*collectives, *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sluice
