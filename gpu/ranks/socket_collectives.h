// The class SocketWorld runs collectives between processes. TCP sockets connect the processes
// (gpu/ranks/socket_port.h).
//
// Thread rule: the thread rule of MessageWorld also holds here.
#pragma once

#include <span>
#include <string>

#include "gpu/ranks/message_collectives.h"
#include "gpu/ranks/socket_port.h"

namespace sluice {

class SocketWorld : public MessageWorld {
 public:
  // The constructor connects the rank of `door` to all other ranks. A process can have several
  // worlds. Fails with the errors of connect_ranks() and of the constructor of MessageWorld.
  SocketWorld(const HostCollectivesOptions& options, const SocketDoor& door,
              std::span<const std::string> endpoints);
};

}  // namespace sluice
