// Steps of which only some end with a commit.
#include "engine/bound/bound_simulation.h"

namespace sluice {
namespace {

// With more updates from commit to commit, a simulation would take too long.
constexpr std::uint32_t kCommitEveryMax = 4;

StepShape with_commits(const StepShape& shape, std::uint32_t commit_every) {
  return {shape.layout, shape.placement,   shape.schedule, shape.window,
          shape.rates,  shape.activations, commit_every,   shape.announced_after};
}

// The cost of which `share` of the steps have that of `a`, and the rest that of `b`.
StepCost mixed(const StepCost& a, const StepCost& b, double share) {
  const auto mix = [&](auto of_a, auto of_b) {
    return static_cast<decltype(of_a)>(share * static_cast<double>(of_a) +
                                       (1 - share) * static_cast<double>(of_b));
  };
  StepCost cost = a;
  cost.step_s = mix(a.step_s, b.step_s);
  for (std::size_t i = 0; i < kResourceCount; ++i) cost.busy_s[i] = mix(a.busy_s[i], b.busy_s[i]);
  cost.traffic.nvme_read_bytes = mix(a.traffic.nvme_read_bytes, b.traffic.nvme_read_bytes);
  cost.traffic.nvme_write_bytes = mix(a.traffic.nvme_write_bytes, b.traffic.nvme_write_bytes);
  return cost;
}

}  // namespace

StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy) {
  if (shape.placement.durable_copies == 0)
    return simulate_whole_commits(with_commits(shape, 1), policy);
  if (shape.commit_every <= kCommitEveryMax) return simulate_whole_commits(shape, policy);
  Placement scratch = shape.placement;
  scratch.durable_copies = 0;
  const StepShape bare{shape.layout,      scratch, shape.schedule,       shape.window, shape.rates,
                       shape.activations, 1,       shape.announced_after};
  return mixed(simulate_whole_commits(with_commits(shape, kCommitEveryMax), policy),
               simulate_whole_commits(bare, policy),
               static_cast<double>(kCommitEveryMax) / shape.commit_every);
}

}  // namespace sluice
