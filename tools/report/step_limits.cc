#include "tools/report/step_limits.h"

#include <sluice/error.h>
#include "engine/bound/planned_step.h"
#include "engine/engine_access.h"
#include "tools/report/plan_rates.h"

namespace sluice {
namespace {

double rate_of(double amount, std::int64_t busy_ns) {
  return busy_ns <= 0 ? 0 : amount * 1e9 / static_cast<double>(busy_ns);
}

Rates calibrated_rates(const LimitCalibration& calibration, const StateFormat& format) {
  PlanRateOptions options;
  options.io_file = calibration.file;
  options.io_paths = calibration.paths;
  options.sharing_ranks = calibration.sharing_ranks;
  return plan_rates(options, format).rates;
}

}  // namespace

LimitMeter::LimitMeter(const Engine& engine, ModelSpec model, std::uint32_t micro_batches,
                       MicroBatchOrder order, LimitCalibration calibration,
                       std::uint32_t commit_every)
    : engine_(engine),
      model_(std::move(model)),
      micro_batches_(micro_batches),
      order_(order),
      calibration_(std::move(calibration)),
      commit_every_(commit_every) {
  if (calibration_.file.empty()) return;
  try {
    (void)calibrated_rates(calibration_, layout_of(engine).format());
    is_calibrated_ = true;
  } catch (const Error&) {
    // The file is mainly for the weights of paths, which need less of it.
  }
}

void LimitMeter::note(const StepReport& report) {
  policy_ = report.policy;
  const TraceCounts now = trace_counts();
  if (++steps_ == 1) {
    first_ = now;
    return;
  }
  storage_bytes_ += report.nvme_read_bytes + report.nvme_write_bytes;
  storage_busy_ns_ +=
      report.times.work.busy(Work::kStorage) + report.times.work_before.busy(Work::kStorage);
  // Evaluations copy, too.
  constexpr auto kCopy = static_cast<std::size_t>(TraceKind::kCopyToDevice);
  copied_bytes_ += now[kCopy].size_bytes - begin_[kCopy].size_bytes;
  copy_busy_ns_ += report.times.work.busy(Work::kCopyUp);
}

Rates LimitMeter::rates() const {
  const StateFormat& format = layout_of(engine_).format();
  // Only updates have these, so the counters are theirs, in steps and between them.
  const TraceCounts counts = trace_counts();
  const auto rate_in = [&](TraceKind kind, double bytes_each) {
    const auto index = static_cast<std::size_t>(kind);
    return rate_of(
        static_cast<double>(counts[index].size_bytes - first_[index].size_bytes) / bytes_each,
        static_cast<std::int64_t>(counts[index].busy_ns - first_[index].busy_ns));
  };
  Rates rates;
  // Reads and writes share the time in which either was under way.
  rates.duplex = Duplex::kHalf;
  rates.read_bytes_per_second = rates.write_bytes_per_second =
      rate_of(static_cast<double>(storage_bytes_), storage_busy_ns_);
  if (is_calibrated_) {
    const Rates measured = calibrated_rates(calibration_, format);
    rates.duplex = measured.duplex;
    rates.read_bytes_per_second = measured.read_bytes_per_second;
    rates.write_bytes_per_second = measured.write_bytes_per_second;
  }
  rates.up_bytes_per_second = rates.down_bytes_per_second =
      rate_of(static_cast<double>(copied_bytes_), copy_busy_ns_);
  rates.adam_parameters_per_second = rate_in(TraceKind::kAdam, format.state_bytes_per_element());
  rates.norm_parameters_per_second =
      rate_in(TraceKind::kNorm, static_cast<double>(format.gradient_bytes()));
  rates.units = engine_.unit_times();
  return rates;
}

std::optional<StepLimits> LimitMeter::limits() const {
  if (steps_ < 3) return std::nullopt;
  StepLimits limits{.least = {}, .bound = {}, .rates = rates(), .policy = policy_};
  const PlannedStep step({.model = model_, .micro_batches = micro_batches_, .order = order_},
                         layout_of(engine_), placement_of(engine_), commit_every_);
  const StepShape shape = step.shape(limits.rates);
  limits.least = minimum_step(shape);
  limits.bound = bound_step(shape, policy_);
  return limits;
}

}  // namespace sluice
