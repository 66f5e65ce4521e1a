#include "tools/report/plan_rates.h"

#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"
#include "tools/report/machine_presets.h"

namespace sluice {
namespace {

// A drive of today, a bus of 16 lanes of PCI Express 4, a server's memory, a large device. They let
// a plan work without any word about the machine.
constexpr double kAssumedRead = 6e9;
constexpr double kAssumedWrite = 4e9;
constexpr double kAssumedCopy = 20e9;
constexpr double kAssumedAdam = 2e9;
constexpr double kAssumedDeviceAdam = 60e9;
constexpr double kAssumedFlops = 200e12;
constexpr double kLatencyS = 100e-6;
constexpr double kAssumedFlushS = 5e-3;  // a volatile cache of a drive of today, nearly empty
// The interference from which on a drive is nearer to half duplex than to full.
constexpr double kHalfDuplexFrom = 0.75;
constexpr std::uint64_t kRatesFileBytesMax = 16_MiB;  // far more than any has

nlohmann::json read_json(const std::string& path) {
  std::string why;
  const auto text = read_text_file(path, kRatesFileBytesMax, why);
  if (!text)
    throw Error(ErrorCode::kInput,
                fmt::format("cannot read the calibration \"{}\": {}", path, why));
  try {
    return nlohmann::json::parse(*text);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" is no JSON: {}", path, error.what()));
  }
}

// Parameters a second at the most threads measured. Older files know only fp32 moments, and do not
// say so.
void take_adam_file(const PlanRateOptions& options, const StateFormat& format, PlanRates& plan) {
  const nlohmann::json document = read_json(options.adam_file);
  const char* state = format.master == MasterLayout::kSplitBf16 ? "split_bf16"
                      : format.master == MasterLayout::kFp16    ? "fp16"
                                                                : "fp32";
  try {
    unsigned threads = 0;
    for (const nlohmann::json& row : document.at("results")) {
      if (row.value("moments", "fp32") != name_of(format.moments)) continue;
      if (row.at("state") != state || row.at("threads").get<unsigned>() < threads) continue;
      threads = row.at("threads").get<unsigned>();
      plan.rates.adam_parameters_per_second = row.at("parameters_per_s").at("median").get<double>();
    }
    if (threads == 0) throw Error(ErrorCode::kInput, "");
  } catch (const std::exception&) {
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" has no row for state {} with moments in {}; write it with sluice "
                    "bench adam --state {} --json",
                    options.adam_file, state, name_of(format.moments), name_of(format.moments)));
  }
}

void take_io_file(const PlanRateOptions& options, PlanRates& plan) {
  const nlohmann::json document = read_json(options.io_file);
  try {
    const nlohmann::json& best = document.at("best");
    const auto rate = [&](const char* pattern) {
      return best.at(pattern).at("bytes_per_second").get<double>();
    };
    set_storage_rates(rate("read"), rate("write"), document.at("interference").get<double>(),
                      plan.rates);
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no calibration of reads, writes and both; write it with "
                            "sluice bench io --json",
                            options.io_file));
  }
}

double size_rate(const std::string& text, const char* option) {
  const auto rate = static_cast<double>(parse_size(text));
  if (rate < 1e6)
    throw Error(ErrorCode::kConfig, fmt::format("plan: {} {} is below 1MB a second", option, text));
  return rate;
}

double positive(double value, const char* option) {
  if (!(value > 0))
    throw Error(ErrorCode::kConfig, fmt::format("plan: {} {} is not positive", option, value));
  return value;
}

const char* source_of(bool is_stated, const std::string& file) {
  return is_stated ? "stated" : file.empty() ? "assumed" : "calibration";
}

void take_drives(const PlanRateOptions& options, PlanRates& plan) {
  const DriveSet set = drive_set(options.drives);
  plan.rates.read_bytes_per_second = set.count * set.drive.read_bytes_per_second;
  plan.rates.write_bytes_per_second = set.count * set.drive.write_bytes_per_second;
}

std::string source_of_storage(bool is_stated, const PlanRateOptions& options) {
  const bool is_of_sheet = !is_stated && options.io_file.empty() && !options.drives.empty();
  return is_of_sheet ? "data sheet of " + options.drives : source_of(is_stated, options.io_file);
}

void share(std::uint32_t ranks, Rates& rates) {
  rates.read_bytes_per_second /= ranks;
  rates.write_bytes_per_second /= ranks;
  rates.adam_parameters_per_second /= ranks;
}

}  // namespace

