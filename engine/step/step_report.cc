#include <sluice/step_report.h>

#include <fmt/format.h>

#include <sluice/units.h>

namespace sluice {

std::string to_string(const StepReport& report) {
  const double total_ns = static_cast<double>(report.times.total_ns);
  const auto percent = [&](std::int64_t part_ns) {
    return total_ns == 0 ? 0.0 : 100 * static_cast<double>(part_ns) / total_ns;
  };
  std::string line = fmt::format(
      "step {}: norm {:.4g}, {:.3f} ms (compute {:.0f} %, I/O {:.0f} %, optimizer {:.0f} %, other "
      "{:.0f} %), read {}, written {}, {:.0f} % hidden",
      report.step, report.gradient_norm, total_ns * 1e-6, percent(report.times.compute_ns),
      percent(report.times.exposed_io_ns), percent(report.times.exposed_optimizer_ns),
      percent(report.times.other_ns), format_bytes(report.nvme_read_bytes),
      format_bytes(report.nvme_write_bytes), 100 * report.times.hidden_share());
  if (report.skipped) line += ", skipped: a gradient was not finite";
  if (report.clip_factor != 1) line += fmt::format(", clipped by {:.4g}", report.clip_factor);
  return line;
}

}  // namespace sluice
