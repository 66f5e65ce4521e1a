#include "tools/gpt/train/run_publisher.h"

#include <algorithm>
#include <memory>

#include <sluice/error.h>
#include "engine/plan/placement.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

constexpr std::array kLinkKinds{TraceKind::kRead, TraceKind::kWrite, TraceKind::kCopyToDevice,
                                TraceKind::kCopyToHost};
static_assert(kLinkKinds.size() == kStatusLinks);

}  // namespace

RunPublisher::RunPublisher(const TrainConfig& config, const Engine& engine) {
  if (!config.has_status) return;
  try {
    page_ = std::make_unique<StatusPage>(status_folder());
  } catch (const Error& error) {
    problem_ = error.what();
    return;
  }
  if (!page_->is_there()) {
    page_.reset();
    return;
  }
  const Placement& placement = engine.placement();
  status_.rank = engine.rank();
  status_.ranks = engine.rank_count();
  status_.steps = config.steps;
  status_.flops_per_token = gpt::flops_per_token(config.model);
  status_.tiers = {{{.pool_bytes = placement.device_bytes(),
                     .budget_bytes = placement.device_budget_bytes,
                     .in_use_bytes = 0},
                    {.pool_bytes = placement.host_bytes(),
                     .budget_bytes = placement.host_budget_bytes,
                     .in_use_bytes = 0},
                    {.pool_bytes = placement.nvme_bytes(), .budget_bytes = 0, .in_use_bytes = 0}}};
  counts_ = trace_counts();
  page_->write(status_);
}

void RunPublisher::enter(RunPhase phase, std::uint64_t step) {
  if (page_ == nullptr) return;
  status_.phase = phase;
  status_.step = step;
  page_->write(status_);
}

void RunPublisher::step_ended(const StepRecord& record, const StepReport& report) {
  if (page_ == nullptr) return;
  status_.phase = RunPhase::kTraining;
  status_.step = record.step;
  status_.tokens = record.tokens;
  status_.peak_flops = record.peak_flops;
  status_.loss = record.loss;
  status_.gradient_norm = record.gradient_norm;
  status_.step_s = record.time_s;
  status_.total_ns = record.times.total_ns;
  status_.compute_ns = record.times.compute_ns;
  status_.exposed_io_ns = record.times.exposed_io_ns;
  status_.exposed_optimizer_ns = record.times.exposed_optimizer_ns;
  status_.other_ns = record.times.other_ns;
  status_.wait_ns = record.times.wait_ns;
  status_.gathered_bytes = record.rank_traffic.gathered_bytes;
  status_.reduced_bytes = record.rank_traffic.reduced_bytes;
  const TraceCounts counts = trace_counts();
  for (std::size_t link = 0; link < kStatusLinks; ++link) {
    const auto kind = static_cast<std::size_t>(kLinkKinds[link]);
    status_.links[link] = {.size_bytes = counts[kind].size_bytes - counts_[kind].size_bytes,
                           .busy_ns = counts[kind].busy_ns - counts_[kind].busy_ns};
  }
  counts_ = counts;
  // As the run's own lines say it.
  status_.links[0].size_bytes = record.nvme_read_bytes;
  status_.links[1].size_bytes = record.nvme_write_bytes;
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    status_.tiers[tier].in_use_bytes = 0;
    for (const PoolMarks& marks : report.buffers)
      status_.tiers[tier].in_use_bytes =
          std::max(status_.tiers[tier].in_use_bytes, marks.tier_bytes[tier]);
  }
  page_->write(status_);
}

}  // namespace sluice
