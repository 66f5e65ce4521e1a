#include "gpu/ranks/socket_collectives.h"

#include <memory>
#include <utility>

#include "gpu/ranks/message_port.h"
#include "gpu/ranks/message_thread.h"

namespace sluice {
namespace {

// The port opens before the thread begins, which could not be left alone with a stuck one: opening
// has a deadline of its own.
Connection socket_connection(const SocketDoor& door, std::span<const std::string> endpoints,
                             double timeout_s) {
  const auto port =
      std::make_shared<std::unique_ptr<MessagePort>>(connect_ranks(door, endpoints, timeout_s));
  return {.kind = "sockets",
          .opening = "the meeting of the ranks",
          .closing = "the end of the connections",
          .open = [port] { return std::move(*port); }};
}

}  // namespace

SocketWorld::SocketWorld(const HostCollectivesOptions& options, const SocketDoor& door,
                         std::span<const std::string> endpoints)
    : MessageWorld(options, socket_connection(door, endpoints, options.timeout_s)) {}

}  // namespace sluice
