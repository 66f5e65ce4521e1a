// Messages between processes over TCP, for programs that no MPI has started, such as those of
// torchrun. Each rank opens a door, which is a listening socket, and describes it by a text, its
// endpoint. The program brings every rank's endpoint to all ranks by its own means. Then every rank
// connects to every other rank. An endpoint contains a secret, so that no stranger can connect.
// Data on the connections is not encrypted.
//
// Data is sent only after the receiver has asked for it, which the receiver does when its receive
// begins. So no rank stores data that nothing waits for, and a late message does not delay other
// messages.
//
// Thread rule: one thread uses a door; the port follows the rule of MessagePort.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/unique_fd.h"
#include "gpu/ranks/message_port.h"

namespace sluice {

// The contents of an endpoint, which tell where and how a rank can be reached.
struct SocketEndpoint {
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 0;
  std::string address;  // an IP address
  std::uint16_t port = 0;
  std::string secret;  // 32 hexadecimal digits
  std::string host;    // equal for processes that share memory and process numbers

  std::string text() const;
};

class SocketDoor {
 public:
  // Listens at `address`, an IP address of this host at which all other ranks reach it.
  // Fails with: kInvalidArgument for a rank beyond `rank_count` and for a text that is no IP
  // address; kUnsupported when the system refuses the address.
  SocketDoor(const std::string& address, std::uint32_t rank, std::uint32_t rank_count);

  const SocketEndpoint& endpoint() const { return endpoint_; }
  int socket() const { return socket_.get(); }

 private:
  SocketEndpoint endpoint_;
  UniqueFd socket_;
};

// Connects the rank of `door` to all others. `endpoints` has the text of every rank, by rank.
// Blocks until all are connected, but no longer than the timeout.
// Fails with: kInvalidArgument for a text that is not the endpoint of its rank; kRanks naming the
// ranks that have not come.
std::unique_ptr<MessagePort> connect_ranks(const SocketDoor& door,
                                           std::span<const std::string> endpoints,
                                           double timeout_s);

}  // namespace sluice
