#include "engine/bound/simulated_machine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;
constexpr double kTicksMax = 0x1p62;

// More than all jobs of a step take, one after the other: each use of a unit, and its update,
// moves no more than all of the unit's state by each of the machine's ways.
double longest_step_s(const StepShape& shape) {
  const Rates& rates = shape.rates;
  const auto of = [](double amount, double rate) { return rate > 0 ? amount / rate : 0; };
  const StateFormat& format = shape.layout.format();
  double step_s = 3 * rates.flush_s;
  const auto add = [&](const UnitPlace& unit) {
    const auto elements = static_cast<double>(unit.element_count);
    const double requests = 8.0 * (unit.block_count + 1);
    const double bytes = elements * (2 * format.state_bytes_per_element() + 8) +
                         requests * static_cast<double>(kStorageAlignBytes);
    step_s += requests * rates.latency_s + of(bytes, rates.read_bytes_per_second) +
              of(bytes, rates.write_bytes_per_second) + of(bytes, rates.up_bytes_per_second) +
              of(bytes, rates.down_bytes_per_second) +
              of(elements, rates.adam_parameters_per_second) +
              of(3 * elements, rates.norm_parameters_per_second) +
              of(elements, rates.device_adam_parameters_per_second);
  };
  for (const UnitPlace& unit : shape.layout.units()) add(unit);
  for (const ScheduledUse& use : shape.schedule) {
    const UnitTime& time = rates.units[index_of(use.unit)];
    step_s += time.forward_s + time.backward_s;
    add(shape.layout.unit(use.unit));
  }
  return step_s;
}

// The model of a write cache counts in nanoseconds.
double ticks_per_second(const StepShape& shape, std::uint64_t steps) {
  double ticks = kNanosecondsPerSecond;
  if (shape.rates.write_cache_bytes != 0) return ticks;
  const double most_s = static_cast<double>(steps) * longest_step_s(shape);
  while (most_s * ticks > kTicksMax) ticks /= 2;
  return ticks;
}

}  // namespace

SimulatedMachine::SimulatedMachine(const StepShape& shape, std::uint64_t steps,
                                   std::function<void(const SimulatedJob&)> on_end)
    : rates_(shape.rates),
      format_(shape.layout.format()),
      ticks_per_s_(ticks_per_second(shape, steps)),
      on_end_(std::move(on_end)),
      cache_(rates_.write_cache_bytes, rates_.write_bytes_per_second) {}

std::int64_t SimulatedMachine::as_ticks(double seconds) const {
  return std::llround(seconds * ticks_per_s_);
}

void SimulatedMachine::read(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_read_bytes += size_bytes;
  host_memory_bytes_ += static_cast<double>(size_bytes);
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageRead, job,
         static_cast<double>(size_bytes), rates_.read_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::write(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_write_bytes += size_bytes;
  host_memory_bytes_ += static_cast<double>(size_bytes);
  if (cache_.exists()) {
    Line& line = write_line();
    if (!line.is_busy && line.waiting.empty()) end_idleness(line);
    if (!cache_.take(size_bytes))
      return line.waiting.push({.job = job,
                                .latency_ticks = as_ticks(rates_.latency_s),
                                .cache = CacheUse::kWrite,
                                .cached_bytes = size_bytes});
    if (rates_.latency_s == 0) return on_end_(job);
    return enter(now_ticks_ + as_ticks(rates_.latency_s), job);
  }
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageWrite, job,
         static_cast<double>(size_bytes), rates_.write_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::flush(const SimulatedJob& job, double duration_s) {
  if (cache_.exists())
    return write_line().waiting.push(
        {.job = job, .duration_ticks = as_ticks(duration_s), .cache = CacheUse::kFlush});
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageWrite, job,
         duration_s, 1);
}

void SimulatedMachine::copy_up(const SimulatedJob& job, std::uint64_t size_bytes) {
  host_memory_bytes_ += static_cast<double>(size_bytes);
  submit(Resource::kCopyUp, job, static_cast<double>(size_bytes), rates_.up_bytes_per_second);
}

void SimulatedMachine::copy_down(const SimulatedJob& job, std::uint64_t size_bytes) {
  host_memory_bytes_ += static_cast<double>(size_bytes);
  submit(Resource::kCopyDown, job, static_cast<double>(size_bytes), rates_.down_bytes_per_second);
}

void SimulatedMachine::compute(const SimulatedJob& job, double duration_s) {
  submit(Resource::kCompute, job, duration_s, 1);
}

// A norm reads what has just arrived, often from a cache. An addition reads and writes the sum.
void SimulatedMachine::norm(const SimulatedJob& job, std::uint64_t element_count) {
  if (job.task == SimulatedTask::kAccumulate)
    host_memory_bytes_ += 2.0 * static_cast<double>(element_count * format_.gradient_bytes());
  submit(Resource::kCpu, job, static_cast<double>(element_count),
         rates_.norm_parameters_per_second);
}

void SimulatedMachine::adam(const SimulatedJob& job, std::uint64_t element_count) {
  host_memory_bytes_ += static_cast<double>(element_count) * update_bytes_per_element(format_);
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
                    .duration_ticks = rate == 0 ? 0 : as_ticks(amount / rate),
                    .latency_ticks = as_ticks(latency_s)};
  if (timed.duration_ticks == 0 && timed.latency_ticks == 0) return on_end_(job);
  lines_[static_cast<std::size_t>(resource)].waiting.push(timed);
}

