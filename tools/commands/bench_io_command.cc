#include "tools/commands/bench_io_command.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "engine/store/storage_queue.h"
#include "tools/bench/io_bench.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"

namespace sluice {
namespace {

constexpr std::array kPatterns{IoPattern::kRead, IoPattern::kWrite, IoPattern::kMixed};

struct Series {
  IoCase io_case;
  std::vector<double> rates;  // bytes per second
  std::vector<double> cpu_s_per_gib;

  static double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  }
  double rate() const { return median(rates); }
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kConfig, "bench io: " + message);
}

IoPattern pattern_from(const std::string& name) {
  if (name == "write") return IoPattern::kWrite;
  return name == "mixed" ? IoPattern::kMixed : IoPattern::kRead;
}

// Every case with all paths at once, then with each by itself, if there are several.
std::vector<Series> planned(const BenchIoOptions& options) {
  const auto or_default = [](auto given, decltype(given) usual) {
    return given.empty() ? usual : given;
  };
  std::vector<Series> series;
  for (const std::string& pattern : or_default(options.patterns, {"read", "write", "mixed"})) {
    for (const std::string& request : or_default(options.requests, {"1MiB", "4MiB"})) {
      const std::uint64_t request_bytes = parse_size(request);
      if (request_bytes == 0 || !is_aligned(request_bytes, 4096) || request_bytes > 1_GiB)
        refuse(fmt::format("--request {} is not a multiple of 4096 up to 1GiB", request));
      for (const std::uint32_t depth : or_default(options.depths, {4, 16, 32})) {
        if (depth < 1 || depth > 1024) refuse(fmt::format("--depth {} is not in 1..1024", depth));
        series.push_back({.io_case = {.pattern = pattern_from(pattern),
                                      .request_bytes = request_bytes,
                                      .depth = depth},
                          .rates = {},
                          .cpu_s_per_gib = {}});
      }
    }
  }
  const std::vector<Series> together = series;
  for (std::uint32_t drive = 0; options.paths.size() > 1 && drive < options.paths.size(); ++drive) {
    for (Series alone : together) {
      alone.io_case.drive = drive;
      series.push_back(std::move(alone));
    }
  }
  return series;
}

IoBackend backend_from(const std::string& name) {
  if (name == "uring") return IoBackend::kUring;
  if (name == "threads") return IoBackend::kThreads;
  return name == "sync" ? IoBackend::kSync : IoBackend::kAuto;
}

const Series* best(const std::vector<Series>& all, IoPattern pattern,
                   std::optional<std::uint32_t> drive = std::nullopt) {
  const Series* found = nullptr;
  for (const Series& series : all) {
    if (series.io_case.pattern != pattern || series.io_case.drive != drive) continue;
    if (found == nullptr || series.rate() > found->rate()) found = &series;
  }
  return found;
}

// Time of reading and writing at once, over the sum of the times of one after the other: 1 on a
// half-duplex drive, 0.5 on one that does both at full rate.
std::optional<double> interference(const std::vector<Series>& all) {
  const Series* read = best(all, IoPattern::kRead);
  const Series* write = best(all, IoPattern::kWrite);
  const Series* mixed = best(all, IoPattern::kMixed);
  if (read == nullptr || write == nullptr || mixed == nullptr) return std::nullopt;
  return 2 / mixed->rate() / (1 / read->rate() + 1 / write->rate());
}

void print_series(const Series& series, const std::string& where) {
  const auto [low, high] = std::ranges::minmax(series.rates);
  say("{:8} {:>8} {:6} {:8.2f}  [{:.2f}, {:.2f}] {:10.3f}{}\n", name_of(series.io_case.pattern),
      format_bytes(series.io_case.request_bytes), series.io_case.depth, series.rate() * 1e-9,
      low * 1e-9, high * 1e-9, Series::median(series.cpu_s_per_gib), where);
}

nlohmann::json json_of(const Series& series) {
  const auto [low, high] = std::ranges::minmax(series.rates);
  return {{"pattern", name_of(series.io_case.pattern)},
          {"request_bytes", series.io_case.request_bytes},
          {"depth", series.io_case.depth},
          {"bytes_per_second", series.rate()},
          {"bytes_per_second_min", low},
          {"bytes_per_second_max", high},
          {"cpu_seconds_per_gib", Series::median(series.cpu_s_per_gib)}};
}

// Planning reads this: the best rates of each path by itself, under the folder's one name.
nlohmann::json json_of_drives(const BenchIoOptions& options, const std::vector<Series>& all) {
  auto drives = nlohmann::json::array();
  for (std::uint32_t i = 0; i < options.paths.size(); ++i) {
    nlohmann::json drive{{"path", std::filesystem::canonical(options.paths[i]).string()}};
    for (const IoPattern pattern : kPatterns) {
      const Series* found =
          best(all, pattern, options.paths.size() > 1 ? std::optional(i) : std::nullopt);
      if (found != nullptr) drive[std::string(name_of(pattern))] = found->rate();
    }
    drives.push_back(std::move(drive));
  }
  return drives;
}

