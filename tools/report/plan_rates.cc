#include "tools/report/plan_rates.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/report/machine_presets.h"

namespace sluice {
namespace {

// A drive of today, a bus of 16 lanes of PCI Express 4, a server's memory, a large device. They let
// a plan work without any word about the machine.
constexpr double kAssumedRead = 6e9;
constexpr double kAssumedWrite = 4e9;
constexpr double kAssumedCopy = 20e9;
constexpr double kAssumedAdam = 2e9;
constexpr double kAssumedThreadAdam = 0.25e9;  // of the host, on which eight share the rate above
constexpr double kAssumedDeviceAdam = 60e9;
constexpr double kAssumedFlops = 200e12;
constexpr double kLatencyS = 100e-6;
constexpr double kAssumedFlushS = 5e-3;  // a volatile cache of a drive of today, nearly empty

// `field` of the file, written by `command`.
double checked_rate(double rate, const std::string& file, const std::string& field,
                    const char* command) {
  if (rate > 0 && std::isfinite(rate)) return rate;
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\": {} is {}, but must be more than 0; write the file again with "
                          "sluice {} --json",
                          file, field, rate, command));
}

// The origin of each rate, as the plan prints it.
struct RateSources {
  std::string read = "assumed";
  std::string write = "assumed";
  std::string copy = "assumed";
  std::string adam = "assumed";
  std::string device_adam = "assumed";
  std::string flops = "assumed";
  std::string host_memory;  // empty = its rate is not known, and it takes no time
  // One thread of the host, in parameters a second, and its origin.
  double thread_adam = kAssumedThreadAdam;
  std::string thread = "assumed, a thread of the host";
};
constexpr const char* kMeasured = "measured by bench gpu";

// Parameters a second at the most threads measured. At the least, they are those of one thread.
// Older files know only fp32 moments, and do not say so.
void take_adam_file(const PlanRateOptions& options, const StateFormat& format, PlanRates& plan,
                    RateSources& sources) {
  sources.adam = "calibration";
  const nlohmann::json document = read_rates_file(options.adam_file);
  const char* state = format.master == MasterLayout::kSplitBf16 ? "split_bf16"
                      : format.master == MasterLayout::kFp16    ? "fp16"
                                                                : "fp32";
  bool has_row = false;
  try {
    unsigned most = 0, least = UINT_MAX;
    for (const nlohmann::json& row : document.at("results")) {
      if (row.value("moments", "fp32") != name_of(format.moments)) continue;
      if (row.at("state") != state) continue;
      const auto threads = row.at("threads").get<unsigned>();
      const double rate =
          checked_rate(row.at("parameters_per_s").at("median").get<double>(), options.adam_file,
                       fmt::format("parameters_per_s.median of {} threads", threads), "bench adam");
      if (threads >= most) plan.rates.adam_parameters_per_second = rate;
      if (threads != 0 && threads <= least) sources.thread_adam = rate / threads;
      most = std::max(most, threads);
      if (threads != 0) least = std::min(least, threads);
    }
    has_row = most != 0;
    sources.thread = "calibration, a thread of the host";
  } catch (const nlohmann::json::exception&) {
    has_row = false;
  }
  if (!has_row)
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" has no row for state {} with moments in {}; write it with sluice "
                    "bench adam --state {} --json",
                    options.adam_file, state, name_of(format.moments), name_of(format.moments)));
}

// The drives of the run, if the file has all of them, and others. They reach no more together than
// all drives did.
void take_part_of_drives(const PlanRateOptions& options, double& read, double& write) {
  const std::vector<DriveRates> drives = drive_rates(options.io_file);
  if (options.io_paths.empty() || drives.size() <= options.io_paths.size()) return;
  double own_read = 0, own_write = 0;
  for (const std::string& path : options.io_paths) {
    const auto found = std::ranges::find(drives, one_name_of(path), &DriveRates::path);
    if (found == drives.end() || found->read_bytes_per_second <= 0 ||
        found->write_bytes_per_second <= 0)
      return;
    own_read += found->read_bytes_per_second;
    own_write += found->write_bytes_per_second;
  }
  read = std::min(read, own_read);
  write = std::min(write, own_write);
}

