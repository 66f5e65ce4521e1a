#include "base/trace/trace_recorder.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <mutex>
#include <new>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_ring.h"
#include "base/trace/trace_writer.h"

namespace sluice {
namespace {

// A ring of this many records takes 64 GiB.
constexpr std::uint32_t kRingRecordsMax = 1u << 30;

struct AtomicCount {
  std::atomic<std::uint64_t> spans{0};
  std::atomic<std::uint64_t> size_bytes{0};
  std::atomic<std::uint64_t> busy_ns{0};
  std::array<std::atomic<std::uint64_t>, kTraceBuckets> by_duration{};
};

struct Recorder {
  std::array<AtomicCount, kTraceKinds> counts;
  // Grows with every trace, so that threads leave old rings. 0: there has been no trace.
  std::atomic<std::uint64_t> generation{0};
  // Records of threads for whose rings there was no memory.
  std::atomic<std::uint64_t> lost_without_ring{0};

  std::mutex mutex;
  // Guarded by mutex.
  std::uint32_t ring_records = 0;
  std::uint32_t threads = 0;
  std::vector<std::shared_ptr<TraceRing>> rings;  // nothing drains them
  std::unique_ptr<TraceWriter> writer;            // or this writer drains them

  std::mutex polls_mutex;
  std::vector<const TracePoll*> polls;  // guarded by polls_mutex
};

// Never destroyed, because threads may record until the process ends.
Recorder& recorder() {
  static Recorder* const instance = new Recorder;
  return *instance;
}

// The calling thread's ring. A raw pointer and trivial, because every record reads it. The holder
// keeps the ring alive after its trace has ended: a late record then still goes to valid memory.
constinit thread_local TraceRing* ring_of_this_thread = nullptr;
constinit thread_local std::uint64_t generation_of_this_thread = 0;

struct RingHolder {
  std::shared_ptr<TraceRing> ring;
  void replace(std::shared_ptr<TraceRing> next) {
    if (ring != nullptr) ring->close();
    ring = std::move(next);
  }
  ~RingHolder() {
    replace(nullptr);
    ring_of_this_thread = nullptr;
    generation_of_this_thread = UINT64_MAX;  // what is recorded by later destructors is dropped
  }
};
thread_local RingHolder ring_holder;

// Returns null when no trace runs any more. Throws std::bad_alloc.
TraceRing* make_ring(std::uint64_t generation) {
  Recorder& all = recorder();
  char name[kTraceNameBytes + 1] = {};
  (void)::pthread_getname_np(::pthread_self(), name, sizeof(name));
  const std::scoped_lock lock(all.mutex);
  if (all.ring_records == 0) return nullptr;
  auto ring = std::make_shared<TraceRing>(all.ring_records, all.threads++, name);
  if (all.writer != nullptr) {
    all.writer->add_ring(ring);
  } else {
    all.rings.push_back(ring);
  }
  ring_of_this_thread = ring.get();
  generation_of_this_thread = generation;
  ring_holder.replace(std::move(ring));
  return ring_of_this_thread;
}

std::string ring_size_text(std::uint32_t records) {
  return format_bytes(std::uint64_t{records} * sizeof(TraceRecord));
}

// The rings are made later, by threads that cannot fail. A size that the system never grants is
// refused before.
void try_ring(std::uint32_t records) {
  try {
    const TraceRing tried(records, 0, "");
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("trace_start: each thread's ring of {} records takes up to {}, and the "
                            "system refuses to reserve that; lower ring_records (trace.ring of the "
                            "config), or raise the limit of address space (ulimit -v)",
                            records, ring_size_text(records)));
  }
}

// As make_ring(). Without memory, the thread's records of this trace are counted as lost.
TraceRing* find_ring(std::uint64_t generation) noexcept {
  try {
    return make_ring(generation);
  } catch (const std::bad_alloc&) {
    ring_of_this_thread = nullptr;
    generation_of_this_thread = generation;
    return nullptr;
  }
}

// In a forked child: the drainer is not there, and another thread may have held a lock. The trace
// is the parent's, and nothing of the child gets into it.
std::atomic<bool> is_in_child{false};
void leave_trace_in_child() {
  if (trace_is_on.exchange(false)) is_in_child.store(true);
}

void begin_generation(Recorder& all, std::uint32_t ring_records) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, leave_trace_in_child);
  SLUICE_CHECK(registered == 0, "a fork handler can be registered");
  all.rings.clear();
  all.threads = 0;
  all.ring_records = ring_records;
  all.lost_without_ring.store(0);
  all.generation.fetch_add(1);
  trace_is_on.store(ring_records != 0);
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
    case TraceKind::kStep: return "step";
    case TraceKind::kCompute: return "compute";
    case TraceKind::kWait: return "wait";
    case TraceKind::kLane: return "lane";
    case TraceKind::kResident: return "resident";
    case TraceKind::kCollective: return "collective";
    case TraceKind::kOnDevice: return "on device";
    case TraceKind::kFlush: return "flush";
  }
  return "unknown";
}

