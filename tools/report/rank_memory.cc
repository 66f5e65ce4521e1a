#include "tools/report/rank_memory.h"

#include <fstream>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/placement.h"

namespace sluice {

std::vector<RankMemory> memory_of_ranks(Engine& engine, const PhaseMarks& most_in_use) {
  const Placement& placement = placement_of(engine);
  const RankMemory own{
      .device_pool = placement.device_bytes(),
      .host_pool = placement.host_bytes(),
      .nvme = placement.nvme_bytes(),
      .peak_rss = peak_rss_bytes(),
      .parameters = placement.resident_parameter_bytes + placement.host_parameter_bytes +
                    placement.nvme_parameter_bytes,
      .window = placement.window_bytes,
      .gradients = placement.gradient_set_bytes + placement.device_gradient_bytes +
                   placement.nvme_gradient_bytes,
      .optimizer =
          placement.device_record_bytes + placement.host_record_bytes + placement.nvme_record_bytes,
      .most_in_use = most_in_use};
  std::vector<RankMemory> all(engine.rank_count());
  const auto exchange = [&](const auto& value_in) {
    RankMemory given = own;
    const std::vector<double> values = engine.exchange(static_cast<double>(value_in(given)));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      value_in(all[rank]) = static_cast<std::uint64_t>(values[rank]);
  };
  for (std::uint64_t RankMemory::*const member :
       {&RankMemory::device_pool, &RankMemory::host_pool, &RankMemory::nvme, &RankMemory::peak_rss,
        &RankMemory::parameters, &RankMemory::window, &RankMemory::gradients,
        &RankMemory::optimizer})
    exchange([=](RankMemory& rank) -> std::uint64_t& { return rank.*member; });
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    for (std::size_t tier = 0; tier < kTiers; ++tier)
      exchange([=](RankMemory& rank) -> std::uint64_t& {
        return rank.most_in_use[phase].tier_bytes[tier];
      });
    for (std::size_t kind = 0; kind < kMemoryKinds; ++kind)
      exchange([=](RankMemory& rank) -> std::uint64_t& {
        return rank.most_in_use[phase].kind_bytes[kind];
      });
  }
  return all;
}

std::string memory_report(const RankMemory& own) {
  std::string text;
  const auto line = [&](const char* name, Tier tier, std::uint64_t pool_bytes) {
    if (pool_bytes == 0) return;
    const auto most = [&](StepPhase phase) {
      return format_bytes(own.most_in_use[static_cast<std::size_t>(phase)].most(tier));
    };
    text += fmt::format("{} in use at most: forward {}, backward {}, optimizer {} of {}\n", name,
                        most(StepPhase::kForward), most(StepPhase::kBackward),
                        most(StepPhase::kOptimizer), format_bytes(pool_bytes));
  };
  line("device memory", Tier::kDevice, own.device_pool);
  line("host memory", Tier::kHost, own.host_pool);
  line("storage", Tier::kNvme, own.nvme);
  return text;
}

nlohmann::ordered_json json_of(const PhaseMarks& marks) {
  nlohmann::ordered_json phases;
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    nlohmann::ordered_json& entry = phases[name_of(static_cast<StepPhase>(phase))];
    for (std::size_t tier = 0; tier < kTiers; ++tier)
      entry[std::string(name_of(static_cast<Tier>(tier)))] = marks[phase].tier_bytes[tier];
    for (std::size_t kind = 0; kind < kMemoryKinds; ++kind)
      entry[name_of(static_cast<MemoryKind>(kind))] = marks[phase].kind_bytes[kind];
  }
  return phases;
}

nlohmann::ordered_json json_of(const RankMemory& rank) {
  return {{"device_pool_bytes", rank.device_pool},
          {"host_pool_bytes", rank.host_pool},
          {"nvme_bytes", rank.nvme},
          {"peak_rss_bytes", rank.peak_rss},
          {"parameter_bytes", rank.parameters},
          {"window_bytes", rank.window},
          {"gradient_bytes", rank.gradients},
          {"optimizer_bytes", rank.optimizer},
          {"most_in_use_bytes", json_of(rank.most_in_use)}};
}

std::uint64_t peak_rss_bytes() {
  // Not getrusage(): its maximum lives on across exec() and would count the program that started
  // this one.
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::uint64_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib << 10;
  }
  return 0;
}

}  // namespace sluice