void take_io_file(const PlanRateOptions& options, PlanRates& plan, RateSources& sources) {
  sources.read = sources.write = "calibration";
  const nlohmann::json document = read_rates_file(options.io_file);
  try {
    const nlohmann::json& best = document.at("best");
    const auto rate = [&](const char* pattern) {
      return checked_rate(best.at(pattern).at("bytes_per_second").get<double>(), options.io_file,
                          fmt::format("best.{}.bytes_per_second", pattern), "bench io");
    };
    const double interference = checked_rate(document.at("interference").get<double>(),
                                             options.io_file, "interference", "bench io");
    double read = rate("read"), write = rate("write");
    take_part_of_drives(options, read, write);
    set_storage_rates(read, write, interference, plan.rates);
    if (options.is_unscaled) {
      plan.rates.read_bytes_per_second = rate("read");
      plan.rates.write_bytes_per_second = rate("write");
    }
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no calibration of reads, writes and both; write it with "
                            "sluice bench io --json",
                            options.io_file));
  }
}

// The copies of one direction, in bytes a second.
double copy_rate(const nlohmann::json& document, const char* direction) {
  for (const nlohmann::json& copies : document.at("copies"))
    if (copies.at("direction") == direction)
      return 1e9 * copies.at("gb_per_s").at("median").get<double>();
  throw Error(ErrorCode::kInput, "");
}

// The rate of the best shape without transfers; 0 where none was measured.
double compute_rate(const nlohmann::json& document) {
  double rate = 0;
  if (!document.contains("training")) return rate;
  for (const nlohmann::json& step : document.at("training"))
    rate = std::max(rate, step.value("compute_flops_per_s", 0.0));
  return rate;
}

double measured(double rate) {
  if (!(rate > 0 && std::isfinite(rate))) throw Error(ErrorCode::kInput, "");
  return rate;
}

// A bench that is still under way, or was stopped, may have no drive and no training yet. Its CPU
// updated bf16 parameters with a split master and fp32 moments.
void take_gpu_file(const PlanRateOptions& options, const StateFormat& format, PlanRates& plan,
                   RateSources& sources) {
  const nlohmann::json document = read_rates_file(options.gpu_file);
  Rates& rates = plan.rates;
  try {
    rates.up_bytes_per_second = measured(copy_rate(document, "up"));
    rates.down_bytes_per_second = measured(copy_rate(document, "down"));
    rates.device_adam_parameters_per_second =
        measured(document.at("adam").at("parameters_per_s").get<double>());
    sources.copy = sources.device_adam = kMeasured;
    const bool is_benched =
        format.master == MasterLayout::kSplitBf16 && format.moments == OptimizerState::kFp32;
    if (is_benched && document.contains("cpu_adam_parameters_per_s")) {
      rates.adam_parameters_per_second =
          measured(document.at("cpu_adam_parameters_per_s").get<double>());
      sources.adam = kMeasured;
    }
    // Files of older versions have none.
    if (document.contains("host_memory")) {
      rates.host_memory_bytes_per_second =
          1e9 * measured(document.at("host_memory").at("gb_per_s").at("median").get<double>());
      sources.host_memory = kMeasured;
    }
    if (document.contains("drive")) {
      const nlohmann::json& drive = document.at("drive");
      rates.read_bytes_per_second = measured(drive.at("read_bytes_per_second").get<double>());
      rates.write_bytes_per_second = measured(drive.at("write_bytes_per_second").get<double>());
      rates.duplex = drive.at("duplex") == "half" ? Duplex::kHalf : Duplex::kFull;
      sources.read = sources.write = kMeasured;
    }
    if (const double rate = compute_rate(document); rate != 0) {
      plan.flops = measured(rate);
      sources.flops = kMeasured;
    }
  } catch (const std::exception&) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has no rates of copies both ways and of the optimizer on the "
                            "device, or one that is no rate; write it with sluice bench gpu --json",
                            options.gpu_file));
  }
}

