#include "tools/commands/bench_matrix_command.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/bench/matrix_bench.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/bench_plots.h"
#include "tools/report/median.h"
#include "tools/report/rank_memory.h"

namespace sluice {
namespace {

constexpr unsigned kWarmStepsOfACell = 2;

// Memory that the plan does not have at all is 100 % off.
double percent_off(double measured, double planned) {
  if (measured == planned) return 0;
  if (planned == 0) return 100;
  return 100 * (measured / planned - 1);
}

// The tier's use, in per cent of the plan's, that is farthest from it over all phases.
double memory_off(const PhaseMarks& measured, const PhaseMarks& planned) {
  double worst = 0;
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
      const double off = percent_off(static_cast<double>(measured[phase].tier_bytes[tier]),
                                     static_cast<double>(planned[phase].tier_bytes[tier]));
      if (std::abs(off) > std::abs(worst)) worst = off;
    }
  }
  return worst;
}

struct Cell {
  const MatrixRow& planned;
  std::optional<MeasuredRow> measured;

  double step_s() const { return median(measured->step_s); }
};

// Lines of at most 80 characters.
std::string text_of(const Cell& cell) {
  const MatrixRow& row = cell.planned;
  const std::string head = fmt::format("{:<6}{:<18}", row.stage, row.offload);
  if (!cell.measured) return head + in_short(row.obstacle) + '\n';
  std::string text;
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    const auto& measured = cell.measured->most_in_use[phase].tier_bytes;
    const auto& planned = row.most_in_use[phase].tier_bytes;
    double worst = 0;
    text +=
        fmt::format("{:<24}{:<10}", phase == 0 ? head : "", name_of(static_cast<StepPhase>(phase)));
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
      const double off =
          percent_off(static_cast<double>(measured[tier]), static_cast<double>(planned[tier]));
      if (std::abs(off) > std::abs(worst)) worst = off;
      text += fmt::format("{:>10}", format_bytes(measured[tier]));
    }
    text += fmt::format("{:>9.1f} %\n", worst);
  }
  return text + fmt::format("{:<24}step {:.4f} s, planned {:.4f} s{:>20.1f} %\n", "", cell.step_s(),
                            row.step.step_s, percent_off(cell.step_s(), row.step.step_s));
}

void print_head(const BenchMatrixOptions& options, std::uint32_t ranks) {
  say("{} parameters (bf16) in {} units on {} {}; computation {:g} ms per step;\na rank's drive "
      "throttled to {} per second, half duplex\n{:<6}{:<18}{:<10}{:>10}{:>10}{:>10}{:>11}\n",
      options.parameters, options.units, ranks, ranks == 1 ? "rank" : "ranks", options.compute_ms,
      options.rate, "stage", "offload", "phase", "device", "host", "nvme", "off by");
  flush_said();
}

nlohmann::ordered_json json_of(const Cell& cell) {
  nlohmann::ordered_json entry = {{"stage", cell.planned.stage}, {"offload", cell.planned.offload}};
  if (!cell.measured) {
    entry["obstacle"] = cell.planned.obstacle;
    return entry;
  }
  entry["planned"] = {{"step_s", cell.planned.step.step_s},
                      {"most_in_use_bytes", json_of(cell.planned.most_in_use)}};
  entry["measured"] = {{"step_s", cell.step_s()},
                       {"steps_s", cell.measured->step_s},
                       {"most_in_use_bytes", json_of(cell.measured->most_in_use)}};
  entry["memory_percent_off"] = memory_off(cell.measured->most_in_use, cell.planned.most_in_use);
  entry["time_percent_off"] = percent_off(cell.step_s(), cell.planned.step.step_s);
  return entry;
}

void check(const BenchMatrixOptions& options) {
  if (options.parameters < options.units)
    throw Error(ErrorCode::kConfig, fmt::format("bench matrix: {} parameters in {} units",
                                                options.parameters, options.units));
  if (parse_size(options.rate) < 1'000'000)
    throw Error(ErrorCode::kConfig,
                fmt::format("bench matrix: --rate {} is below 1MB per second", options.rate));
}

void measure_all(const BenchMatrixOptions& options, RankWorld& world) {
  const bool tells = world.rank() == 0;
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", tells ? options.json_file : "");
  OutputFile& plot = outputs.add("--plot", tells ? options.plot_file : "");
  outputs.check();
  MatrixBench bench({.parameters = options.parameters,
                     .units = options.units,
                     .path = options.path,
                     .rate_bytes_per_second = parse_size(options.rate),
                     .compute_s = options.compute_ms * 1e-3},
                    world);
  if (tells) print_head(options, world.count());
  const std::vector<MatrixRow> rows = bench.planned();
  auto list = nlohmann::ordered_json::array();
  double memory = 0, time = 0;
  for (const MatrixRow& row : rows) {
    Cell cell{row, std::nullopt};
    if (row.obstacle.empty()) {
      const Progress progress(
          fmt::format("measuring stage {}, offload: {}", row.stage, row.offload), !tells);
      cell.measured = bench.measure(row, kWarmStepsOfACell, options.steps);
      memory = std::max(memory, std::abs(memory_off(cell.measured->most_in_use, row.most_in_use)));
      time = std::max(time, std::abs(percent_off(cell.step_s(), row.step.step_s)));
    }
    if (!tells) continue;
    say("{}", text_of(cell));
    flush_said();
    list.push_back(json_of(cell));
  }
  if (tells) say("at most {:.1f} % off in memory, {:.1f} % in time\n", memory, time);
  const nlohmann::ordered_json document{
      {"parameters", options.parameters}, {"units", options.units},
      {"ranks", world.count()},           {"rate_bytes_per_second", parse_size(options.rate)},
      {"compute_ms", options.compute_ms}, {"cells", list}};
  if (json.is_wanted()) write_whole(json, document.dump(2) + "\n");
  if (plot.is_wanted()) write_whole(plot, matrix_plot(document));
}

}  // namespace

int run_bench_matrix(const BenchMatrixOptions& options) {
  check(options);
  RankWorld world;
  try {
    with_words({{"storage.paths", "--path"}}, [&] {
      measure_all(options, world);
      return kExitOk;
    });
  } catch (const std::exception& failure) {
    if (!world.are_several()) throw;
    warn("sluice: rank {}: {}\n", world.rank(), failure.what());
    world.abort();
    const auto* error = dynamic_cast<const Error*>(&failure);
    // MPI may wait inside this process.
    ::_exit(error == nullptr ? kExitInternal : exit_code_of(error->code()));
  }
  world.leave();
  return kExitOk;
}

}  // namespace sluice