void set_storage_rates(double read, double write, double interference, Rates& rates) {
  rates.duplex = interference >= kHalfDuplexFrom ? Duplex::kHalf : Duplex::kFull;
  // Reading and writing at once then take the measured time.
  const double scale = interference * (rates.duplex == Duplex::kHalf ? 1 : 2);
  rates.read_bytes_per_second = read / scale;
  rates.write_bytes_per_second = write / scale;
}

PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format) {
  PlanRates plan;
  Rates& rates = plan.rates;
  rates.read_bytes_per_second = kAssumedRead;
  rates.write_bytes_per_second = kAssumedWrite;
  rates.latency_s = kLatencyS;
  rates.up_bytes_per_second = rates.down_bytes_per_second = kAssumedCopy;
  rates.adam_parameters_per_second = kAssumedAdam;
  plan.flops = options.flops ? positive(*options.flops, "--flops") : kAssumedFlops;
  if (!options.drives.empty()) take_drives(options, plan);
  if (!options.io_file.empty()) take_io_file(options, plan);
  if (!options.adam_file.empty()) take_adam_file(options, format, plan);
  if (!options.read.empty()) rates.read_bytes_per_second = size_rate(options.read, "--read-rate");
  if (!options.write.empty())
    rates.write_bytes_per_second = size_rate(options.write, "--write-rate");
  if (!options.duplex.empty())
    rates.duplex = options.duplex == "half" ? Duplex::kHalf : Duplex::kFull;
  if (!options.copy.empty())
    rates.up_bytes_per_second = rates.down_bytes_per_second =
        size_rate(options.copy, "--copy-rate");
  if (options.adam) rates.adam_parameters_per_second = positive(*options.adam, "--adam-rate");
  share(options.sharing_ranks, rates);
  if (!options.link.empty()) rates.link_bytes_per_second = size_rate(options.link, "--link-rate");
  rates.device_adam_parameters_per_second =
      options.device_adam ? positive(*options.device_adam, "--device-adam-rate")
                          : kAssumedDeviceAdam;
  rates.flush_s = options.flush_ms ? *options.flush_ms * 1e-3 : kAssumedFlushS;
  // Both go at the pace of memory: the norm reads the gradient alone, Adam reads and writes all.
  const auto gradient_bytes = static_cast<double>(format.gradient_bytes());
  const double state_bytes = format.state_bytes_per_element();
  rates.norm_parameters_per_second =
      rates.adam_parameters_per_second * (2 * state_bytes + gradient_bytes) / gradient_bytes;
  const auto gigabytes = [](double rate) { return fmt::format("{:.2f} GB/s", rate * 1e-9); };
  plan.sources = {
      fmt::format("storage reads   {:>14}  {}", gigabytes(rates.read_bytes_per_second),
                  source_of_storage(!options.read.empty(), options)),
      fmt::format("storage writes  {:>14}  {}, {} duplex", gigabytes(rates.write_bytes_per_second),
                  source_of_storage(!options.write.empty(), options),
                  rates.duplex == Duplex::kHalf ? "half" : "full"),
      fmt::format("copies          {:>14}  {}, each way", gigabytes(rates.up_bytes_per_second),
                  source_of(!options.copy.empty(), {})),
      fmt::format("Adam            {:>7.2f} Gparam/s  {}", rates.adam_parameters_per_second * 1e-9,
                  source_of(options.adam.has_value(), options.adam_file)),
      fmt::format("on the device   {:>7.2f} Gparam/s  {}",
                  rates.device_adam_parameters_per_second * 1e-9,
                  source_of(options.device_adam.has_value(), {})),
      fmt::format("computation     {:>7.1f} Tflop/s  {}", plan.flops * 1e-12,
                  source_of(options.flops.has_value(), {}))};
  if (options.sharing_ranks > 1)
    plan.sources.push_back(fmt::format(
        "of a host's drives and cores, each of {} ranks has this share", options.sharing_ranks));
  if (!options.link.empty())
    plan.sources.push_back(fmt::format("link to ranks   {:>14}  stated, each way",
                                       gigabytes(rates.link_bytes_per_second)));
  if (options.flush_ms)
    plan.sources.push_back(fmt::format("flush           {:>11.1f} ms  stated, three for a commit",
                                       rates.flush_s * 1e3));
  return plan;
}

}  // namespace sluice
