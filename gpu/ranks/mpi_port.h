// What Sluice needs of MPI: point-to-point messages between processes, which of them share a host,
// and the end of all of them.
// Implemented by a small library of its own (mpi_port_plugin.cc) that is linked to the MPI it was
// compiled with and opened at run time, so that a program which contains Sluice starts without MPI.
//
// Thread rule: one call at a time, from any thread; opened and destroyed by the same one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sluice {

class MpiPort {
 public:
  MpiPort() = default;
  MpiPort(const MpiPort&) = delete;
  MpiPort& operator=(const MpiPort&) = delete;
  // Ends MPI in this process; waits for the other ranks to do the same.
  virtual ~MpiPort() = default;

  virtual std::string version() const = 0;
  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t rank_count() const = 0;
  virtual int tag_max() const = 0;

  // At most 2^31 - 1 bytes. Returns the number that test() will give back; numbers are used again.
  // Messages between two ranks with one tag arrive in the order in which they were started.
  virtual std::uint32_t start_send(const std::byte* data, std::uint64_t size_bytes,
                                   std::uint32_t peer, int tag) = 0;
  virtual std::uint32_t start_receive(std::byte* data, std::uint64_t size_bytes, std::uint32_t peer,
                                      int tag) = 0;
  // Appends the numbers of messages that have ended since. What MPI says against one of them goes
  // to `failure`.
  virtual void test(std::vector<std::uint32_t>& ended, std::string& failure) = 0;

  // These wait for other ranks for ever: whoever waits for them elsewhere has a deadline.
  // The ranks of this one's host, this one among them, in their order; none where MPI cannot tell.
  // Every rank at once, once.
  virtual std::vector<std::uint32_t> host_ranks() = 0;
  // Every rank of the host at once. Requires: host_ranks() has named at least two.
  // Data of the first of them for all of them; whether it has come.
  virtual bool broadcast_on_host(std::span<std::byte> data) = 0;
  // Whether all of them say yes.
  virtual bool agree_on_host(bool own) = 0;

  // Ends every process of the run.
  [[noreturn]] virtual void abort() = 0;
};

// The library's one symbol. Null, and why, when MPI does not start.
using OpenMpiPort = MpiPort* (*)(std::string& why);
inline constexpr const char* kOpenMpiPortSymbol = "sluice_open_mpi_port";

}  // namespace sluice
