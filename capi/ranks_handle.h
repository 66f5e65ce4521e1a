// The handle of the ranks holds a listening socket, and the connections to the other ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "capi/call_guard.h"
#include "gpu/ranks/socket_collectives.h"

struct sluice_ranks : sluice::Handle {
  explicit sluice_ranks(const std::string& address, std::uint32_t rank, std::uint32_t rank_count)
      : door(std::in_place, address, rank, rank_count), endpoint(door->endpoint().text()) {}

  std::optional<sluice::SocketDoor> door;  // until the ranks are connected
  const std::string endpoint;
  std::unique_ptr<sluice::SocketWorld> world;  // null until the ranks are connected
  bool has_engine = false;
};