SimulatedMachine::Line& SimulatedMachine::write_line() {
  return lines_[static_cast<std::size_t>(rates_.duplex == Duplex::kHalf ? Resource::kStorage
                                                                        : Resource::kStorageWrite)];
}

void SimulatedMachine::end_idleness(Line& line) {
  if (cache_.exists() && &line == &write_line())
    line.busy_ticks += static_cast<std::int64_t>(
        cache_.idle(static_cast<std::uint64_t>(now_ticks_ - line.idle_since_ticks)));
  line.idle_since_ticks = now_ticks_;
}

// The time for which the write cache occupies the drive.
std::int64_t SimulatedMachine::cache_ticks(const Timed& timed) {
  switch (timed.cache) {
    case CacheUse::kWrite: return static_cast<std::int64_t>(cache_.make_room(timed.cached_bytes));
    case CacheUse::kFlush: return static_cast<std::int64_t>(cache_.empty());
    case CacheUse::kNone: break;
  }
  return 0;
}

void SimulatedMachine::take_up(Line& line) {
  if (line.is_busy || line.waiting.empty()) return;
  Timed timed = line.waiting.pop();
  end_idleness(line);
  timed.duration_ticks += cache_ticks(timed);
  line.is_busy = true;
  line.busy_ticks += timed.duration_ticks;
  line.free_ticks = now_ticks_ + timed.duration_ticks;
  line.ends_job = timed.latency_ticks == 0;
  line.number = entered_++;
  line.job = timed.job;
  if (!line.ends_job) enter(line.free_ticks + timed.latency_ticks, timed.job);
}

void SimulatedMachine::enter(std::int64_t time_ticks, const SimulatedJob& job) {
  calendar_.push_back({.time_ticks = time_ticks, .number = entered_++, .job = job});
  std::push_heap(calendar_.begin(), calendar_.end(), std::greater<>());
}

void SimulatedMachine::advance() {
  for (Line& line : lines_) take_up(line);
  std::int64_t next_ticks = calendar_.empty() ? INT64_MAX : calendar_.front().time_ticks;
  for (const Line& line : lines_)
    if (line.is_busy) next_ticks = std::min(next_ticks, line.free_ticks);
  SLUICE_CHECK(next_ticks != INT64_MAX, "the simulated schedule goes on");
  now_ticks_ = next_ticks;
  ended_.clear();
  for (Line& line : lines_) {
    if (!line.is_busy || line.free_ticks != now_ticks_) continue;
    line.is_busy = false;
    line.idle_since_ticks = now_ticks_;
    if (line.ends_job) ended_.push_back({.number = line.number, .job = line.job});
  }
  while (!calendar_.empty() && calendar_.front().time_ticks == now_ticks_) {
    ended_.push_back({.number = calendar_.front().number, .job = calendar_.front().job});
    std::pop_heap(calendar_.begin(), calendar_.end(), std::greater<>());
    calendar_.pop_back();
  }
  if (ended_.size() > 1) std::ranges::sort(ended_, {}, &Entry::number);
  for (const Entry& entry : ended_) on_end_(entry.job);
}

void SimulatedMachine::add_to(SimulatedState& state) const {
  const auto add = [&state](const SimulatedJob& job, std::int64_t ticks) {
    state.add(static_cast<std::uint64_t>(job.task));
    state.add(job.rank >> 56);  // a fetch may be of either urgency
    state.add(job.subject);
    state.add(static_cast<std::uint64_t>(ticks));
  };
  for (const Line& line : lines_) {
    state.add(line.is_busy);
    if (line.is_busy) add(line.job, line.free_ticks - now_ticks_);
    line.waiting.for_each([&](const Timed& timed) {
      add(timed.job, timed.duration_ticks);
      state.add(static_cast<std::uint64_t>(timed.latency_ticks));
    });
    state.add(UINT64_MAX);
  }
  std::vector<Entry> coming = calendar_;
  std::ranges::sort(coming, std::less<>(),
                    [](const Entry& entry) { return std::pair(entry.time_ticks, entry.number); });
  // Ends of one instant are in the order in which they were entered.
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  for (std::size_t i = 0; i < lines_.size(); ++i)
    if (lines_[i].is_busy) order.emplace_back(lines_[i].number, i);
  for (const Entry& entry : coming) {
    add(entry.job, entry.time_ticks - now_ticks_);
    order.emplace_back(entry.number, lines_.size() + order.size());
  }
  std::ranges::sort(order);
  for (const auto& [number, which] : order) state.add(which);
}

StepCost SimulatedMachine::account() const {
  StepCost cost{.step_s = static_cast<double>(now_ticks_) / ticks_per_s_, .traffic = traffic_};
  for (std::size_t i = 0; i < kResourceCount; ++i)
    cost.busy_s[i] = static_cast<double>(lines_[i].busy_ticks) / ticks_per_s_;
  if (rates_.host_memory_bytes_per_second > 0)
    cost.busy_s[static_cast<std::size_t>(Resource::kHostMemory)] =
        host_memory_bytes_ / rates_.host_memory_bytes_per_second;
  return cost;
}

}  // namespace sluice
