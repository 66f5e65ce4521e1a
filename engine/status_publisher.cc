#include <sluice/status_publisher.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/engine.h>

#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/run/status_page.h"

namespace sluice {
namespace {

constexpr std::array kLinkKinds{TraceKind::kRead, TraceKind::kWrite, TraceKind::kCopyToDevice,
                                TraceKind::kCopyToHost};
static_assert(kLinkKinds.size() == kStatusLinks);

// The process in which a publisher has the page; 0 = none. A forked child finds its parent here.
std::atomic<pid_t> page_owner = 0;

bool take_page() {
  const pid_t own = ::getpid();
  return page_owner.exchange(own) != own;
}

// A path that is too long keeps its end, which tells drives apart. Control characters would change
// a terminal.
std::array<char, 64> shown_path(std::string_view path, const std::string& mark = {}) {
  const std::string cut = mark + "...";
  std::array<char, 64> shown{};
  auto place = shown.begin();
  if (path.size() >= shown.size() || !mark.empty()) {
    const std::size_t room = shown.size() - 1 - cut.size();
    path.remove_prefix(path.size() - std::min(path.size(), room));
    // The rest of a character whose beginning is cut off.
    while (!path.empty() && (static_cast<unsigned char>(path.front()) & 0xc0) == 0x80)
      path.remove_prefix(1);
    place = std::ranges::copy(cut, place).out;
  }
  std::ranges::transform(path, place, [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  });
  return shown;
}

RunStatus begin_of(const Engine& engine) {
  RunStatus status{};
  status.rank = engine.rank();
  status.ranks = engine.rank_count();
  status.loss = std::numeric_limits<double>::quiet_NaN();
  const Placement& placement = placement_of(engine);
  status.tiers = {{{.pool_bytes = placement.device_bytes(),
                    .budget_bytes = placement.device_budget_bytes,
                    .in_use_bytes = 0},
                   {.pool_bytes = placement.host_bytes(),
                    .budget_bytes = placement.host_budget_bytes,
                    .in_use_bytes = 0},
                   {.pool_bytes = placement.nvme_bytes(), .budget_bytes = 0, .in_use_bytes = 0}}};
  if (placement.nvme_bytes() != 0) {
    const std::vector<std::string>& paths = engine.storage_paths();
    status.drive_count = static_cast<std::uint32_t>(std::min(paths.size(), kStatusDrives));
    for (std::uint32_t drive = 0; drive < status.drive_count; ++drive)
      status.drives[drive].path = shown_path(paths[drive]);
    // Ends alone may be the same; then the drives have their numbers before them.
    const auto shown = status.drives;
    for (std::uint32_t drive = 0; drive < status.drive_count; ++drive) {
      if (std::ranges::count(std::span(shown).first(status.drive_count), shown[drive].path,
                             &DriveStatus::path) > 1)
        status.drives[drive].path = shown_path(paths[drive], std::to_string(drive));
    }
  }
  return status;
}

}  // namespace

struct StatusPublisher::Parts {
  using Clock = std::chrono::steady_clock;

  Parts(const std::string& folder, const Engine& engine)
      : page(folder), status(begin_of(engine)), counts(trace_counts()) {}
  ~Parts() { page_owner = 0; }

  void add_links(const StepReport& report) {
    const TraceCounts now = trace_counts();
    for (std::size_t link = 0; link < kStatusLinks; ++link) {
      const auto kind = static_cast<std::size_t>(kLinkKinds[link]);
      status.links[link] = {
          .size_bytes = counted[link].size_bytes + now[kind].size_bytes - counts[kind].size_bytes,
          .busy_ns = counted[link].busy_ns + now[kind].busy_ns - counts[kind].busy_ns};
    }
    counts = now;
    counted = {};
    // As the report says it: without saves, and of this engine alone.
    status.links[0].size_bytes = report.nvme_read_bytes;
    status.links[1].size_bytes = report.nvme_write_bytes;
    for (std::size_t drive = 0; drive < report.drives.size() && drive < status.drive_count;
         ++drive) {
      status.drives[drive].read_bytes = report.drives[drive].read_bytes;
      status.drives[drive].write_bytes = report.drives[drive].write_bytes;
    }
  }

