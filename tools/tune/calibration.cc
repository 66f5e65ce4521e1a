#include "tools/tune/calibration.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <ranges>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"
#include "base/topology.h"
#include "cpu_optim/cpu_optimizer.h"
#include "tools/bench/bench_adam.h"
#include "tools/bench/io_calibration.h"
#include "tools/cli/output_file.h"
#include "tools/report/plan_rates.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMachineFileBytesMax = 16_MiB;  // far more than any has
constexpr const char* kCalibrationFormat = "sluice-machine-calibration-1";
constexpr std::array kTunePatterns{IoPattern::kRead, IoPattern::kWrite, IoPattern::kMixed};
// Large enough that a drive's cache does not hold it for long, small enough to be measured quickly.
constexpr std::uint64_t kFileBytes = 128_MiB;
constexpr std::uint32_t kRounds = 2;
constexpr std::uint64_t kAdamParameters = 16 << 20;
constexpr unsigned kAdamRounds = 5;

const BenchCase& adam_case(const StateFormat& format) {
  for (const BenchCase& state : kBenchCases)
    if (state.layout == format.master) return state;
  return kBenchCases[0];
}

// Where `value` lies between two of the sorted `points`, by logarithm.
struct Between {
  std::size_t low = 0, high = 0;
  double share = 0;  // of `high`
};

template <class T>
Between between_points(const std::vector<T>& points, double value) {
  const auto above = std::ranges::find_if(
      points, [&](const T& point) { return static_cast<double>(point) >= value; });
  const auto at = static_cast<std::size_t>(above - points.begin());
  if (at == 0) return {};
  if (at == points.size()) return {at - 1, at - 1, 0};
  const auto low = static_cast<double>(points[at - 1]), high = static_cast<double>(points[at]);
  return {at - 1, at, std::log(value / low) / std::log(high / low)};
}

double rate_at(const MachineCalibration& machine, IoPattern pattern, std::uint64_t request_bytes,
               std::uint32_t depth) {
  std::set<std::uint64_t> sizes;
  std::set<std::uint32_t> depths;
  for (const DriveRate& rate : machine.drives) {
    sizes.insert(rate.request_bytes);
    depths.insert(rate.depth);
  }
  const std::vector<std::uint64_t> by_size(sizes.begin(), sizes.end());
  const std::vector<std::uint32_t> by_depth(depths.begin(), depths.end());
  const auto at = [&](std::size_t size, std::size_t deep) {
    const auto found = std::ranges::find_if(machine.drives, [&](const DriveRate& rate) {
      return rate.pattern == pattern && rate.request_bytes == by_size[size] &&
             rate.depth == by_depth[deep];
    });
    return std::log(found->bytes_per_second);
  };
  const Between size = between_points(by_size, static_cast<double>(request_bytes));
  const Between deep = between_points(by_depth, depth);
  const auto along = [&](std::size_t d) {
    return (1 - size.share) * at(size.low, d) + size.share * at(size.high, d);
  };
  return std::exp((1 - deep.share) * along(deep.low) + deep.share * along(deep.high));
}

// The time for which a small read is longer on its way than its bytes take to move.
double latency_of(const MachineCalibration& machine) {
  const auto of_reads = [](const DriveRate& rate) { return rate.pattern == IoPattern::kRead; };
  const DriveRate* smallest = nullptr;
  double best = 0;
  for (const DriveRate& rate : machine.drives | std::views::filter(of_reads)) {
    best = std::max(best, rate.bytes_per_second);
    if (smallest == nullptr || std::tie(rate.request_bytes, rate.depth) <
                                   std::tie(smallest->request_bytes, smallest->depth))
      smallest = &rate;
  }
  const auto size_bytes = static_cast<double>(smallest->request_bytes);
  return std::max(0.0,
                  smallest->depth * size_bytes / smallest->bytes_per_second - size_bytes / best);
}

// Faster than any memory: such a number was not measured.
constexpr double kRateMax = 1e15;

