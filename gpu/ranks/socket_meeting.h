// These functions let ranks find each other and connect over sockets. Every rank connects to the
// ranks with lower numbers, and accepts connections from the ranks with higher numbers. Each side
// proves that it knows the other side's secret.
//
// Thread rule: one thread.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "gpu/ranks/socket_port.h"

namespace sluice {

// Fails with kInvalidArgument if a text is not an endpoint, or if this rank's text is not that of
// `door`.
std::vector<SocketEndpoint> parse_endpoints(const SocketDoor& door,
                                            std::span<const std::string> texts);

// Returns a connected socket for each other rank, indexed by rank. The entry of this rank is empty.
// Fails with kRanks if a rank does not connect within the timeout.
std::vector<ProcessFd> meet(const SocketDoor& door, std::span<const SocketEndpoint> endpoints,
                            double timeout_s);

}  // namespace sluice