  // The bytes that links carry outside of training are of no step.
  void change_phase(RunPhase phase) {
    const bool trained = status.phase == RunPhase::kTraining;
    const bool trains = phase == RunPhase::kTraining;
    status.phase = phase;
    if (trained == trains) return;
    const TraceCounts now = trace_counts();
    for (std::size_t link = 0; link < kStatusLinks && trained; ++link) {
      const auto kind = static_cast<std::size_t>(kLinkKinds[link]);
      counted[link].size_bytes += now[kind].size_bytes - counts[kind].size_bytes;
      counted[link].busy_ns += now[kind].busy_ns - counts[kind].busy_ns;
    }
    counts = now;
  }

  StatusPage page;
  RunStatus status;
  TraceCounts counts;  // at the end of the last step, or when the phase changed after it
  std::array<LinkStatus, kStatusLinks> counted{};  // between these two
  std::optional<Clock::time_point> last;           // when it ended
};

std::string_view name_of(RunPhase phase) {
  switch (phase) {
    case RunPhase::kStarting: return "starting";
    case RunPhase::kTraining: return "training";
    case RunPhase::kEvaluating: return "evaluating";
    case RunPhase::kSaving: return "saving";
  }
  return "unknown";
}

StatusPublisher::StatusPublisher(const Engine& engine, const StatusOptions& options) {
  const std::string folder = status_folder();
  if (folder.empty()) return;
  if (!take_page()) {
    problem_ =
        "`sluice top` shows another engine of this process; a process has one page, so this one is "
        "not shown";
    return;
  }
  try {
    parts_ = std::make_unique<Parts>(folder, engine);
  } catch (const std::exception& error) {
    page_owner = 0;
    problem_ = error.what();
    return;
  }
  set_options(options);
}

StatusPublisher::~StatusPublisher() = default;

void StatusPublisher::set_options(const StatusOptions& options) {
  if (parts_ == nullptr) return;
  parts_->status.steps = options.steps;
  parts_->status.flops_per_token = options.flops_per_token;
  parts_->page.write(parts_->status);
}

void StatusPublisher::enter(RunPhase phase) {
  if (parts_ == nullptr) return;
  parts_->change_phase(phase);
  parts_->page.write(parts_->status);
}

void StatusPublisher::enter(RunPhase phase, std::uint64_t step) {
  if (parts_ == nullptr) return;
  parts_->status.step = step;
  enter(phase);
}

void StatusPublisher::step_ended(const StepReport& report, const StepFigures& figures) {
  if (parts_ == nullptr) return;
  const auto now = Parts::Clock::now();
  RunStatus& status = parts_->status;
  status.phase = RunPhase::kTraining;
  status.step = figures.step != 0 ? figures.step : report.step;
  status.tokens = figures.tokens;
  status.peak_flops = figures.peak_flops;
  status.loss = figures.loss;
  status.gradient_norm = report.gradient_norm;
  if (figures.time_s > 0)
    status.step_s = figures.time_s;
  else if (parts_->last)
    status.step_s = std::chrono::duration<double>(now - *parts_->last).count();
  else
    status.step_s = static_cast<double>(report.times.total_ns) * 1e-9;
  parts_->last = now;
  status.total_ns = report.times.total_ns;
  status.compute_ns = report.times.compute_ns;
  status.exposed_io_ns = report.times.exposed_io_ns;
  status.exposed_optimizer_ns = report.times.exposed_optimizer_ns;
  status.other_ns = report.times.other_ns;
  status.wait_ns = report.times.wait_ns;
  status.gathered_bytes = report.rank_traffic.gathered_bytes;
  status.reduced_bytes = report.rank_traffic.reduced_bytes;
  parts_->add_links(report);
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    status.tiers[tier].in_use_bytes = 0;
    for (const PoolMarks& marks : report.buffers)
      status.tiers[tier].in_use_bytes =
          std::max(status.tiers[tier].in_use_bytes, marks.tier_bytes[tier]);
  }
  parts_->page.write(status);
}

}  // namespace sluice
