#include "tools/report/machine_presets.h"

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include <fmt/ranges.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30;
constexpr std::array<GpuPreset, 10> kGpus{{{"3090", 24 * kGibibyte, 71e12},
                                           {"4090", 24 * kGibibyte, 165.2e12},
                                           {"5090", 32 * kGibibyte, 209.5e12},
                                           {"v100", 32 * kGibibyte, 125e12},
                                           {"l40s", 48 * kGibibyte, 362e12},
                                           {"a100", 80 * kGibibyte, 312e12},
                                           {"h100", 80 * kGibibyte, 989e12},
                                           {"h200", 141'000'000'000, 989e12},
                                           {"gh200", 96'000'000'000, 989e12},
                                           {"b200", 180'000'000'000, 2250e12}}};
// 990 PRO, SN850X, T705 and 9100 PRO with 2 TB, PM9A3 with 3.84 TB, Optane P5800X with 1.6 TB.
constexpr std::array<DrivePreset, 6> kDrives{{{"990pro", 7.45e9, 6.9e9, 2e12, 1200e12},
                                              {"sn850x", 7.3e9, 6.6e9, 2e12, 1200e12},
                                              {"t705", 14.5e9, 12.7e9, 2e12, 1200e12},
                                              {"9100pro", 14.7e9, 13.4e9, 2e12, 1200e12},
                                              {"pm9a3", 6.9e9, 4.1e9, 3.84e12, 7008e12},
                                              {"p5800x", 7.2e9, 6.2e9, 1.6e12, 292e15}}};
constexpr std::uint32_t kDriveCountMax = 1024;

template <class Presets>
std::string names_of(const Presets& presets) {
  std::vector<std::string_view> names;
  for (const auto& preset : presets) names.emplace_back(preset.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

template <class Presets>
const auto& find_preset(const Presets& presets, const char* option, std::string_view name,
                        const char* other) {
  for (const auto& preset : presets)
    if (preset.name == name) return preset;
  throw Error(ErrorCode::kConfig, fmt::format("plan: {} {} is not known; there are {}; {}", option,
                                              name, names_of(presets), other));
}

}  // namespace

const GpuPreset& gpu_preset(const std::string& name) {
  return find_preset(kGpus, "--gpu", name,
                     "of another, give --set run.device=cuda --set memory.device=SIZE and --flops");
}

DriveSet drive_set(const std::string& text) {
  const std::size_t colon = text.find(':');
  DriveSet set{.drive = find_preset(kDrives, "--drive", text.substr(0, colon),
                                    "of another, give --read-rate and --write-rate")};
  if (colon == std::string::npos) return set;
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data() + colon + 1, end, set.count);
  if (status != std::errc{} || stop != end || set.count == 0 || set.count > kDriveCountMax)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("plan: --drive {}: behind the colon stands the number of drives, from 1 "
                    "to {}, such as {}:4",
                    text, kDriveCountMax, set.drive.name));
  return set;
}

std::string gpu_names() {
  return names_of(kGpus);
}

std::string drive_names() {
  return names_of(kDrives);
}

}  // namespace sluice
