#include "tools/report/status_text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "base/utf8.h"
#include "tools/report/step_log.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

double seconds(std::int64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-9;
}

double per_step_second(std::uint64_t size_bytes, const RunStatus& status) {
  return status.step_s > 0 ? static_cast<double>(size_bytes) / status.step_s : 0;
}

double percent(std::int64_t part_ns, const RunStatus& status) {
  return status.total_ns == 0
             ? 0
             : 100 * static_cast<double>(part_ns) / static_cast<double>(status.total_ns);
}

const LinkStatus& link_of(const RunStatus& status, StatusLink link) {
  return status.links[static_cast<std::size_t>(link)];
}

std::span<const DriveStatus> drives_of(const RunStatus& status) {
  return std::span(status.drives)
      .first(std::min<std::size_t>(status.drive_count, status.drives.size()));
}

std::string moved_text(const RunStatus& status, std::uint64_t size_bytes) {
  return fmt::format("{}, {:.2f} GB/s", format_bytes(size_bytes),
                     1e-9 * per_step_second(size_bytes, status));
}

std::string link_text(const RunStatus& status, StatusLink link) {
  return moved_text(status, link_of(status, link).size_bytes);
}

// Leaves out figures that are not known.
std::string rates_text(const RunStatus& status) {
  std::string text = "  ";
  if (!std::isnan(status.loss)) text += fmt::format("loss {:.4f}  ", status.loss);
  text += fmt::format("norm {:.3f}  ", status.gradient_norm);
  if (status.tokens != 0) text += fmt::format("{:.0f} tok/s  ", status.tokens_per_s());
  if (status.flops_per_s() > 0)
    text += fmt::format("{:.3g} TFLOP/s  ", 1e-12 * status.flops_per_s());
  if (status.peak_flops > 0) text += fmt::format("MFU {:.1f} %  ", 100 * status.mfu());
  return text + fmt::format("{:.3f} s per step\n", status.step_s);
}

// The drives one by one, where there are several.
std::string storage_text(const RunStatus& status) {
  const std::span<const DriveStatus> drives = drives_of(status);
  std::string text = fmt::format("  storage{}: read {}; written {}\n",
                                 drives.size() == 1 ? " " + std::string(drives.front().name()) : "",
                                 link_text(status, StatusLink::kStorageRead),
                                 link_text(status, StatusLink::kStorageWrite));
  if (drives.size() < 2) return text;
  for (const DriveStatus& drive : drives)
    text +=
        fmt::format("    {}: read {}; written {}\n", drive.name(),
                    moved_text(status, drive.read_bytes), moved_text(status, drive.write_bytes));
  return text;
}

std::string step_text(const RunStatus& status) {
  std::string text = rates_text(status);
  text += fmt::format(
      "  compute {:.1f} %  exposed I/O {:.1f} %  exposed optimizer {:.1f} %  other {:.1f} %\n",
      percent(status.compute_ns, status), percent(status.exposed_io_ns, status),
      percent(status.exposed_optimizer_ns, status), percent(status.other_ns, status));
  if (const TraceReason longest = status.longest_wait(); longest != TraceReason::kNone)
    text += fmt::format("  waits most for: {}, {:.3f} s of the step\n", name_of(longest),
                        seconds(status.wait_ns[static_cast<std::size_t>(longest)]));
  text += storage_text(status);
  text += fmt::format("  copies: to device {}; from device {}\n",
                      link_text(status, StatusLink::kCopyToDevice),
                      link_text(status, StatusLink::kCopyFromDevice));
  if (status.ranks > 1)
    text +=
        fmt::format("  ranks: gathered {}; reduced {}\n", moved_text(status, status.gathered_bytes),
                    moved_text(status, status.reduced_bytes));
  return text;
}

// "4 of 9", or "4" where the end is not known.
std::string steps_text(const RunStatus& status, std::string_view between) {
  return status.steps == 0 ? fmt::format("{}", status.step)
                           : fmt::format("{}{}{}", status.step, between, status.steps);
}

std::string run_text(const RunStatus& status, std::int64_t now_unix_ns) {
  std::string text = fmt::format("process {}", status.pid);
  if (status.ranks > 1) text += fmt::format(", rank {} of {}", status.rank, status.ranks);
  text += fmt::format(": {}, step {}, {:.1f} s ago\n", name_of(status.phase),
                      steps_text(status, "/"), seconds(now_unix_ns - status.updated_unix_ns));
  if (status.step_s > 0) text += step_text(status);
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    const TierStatus& memory = status.tiers[tier];
    text += fmt::format("  {:<7} {} in use at most, {} planned", name_of(static_cast<Tier>(tier)),
                        format_bytes(memory.in_use_bytes), format_bytes(memory.pool_bytes));
    if (memory.budget_bytes != 0)
      text += fmt::format(", budget {}", format_bytes(memory.budget_bytes));
    text += "\n";
  }
  return text;
}

