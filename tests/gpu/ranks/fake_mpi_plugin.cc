// A stand-in for the library that is linked to MPI: one rank of as many as FAKE_MPI_RANKS says.
// Other ranks send zeros, at once. The call that FAKE_MPI_BLOCKS names never returns, as
// when another rank is stopped: init, host_ranks, broadcast, agree, finalize or abort; the ranks of
// this host are then this one and the next.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "gpu/ranks/message_port.h"

namespace sluice {
namespace {

std::string setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

class FakePort final : public MessagePort {
 public:
  FakePort()
      : rank_count_(static_cast<std::uint32_t>(std::atoi(setting("FAKE_MPI_RANKS").c_str()))),
        blocking_(setting("FAKE_MPI_BLOCKS")) {
    block_in("init");
  }
  ~FakePort() override { block_in("finalize"); }

  std::string version() const override { return "a stand-in"; }
  std::uint32_t rank() const override { return 0; }
  std::uint32_t rank_count() const override { return rank_count_; }
  int tag_max() const override { return 1 << 20; }

  std::uint32_t start_send(const std::byte*, std::uint64_t, std::uint32_t, int) override {
    return start();
  }
  std::uint32_t start_receive(std::byte* data, std::uint64_t size_bytes, std::uint32_t,
                              int) override {
    std::memset(data, 0, size_bytes);
    return start();
  }
  void test(std::vector<std::uint32_t>& ended, std::string&) override {
    for (const std::uint32_t number : std::exchange(started_, {})) ended.push_back(number);
    next_ = 0;
  }

  std::vector<std::uint32_t> host_ranks() override {
    block_in("host_ranks");
    if (blocking_.empty()) return {0};
    return {0, 1};
  }
  bool broadcast_on_host(std::span<std::byte>) override {
    block_in("broadcast");
    return true;
  }
  bool agree_on_host(bool) override {
    block_in("agree");
    return false;
  }
  [[noreturn]] void abort() override {
    block_in("abort");
    std::abort();
  }

 private:
  void block_in(const std::string& call) const {
    while (call == blocking_) ::pause();
  }
  std::uint32_t start() {
    started_.push_back(next_);
    return next_++;
  }

  const std::uint32_t rank_count_;
  const std::string blocking_;
  std::vector<std::uint32_t> started_;
  std::uint32_t next_ = 0;
};

}  // namespace
}  // namespace sluice

extern "C" sluice::MessagePort* SLUICE_OPEN_MPI_PORT(std::string&) {
  return new sluice::FakePort;
}