double size_rate(const std::string& text, const char* option) {
  const auto rate = static_cast<double>(parse_size(text));
  if (rate < 1e6)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("plan: {} {} is below 1MB per second; write the rate with its unit, such "
                    "as 7000MB or 25GB",
                    option, text));
  return rate;
}

double positive(double value, const char* option) {
  if (!(value > 0))
    throw Error(ErrorCode::kConfig, fmt::format("plan: {} {} is not positive", option, value));
  return value;
}

void take_drives(const PlanRateOptions& options, PlanRates& plan, RateSources& sources) {
  const DriveSet set = drive_set(options.drives);
  plan.rates.read_bytes_per_second = set.count * set.drive.read_bytes_per_second;
  plan.rates.write_bytes_per_second = set.count * set.drive.write_bytes_per_second;
  plan.rates.duplex = Duplex::kFull;
  sources.read = sources.write = "data sheet of " + options.drives;
}

// From the least reliable source to the best.
RateSources take_rates(const PlanRateOptions& options, const StateFormat& format, PlanRates& plan) {
  RateSources sources;
  Rates& rates = plan.rates;
  if (options.host_threads != 0) {
    plan.flops = kAssumedCoreFlops * options.host_threads;
    sources.flops = fmt::format("assumed, {} threads of this machine", options.host_threads);
  }
  if (options.sheet_flops) {
    plan.flops = *options.sheet_flops;
    sources.flops = "assumed, a share of the data sheet";
  }
  if (!options.gpu_file.empty()) take_gpu_file(options, format, plan, sources);
  if (!options.drives.empty()) take_drives(options, plan, sources);
  if (!options.io_file.empty()) take_io_file(options, plan, sources);
  if (!options.adam_file.empty()) take_adam_file(options, format, plan, sources);
  const auto state = [](double& rate, std::string& source, double stated) {
    rate = stated;
    source = "stated";
  };
  if (!options.read.empty())
    state(rates.read_bytes_per_second, sources.read, size_rate(options.read, "--read-rate"));
  if (!options.write.empty())
    state(rates.write_bytes_per_second, sources.write, size_rate(options.write, "--write-rate"));
  if (!options.duplex.empty())
    rates.duplex = options.duplex == "half" ? Duplex::kHalf : Duplex::kFull;
  if (!options.copy.empty()) {
    state(rates.up_bytes_per_second, sources.copy, size_rate(options.copy, "--copy-rate"));
    rates.down_bytes_per_second = rates.up_bytes_per_second;
  }
  if (options.adam)
    state(rates.adam_parameters_per_second, sources.adam, positive(*options.adam, "--adam-rate"));
  if (options.device_adam)
    state(rates.device_adam_parameters_per_second, sources.device_adam,
          positive(*options.device_adam, "--device-adam-rate"));
  if (!options.host_memory.empty())
    state(rates.host_memory_bytes_per_second, sources.host_memory,
          size_rate(options.host_memory, "--host-memory-rate"));
  if (options.flops) state(plan.flops, sources.flops, positive(*options.flops, "--flops"));
  return sources;
}

std::string gigabytes(double rate) {
  return fmt::format("{:.2f} GB/s", rate * 1e-9);
}

std::vector<std::string> lines_of(const PlanRates& plan, const RateSources& sources) {
  const Rates& rates = plan.rates;
  const bool is_equal = rates.up_bytes_per_second == rates.down_bytes_per_second;
  std::vector<std::string> lines = {
      fmt::format("storage reads   {:>14}  {}", gigabytes(rates.read_bytes_per_second),
                  sources.read),
      fmt::format("storage writes  {:>14}  {}, {} duplex", gigabytes(rates.write_bytes_per_second),
                  sources.write, rates.duplex == Duplex::kHalf ? "half" : "full"),
      fmt::format("copies          {:>14}  {}, {}", gigabytes(rates.up_bytes_per_second),
                  sources.copy,
                  is_equal ? "each way" : "and back " + gigabytes(rates.down_bytes_per_second)),
      fmt::format("Adam            {:>7.2f} Gparam/s  {}", rates.adam_parameters_per_second * 1e-9,
                  sources.adam),
      fmt::format("on the device   {:>7.2f} Gparam/s  {}",
                  rates.device_adam_parameters_per_second * 1e-9, sources.device_adam),
      fmt::format("computation     {:>7.{}f} Tflop/s  {}", plan.flops * 1e-12,
                  plan.flops < 1e12 ? 2 : 1, sources.flops)};
  if (!sources.host_memory.empty())
    lines.push_back(fmt::format("host memory     {:>14}  {}",
                                gigabytes(rates.host_memory_bytes_per_second),
                                sources.host_memory));
  return lines;
}

