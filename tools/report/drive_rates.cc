#include "tools/report/drive_rates.h"

#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"

namespace sluice {
namespace {

constexpr std::uint64_t kRatesFileBytesMax = 16_MiB;  // far more than any has

}  // namespace

nlohmann::json read_rates_file(const std::string& path) {
  std::string why;
  int error = 0;
  const auto text = read_text_file(path, kRatesFileBytesMax, why, &error);
  if (!text)
    throw Error(ErrorCode::kInput,
                fmt::format("cannot read the calibration \"{}\": {}{}", path, why,
                            error == ENOENT ? "; name a file that exists" : ""));
  try {
    return nlohmann::json::parse(*text);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" is no JSON: {}", path, error.what()));
  }
}

std::vector<DriveRates> drive_rates(const std::string& io_file) {
  const nlohmann::json document = read_rates_file(io_file);
  std::vector<DriveRates> drives;
  try {
    if (!document.contains("drives")) return {};
    for (const nlohmann::json& drive : document.at("drives"))
      drives.push_back({.path = drive.at("path").get<std::string>(),
                        .read_bytes_per_second = drive.value("read", 0.0),
                        .write_bytes_per_second = drive.value("write", 0.0)});
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInput,
                fmt::format("the drives of \"{}\" are damaged: {}", io_file, error.what()));
  }
  return drives;
}

std::string one_name_of(const std::string& path) {
  std::error_code failure;
  std::filesystem::path name = std::filesystem::weakly_canonical(path, failure);
  if (failure) return path;
  return name.has_filename() ? name.string() : name.parent_path().string();
}

}  // namespace sluice
