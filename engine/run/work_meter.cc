#include "engine/run/work_meter.h"

#include <utility>

#include "base/trace/trace_clock.h"

namespace sluice {

void WorkMeter::begin(Work work) {
  const std::uint64_t now_ns = trace_now_ns();
  any_.begin(now_ns);
  lines_[static_cast<std::size_t>(work)].begin(now_ns);
}

void WorkMeter::end(Work work) {
  const std::uint64_t now_ns = trace_now_ns();
  any_.end(now_ns);
  lines_[static_cast<std::size_t>(work)].end(now_ns);
}

WorkTimes WorkMeter::take() {
  const std::uint64_t now_ns = trace_now_ns();
  WorkTimes times;
  for (std::size_t i = 0; i < kWorkCount; ++i) times.busy_ns[i] = lines_[i].take(now_ns);
  times.any_ns = any_.take(now_ns);
  return times;
}

void WorkMeter::Line::begin(std::uint64_t now_ns) {
  if (under_way++ == 0) since_ns = now_ns;
}

void WorkMeter::Line::end(std::uint64_t now_ns) {
  if (--under_way == 0) busy_ns += static_cast<std::int64_t>(now_ns - since_ns);
}

std::int64_t WorkMeter::Line::take(std::uint64_t now_ns) {
  if (under_way != 0) busy_ns += static_cast<std::int64_t>(now_ns - since_ns);
  since_ns = now_ns;
  return std::exchange(busy_ns, 0);
}

}  // namespace sluice
