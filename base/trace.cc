#include "base/trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

namespace sluice {
namespace {

// One thread's records. The thread that made it is its only writer; it outlives the thread, so that
// take() sees all.
struct Ring {
  std::vector<TraceRecord> records;
  std::atomic<std::uint64_t> written{0};
};

struct Recorder {
  std::atomic<std::uint32_t> capacity{0};  // records per ring; 0 = off
  std::atomic<std::uint64_t> generation{
      0};  // grows with every enable, so that threads leave old rings
  std::mutex mutex;
  std::vector<std::shared_ptr<Ring>> rings;  // guarded by mutex
};

Recorder& recorder() {
  static Recorder instance;
  return instance;
}

struct ThreadRing {
  std::shared_ptr<Ring> ring;
  std::uint64_t generation = 0;
};

Ring& ring_of_this_thread(std::uint32_t capacity) {
  thread_local ThreadRing mine;
  Recorder& all = recorder();
  const std::uint64_t generation = all.generation.load();
  if (mine.ring == nullptr || mine.generation != generation) {
    mine.ring = std::make_shared<Ring>();
    mine.ring->records.resize(capacity);
    mine.generation = generation;
    const std::scoped_lock lock(all.mutex);
    all.rings.push_back(mine.ring);
  }
  return *mine.ring;
}

}  // namespace

std::string_view name_of(TraceKind kind) {
  switch (kind) {
    case TraceKind::kRead: return "read";
    case TraceKind::kWrite: return "write";
    case TraceKind::kCopyToDevice: return "copy to device";
    case TraceKind::kCopyToHost: return "copy to host";
    case TraceKind::kAdam: return "adam";
    case TraceKind::kAccumulate: return "accumulate";
    case TraceKind::kNorm: return "norm";
    case TraceKind::kAcquire: return "acquire";
    case TraceKind::kFinish: return "finish";
  }
  return "unknown";
}

std::uint64_t steady_now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

void trace_enable(std::uint32_t records_per_thread) {
  Recorder& all = recorder();
  const std::scoped_lock lock(all.mutex);
  all.rings.clear();
  all.generation.fetch_add(1);
  all.capacity.store(records_per_thread);
}

bool trace_enabled() {
  return recorder().capacity.load(std::memory_order_relaxed) != 0;
}  // relaxed: a hint, no data hangs on it

void trace_record(const TraceRecord& record) {
  const std::uint32_t capacity = recorder().capacity.load();
  if (capacity == 0) return;
  Ring& ring = ring_of_this_thread(capacity);
  const std::uint64_t position =
      ring.written.load(std::memory_order_relaxed);  // relaxed: this thread is the only writer
  ring.records[position % ring.records.size()] = record;
  ring.written.store(position + 1);
}

std::vector<TraceRecord> trace_take() {
  Recorder& all = recorder();
  const std::scoped_lock lock(all.mutex);
  std::vector<TraceRecord> taken;
  for (const auto& ring : all.rings) {
    const auto kept = static_cast<std::ptrdiff_t>(
        std::min<std::uint64_t>(ring->written.load(), ring->records.size()));
    taken.insert(taken.end(), ring->records.begin(), ring->records.begin() + kept);
  }
  std::sort(taken.begin(), taken.end(),
            [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
  return taken;
}

}  // namespace sluice
