// Ports of ranks that are threads of one process and share a host. Nothing sends messages.
// Thread rule: one thread per port.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/ranks/message_port.h"

namespace sluice {

// The part that the ranks of the host have in common.
struct SharedHost {
  explicit SharedHost(std::uint32_t count)
      : rank_count(count), rendezvous(static_cast<std::ptrdiff_t>(count)) {}

  const std::uint32_t rank_count;
  std::barrier<> rendezvous;
  std::vector<std::byte> told;  // by the first rank
  std::atomic<std::uint32_t> nays = 0;
};

class ThreadPort final : public MessagePort {
 public:
  // `refused`: agreements, counted from 1, in which the rank says no.
  ThreadPort(SharedHost& host, std::uint32_t rank, std::vector<int> refused = {})
      : host_(host), rank_(rank), refused_(std::move(refused)) {}

  std::uint32_t rank() const override { return rank_; }
  std::vector<std::uint32_t> host_ranks() override {
    std::vector<std::uint32_t> ranks;
    for (std::uint32_t rank = 0; rank < host_.rank_count; ++rank) ranks.push_back(rank);
    return ranks;
  }
  bool broadcast_on_host(std::span<std::byte> data) override {
    if (rank_ == 0) host_.told.assign(data.begin(), data.end());
    host_.rendezvous.arrive_and_wait();
    std::ranges::copy(host_.told, data.begin());
    return true;
  }
  bool agree_on_host(bool own) override {
    if (!own || std::ranges::count(refused_, ++agreements_) != 0) ++host_.nays;
    host_.rendezvous.arrive_and_wait();
    const bool all_agree = host_.nays == 0;
    host_.rendezvous.arrive_and_wait();
    host_.nays = 0;
    host_.rendezvous.arrive_and_wait();
    return all_agree;
  }
  int agreements() const { return agreements_; }

  std::string version() const override { return "threads"; }
  std::uint32_t rank_count() const override { return host_.rank_count; }
  int tag_max() const override { return 0; }
  std::uint32_t start_send(const std::byte*, std::uint64_t, std::uint32_t, int) override {
    std::abort();
  }
  std::uint32_t start_receive(std::byte*, std::uint64_t, std::uint32_t, int) override {
    std::abort();
  }
  void test(std::vector<std::uint32_t>&, std::string&) override { std::abort(); }
  [[noreturn]] void abort() override { std::abort(); }

 private:
  SharedHost& host_;
  std::uint32_t rank_;
  std::vector<int> refused_;
  int agreements_ = 0;
};

using PortBody = std::function<void(ThreadPort& port)>;

// Runs `body` for every rank of a host. The last rank says no in the agreements `refused_by_last`.
inline void run_ports(std::uint32_t rank_count, const std::vector<int>& refused_by_last,
                      const PortBody& body) {
  SharedHost host(rank_count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadPort port(host, rank, rank + 1 == rank_count ? refused_by_last : std::vector<int>());
      body(port);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sluice
