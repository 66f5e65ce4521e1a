// The connection between processes. The messages of gpu/ranks/message_thread.h go through this
// connection. The connection provides point-to-point messages, the list of processes that share a
// host, and a way to end all processes. There are two such connections: sockets
// (gpu/ranks/socket_port.h) and MPI. For MPI, a small separate library (mpi_port_plugin.cc) is
// linked to MPI and opened at run time. So a program that contains Sluice starts without MPI.
//
// Thread rule: any thread may call the port, but only one thread at a time. The thread that opens
// the port also destroys the port.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sluice {

class MessagePort {
 public:
  MessagePort() = default;
  MessagePort(const MessagePort&) = delete;
  MessagePort& operator=(const MessagePort&) = delete;
  // Ends the connection of this process. If ends_with_others() is true, the destructor waits until
  // all other ranks destroy their ports.
  virtual ~MessagePort() = default;
  virtual bool ends_with_others() const { return true; }

  virtual std::string version() const = 0;
  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t rank_count() const = 0;
  virtual int tag_max() const = 0;

  // A message has at most 2^31 - 1 bytes. Returns a number for the message. When the message has
  // ended, test() reports this number. The numbers of ended messages are reused. If messages
  // between the same two ranks have the same tag, the messages arrive in the order in which they
  // were started.
  virtual std::uint32_t start_send(const std::byte* data, std::uint64_t size_bytes,
                                   std::uint32_t peer, int tag) = 0;
  virtual std::uint32_t start_receive(std::byte* data, std::uint64_t size_bytes, std::uint32_t peer,
                                      int tag) = 0;
  // The function appends numbers to `ended`. These are the numbers of the messages that have ended
  // since the last call. If the connection fails, `failure` receives the reason.
  virtual void test(std::vector<std::uint32_t>& ended, std::string& failure) = 0;

  // The next three functions wait for other ranks without a deadline. So the callers of these
  // functions set a deadline. The call host_ranks() returns the ranks of this host in order,
  // including this rank. The result is empty if the connection does not know these ranks. All ranks
  // call host_ranks() at the same time, and only once.
  virtual std::vector<std::uint32_t> host_ranks() = 0;
  // Every rank of the host calls the next two functions at the same time. Requires: host_ranks()
  // has returned at least two ranks. The call sends the data of the host's first rank to all ranks
  // of the host. Returns whether the data has arrived.
  virtual bool broadcast_on_host(std::span<std::byte> data) = 0;
  // Returns whether `own` is true on all ranks of the host.
  virtual bool agree_on_host(bool own) = 0;

  // Ends every process of the run.
  [[noreturn]] virtual void abort() = 0;
};

// The library for MPI exports only this symbol. The symbol's name contains the hash of this file. A
// library of another build may have other virtual functions. Such a library is refused, because its
// symbol has another name. If MPI does not start, the function returns null and writes the reason
// to `why`.
using OpenMpiPort = MessagePort* (*)(std::string& why);

}  // namespace sluice
