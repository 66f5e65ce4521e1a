#include "engine/bound/simulated_machine.h"

#include <algorithm>
#include <cmath>

#include <sluice/error.h>

namespace sluice {
namespace {

std::int64_t as_ns(double seconds) {
  return std::llround(seconds * 1e9);
}

}  // namespace

void SimulatedMachine::read(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_read_bytes += size_bytes;
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageRead, job,
         static_cast<double>(size_bytes), rates_.read_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::write(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_write_bytes += size_bytes;
  if (cache_.exists()) {
    Line& line = write_line();
    if (!line.is_busy && line.waiting.empty()) end_idleness(line);
    if (!cache_.take(size_bytes))
      return line.waiting.push({.job = job,
                                .latency_ns = as_ns(rates_.latency_s),
                                .cache = CacheUse::kWrite,
                                .cached_bytes = size_bytes});
    if (rates_.latency_s == 0) return on_end_(job);
    return enter(now_ns_ + as_ns(rates_.latency_s), nullptr, true, job);
  }
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageWrite, job,
         static_cast<double>(size_bytes), rates_.write_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::flush(const SimulatedJob& job, double duration_s) {
  if (cache_.exists())
    return write_line().waiting.push(
        {.job = job, .duration_ns = as_ns(duration_s), .cache = CacheUse::kFlush});
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageWrite, job,
         duration_s, 1);
}

void SimulatedMachine::copy_up(const SimulatedJob& job, std::uint64_t size_bytes) {
  submit(Resource::kCopyUp, job, static_cast<double>(size_bytes), rates_.up_bytes_per_second);
}

void SimulatedMachine::copy_down(const SimulatedJob& job, std::uint64_t size_bytes) {
  submit(Resource::kCopyDown, job, static_cast<double>(size_bytes), rates_.down_bytes_per_second);
}

void SimulatedMachine::compute(const SimulatedJob& job, double duration_s) {
  submit(Resource::kCompute, job, duration_s, 1);
}

void SimulatedMachine::norm(const SimulatedJob& job, std::uint64_t element_count) {
  submit(Resource::kCpu, job, static_cast<double>(element_count),
         rates_.norm_parameters_per_second);
}

void SimulatedMachine::adam(const SimulatedJob& job, std::uint64_t element_count) {
  submit(Resource::kCpu, job, static_cast<double>(element_count),
         rates_.adam_parameters_per_second);
}

void SimulatedMachine::device_adam(const SimulatedJob& job, std::uint64_t element_count) {
  submit(Resource::kDeviceUpdate, job, static_cast<double>(element_count),
         rates_.device_adam_parameters_per_second);
}

bool SimulatedMachine::cpu_is_free() const {
  const Line& line = lines_[static_cast<std::size_t>(Resource::kCpu)];
  return !line.is_busy && line.waiting.empty();
}

void SimulatedMachine::submit(Resource resource, const SimulatedJob& job, double amount,
                              double rate, double latency_s) {
  const Timed timed{.job = job,
                    .duration_ns = rate == 0 ? 0 : as_ns(amount / rate),
                    .latency_ns = as_ns(latency_s)};
  if (timed.duration_ns == 0 && timed.latency_ns == 0) return on_end_(job);
  lines_[static_cast<std::size_t>(resource)].waiting.push(timed);
}

SimulatedMachine::Line& SimulatedMachine::write_line() {
  return lines_[static_cast<std::size_t>(rates_.duplex == Duplex::kHalf ? Resource::kStorage
                                                                        : Resource::kStorageWrite)];
}

void SimulatedMachine::end_idleness(Line& line) {
  if (cache_.exists() && &line == &write_line())
    line.busy_ns += static_cast<std::int64_t>(
        cache_.idle(static_cast<std::uint64_t>(now_ns_ - line.idle_since_ns)));
  line.idle_since_ns = now_ns_;
}

// The time for which the write cache occupies the drive.
std::int64_t SimulatedMachine::cache_ns(const Timed& timed) {
  switch (timed.cache) {
    case CacheUse::kWrite: return static_cast<std::int64_t>(cache_.make_room(timed.cached_bytes));
    case CacheUse::kFlush: return static_cast<std::int64_t>(cache_.empty());
    case CacheUse::kNone: break;
  }
  return 0;
}

void SimulatedMachine::take_up(Line& line) {
  if (line.is_busy || line.waiting.empty()) return;
  Timed timed = line.waiting.top();
  line.waiting.pop();
  end_idleness(line);
  timed.duration_ns += cache_ns(timed);
  line.is_busy = true;
  line.busy_ns += timed.duration_ns;
  const std::int64_t free_ns = now_ns_ + timed.duration_ns;
  enter(free_ns, &line, timed.latency_ns == 0, timed.job);
  if (timed.latency_ns != 0) enter(free_ns + timed.latency_ns, nullptr, true, timed.job);
}

void SimulatedMachine::enter(std::int64_t time_ns, Line* freed, bool ends_job,
                             const SimulatedJob& job) {
  calendar_.push(
      {.time_ns = time_ns, .number = entered_++, .freed = freed, .ends_job = ends_job, .job = job});
}

void SimulatedMachine::advance() {
  for (Line& line : lines_) take_up(line);
  SLUICE_CHECK(!calendar_.empty(), "the simulated schedule goes on");
  now_ns_ = calendar_.top().time_ns;
  ended_.clear();
  for (; !calendar_.empty() && calendar_.top().time_ns == now_ns_; calendar_.pop()) {
    const Entry& entry = calendar_.top();
    if (entry.freed != nullptr) {
      entry.freed->is_busy = false;
      entry.freed->idle_since_ns = now_ns_;
    }
    if (entry.ends_job) ended_.push_back(entry.job);
  }
  for (const SimulatedJob& job : ended_) on_end_(job);
}

StepCost SimulatedMachine::account() const {
  StepCost cost{.step_s = static_cast<double>(now_ns_) * 1e-9, .traffic = traffic_};
  for (std::size_t i = 0; i < kResourceCount; ++i)
    cost.busy_s[i] = static_cast<double>(lines_[i].busy_ns) * 1e-9;
  return cost;
}

}  // namespace sluice
