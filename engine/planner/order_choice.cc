#include "engine/planner/order_choice.h"

#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/sharding.h"
#include "engine/planner/planner.h"
#include "engine/planner/run_plan.h"

namespace sluice {
namespace {

bool is_tied(const ModelSpec& model) {
  return model.backward_order.size() > model.units.size();
}

std::string summary_of(const OrderPlan& plan) {
  if (!plan.obstacle.empty()) return in_short(plan.obstacle);
  return fmt::format("{} read, {} written, {} copied, of which activations {} out and {} in",
                     format_bytes(plan.traffic.nvme_read_bytes),
                     format_bytes(plan.traffic.nvme_write_bytes), format_bytes(plan.copied_bytes),
                     format_bytes(plan.traffic.activation_out_bytes),
                     format_bytes(plan.traffic.activation_in_bytes));
}

OrderPlan plan_order(Config config, const ModelSpec& model, const RunMachine& machine,
                     MicroBatchOrder order) {
  OrderPlan plan;
  plan.order = order;
  config.activations.order = order;
  const std::uint32_t micro_batches = config.activations.micro_batches;
  if (order == MicroBatchOrder::kVertical && config.activations.home == ActivationHome::kKeep) {
    plan.obstacle = "activations of all micro-batches at once cannot be kept";
    return plan;
  }
  const Layout layout = plan_layout(config, model, shard_of(config.sharding, 0, machine.ranks));
  try {
    const Placement placement = plan_run(config, model, layout, machine).placement;
    StepPlans plans(model, layout, placement);
    const StepPlan& step = plans.training(micro_batches, order);
    plan.traffic = plans.predict_traffic(micro_batches, order);
    plan.copied_bytes = plan.traffic.activation_out_bytes + plan.traffic.activation_in_bytes;
    for (std::size_t use = 0; use < step.schedule.size(); ++use) {
      if (step.window.uses[use].fetch)
        plan.copied_bytes += layout.shard_parameter_bytes(step.schedule[use].unit);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    plan.obstacle = error.what();
  }
  return plan;
}

}  // namespace

std::array<OrderPlan, 2> plan_orders(const Config& config, const ModelSpec& model,
                                     const RunMachine& machine) {
  return {plan_order(config, model, machine, MicroBatchOrder::kHorizontal),
          plan_order(config, model, machine, MicroBatchOrder::kVertical)};
}

bool order_changes_bits(const Config& config, std::uint32_t micro_batches, bool is_tied,
                        std::uint32_t ranks) {
  if (micro_batches == 1) return false;
  return is_tied || (ranks > 1 && !reduces_each_use(shard_of(config.sharding, 0, ranks),
                                                    micro_batches, MicroBatchOrder::kHorizontal));
}

MicroBatchOrder better_order(const std::array<OrderPlan, 2>& plans, const ModelSpec& model,
                             const Config& config, std::uint32_t ranks) {
  const auto& [horizontal, vertical] = plans;
  const auto moved = [](const OrderPlan& plan) {
    return std::tuple(!plan.obstacle.empty(),
                      plan.traffic.nvme_read_bytes + plan.traffic.nvme_write_bytes,
                      plan.copied_bytes);
  };
  const bool may_choose =
      !order_changes_bits(config, config.activations.micro_batches, is_tied(model), ranks);
  return may_choose && vertical.obstacle.empty() && moved(vertical) < moved(horizontal)
             ? MicroBatchOrder::kVertical
             : MicroBatchOrder::kHorizontal;
}

std::string describe(const std::array<OrderPlan, 2>& plans, MicroBatchOrder chosen) {
  const bool is_vertical = chosen == MicroBatchOrder::kVertical;
  const OrderPlan& other = plans[is_vertical ? 0 : 1];
  return fmt::format("micro-batches {}: {} per step; {}: {}", name_of(chosen),
                     summary_of(plans[is_vertical ? 1 : 0]), name_of(other.order),
                     summary_of(other));
}

}  // namespace sluice
