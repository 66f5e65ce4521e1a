// The handle of the ranks holds a listening socket, and the connections to the other ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "capi/call_guard.h"
#include "gpu/ranks/socket_collectives.h"

struct sluice_ranks : sluice::Handle {
  static constexpr const char* kNoun = "group of ranks";

  explicit sluice_ranks(const std::string& address, std::uint32_t rank, std::uint32_t count)
      : door(std::in_place, address, rank, count),
        endpoint(door->endpoint().text()),
        rank_count(count) {}

  std::optional<sluice::SocketDoor> door;  // until the ranks are connected
  const std::string endpoint;
  const std::uint32_t rank_count;
  std::shared_ptr<sluice::SocketWorld> world;  // null until the ranks are connected
  bool has_engine = false;
};
