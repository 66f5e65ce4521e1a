// A drive of files in memory, as an IoQueue, whose power can be cut. Data that has not been flushed
// is then kept, dropped or torn, sector by sector, in any combination, by seed. Reads see what has
// been written, as they do through a drive's cache.
//
// Requests wait for run_one(), which completes one of them drawn by seed; or, for code that waits
// for its requests, are completed within submit(), which throws PowerCut at a point set before.
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

  // Returns its descriptor.
  int add_file(std::uint64_t size_bytes);
  std::span<std::byte> bytes(int file) { return files_[static_cast<std::size_t>(file)].now; }

  void submit(std::span<IoRequest* const> requests) override;
  void wait_idle() override {}
  IoCounters counters() const override { return {}; }
  std::string_view name() const override { return "power cut"; }

  // Completes one waiting request. Returns false where none waits.
  bool run_one();
  // From here on requests complete within submit(), until `requests` have: then it throws.
  void complete_at_once(std::uint64_t requests);
  void let_requests_wait() { is_at_once_ = false; }
  // Writes end well and are not made.
  void lose_writes(bool loses) { loses_writes_ = loses; }
  // The next request of `kind` fails; a write is not made.
  void fail_next(IoKind kind, int error) { failing_ = {kind, error}; }
  // Stores data as if flushed long ago.
  void put(int file, std::uint64_t offset_bytes, std::span<const std::byte> data);
  // Alters bits where they are stored, as media do.
  void flip(int file, std::uint64_t offset_bytes, std::uint8_t bits);

  // The power fails: what waits never happened, or did in part, and is forgotten.
  void cut();
  // The process ends: written data stays, waiting writes may have come through.
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
    std::uint64_t sequence = 0;  // of the last write completed when it came
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
