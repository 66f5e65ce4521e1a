#include "engine/bound/simulated_machine.h"

#include <algorithm>
#include <cmath>

#include <sluice/error.h>

namespace sluice {

void SimulatedMachine::read(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_read_bytes += size_bytes;
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageRead, job,
         static_cast<double>(size_bytes), rates_.read_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::write(const SimulatedJob& job, std::uint64_t size_bytes) {
  traffic_.nvme_write_bytes += size_bytes;
  submit(rates_.duplex == Duplex::kHalf ? Resource::kStorage : Resource::kStorageWrite, job,
         static_cast<double>(size_bytes), rates_.write_bytes_per_second, rates_.latency_s);
}

void SimulatedMachine::flush(const SimulatedJob& job, double duration_s) {
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
  const auto as_ns = [](double seconds) { return std::llround(seconds * 1e9); };
  const Timed timed{.job = job,
                    .duration_ns = rate == 0 ? 0 : as_ns(amount / rate),
                    .latency_ns = as_ns(latency_s)};
  if (timed.duration_ns == 0 && timed.latency_ns == 0) return on_end_(job);
  lines_[static_cast<std::size_t>(resource)].waiting.push(timed);
}

void SimulatedMachine::take_up(Line& line) {
  if (line.is_busy || line.waiting.empty()) return;
  const Timed timed = line.waiting.top();
  line.waiting.pop();
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
    if (entry.freed != nullptr) entry.freed->is_busy = false;
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