bool is_rate(double rate) {
  return rate > 0 && rate <= kRateMax;
}

// Every pattern at every size and depth, or the interpolation would miss a corner.
bool is_whole(const MachineCalibration& machine) {
  std::set<std::uint64_t> sizes;
  std::set<std::uint32_t> depths;
  std::set<std::tuple<IoPattern, std::uint64_t, std::uint32_t>> cases;
  for (const DriveRate& rate : machine.drives) {
    if (!is_rate(rate.bytes_per_second)) return false;
    sizes.insert(rate.request_bytes);
    depths.insert(rate.depth);
    cases.insert({rate.pattern, rate.request_bytes, rate.depth});
  }
  return !cases.empty() && cases.size() == kTunePatterns.size() * sizes.size() * depths.size() &&
         is_rate(machine.adam_parameters_per_second) &&
         std::ranges::all_of(machine.path_rates, is_rate);
}

std::int64_t now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void MachineCalibration::set_storage_rates_for(std::uint64_t request_bytes, std::uint32_t depth,
                                               Rates& rates) const {
  const double read = rate_at(*this, IoPattern::kRead, request_bytes, depth);
  const double write = rate_at(*this, IoPattern::kWrite, request_bytes, depth);
  const double mixed = rate_at(*this, IoPattern::kMixed, request_bytes, depth);
  set_storage_rates(read, write, 2 / mixed / (1 / read + 1 / write), rates);
  // A rate at depth 1 has all of the latency in it.
  rates.latency_s = (1 - 1.0 / depth) * latency_of(*this);
}

double age_days(const MachineCalibration& calibration) {
  return static_cast<double>(now_s() - calibration.made_s) / (24 * 3600);
}

std::string hardware_of(const CalibrationRequest& request) {
  const Topology& machine = topology();
  std::string text = fmt::format(
      "{}; {} of {} cores; {}; {}; Adam over {} with moments in {}", machine.processor,
      granted_threads(request.threads), machine.granted_cores, format_bytes(machine.memory_bytes),
      simd_target_name(), adam_case(request.format).name, name_of(request.format.moments));
  for (const std::string& path : request.paths) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
      throw Error(ErrorCode::kInput,
                  fmt::format("storage.paths names \"{}\", which cannot be reached: {}", path,
                              errno_text(errno)));
    text += fmt::format("; drive {:#x}", status.st_dev);
  }
  return text + fmt::format("; queue {}", name_of(request.backend));
}

MachineCalibration calibrate(const CalibrationRequest& request,
                             const std::function<void(const std::string&)>& progress) {
  const auto begin = std::chrono::steady_clock::now();
  MachineCalibration machine{.hardware = hardware_of(request), .made_s = now_s()};
  progress("measuring the drives");
  const IoListener listener{.goes_on = [&](std::uint32_t round, const IoCase& io_case) {
    progress(fmt::format("measuring the drives, round {} of {}: {} with requests of {}", round + 1,
                         kRounds, name_of(io_case.pattern), format_bytes(io_case.request_bytes)));
  }};
  const IoCalibration io =
      measure_io({.paths = request.paths,
                  .file_bytes = kFileBytes,
                  .rounds = kRounds,
                  .backend = request.backend},
                 io_cases({kTunePatterns.begin(), kTunePatterns.end()}, {64_KiB, 512_KiB, 4_MiB},
                          {1, 8, 32}, request.paths.size()),
                 listener);
  for (const IoSeries& series : io.series) {
    if (series.io_case.drive) continue;
    machine.drives.push_back({.pattern = series.io_case.pattern,
                              .request_bytes = series.io_case.request_bytes,
                              .depth = series.io_case.depth,
                              .bytes_per_second = series.rate()});
  }
  for (std::uint32_t path = 0; request.paths.size() > 1 && path < request.paths.size(); ++path)
    machine.path_rates.push_back(best_of(io.series, IoPattern::kMixed, path)->rate());
  progress("measuring Adam");
  machine.adam_parameters_per_second = bench_adam(adam_case(request.format),
                                                  {.moments = request.format.moments,
                                                   .parameters = kAdamParameters,
                                                   .threads = granted_threads(request.threads),
                                                   .rounds = kAdamRounds},
                                                  [](unsigned) {})
                                           .parameters_per_s.median;
  machine.took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return machine;
}

