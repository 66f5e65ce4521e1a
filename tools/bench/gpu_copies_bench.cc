// Copies between host and device alone, and beside the processor's work on host memory.
#include "tools/bench/gpu_bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "gpu/device/copy_runs.h"

namespace sluice {
namespace {

double elapsed_s(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Page-locked host memory. `device` must outlive it.
class LockedMemory {
 public:
  LockedMemory(Device& device, std::uint64_t size_bytes)
      : device_(device), buffer_(size_bytes, "a benchmark") {
    device_.register_host_memory(buffer_.span());
  }
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;
  ~LockedMemory() { device_.unregister_host_memory(buffer_.span()); }

  std::byte* data() const { return buffer_.data(); }

 private:
  Device& device_;
  AlignedBuffer buffer_;
};

// One direction of the link, as the engine drives it: the blocks of a unit join where they lie
// together, and a record and a report follow the unit.
class Way {
 public:
  Way(Device& device, const char* name)
      : device_(device),
        stream_(device, name, StreamPriority::kHigh),
        copied_(device),
        runs_(device, stream_.id()) {}

  void copy_unit(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
    for (std::uint64_t begin = 0; begin < size_bytes; begin += kBlockBytes)
      runs_.add(target + begin, source + begin, std::min(kBlockBytes, size_bytes - begin));
    runs_.flush();
    device_.notify(stream_.id(), [] {});
    device_.record(copied_.id(), stream_.id());
  }
  void synchronize() { device_.synchronize(stream_.id()); }

 private:
  // The default block, storage.block_elements of bf16.
  static constexpr std::uint64_t kBlockBytes = 2_MiB;

  Device& device_;
  Stream stream_;
  Event copied_;
  CopyRuns runs_;
};

// The memory that copies in both directions read and write.
class CopyMemory {
 public:
  CopyMemory(Device& device, std::uint64_t size_bytes)
      : host_up_(device, size_bytes),
        host_down_(device, size_bytes),
        device_up_(device, size_bytes, "a benchmark's copies up"),
        device_down_(device, size_bytes, "a benchmark's copies down") {}

  PlainCopy ends() const {
    return {.host_up = host_up_.data(),
            .device_up = device_up_.data(),
            .host_down = host_down_.data(),
            .device_down = device_down_.data()};
  }

 private:
  const LockedMemory host_up_;
  const LockedMemory host_down_;
  const DeviceBuffer device_up_;
  const DeviceBuffer device_down_;
};

double device_copies_s(Device& device, const PlainCopy& ends, const CopyBenchOptions& options) {
  Way up(device, "up");
  Way down(device, "down");
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t offset = 0; offset < options.size_bytes; offset += options.unit_bytes) {
    const std::uint64_t bytes = std::min(options.unit_bytes, options.size_bytes - offset);
    if (ends.host_up != nullptr)
      up.copy_unit(ends.device_up + offset, ends.host_up + offset, bytes);
    if (ends.host_down != nullptr)
      down.copy_unit(ends.host_down + offset, ends.device_down + offset, bytes);
  }
  up.synchronize();
  down.synchronize();
  return elapsed_s(begin);
}

}  // namespace

std::vector<CopyBench> bench_copies(Device& device, const CopyBenchOptions& options,
                                    const PlainCopies& plain) {
  const CopyMemory memory(device, options.size_bytes);
  const PlainCopy both = memory.ends();
  const PlainCopy up{.host_up = both.host_up, .device_up = both.device_up};
  const PlainCopy down{.host_down = both.host_down, .device_down = both.device_down};
  std::vector<CopyBench> results;
  for (const auto& [name, ends] : {std::pair{"up", up}, {"down", down}, {"both", both}}) {
    const double ways = std::strcmp(name, "both") == 0 ? 2 : 1;
    const double gigabytes = ways * static_cast<double>(options.size_bytes) * 1e-9;
    std::vector<double> rates;
    std::vector<double> plain_rates;
    std::vector<double> percents;
    (void)device_copies_s(device, ends, options);
    for (unsigned round = 0; round < options.rounds; ++round) {
      rates.push_back(gigabytes / device_copies_s(device, ends, options));
      plain_rates.push_back(gigabytes / plain(ends));
      percents.push_back(100 * rates.back() / plain_rates.back());
    }
    results.push_back({.direction = name,
                       .gb_per_s = gpu_spread(rates),
                       .plain_gb_per_s = gpu_spread(plain_rates),
                       .percent = gpu_spread(percents)});
  }
  return results;
}

HostMemoryBench bench_host_memory(Device& device, const CopyBenchOptions& options,
                                  const std::function<std::uint64_t()>& move) {
  // Long beside one pass of the copies, which goes on alone when the moves have ended.
  constexpr double kRoundS = 0.5;
  const CopyMemory memory(device, options.size_bytes);
  std::vector<double> rates;
  std::vector<double> copy_rates;
  (void)move();
  for (unsigned round = 0; round < options.rounds; ++round) {
    std::atomic<bool> has_ended = false;
    std::future<double> copies = std::async(std::launch::async, [&] {
      double copied_bytes = 0;
      double copied_s = 0;
      while (!has_ended) {
        copied_s += device_copies_s(device, memory.ends(), options);
        copied_bytes += 2 * static_cast<double>(options.size_bytes);
      }
      return copied_s > 0 ? copied_bytes / copied_s : 0;
    });
    const auto begin = std::chrono::steady_clock::now();
    double moved_bytes = 0;
    try {
      do moved_bytes += static_cast<double>(move());
      while (elapsed_s(begin) < kRoundS);
    } catch (...) {
      has_ended = true;  // `copies` waits for its thread
      throw;
    }
    const double moved_s = elapsed_s(begin);
    has_ended = true;
    copy_rates.push_back(1e-9 * copies.get());
    rates.push_back(copy_rates.back() + 1e-9 * moved_bytes / moved_s);
  }
  return {.gb_per_s = gpu_spread(rates), .copy_gb_per_s = gpu_spread(copy_rates)};
}

}  // namespace sluice
