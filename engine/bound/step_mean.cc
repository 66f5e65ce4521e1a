#include "engine/bound/step_mean.h"

namespace sluice {
namespace {

StepCost mean_of(const StepCost& begin, const StepCost& end, std::uint64_t steps) {
  const auto counted = static_cast<double>(steps);
  StepCost mean = end;
  mean.step_s = (end.step_s - begin.step_s) / counted;
  for (std::size_t i = 0; i < kResourceCount; ++i)
    mean.busy_s[i] = (end.busy_s[i] - begin.busy_s[i]) / counted;
  const auto mean_bytes = [steps](std::uint64_t first, std::uint64_t last) {
    return (last - first) / steps;
  };
  mean.traffic.nvme_read_bytes =
      mean_bytes(begin.traffic.nvme_read_bytes, end.traffic.nvme_read_bytes);
  mean.traffic.nvme_write_bytes =
      mean_bytes(begin.traffic.nvme_write_bytes, end.traffic.nvme_write_bytes);
  return mean;
}

// The cost at the end of a step that costs what the steps from `begin` to `end` cost, behind `sum`.
StepCost continued(StepCost sum, const StepCost& begin, const StepCost& end) {
  sum.step_s += end.step_s - begin.step_s;
  for (std::size_t i = 0; i < kResourceCount; ++i) sum.busy_s[i] += end.busy_s[i] - begin.busy_s[i];
  sum.traffic.nvme_read_bytes += end.traffic.nvme_read_bytes - begin.traffic.nvme_read_bytes;
  sum.traffic.nvme_write_bytes += end.traffic.nvme_write_bytes - begin.traffic.nvme_write_bytes;
  return sum;
}

}  // namespace

std::optional<StepCost> StepMean::note(const StepCost& cost,
                                       const std::optional<SimulatedState>& state) {
  begun_.push_back({.state = state, .cost = cost});
  const std::size_t now = begun_.size() - 1;
  const std::size_t end = warm_steps_ + counted_steps_;
  for (std::size_t then = now; state && then-- > 0;) {
    if (begun_[then].state != state) continue;
    for (std::size_t step = now; begun_.size() < end; ++step)
      begun_.push_back({.state = {},
                        .cost = continued(begun_[step].cost, begun_[step - (now - then)].cost,
                                          begun_[step - (now - then) + 1].cost)});
    break;
  }
  if (begun_.size() < end) return std::nullopt;
  return mean_of(begun_[warm_steps_ - 1].cost, begun_[end - 1].cost, counted_steps_);
}

}  // namespace sluice