void share(std::uint32_t ranks, RateSources& sources, Rates& rates) {
  // The copies of a single GPU beside the cores say nothing about what memory has for several.
  if (ranks > 1 && sources.host_memory == kMeasured) {
    sources.host_memory.clear();
    rates.host_memory_bytes_per_second = 0;
  }
  rates.read_bytes_per_second /= ranks;
  rates.write_bytes_per_second /= ranks;
  rates.adam_parameters_per_second /= ranks;
  rates.host_memory_bytes_per_second /= ranks;
}

}  // namespace

// Reading and writing as many bytes at once takes `interference` times the sum of both times.
void set_storage_rates(double read, double write, double interference, Rates& rates) {
  const double sum_s = 1 / read + 1 / write, longest_s = 1 / std::min(read, write);
  const double measured_s = std::max(interference * sum_s, longest_s);
  rates.duplex = measured_s >= (longest_s + sum_s) / 2 ? Duplex::kHalf : Duplex::kFull;
  // Both at once then take the measured time.
  const double scale = measured_s / (rates.duplex == Duplex::kHalf ? sum_s : longest_s);
  rates.read_bytes_per_second = read / scale;
  rates.write_bytes_per_second = write / scale;
}

PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format) {
  if (options.is_on_host && !options.gpu_file.empty())
    throw Error(ErrorCode::kConfig,
                fmt::format("plan: --gpu-rates \"{}\" has the rates of a GPU, but this plan "
                            "computes on the host; set run.device to \"cuda\", or give --gpu",
                            options.gpu_file));
  PlanRates plan;
  Rates& rates = plan.rates;
  rates.read_bytes_per_second = kAssumedRead;
  rates.write_bytes_per_second = kAssumedWrite;
  rates.latency_s = kLatencyS;
  rates.up_bytes_per_second = rates.down_bytes_per_second = kAssumedCopy;
  rates.adam_parameters_per_second = kAssumedAdam;
  rates.device_adam_parameters_per_second = kAssumedDeviceAdam;
  plan.flops = kAssumedFlops;
  RateSources sources = take_rates(options, format, plan);
  share(options.sharing_ranks, sources, rates);
  if (options.is_on_host && !options.device_adam) {
    // A rank's share of all threads is no less than one thread.
    rates.device_adam_parameters_per_second =
        std::min(sources.thread_adam, rates.adam_parameters_per_second);
    sources.device_adam = sources.thread;
  }
  if (!options.link.empty()) rates.link_bytes_per_second = size_rate(options.link, "--link-rate");
  rates.flush_s = options.flush_ms ? *options.flush_ms * 1e-3 : kAssumedFlushS;
  // Both go at the pace of memory: the norm reads the gradient alone, Adam reads and writes all.
  const auto gradient_bytes = static_cast<double>(format.gradient_bytes());
  const double state_bytes = format.state_bytes_per_element();
  rates.norm_parameters_per_second =
      rates.adam_parameters_per_second * (2 * state_bytes + gradient_bytes) / gradient_bytes;
  plan.sources = lines_of(plan, sources);
  if (options.sharing_ranks > 1)
    plan.sources.push_back(
        fmt::format("of a host's drives, cores and memory, each of {} ranks has this share",
                    options.sharing_ranks));
  if (!options.link.empty())
    plan.sources.push_back(fmt::format("link to ranks   {:>14}  stated, each way",
                                       gigabytes(rates.link_bytes_per_second)));
  if (options.flush_ms)
    plan.sources.push_back(fmt::format("flush           {:>11.1f} ms  stated, three for a commit",
                                       rates.flush_s * 1e3));
  return plan;
}

}  // namespace sluice
