#include "tools/report/step_limits.h"

#include <sluice/error.h>
#include "engine/bound/planned_step.h"
#include "tools/report/plan_rates.h"

namespace sluice {
namespace {

double rate_of(double amount, std::int64_t busy_ns) {
  return busy_ns <= 0 ? 0 : amount * 1e9 / static_cast<double>(busy_ns);
}

Rates calibrated_rates(const std::string& file, const StateFormat& format) {
  PlanRateOptions options;
  options.io_file = file;
  return plan_rates(options, format).rates;
}

}  // namespace

LimitMeter::LimitMeter(const Engine& engine, ModelSpec model, std::uint32_t micro_batches,
                       MicroBatchOrder order, std::string calibration, std::uint32_t commit_every)
    : engine_(engine),
      model_(std::move(model)),
      micro_batches_(micro_batches),
      order_(order),
      calibration_(std::move(calibration)),
      commit_every_(commit_every) {
  if (calibration_.empty()) return;
  try {
    (void)calibrated_rates(calibration_, engine.layout().format());
    is_calibrated_ = true;
  } catch (const Error&) {
    // The file is mainly for the weights of paths, which need less of it.
  }
}

void LimitMeter::note(const StepReport& report) {
  policy_ = report.policy;
  if (++steps_ == 1) {
    begin_ = trace_counts();
    return;
  }
  storage_bytes_ += report.nvme_read_bytes + report.nvme_write_bytes;
  const WorkTimes& work = report.times.work;
  for (std::size_t i = 0; i < kWorkCount; ++i) work_.busy_ns[i] += work.busy_ns[i];
}

Rates LimitMeter::rates() const {
  const StateFormat& format = engine_.layout().format();
  const TraceCounts counts = trace_counts();
  const auto size_bytes = [&](TraceKind kind) {
    const auto index = static_cast<std::size_t>(kind);
    return static_cast<double>(counts[index].size_bytes - begin_[index].size_bytes);
  };
  const auto busy_ns = [&](TraceKind kind) {
    const auto index = static_cast<std::size_t>(kind);
    return static_cast<std::int64_t>(counts[index].busy_ns - begin_[index].busy_ns);
  };
  Rates rates;
  // Reads and writes share the time in which either was under way.
  rates.duplex = Duplex::kHalf;
  rates.read_bytes_per_second = rates.write_bytes_per_second =
      rate_of(static_cast<double>(storage_bytes_), work_.busy(Work::kStorage));
  if (is_calibrated_) {
    const Rates measured = calibrated_rates(calibration_, format);
    rates.duplex = measured.duplex;
    rates.read_bytes_per_second = measured.read_bytes_per_second;
    rates.write_bytes_per_second = measured.write_bytes_per_second;
  }
  rates.up_bytes_per_second = rates.down_bytes_per_second =
      rate_of(size_bytes(TraceKind::kCopyToDevice), work_.busy(Work::kCopyUp));
  const double state_bytes = format.state_bytes_per_element();
  rates.adam_parameters_per_second =
      rate_of(size_bytes(TraceKind::kAdam) / state_bytes, busy_ns(TraceKind::kAdam));
  const auto gradient_bytes = static_cast<double>(format.gradient_bytes());
  rates.norm_parameters_per_second =
      rate_of(size_bytes(TraceKind::kNorm) / gradient_bytes, busy_ns(TraceKind::kNorm));
  rates.units = engine_.unit_times();
  return rates;
}

std::optional<StepLimits> LimitMeter::limits() const {
  if (steps_ < 3) return std::nullopt;
  StepLimits limits{.least = {}, .bound = {}, .rates = rates(), .policy = policy_};
  const PlannedStep step({.model = model_, .micro_batches = micro_batches_, .order = order_},
                         engine_.layout(), engine_.placement(), commit_every_);
  const StepShape shape = step.shape(limits.rates);
  limits.least = minimum_step(shape);
  limits.bound = bound_step(shape, policy_);
  return limits;
}

}  // namespace sluice
