// The class is an IoQueue that simulates a drive. A test can cut the power of this drive. The files
// are in memory. In a power cut, each sector of unflushed data is kept, lost or torn. The seed
// decides what happens to each sector. As with a drive's cache, a read returns written data even
// before a flush.
//
// All requests wait until run_one() is called. Each call of run_one() completes one request. The
// seed selects this request. For code that waits for its requests, submit() can complete requests
// itself (complete_at_once()). In this mode, submit() throws PowerCut after a given number of
// completions.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "io/io_queue.h"

namespace sluice::test {

struct PowerCut {};

class PowerCutDisk final : public IoQueue {
 public:
  explicit PowerCutDisk(std::uint64_t seed) : random_(seed) {}

  // Returns the file's descriptor.
  int add_file(std::uint64_t size_bytes);
  std::span<std::byte> bytes(int file) { return files_[static_cast<std::size_t>(file)].now; }

  void submit(std::span<IoRequest* const> requests) override;
  void wait_idle() override {}
  IoCounters counters() const override { return {}; }
  std::string_view name() const override { return "power cut"; }

  // Completes one waiting request. Returns false if no request waits.
  bool run_one();
  // After this call, submit() completes requests itself. After `requests` completions, submit()
  // throws PowerCut.
  void complete_at_once(std::uint64_t requests);
  void let_requests_wait() { is_at_once_ = false; }
  // If `loses` is true, each write reports success, but does not change the disk.
  void lose_writes(bool loses) { loses_writes_ = loses; }
  // The next request of `kind` fails. A failed write changes nothing.
  void fail_next(IoKind kind, int error) { failing_ = {kind, error}; }
  // The call stores `data` as if the data had been flushed long ago.
  void put(int file, std::uint64_t offset_bytes, std::span<const std::byte> data);
  // The call flips stored bits, as a failing medium does.
  void flip(int file, std::uint64_t offset_bytes, std::uint8_t bits);

  // The call cuts the power. The disk forgets all waiting requests. A forgotten request may have
  // its full effect, a part of its effect, or no effect.
  void cut();
  // The call ends the process. Written data stays. Each waiting write takes effect fully, partly,
  // or not at all.
  void kill();

 private:
  struct Write {
    std::uint64_t offset_bytes = 0;
    std::vector<std::byte> data;
    std::uint64_t sequence = 0;
  };
  struct File {
    std::vector<std::byte> now;
    std::vector<std::byte> durable;
    std::vector<Write> unflushed;
  };
  struct Waiting {
    IoRequest* request = nullptr;
    std::uint64_t sequence = 0;  // the last write that was complete when the request came
  };

  File& file_of(const IoRequest& request) {
    return files_[static_cast<std::size_t>(request.descriptor)];
  }
  void complete(const Waiting& waiting);
  void write(const IoRequest& request);
  void keep_some(std::vector<std::byte>& target, const Write& write, std::uint64_t mode);

  std::mt19937_64 random_;
  std::vector<File> files_;
  std::vector<Waiting> waiting_;
  std::uint64_t sequence_ = 0;
  bool is_at_once_ = false;
  bool loses_writes_ = false;
  std::pair<IoKind, int> failing_{IoKind::kRead, 0};
  std::uint64_t left_ = 0;
};

}  // namespace sluice::test