void write_calibration(OutputFile& output, const BenchIoOptions& options,
                       const std::vector<Series>& all, const IoBench& bench) {
  nlohmann::json calibration{{"format", "sluice-io-calibration-1"},
                             {"paths", options.paths},
                             {"file_bytes", parse_size(options.size)},
                             {"rounds", options.rounds},
                             {"backend", bench.queue_name()},
                             {"direct", bench.is_direct()},
                             {"processor", topology().processor},
                             {"cores", topology().granted_cores},
                             {"interference", nullptr},
                             {"cases", nlohmann::json::array()}};
  for (const Series& series : all) {
    if (!series.io_case.drive) calibration["cases"].push_back(json_of(series));
  }
  for (const IoPattern pattern : kPatterns) {
    const Series* found = best(all, pattern);
    if (found != nullptr) calibration["best"][std::string(name_of(pattern))] = json_of(*found);
  }
  calibration["drives"] = json_of_drives(options, all);
  if (const auto factor = interference(all)) calibration["interference"] = *factor;
  write_whole(output, calibration.dump(2) + "\n");
}

int bench_io(const BenchIoOptions& options) {
  std::vector<Series> all = planned(options);
  if (options.rounds < 1 || options.rounds > 1000)
    refuse(fmt::format("--rounds {} is not in 1..1000", options.rounds));
  IoBenchOptions bench_options{.paths = options.paths, .file_bytes = parse_size(options.size)};
  for (const Series& series : all) {
    bench_options.request_bytes_max =
        std::max(bench_options.request_bytes_max, series.io_case.request_bytes);
    bench_options.depth_max = std::max(bench_options.depth_max, series.io_case.depth);
  }
  // Each pass covers the whole file, so that the next one knows what it holds.
  for (const Series& series : all) {
    if (!is_aligned(bench_options.request_bytes_max, series.io_case.request_bytes))
      refuse(fmt::format("--request {} does not divide the largest one, {}",
                         format_bytes(series.io_case.request_bytes),
                         format_bytes(bench_options.request_bytes_max)));
  }
  if (bench_options.file_bytes < bench_options.request_bytes_max)
    refuse(fmt::format("--size {} is smaller than a request", options.size));
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  outputs.check();
  Config::Storage storage;
  storage.backend = backend_from(options.backend);
  storage.queue_depth = bench_options.depth_max;
  std::string note;
  std::optional<Progress> progress(std::in_place,
                                   fmt::format("writing {} to each path once", options.size));
  IoBench bench(bench_options, [&](std::span<std::byte> memory, std::span<const int> files) {
    return open_io_queue(storage, {.memory = memory, .files = files}, note);
  });
  if (!note.empty()) say("{}\n", note);
  say("{} a path, queue \"{}\"{}, {} rounds\n", options.size, bench.queue_name(),
      bench.is_direct() ? "" : ", without O_DIRECT: this measures the page cache", options.rounds);
  // Round by round over all cases: the rate of a shared drive drifts.
  for (std::uint32_t round = 0; round < options.rounds; ++round) {
    for (Series& series : all) {
      progress->set(fmt::format("round {} of {}: {} with requests of {}, {} in flight", round + 1,
                                options.rounds, name_of(series.io_case.pattern),
                                format_bytes(series.io_case.request_bytes), series.io_case.depth));
      const IoMeasurement measured = bench.measure(series.io_case);
      const auto bytes = static_cast<double>(measured.bytes);
      series.rates.push_back(bytes / measured.seconds);
      series.cpu_s_per_gib.push_back(measured.cpu_seconds / (bytes / static_cast<double>(1_GiB)));
    }
  }
  progress.reset();
  say("pattern   request  depth     GB/s  [min, max]    CPU s/GiB\n");
  for (const Series& series : all) {
    print_series(series, options.paths.size() == 1 ? ""
                         : series.io_case.drive    ? "  " + options.paths[*series.io_case.drive]
                                                   : "  all paths");
  }
  if (const auto factor = interference(all))
    say("reading and writing at once takes {:.2f} of the sum of both\n", *factor);
  if (json.is_wanted()) write_calibration(json, options, all, bench);
  return kExitOk;
}

}  // namespace

int run_bench_io(const BenchIoOptions& options) {
  return with_words({{"storage.paths", "--path"}, {"storage.backend", "--backend"}},
                    [&] { return bench_io(options); });
}

}  // namespace sluice
