#include "tools/commands/bench_io_command.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/bench/io_calibration.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/json_text.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/bench_plots.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kConfig, "bench io: " + message);
}

IoPattern pattern_from(const std::string& name) {
  if (name == "write") return IoPattern::kWrite;
  return name == "mixed" ? IoPattern::kMixed : IoPattern::kRead;
}

// Every case with all paths at once, then with each by itself, if there are several.
std::vector<IoSeries> planned(const BenchIoOptions& options) {
  const auto or_default = [](auto given, decltype(given) usual) {
    return given.empty() ? usual : given;
  };
  std::vector<IoPattern> patterns;
  for (const std::string& pattern : or_default(options.patterns, {"read", "write", "mixed"}))
    patterns.push_back(pattern_from(pattern));
  std::vector<std::uint64_t> requests;
  for (const std::string& request : or_default(options.requests, {"1MiB", "4MiB"})) {
    requests.push_back(parse_size(request));
    if (requests.back() == 0 || !is_aligned(requests.back(), 4096) || requests.back() > 1_GiB)
      refuse(fmt::format("--request {} is not a multiple of 4096 up to 1GiB", request));
  }
  const std::vector<std::uint32_t> depths = or_default(options.depths, {4, 16, 32});
  for (const std::uint32_t depth : depths)
    if (depth < 1 || depth > 1024) refuse(fmt::format("--depth {} is not in 1..1024", depth));
  return io_cases(patterns, requests, depths, options.paths.size());
}

IoBackend backend_from(const std::string& name) {
  if (name == "uring") return IoBackend::kUring;
  if (name == "threads") return IoBackend::kThreads;
  return name == "sync" ? IoBackend::kSync : IoBackend::kAuto;
}

void print_series(const IoSeries& series, const std::string& where) {
  const auto [low, high] = std::ranges::minmax(series.rates);
  say("{:8} {:>8} {:6} {:8.2f}  [{:.2f}, {:.2f}] {:10.3f}{}\n", name_of(series.io_case.pattern),
      format_bytes(series.io_case.request_bytes), series.io_case.depth, series.rate() * 1e-9,
      low * 1e-9, high * 1e-9, median(series.cpu_s_per_gib), where);
}

int bench_io(const BenchIoOptions& options) {
  std::vector<IoSeries> all = planned(options);
  if (options.rounds < 1 || options.rounds > 1000)
    refuse(fmt::format("--rounds {} is not in 1..1000", options.rounds));
  const std::uint64_t request_bytes_max = std::ranges::max(all, {}, [](const IoSeries& series) {
                                            return series.io_case.request_bytes;
                                          }).io_case.request_bytes;
  // Each pass covers the whole file, so that the next one knows what it holds.
  for (const IoSeries& series : all) {
    if (!is_aligned(request_bytes_max, series.io_case.request_bytes))
      refuse(fmt::format("--request {} does not divide the largest one, {}",
                         format_bytes(series.io_case.request_bytes),
                         format_bytes(request_bytes_max)));
  }
  const std::uint64_t file_bytes = parse_size(options.size);
  if (file_bytes < request_bytes_max)
    refuse(fmt::format("--size {} is smaller than a request", options.size));
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& plot = outputs.add("--plot", options.plot_file);
  outputs.check();
  std::optional<Progress> progress(std::in_place,
                                   fmt::format("writing {} to each path once", options.size));
  const IoListener listener{
      .began =
          [&](const IoBench& bench, const std::string& note) {
            if (!note.empty()) say("{}\n", note);
            say("{} a path, queue \"{}\"{}, {} rounds\n", options.size, bench.queue_name(),
                bench.is_direct() ? "" : ", without O_DIRECT: this measures the page cache",
                options.rounds);
          },
      .goes_on =
          [&](std::uint32_t round, const IoCase& io_case) {
            progress->set(fmt::format("round {} of {}: {} with requests of {}, {} in flight",
                                      round + 1, options.rounds, name_of(io_case.pattern),
                                      format_bytes(io_case.request_bytes), io_case.depth));
          }};
  const IoCalibration calibration = measure_io({.paths = options.paths,
                                                .file_bytes = file_bytes,
                                                .rounds = options.rounds,
                                                .backend = backend_from(options.backend)},
                                               std::move(all), listener);
  progress.reset();
  say("pattern   request  depth     GB/s  [min, max]    CPU s/GiB\n");
  for (const IoSeries& series : calibration.series) {
    print_series(series, options.paths.size() == 1 ? ""
                         : series.io_case.drive    ? "  " + options.paths[*series.io_case.drive]
                                                   : "  all paths");
  }
  if (const auto factor = interference_of(calibration.series))
    say("reading and writing at once takes {:.2f} of the sum of both\n", *factor);
  if (json.is_wanted()) write_whole(json, json_text(calibration_json(calibration)) + "\n");
  if (plot.is_wanted()) write_whole(plot, io_plot(calibration.series, options.paths));
  return kExitOk;
}

}  // namespace

int run_bench_io(const BenchIoOptions& options) {
  return with_words({{"storage.paths", "--path"}, {"storage.backend", "--backend"}},
                    [&] { return bench_io(options); });
}

}  // namespace sluice
