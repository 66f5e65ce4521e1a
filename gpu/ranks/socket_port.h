// Messages between processes over TCP. Socket messages are for programs that MPI has not started.
// For example, torchrun starts such programs. Each rank opens a door, which is a listening socket.
// A text, called the endpoint, describes the door. The program itself has to send every rank's
// endpoint to all ranks. Then every rank connects to every other rank. An endpoint contains a
// secret, so that other processes cannot connect. Data on the connections is not encrypted.
//
// When a receive begins, the receiver asks for the data. The sender sends the data only after this
// request. So no rank has to store data for a receive that has not begun. A late message does not
// delay other messages.
//
// Thread rule: one thread uses a door. The port follows the rule of MessagePort.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/process_fd.h"
#include "gpu/ranks/message_port.h"

namespace sluice {

// The contents of an endpoint. The contents say where and how a rank can be reached.
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
  // The door listens at `address`, an IP address of this host that all other ranks can reach.
  // Fails with kInvalidArgument if `rank` is not below `rank_count` or `address` is no IP address,
  // and with kUnsupported if the system refuses the address.
  SocketDoor(const std::string& address, std::uint32_t rank, std::uint32_t rank_count);

  const SocketEndpoint& endpoint() const { return endpoint_; }
  int socket() const { return socket_.get(); }

 private:
  SocketEndpoint endpoint_;
  ProcessFd socket_;
};

// Connects the rank of `door` to all other ranks. `endpoints` has the text of every rank, in the
// order of the ranks. The call blocks until all ranks are connected, but no longer than the
// timeout. Fails with kInvalidArgument if a text is not the endpoint of its rank, and with kRanks
// if some ranks have not connected. The message names these ranks.
std::unique_ptr<MessagePort> connect_ranks(const SocketDoor& door,
                                           std::span<const std::string> endpoints,
                                           double timeout_s);

}  // namespace sluice
