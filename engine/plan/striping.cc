#include "engine/plan/striping.h"

#include <cmath>
#include <filesystem>
#include <numeric>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"
#include "base/topology.h"
#include "base/untrusted_json.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr std::uint64_t kWeightsFileBytesMax = 16_MiB;  // far more than any has

[[noreturn]] void refuse(const Config::Storage& storage, const std::string& why) {
  std::string command = "sluice bench io";
  for (const std::string& path : storage.paths) command += " --path " + path;
  throw Error(ErrorCode::kInput,
              fmt::format("storage.calibration \"{}\" {}; measure: {} --json {}",
                          storage.calibration, why, command, storage.calibration));
}

// One name for a folder, in whatever form it is written.
std::string canonical(const std::string& path) {
  std::error_code error;
  const auto found = std::filesystem::weakly_canonical(path, error);
  return error ? path : found.string();
}

json read_calibration(const Config::Storage& storage) {
  std::string why;
  const auto text = read_text_file(storage.calibration, kWeightsFileBytesMax, why);
  if (!text) refuse(storage, "cannot be read: " + why);
  json calibration = parse_untrusted_json<json>(*text);
  if (!calibration.is_object() || calibration.value("format", json()) != "sluice-io-calibration-1")
    refuse(storage, "is not a calibration of this version");
  // Two machines may have drives of other speeds under the same names.
  const json made_on = calibration.value("processor", json());
  const std::string& here = topology().processor;
  if (made_on.is_string() && made_on != "" && !here.empty() && made_on != here)
    refuse(storage, fmt::format("is of another machine, whose processor is \"{}\"; this one's is "
                                "\"{}\"",
                                made_on.get<std::string>(), here));
  return calibration;
}

// The rate of the optimizer's pattern on one path, or 0.
double mixed_rate(const json& calibration, const std::string& path) {
  const auto drives = calibration.find("drives");
  if (drives == calibration.end() || !drives->is_array()) return 0;
  for (const json& drive : *drives) {
    if (!drive.is_object() || drive.value("path", json()) != path) continue;
    const json rate = drive.value("mixed", json());
    return rate.is_number() && std::isfinite(rate.get<double>()) ? rate.get<double>() : 0;
  }
  return 0;
}

}  // namespace

std::vector<double> storage_weights(const Config::Storage& storage) {
  if (!storage.weights.empty()) return storage.weights;
  std::vector<double> weights(storage.paths.size(), 1.0);
  if (storage.calibration.empty()) return weights;
  const json calibration = read_calibration(storage);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = mixed_rate(calibration, canonical(storage.paths[i]));
    if (!(weights[i] > 0))
      refuse(storage,
             fmt::format("has no rate of \"mixed\" for storage path \"{}\"", storage.paths[i]));
  }
  return weights;
}

DriveDealer::DriveDealer(std::span<const double> weights)
    : shares_(weights.begin(), weights.end()), drive_bytes_(weights.size(), 0) {
  const double weight_sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& share : shares_) share /= weight_sum;
}

std::uint32_t DriveDealer::deal(std::uint64_t size_bytes) {
  dealt_bytes_ += size_bytes;
  const auto missing_bytes = [&](std::size_t drive) {
    return static_cast<double>(dealt_bytes_) * shares_[drive] -
           static_cast<double>(drive_bytes_[drive]);
  };
  std::uint32_t chosen = 0;
  for (std::uint32_t drive = 1; drive < shares_.size(); ++drive) {
    if (missing_bytes(drive) > missing_bytes(chosen)) chosen = drive;
  }
  drive_bytes_[chosen] += size_bytes;
  return chosen;
}

Striping plan_striping(const Layout& layout, const Placement& placement,
                       std::span<const double> weights) {
  DriveDealer dealer(weights);
  Striping striping;
  for (const BlockPlace& block : layout.blocks()) {
    const std::uint32_t i = index_of(block.id);
    std::uint64_t block_bytes = 0;
    if (placement.parameter_tier[i] == Tier::kNvme)
      block_bytes += layout.parameter_slot_bytes(block.id);
    if (placement.record_tier[i] == Tier::kNvme) block_bytes += layout.record_slot_bytes(block.id);
    if (placement.has_shadow(block.id)) block_bytes *= 2;
    if (placement.gradient_tier[index_of(block.unit)] == Tier::kNvme)
      block_bytes += layout.gradient_slot_bytes(block.id);
    striping.drive.push_back(dealer.deal(block_bytes));
  }
  striping.drive_bytes = dealer.drive_bytes();
  return striping;
}

}  // namespace sluice