std::string_view name_of(TraceReason reason) {
  switch (reason) {
    case TraceReason::kNone: return "none";
    case TraceReason::kRead: return "read";
    case TraceReason::kSlot: return "parameter slot";
    case TraceReason::kWindow: return "window";
    case TraceReason::kCopy: return "copy to device";
    case TraceReason::kGradientSlot: return "gradient slot";
    case TraceReason::kUpdateRead: return "read of the update";
    case TraceReason::kUpdateLane: return "lane of the update";
    case TraceReason::kUpdate: return "update";
    case TraceReason::kUpdateWrite: return "write of the update";
    case TraceReason::kGradientCopy: return "copy of gradients";
    case TraceReason::kNorm: return "norm";
    case TraceReason::kCollective: return "collective";
    case TraceReason::kSchedule: return "changed schedule";
    case TraceReason::kActivation: return "activation";
    case TraceReason::kCommit: return "commit";
    case TraceReason::kSave: return "checkpoint";
    case TraceReason::kAnnounce: return "announcement";
    case TraceReason::kGradientSpill: return "gradients to where they wait";
  }
  return "unknown";
}

std::string span_name(const TraceRecord& record, std::string_view unit) {
  constexpr const char* kPasses[] = {"forward", "backward", "inference"};
  constexpr const char* kPlanes[] = {"parameters", "optimizer state", "activations", "gradients"};
  constexpr const char* kCollectives[] = {"gather", "reduction", "reduction and gather", "votes"};
  const std::size_t plane = std::min<std::size_t>(record.detail, 3);
  const std::size_t pass = std::min<std::size_t>(record.detail, 2);
  std::string name(name_of(record.kind));
  switch (record.kind) {
    case TraceKind::kStep: return name + " " + std::to_string(record.step);
    case TraceKind::kCompute: return std::string(unit) + " " + kPasses[pass];
    case TraceKind::kAcquire: return name + " " + std::string(unit) + " " + kPasses[pass];
    case TraceKind::kCopyToDevice:
    case TraceKind::kCopyToHost:
      if (record.detail != kTraceActivations) break;
      [[fallthrough]];
    case TraceKind::kOnDevice:
    case TraceKind::kRead:
    case TraceKind::kWrite: return name + " " + std::string(unit) + " " + kPlanes[plane];
    case TraceKind::kCollective:
      name = kCollectives[std::min<std::size_t>(record.detail, 3)];
      break;
    default: break;
  }
  return unit.empty() ? name : name + " " + std::string(unit);
}

TraceCounts trace_counts() {
  TraceCounts counts;
  for (std::size_t kind = 0; kind < kTraceKinds; ++kind) {
    const AtomicCount& from = recorder().counts[kind];
    counts[kind] = {.spans = from.spans.load(),
                    .size_bytes = from.size_bytes.load(),
                    .busy_ns = from.busy_ns.load()};
    for (std::size_t i = 0; i < kTraceBuckets; ++i)
      counts[kind].by_duration[i] = from.by_duration[i].load();
  }
  return counts;
}

void trace_span(const TraceRecord& record) {
  AtomicCount& count = recorder().counts[static_cast<std::size_t>(record.kind)];
  const std::uint64_t duration_ns = record.end_ns - record.begin_ns;
  const std::size_t bucket =
      std::min<std::size_t>(std::bit_width(duration_ns | 1) - 1, kTraceBuckets - 1);
  // Relaxed: these are independent sums.
  count.spans.fetch_add(1, std::memory_order_relaxed);
  count.size_bytes.fetch_add(record.size_bytes, std::memory_order_relaxed);
  count.busy_ns.fetch_add(duration_ns, std::memory_order_relaxed);
  count.by_duration[bucket].fetch_add(1, std::memory_order_relaxed);
  trace_record(record);
}

