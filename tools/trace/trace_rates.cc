#include "tools/trace/trace_rates.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "tools/trace/trace_steps.h"

namespace sluice {
namespace {

// A drive whose transfers, one after another at the fitted rate, come to this share of the time in
// which it was at work is one that serves them so.
constexpr double kFitFrom = 0.5;
constexpr double kFitTo = 1.05;

struct Amount {
  double size_bytes = 0;
  double busy_ns = 0;

  double rate() const { return busy_ns <= 0 ? 0 : size_bytes * 1e9 / busy_ns; }
};

// The middle of the transfers of one plane and direction.
struct Typical {
  double size_bytes = 0;
  double device_ns = 0;
};

Typical typical_of(const std::vector<const TraceRecord*>& records) {
  std::vector<std::uint64_t> sizes, times;
  for (const TraceRecord* record : records) {
    sizes.push_back(record->size_bytes);
    times.push_back(record->moved_ns - record->started_ns);
  }
  return {.size_bytes = static_cast<double>(percentiles_of(sizes).p50_ns),
          .device_ns = static_cast<double>(percentiles_of(times).p50_ns)};
}

// One direction: by the planes' two sizes, time = latency + size / rate.
struct Direction {
  std::array<std::vector<const TraceRecord*>, 2> planes;
  IntervalSet busy;
  double size_bytes = 0;
  double rate = 0;
  double latency_ns = 0;
  bool is_fitted = false;

  void fit(double all_bytes, double all_busy_ns) {
    rate = busy.busy_ns() == 0 ? 0 : size_bytes * 1e9 / static_cast<double>(busy.busy_ns());
    if (planes[0].empty() || planes[1].empty()) return;
    const Typical small = typical_of(planes[0]), large = typical_of(planes[1]);
    const double more_ns = large.device_ns - small.device_ns;
    if (large.size_bytes <= small.size_bytes || more_ns <= 0) return;
    const double fitted = (large.size_bytes - small.size_bytes) * 1e9 / more_ns;
    const double fitted_latency_ns = small.device_ns - small.size_bytes * 1e9 / fitted;
    const double share = all_bytes * 1e9 / fitted / all_busy_ns;
    if (fitted_latency_ns < -0.05 * small.device_ns || share < kFitFrom || share > kFitTo) return;
    rate = fitted;
    latency_ns = std::max(0.0, fitted_latency_ns);
    is_fitted = true;
  }
};

void take_storage(const std::vector<TraceRecord>& records, std::uint64_t from_ns, Rates& rates) {
  std::array<Direction, 2> directions;  // reads, writes
  IntervalSet both;
  for (const TraceRecord& record : records) {
    if (record.kind > TraceKind::kWrite || record.begin_ns < from_ns) continue;
    Direction& direction = directions[record.kind == TraceKind::kWrite ? 1 : 0];
    if (record.detail < kTraceActivations) direction.planes[record.detail & 1].push_back(&record);
    direction.busy.add(record.started_ns, record.moved_ns);
    direction.size_bytes += static_cast<double>(record.size_bytes);
    both.add(record.started_ns, record.moved_ns);
  }
  for (Direction& direction : directions) direction.busy.seal();
  both.seal();
  const auto busy_ns = static_cast<double>(both.busy_ns());
  if (busy_ns == 0) return;
  // How much of the time in which the drive reads it also writes: a drive that does one thing at a
  // time hardly ever does.
  double beside_ns = 0;
  for (const auto& [begin_ns, end_ns] : directions[0].busy.joined())
    beside_ns += static_cast<double>(directions[1].busy.busy_ns(begin_ns, end_ns));
  const double read_ns = static_cast<double>(directions[0].busy.busy_ns());
  const double write_ns = static_cast<double>(directions[1].busy.busy_ns());
  const double all_bytes = directions[0].size_bytes + directions[1].size_bytes;
  directions[0].fit(directions[0].size_bytes, read_ns);
  directions[1].fit(directions[1].size_bytes, write_ns);
  const bool is_serial = beside_ns < 0.1 * std::min(read_ns, write_ns);
  const bool both_fitted = directions[0].is_fitted && directions[1].is_fitted;
  // The time of two fitted directions one after the other, against the time that both took.
  const double in_turn_ns = directions[0].size_bytes * 1e9 / std::max(1.0, directions[0].rate) +
                            directions[1].size_bytes * 1e9 / std::max(1.0, directions[1].rate);
  const bool is_half = is_serial || !both_fitted || in_turn_ns < kFitTo * busy_ns;
  rates.duplex = is_half ? Duplex::kHalf : Duplex::kFull;
  rates.read_bytes_per_second = directions[0].rate;
  rates.write_bytes_per_second = directions[1].rate;
  rates.latency_s = std::max(directions[0].latency_ns, directions[1].latency_ns) * 1e-9;
  if (is_half && !both_fitted) {
    rates.read_bytes_per_second = rates.write_bytes_per_second = all_bytes * 1e9 / busy_ns;
    rates.latency_s = 0;
  }
}

}  // namespace

Rates rates_of(const TraceAnalysis& analysis, const Layout& layout) {
  const std::uint64_t from_ns =
      analysis.steps().size() > 1 ? analysis.steps()[first_steady(analysis)].begin_ns : 0;
  const StateFormat& format = layout.format();
  Rates rates;
  take_storage(analysis.trace().records, from_ns, rates);
  std::array<Amount, kTraceKinds> amounts;
  struct Times {
    double sum_s[2] = {0, 0};
    double uses[2] = {0, 0};
  };
  std::vector<Times> units(layout.units().size());
  std::set<std::pair<std::size_t, std::uint32_t>> uses;  // by the step's place
  for (const TraceRecord& record : analysis.trace().records) {
    if (record.begin_ns < from_ns) continue;
    const auto duration_ns = static_cast<double>(record.end_ns - record.begin_ns);
    Amount& amount = amounts[static_cast<std::size_t>(record.kind)];
    amount.size_bytes += static_cast<double>(record.size_bytes);
    const bool is_copy =
        record.kind == TraceKind::kCopyToDevice || record.kind == TraceKind::kCopyToHost;
    amount.busy_ns +=
        is_copy ? static_cast<double>(record.moved_ns - record.started_ns) : duration_ns;
    if (record.kind != TraceKind::kCompute || record.unit >= units.size() || record.detail > 1)
      continue;
    units[record.unit].sum_s[record.detail] += duration_ns * 1e-9;
    // A use that waited for an activation has more than one record. Skipped steps have the number
    // of the step after them.
    const std::optional<std::size_t> place = place_of(record, analysis.steps());
    if (place && uses.emplace(*place, record.use).second) ++units[record.unit].uses[record.detail];
  }
  const auto rate = [&](TraceKind kind) { return amounts[static_cast<std::size_t>(kind)].rate(); };
  rates.up_bytes_per_second = rate(TraceKind::kCopyToDevice);
  rates.down_bytes_per_second = rate(TraceKind::kCopyToHost);
  rates.adam_parameters_per_second = rate(TraceKind::kAdam) / format.state_bytes_per_element();
  rates.norm_parameters_per_second =
      rate(TraceKind::kNorm) / static_cast<double>(format.gradient_bytes());
  for (const Times& unit : units) {
    const auto mean = [&](std::size_t pass) {
      return unit.uses[pass] == 0 ? 0 : unit.sum_s[pass] / unit.uses[pass];
    };
    rates.units.push_back({.forward_s = mean(0), .backward_s = mean(1)});
  }
  return rates;
}

}  // namespace sluice
