#include "tools/commands/bench_adam_command.h"

#include <unistd.h>

#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "tools/bench/bench_adam.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/json_text.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/bench_plots.h"

namespace sluice {
namespace {

std::vector<unsigned> thread_counts(unsigned asked) {
  if (asked != 0) return {asked};
  std::vector<unsigned> counts;
  const unsigned granted = topology().granted_cores;
  for (unsigned threads = 1; threads < granted; threads *= 2) counts.push_back(threads);
  counts.push_back(granted);
  return counts;
}

void check(const BenchAdamOptions& options) {
  const unsigned granted = topology().granted_cores;
  if (options.threads > granted)
    throw Error(ErrorCode::kConfig,
                fmt::format("--threads is {}, but {} cores are granted to this process",
                            options.threads, granted));
  if (options.moments == OptimizerState::k8bit && options.input == BenchInput::kUnaligned)
    throw Error(ErrorCode::kConfig,
                "--input unaligned does not go with --state 8bit: 8-bit moments begin with a group "
                "of 256 elements; leave out one of them");
  std::uint64_t bytes = 0;
  for (const BenchCase& state : kBenchCases)
    bytes = std::max(bytes, bench_bytes(state, options.parameters));
  const std::uint64_t memory = topology().memory_bytes;
  if (memory != 0 && bytes > memory / 4 * 3)
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} parameters take {} of {} of memory; ask for at most {} with --parameters",
                    options.parameters, format_bytes(bytes), format_bytes(memory),
                    options.parameters * (memory / 4 * 3 / 1024) / (bytes / 1024 + 1)));
}

nlohmann::ordered_json json_of(const Spread& spread) {
  return {{"median", spread.median}, {"p25", spread.low}, {"p75", spread.high}};
}

nlohmann::ordered_json json_of(const BenchResult& result) {
  return {{"state", result.state.name},
          {"moments", name_of(result.moments)},
          {"threads", result.threads},
          {"bytes_per_parameter", result.bytes_per_parameter},
          {"parameters_per_s", json_of(result.parameters_per_s)},
          {"update_gb_per_s", json_of(result.update_gb_per_s)},
          {"limit_gb_per_s", json_of(result.limit_gb_per_s)},
          {"percent_of_limit", json_of(result.percent_of_limit)},
          {"memcpy_gb_per_s", json_of(result.memcpy_gb_per_s)},
          {"triad_gb_per_s", json_of(result.triad_gb_per_s)}};
}

void write_json(OutputFile& output, const BenchAdamOptions& options,
                const std::vector<BenchResult>& results, bool was_interrupted) {
  nlohmann::ordered_json root = {{"processor", topology().processor},
                                 {"granted_cores", topology().granted_cores},
                                 {"instruction_set", simd_target_name()},
                                 {"parameters", options.parameters},
                                 {"rounds", options.rounds},
                                 {"input", name_of(options.input)},
                                 {"interrupted", was_interrupted},
                                 {"results", nlohmann::ordered_json::array()}};
  for (const BenchResult& result : results) root["results"].push_back(json_of(result));
  write_whole(output, json_text(root) + "\n");
}

void print_row(const BenchResult& r) {
  say("{:<11}{:>7}{:>9.2f}{:>7.1f}{:>7.1f}{:>8.1f}  {:<14}{:>8.1f}{:>7.1f}\n", r.state.name,
      r.threads, r.parameters_per_s.median * 1e-9, r.update_gb_per_s.median,
      r.limit_gb_per_s.median, r.percent_of_limit.median,
      fmt::format("[{:.1f}, {:.1f}]", r.percent_of_limit.low, r.percent_of_limit.high),
      r.memcpy_gb_per_s.median, r.triad_gb_per_s.median);
  flush_said();
}

}  // namespace

int run_bench_adam(const BenchAdamOptions& options) {
  check(options);
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& plot = outputs.add("--plot", options.plot_file);
  outputs.check();  // now, so that no measurement is lost to a typing mistake
  catch_interrupts();
  defer_interrupts(
      "sluice: ending after this row; a second signal ends at once, without its figures\n");
  const std::string_view instruction_set = simd_target_name();
  const bool shows_rounds = !options.quiet && is_terminal(STDERR_FILENO);
  if (!options.quiet) {
    say("AdamW on {}, {} cores granted, {}; {} parameters, moments in {}, {} rounds\n",
        topology().processor, topology().granted_cores, instruction_set, options.parameters,
        name_of(options.moments), options.rounds);
    say("{:<11}{:>7}{:>9}{:>7}{:>7}{:>8}  {:<14}{:>8}{:>7}\n", "state", "threads", "Gparam/s",
        "GB/s", "limit", "% of it", "[quartiles]", "memcpy", "triad");
  }
  std::vector<BenchResult> results;
  const std::vector<unsigned> counts = thread_counts(options.threads);
  for (const BenchCase& state : kBenchCases) {
    for (const unsigned threads : counts) {
      if (interrupted()) break;
      const auto progress = [&](unsigned round) {
        if (!shows_rounds) return;
        warn("\r\x1b[K{}, {} threads, round {} of {}", state.name, threads, round + 1,
             options.rounds);
      };
      results.push_back(bench_adam(state,
                                   {.input = options.input,
                                    .moments = options.moments,
                                    .parameters = options.parameters,
                                    .threads = threads,
                                    .rounds = options.rounds},
                                   progress));
      if (shows_rounds) warn("\r\x1b[K");
      if (!options.quiet) print_row(results.back());
    }
  }
  if (json.is_wanted()) write_json(json, options, results, interrupted());
  if (plot.is_wanted() && !results.empty()) write_whole(plot, adam_plot(results));
  return interrupted() ? kExitInterrupted : kExitOk;
}

}  // namespace sluice