void trace_append(const TraceRecord& record) {
  // Acquire: a thread that sees the new generation also sees the data that belongs to it.
  const std::uint64_t generation = recorder().generation.load(std::memory_order_acquire);
  TraceRing* ring = ring_of_this_thread;
  if (generation_of_this_thread != generation) {
    if (generation_of_this_thread == UINT64_MAX) return;
    ring = find_ring(generation);
  }
  if (ring != nullptr) return ring->append(record);
  recorder().lost_without_ring.fetch_add(1, std::memory_order_relaxed);  // a count
}

TracePoll::TracePoll(std::function<void()> poll) : poll_(std::move(poll)) {
  const std::scoped_lock lock(recorder().polls_mutex);
  recorder().polls.push_back(this);
}

TracePoll::~TracePoll() {
  const std::scoped_lock lock(recorder().polls_mutex);
  std::erase(recorder().polls, this);
}

void run_trace_polls() {
  const std::scoped_lock lock(recorder().polls_mutex);
  for (const TracePoll* poll : recorder().polls) poll->poll_();
}

void trace_start(const TraceOptions& options) {
  if (is_in_child)
    throw Error(
        ErrorCode::kInvalidArgument,
        "trace_start: the trace's thread belongs to the process that forked this one; start "
        "a process of its own for what is to be traced");
  if (options.ring_records > kRingRecordsMax)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("trace_start: ring_records is {}; a thread's ring has at most {}, which "
                    "take {}; lower it (trace.ring of the config)",
                    options.ring_records, kRingRecordsMax, ring_size_text(kRingRecordsMax)));
  if (options.rank >= options.ranks)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("trace_start: rank {} does not exist; there are {} ranks", options.rank,
                            options.ranks));
  try_ring(options.ring_records);
  Recorder& all = recorder();
  calibrate_trace_clock();
  const std::scoped_lock lock(all.mutex);
  if (trace_enabled())
    throw Error(ErrorCode::kInvalidArgument,
                "trace_start: a trace is running already; end it with trace_stop() first");
  all.writer = std::make_unique<TraceWriter>(options);
  begin_generation(all, std::max(options.ring_records, 2u));
}

void trace_section(std::string_view name, std::string_view text) {
  if (!trace_enabled()) return;
  Recorder& all = recorder();
  const std::scoped_lock lock(all.mutex);
  if (all.writer != nullptr) all.writer->add_section(name, text);
}

TraceResult trace_stop() {
  if (is_in_child) return {};
  Recorder& all = recorder();
  std::unique_ptr<TraceWriter> writer;
  std::uint64_t lost_without_ring = 0;
  {
    const std::scoped_lock lock(all.mutex);
    if (all.writer == nullptr) return {};
    lost_without_ring = all.lost_without_ring.load();
    begin_generation(all, 0);
    writer = std::move(all.writer);
  }
  const TraceResult result = writer->finish(lost_without_ring);
  rest_trace_clock();
  return result;
}

void trace_enable(std::uint32_t ring_records) {
  (void)trace_stop();
  if (ring_records == 0) rest_trace_clock();
  Recorder& all = recorder();
  if (ring_records != 0) calibrate_trace_clock();
  const std::scoped_lock lock(all.mutex);
  begin_generation(all, ring_records);
}

std::vector<TraceRecord> trace_take() {
  Recorder& all = recorder();
  const std::scoped_lock lock(all.mutex);
  std::vector<TraceRecord> taken;
  std::vector<TraceRecord> part(kTraceBlockRecordsMax);
  for (const auto& ring : all.rings) {
    while (const std::size_t count = ring->drain(part))
      taken.insert(taken.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(count));
  }
  std::erase_if(taken, [](const TraceRecord& record) { return record.end_ns == 0; });
  std::sort(taken.begin(), taken.end(),
            [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
  return taken;
}

}  // namespace sluice
