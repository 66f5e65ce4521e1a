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

}  // namespace

std::optional<StepCost> StepMean::note(const StepCost& cost,
                                       const std::optional<SimulatedState>& state) {
  for (std::size_t ago = 1; state && ago <= begun_.size(); ++ago) {
    const Begun& then = begun_[begun_.size() - ago];
    if (counted_steps_ % ago == 0 && then.state == state) return mean_of(then.cost, cost, ago);
  }
  if (begun_.size() + 1 == warm_steps_ + counted_steps_)
    return mean_of(begun_[warm_steps_ - 1].cost, cost, counted_steps_);
  begun_.push_back({.state = state, .cost = cost});
  return std::nullopt;
}

}  // namespace sluice
