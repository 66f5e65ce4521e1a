#include "base/trace/trace_clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace sluice {
namespace {

constexpr std::chrono::milliseconds kFirstBaseline{2};
// A rate is taken over at least this time, so that the error of two readings does not matter.
constexpr std::uint64_t kBaselineNs = 1'000'000'000;
// A calibration that is off by more than this, and by more than one part in kTrustedDrift, is not
// the drift of quartz: the counter cannot be trusted (a virtual machine has moved, say).
constexpr std::int64_t kTrustedNs = 5'000'000;
constexpr std::int64_t kTrustedDrift = 5000;

#if defined(__x86_64__)
std::uint64_t read_ticks() {
  return __rdtsc();
}

bool ticks_are_steady() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) == 1 && (edx & (1u << 8)) != 0;
}
#else
std::uint64_t read_ticks() {
  return 0;
}
bool ticks_are_steady() {
  return false;
}
#endif

struct Reading {
  std::uint64_t ticks = 0;
  std::uint64_t time_ns = 0;
};

// Reads both clocks at one instant: of a few tries, the one in which the least time passed.
Reading read_both() {
  Reading best;
  std::uint64_t best_width = UINT64_MAX;
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t before = read_ticks();
    const std::uint64_t time_ns = steady_now_ns();
    const std::uint64_t after = read_ticks();
    if (after - before >= best_width) continue;
    best_width = after - before;
    best = {.ticks = before + (after - before) / 2, .time_ns = time_ns};
  }
  return best;
}

// Written under mutex with an odd sequence, read without it: a reader that sees the sequence change
// reads again. ns_per_tick 0: not calibrated, or not to be used.
struct Calibration {
  std::atomic<std::uint32_t> sequence{0};
  std::atomic<std::uint64_t> base_ticks{0};
  std::atomic<std::uint64_t> base_ns{0};
  std::atomic<double> ns_per_tick{0};
  std::mutex mutex;
  // Guarded by mutex.
  Reading first;
  Reading last;
  bool is_forced = false;
  bool is_distrusted = false;
};

Calibration calibration;

std::uint64_t converted(std::uint64_t ticks, const Reading& base, double ns_per_tick) {
  // Signed: another processor's counter may be some ticks behind the base.
  const auto passed = static_cast<double>(static_cast<std::int64_t>(ticks - base.ticks));
  return base.time_ns + static_cast<std::uint64_t>(static_cast<std::int64_t>(passed * ns_per_tick));
}

void publish(const Reading& base, double ns_per_tick) {
  // These stores are sequentially consistent: they are rare, and readers rely on the order.
  calibration.sequence.fetch_add(1);
  calibration.base_ticks.store(base.ticks);
  calibration.base_ns.store(base.time_ns);
  calibration.ns_per_tick.store(ns_per_tick);
  calibration.sequence.fetch_add(1);
}

double rate_between(const Reading& from, const Reading& to) {
  if (to.ticks == from.ticks) return 0;
  return static_cast<double>(to.time_ns - from.time_ns) /
         static_cast<double>(to.ticks - from.ticks);
}

}  // namespace

std::uint64_t steady_now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

std::uint64_t trace_now_ns() {
  while (true) {
    // Acquire: the fields are read after the sequence, and before it is read again.
    const std::uint32_t sequence = calibration.sequence.load(std::memory_order_acquire);
    const double ns_per_tick = calibration.ns_per_tick.load(std::memory_order_acquire);
    const Reading base{.ticks = calibration.base_ticks.load(std::memory_order_acquire),
                       .time_ns = calibration.base_ns.load(std::memory_order_acquire)};
    if ((sequence & 1) != 0 || calibration.sequence.load(std::memory_order_relaxed) != sequence)
      continue;
    return ns_per_tick == 0 ? steady_now_ns() : converted(read_ticks(), base, ns_per_tick);
  }
}

void calibrate_trace_clock() {
  const std::scoped_lock lock(calibration.mutex);
  if (calibration.is_forced || calibration.is_distrusted || !ticks_are_steady())
    return publish({}, 0);
  const double old = calibration.ns_per_tick.load();
  if (calibration.first.ticks == 0) {
    calibration.first = calibration.last = read_both();
    std::this_thread::sleep_for(kFirstBaseline);
  }
  const Reading now = read_both();
  if (old != 0) {
    const std::uint64_t expected = converted(now.ticks, calibration.last, old);
    const auto passed = static_cast<std::int64_t>(now.time_ns - calibration.last.time_ns);
    if (std::abs(static_cast<std::int64_t>(expected - now.time_ns)) >
        kTrustedNs + passed / kTrustedDrift) {
      calibration.is_distrusted = true;
      return publish({}, 0);
    }
  }
  publish(now, rate_between(calibration.first, now));
  // The kernel steers its own rate, so this rate is taken over the last seconds.
  if (now.time_ns - calibration.last.time_ns >= kBaselineNs) calibration.first = calibration.last;
  calibration.last = now;
}

void rest_trace_clock() {
  const std::scoped_lock lock(calibration.mutex);
  calibration.first = {};
  publish({}, 0);
}

void force_steady_trace_clock(bool forced) {
  {
    const std::scoped_lock lock(calibration.mutex);
    calibration.is_forced = forced;
  }
  calibrate_trace_clock();
}

std::string_view trace_clock_name() {
  return calibration.ns_per_tick.load() == 0 ? "clock_gettime" : "tsc";
}

}  // namespace sluice