Json run_json(const RunStatus& status, std::int64_t now_unix_ns) {
  Json run{{"pid", status.pid},
           {"rank", status.rank},
           {"ranks", status.ranks},
           {"phase", name_of(status.phase)},
           {"started_unix_s", seconds(status.started_unix_ns)},
           {"age_s", seconds(now_unix_ns - status.updated_unix_ns)},
           {"step", status.step},
           {"steps", status.steps == 0 ? Json(nullptr) : Json(status.steps)},
           {"tokens", status.tokens == 0 ? Json(nullptr) : Json(status.tokens)},
           {"loss", json_number(status.loss)},
           {"gradient_norm", json_number(status.gradient_norm)},
           {"time_s", status.step_s},
           {"tokens_per_s", status.tokens == 0 ? Json(nullptr) : Json(status.tokens_per_s())},
           {"flops_per_s", status.flops_per_s() == 0 ? Json(nullptr) : Json(status.flops_per_s())},
           {"mfu", status.peak_flops == 0 ? Json(nullptr) : Json(status.mfu())},
           {"total_s", seconds(status.total_ns)},
           {"compute_s", seconds(status.compute_ns)},
           {"exposed_io_s", seconds(status.exposed_io_ns)},
           {"exposed_optimizer_s", seconds(status.exposed_optimizer_ns)},
           {"other_s", seconds(status.other_ns)},
           {"gathered_bytes", status.gathered_bytes},
           {"reduced_bytes", status.reduced_bytes},
           {"gathered_bytes_per_s", per_step_second(status.gathered_bytes, status)},
           {"reduced_bytes_per_s", per_step_second(status.reduced_bytes, status)}};
  const TraceReason longest = status.longest_wait();
  run["waits_most_for"] = longest == TraceReason::kNone ? Json(nullptr) : Json(name_of(longest));
  run["waits_s"] = Json::object();
  for (std::size_t reason = 1; reason < kTraceReasons; ++reason) {
    if (status.wait_ns[reason] != 0)
      run["waits_s"][std::string(name_of(static_cast<TraceReason>(reason)))] =
          seconds(status.wait_ns[reason]);
  }
  for (std::size_t link = 0; link < kStatusLinks; ++link) {
    const LinkStatus& moved = status.links[link];
    run["links"][std::string(name_of(static_cast<StatusLink>(link)))] = {
        {"bytes", moved.size_bytes},
        {"busy_s", 1e-9 * static_cast<double>(moved.busy_ns)},
        {"bytes_per_s", per_step_second(moved.size_bytes, status)}};
  }
  run["drives"] = Json::array();
  for (const DriveStatus& drive : drives_of(status))
    run["drives"].push_back({{"path", drive.name()},
                             {"read_bytes", drive.read_bytes},
                             {"read_bytes_per_s", per_step_second(drive.read_bytes, status)},
                             {"write_bytes", drive.write_bytes},
                             {"write_bytes_per_s", per_step_second(drive.write_bytes, status)}});
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    const TierStatus& memory = status.tiers[tier];
    run["memory"][std::string(name_of(static_cast<Tier>(tier)))] = {
        {"in_use_bytes", memory.in_use_bytes},
        {"pool_bytes", memory.pool_bytes},
        {"budget_bytes", memory.budget_bytes == 0 ? Json(nullptr) : Json(memory.budget_bytes)}};
  }
  return run;
}

// As Prometheus writes it between quotes.
std::string label_value(std::string_view text) {
  std::string value;
  for (const char c : valid_utf8(text)) {
    if (c == '\\' || c == '"') value += '\\';
    value += c;
  }
  return value;
}

// One metric: its samples of every run, with the labels behind the process and the rank.
struct Metric {
  const char* name;
  const char* help;
  std::function<void(const RunStatus&, const std::function<void(std::string, double)>&)> samples;
};

