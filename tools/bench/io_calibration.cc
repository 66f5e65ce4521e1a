#include "tools/bench/io_calibration.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <utility>

#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "base/topology.h"
#include "engine/store/storage_queue.h"

namespace sluice {
namespace {

constexpr std::array kPatterns{IoPattern::kRead, IoPattern::kWrite, IoPattern::kMixed};

nlohmann::json series_json(const IoSeries& series) {
  const auto [low, high] = std::ranges::minmax(series.rates);
  return {{"pattern", name_of(series.io_case.pattern)},
          {"request_bytes", series.io_case.request_bytes},
          {"depth", series.io_case.depth},
          {"bytes_per_second", series.rate()},
          {"bytes_per_second_min", low},
          {"bytes_per_second_max", high},
          {"cpu_seconds_per_gib", median(series.cpu_s_per_gib)}};
}

// Planning reads this: the best rates of each path by itself, under the folder's one name.
nlohmann::json drives_json(const IoCalibration& calibration) {
  const std::vector<std::string>& paths = calibration.options.paths;
  auto drives = nlohmann::json::array();
  for (std::uint32_t i = 0; i < paths.size(); ++i) {
    nlohmann::json drive{{"path", std::filesystem::canonical(paths[i]).string()}};
    for (const IoPattern pattern : kPatterns) {
      const IoSeries* found =
          best_of(calibration.series, pattern, paths.size() > 1 ? std::optional(i) : std::nullopt);
      if (found != nullptr) drive[std::string(name_of(pattern))] = found->rate();
    }
    drives.push_back(std::move(drive));
  }
  return drives;
}

}  // namespace

std::vector<IoSeries> io_cases(const std::vector<IoPattern>& patterns,
                               const std::vector<std::uint64_t>& requests,
                               const std::vector<std::uint32_t>& depths, std::size_t paths) {
  std::vector<IoSeries> series;
  for (const IoPattern pattern : patterns) {
    for (const std::uint64_t request : requests) {
      for (const std::uint32_t depth : depths)
        series.push_back(
            {.io_case = {.pattern = pattern, .request_bytes = request, .depth = depth}});
    }
  }
  const std::vector<IoSeries> together = series;
  for (std::uint32_t drive = 0; paths > 1 && drive < paths; ++drive) {
    for (IoSeries alone : together) {
      alone.io_case.drive = drive;
      series.push_back(std::move(alone));
    }
  }
  return series;
}

IoCalibration measure_io(const IoCalibrationOptions& options, std::vector<IoSeries> series,
                         const IoListener& listener) {
  IoBenchOptions bench_options{.paths = options.paths, .file_bytes = options.file_bytes};
  for (const IoSeries& one : series) {
    bench_options.request_bytes_max =
        std::max(bench_options.request_bytes_max, one.io_case.request_bytes);
    bench_options.depth_max = std::max(bench_options.depth_max, one.io_case.depth);
  }
  Config::Storage storage;
  storage.backend = options.backend;
  storage.queue_depth = bench_options.depth_max;
  std::string note;
  IoBench bench(bench_options, [&](std::span<std::byte> memory, std::span<const int> files) {
    return open_io_queue(storage, {.memory = memory, .files = files}, note);
  });
  if (listener.began) listener.began(bench, note);
  for (std::uint32_t round = 0; round < options.rounds; ++round) {
    for (IoSeries& one : series) {
      if (listener.goes_on) listener.goes_on(round, one.io_case);
      const IoMeasurement measured = bench.measure(one.io_case);
      const auto bytes = static_cast<double>(measured.bytes);
      one.rates.push_back(bytes / measured.seconds);
      one.cpu_s_per_gib.push_back(measured.cpu_seconds / (bytes / static_cast<double>(1_GiB)));
    }
  }
  return {.options = options,
          .series = std::move(series),
          .queue = std::string(bench.queue_name()),
          .is_direct = bench.is_direct()};
}

const IoSeries* best_of(const std::vector<IoSeries>& all, IoPattern pattern,
                        std::optional<std::uint32_t> drive) {
  const IoSeries* found = nullptr;
  for (const IoSeries& series : all) {
    if (series.io_case.pattern != pattern || series.io_case.drive != drive) continue;
    if (found == nullptr || series.rate() > found->rate()) found = &series;
  }
  return found;
}

std::optional<double> interference_of(const std::vector<IoSeries>& all) {
  const IoSeries* read = best_of(all, IoPattern::kRead);
  const IoSeries* write = best_of(all, IoPattern::kWrite);
  const IoSeries* mixed = best_of(all, IoPattern::kMixed);
  if (read == nullptr || write == nullptr || mixed == nullptr) return std::nullopt;
  return 2 / mixed->rate() / (1 / read->rate() + 1 / write->rate());
}

nlohmann::json calibration_json(const IoCalibration& calibration) {
  const IoCalibrationOptions& options = calibration.options;
  nlohmann::json root{{"format", "sluice-io-calibration-1"},
                      {"paths", options.paths},
                      {"file_bytes", options.file_bytes},
                      {"rounds", options.rounds},
                      {"backend", calibration.queue},
                      {"direct", calibration.is_direct},
                      {"processor", topology().processor},
                      {"cores", topology().granted_cores},
                      {"interference", nullptr},
                      {"cases", nlohmann::json::array()}};
  for (const IoSeries& series : calibration.series) {
    if (!series.io_case.drive) root["cases"].push_back(series_json(series));
  }
  for (const IoPattern pattern : kPatterns) {
    const IoSeries* found = best_of(calibration.series, pattern);
    if (found != nullptr) root["best"][std::string(name_of(pattern))] = series_json(*found);
  }
  root["drives"] = drives_json(calibration);
  if (const auto factor = interference_of(calibration.series)) root["interference"] = *factor;
  return root;
}

}  // namespace sluice