std::string calibration_file(const std::string& hardware) {
  const char* folder = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::filesystem::path base;
  if (folder != nullptr && *folder == '/') {
    base = folder;
  } else if (home != nullptr && *home == '/') {
    base = std::filesystem::path(home) / ".cache";
  } else {
    return "";
  }
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : hardware) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return (base / "sluice" / fmt::format("calibration-{:016x}.json", hash)).string();
}

std::optional<MachineCalibration> load_calibration(const std::string& path,
                                                   const std::string& hardware, std::size_t paths,
                                                   std::string& why) {
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  std::string unreadable;
  const auto text = read_text_file(path, kMachineFileBytesMax, unreadable);
  if (!text) {
    why = fmt::format("\"{}\" cannot be read: {}", path, unreadable);
    return std::nullopt;
  }
  const auto root = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  MachineCalibration machine;
  try {
    if (root.at("format") != kCalibrationFormat) throw Error(ErrorCode::kInput, "");
    machine.hardware = root.at("hardware").get<std::string>();
    machine.made_s = root.at("made_s").get<std::int64_t>();
    machine.took_s = root.at("took_s").get<double>();
    machine.adam_parameters_per_second = root.at("adam_parameters_per_second").get<double>();
    machine.path_rates = root.at("path_rates").get<std::vector<double>>();
    for (const nlohmann::json& rate : root.at("drives")) {
      const auto pattern = std::ranges::find_if(
          kTunePatterns, [&](IoPattern one) { return rate.at("pattern") == name_of(one); });
      if (pattern == kTunePatterns.end()) throw Error(ErrorCode::kInput, "");
      machine.drives.push_back({.pattern = *pattern,
                                .request_bytes = rate.at("request_bytes").get<std::uint64_t>(),
                                .depth = rate.at("depth").get<std::uint32_t>(),
                                .bytes_per_second = rate.at("bytes_per_second").get<double>()});
    }
    if (!is_whole(machine)) throw Error(ErrorCode::kInput, "");
  } catch (const std::exception&) {
    why = fmt::format("\"{}\" is no calibration of sluice tune", path);
    return std::nullopt;
  }
  const std::size_t path_rates = paths > 1 ? paths : 0;
  if (machine.hardware != hardware) {
    why = fmt::format("\"{}\" was measured on other hardware: {}; here: {}", path, machine.hardware,
                      hardware);
  } else if (machine.path_rates.size() != path_rates) {
    why = fmt::format("\"{}\" has the rates of {} paths, where {} are expected", path,
                      machine.path_rates.size(), path_rates);
  } else if (age_days(machine) < 0) {  // it would never grow old
    why = fmt::format("\"{}\" was measured later than now, by this machine's clock", path);
  } else {
    return machine;
  }
  return std::nullopt;
}

std::string save_calibration(const std::string& path, const MachineCalibration& calibration) {
  nlohmann::ordered_json root = {
      {"format", kCalibrationFormat},
      {"hardware", calibration.hardware},
      {"made_s", calibration.made_s},
      {"took_s", calibration.took_s},
      {"adam_parameters_per_second", calibration.adam_parameters_per_second},
      {"path_rates", calibration.path_rates},
      {"drives", nlohmann::ordered_json::array()}};
  for (const DriveRate& rate : calibration.drives)
    root["drives"].push_back({{"pattern", name_of(rate.pattern)},
                              {"request_bytes", rate.request_bytes},
                              {"depth", rate.depth},
                              {"bytes_per_second", rate.bytes_per_second}});
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  try {
    OutputFile file("the calibration", path);
    file.check();
    write_whole(file, root.dump(2) + "\n");
  } catch (const Error& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace sluice