const std::vector<Metric>& metrics() {
  static const std::vector<Metric> all{
      {"step", "Steps that have ended.",
       [](const RunStatus& run, const auto& add) { add("", static_cast<double>(run.step)); }},
      {"loss", "Loss of the last step.",
       [](const RunStatus& run, const auto& add) { add("", run.loss); }},
      {"tokens_per_second", "Tokens of all ranks, in the last step.",
       [](const RunStatus& run, const auto& add) {
         if (run.tokens != 0) add("", run.tokens_per_s());
       }},
      {"flops_per_second", "Operations of the model's products, of all ranks, in the last step.",
       [](const RunStatus& run, const auto& add) {
         if (run.flops_per_s() > 0) add("", run.flops_per_s());
       }},
      {"mfu", "The part of the peak rate that the last step reached.",
       [](const RunStatus& run, const auto& add) {
         if (run.peak_flops > 0) add("", run.mfu());
       }},
      {"step_seconds", "Where the time of the last step went.",
       [](const RunStatus& run, const auto& add) {
         add(",part=\"compute\"", seconds(run.compute_ns));
         add(",part=\"exposed_io\"", seconds(run.exposed_io_ns));
         add(",part=\"exposed_optimizer\"", seconds(run.exposed_optimizer_ns));
         add(",part=\"other\"", seconds(run.other_ns));
       }},
      {"link_bytes", "Bytes that a link moved in the last step.",
       [](const RunStatus& run, const auto& add) {
         for (std::size_t link = 0; link < kStatusLinks; ++link)
           add(fmt::format(",link=\"{}\"", name_of(static_cast<StatusLink>(link))),
               static_cast<double>(run.links[link].size_bytes));
         add(",link=\"gathered\"", static_cast<double>(run.gathered_bytes));
         add(",link=\"reduced\"", static_cast<double>(run.reduced_bytes));
       }},
      {"drive_bytes", "Bytes that a path of storage.paths moved in the last step.",
       [](const RunStatus& run, const auto& add) {
         for (const DriveStatus& drive : drives_of(run)) {
           const std::string label = label_value(drive.name());
           add(fmt::format(",drive=\"{}\",direction=\"read\"", label),
               static_cast<double>(drive.read_bytes));
           add(fmt::format(",drive=\"{}\",direction=\"write\"", label),
               static_cast<double>(drive.write_bytes));
         }
       }},
      {"memory_bytes", "The most in use of a tier's pools.",
       [](const RunStatus& run, const auto& add) {
         for (std::size_t tier = 0; tier < kTiers; ++tier)
           add(fmt::format(",tier=\"{}\"", name_of(static_cast<Tier>(tier))),
               static_cast<double>(run.tiers[tier].in_use_bytes));
       }}};
  return all;
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

}  // namespace

std::string status_view(std::span<const FoundPage> pages, std::int64_t now_unix_ns) {
  std::string text;
  for (const FoundPage& page : pages) {
    if (!page.problem.empty())
      text += fmt::format("page {}: {}\n", page.name, page.problem);
    else if (!page.is_alive)
      text += fmt::format("process {} is gone: killed or crashed behind step {}\n", page.name,
                          steps_text(*page.status, " of "));
    else
      text += run_text(*page.status, now_unix_ns);
  }
  return text;
}

std::string status_json(std::span<const FoundPage> pages, std::int64_t now_unix_ns) {
  Json root{{"runs", Json::array()}, {"ended", Json::array()}, {"problems", Json::array()}};
  for (const FoundPage& page : pages) {
    if (!page.problem.empty())
      root["problems"].push_back({{"page", page.name}, {"problem", page.problem}});
    else
      root[page.is_alive ? "runs" : "ended"].push_back(run_json(*page.status, now_unix_ns));
  }
  // A path need not be UTF-8.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string status_prometheus(std::span<const FoundPage> pages, std::int64_t now_unix_ns) {
  std::string text;
  const auto add_metric = [&](const Metric& metric) {
    text +=
        fmt::format("# HELP sluice_{0} {1}\n# TYPE sluice_{0} gauge\n", metric.name, metric.help);
    for (const FoundPage& page : pages) {
      if (!page.status || !page.is_alive) continue;
      const RunStatus& run = *page.status;
      metric.samples(run, [&](const std::string& labels, double value) {
        text += fmt::format("sluice_{}{{pid=\"{}\",rank=\"{}\"{}}} {}\n", metric.name, run.pid,
                            run.rank, labels, number_text(value));
      });
    }
  };
  for (const Metric& metric : metrics()) add_metric(metric);
  add_metric({"age_seconds", "Time since the page was written.",
              [&](const RunStatus& run, const auto& add) {
                add("", seconds(now_unix_ns - run.updated_unix_ns));
              }});
  return text;
}

}  // namespace sluice
