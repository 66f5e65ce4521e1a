// The planner behind plan_placement(): the device's pools first (engine/placement_planner.cc), then
// the host's (engine/placement_host.cc). For those two files alone.
//
// Thread rule: none; one call of plan_placement() owns it.
#pragma once

#include <vector>

#include "engine/placement.h"
#include "engine/schedule.h"

namespace sluice {

class PlacementPlanner {
 public:
  // All must outlive the planner.
  PlacementPlanner(const Layout& layout, const ModelSpec& model, const Config::Placement& choices,
                   const Budgets& budgets, const PassNeeds& pass);

  Placement plan();

 private:
  // A budget that does not hold its pools: the least that would, and what takes it.
  struct Shortage {
    std::uint64_t needed_bytes = 0;
    std::vector<Pool> pools;
  };

  void plan_activation_pools();

  // Device.
  void plan_device();
  bool may_be_resident() const;
  void plan_window_pool(std::uint64_t budget, std::uint64_t window_minimum);
  void make_resident(const UnitPlace& unit);
  std::uint64_t update_bytes(const UnitPlace& unit) const;
  void update_on_device(const UnitPlace& unit);
  void fill_device();

  // Host.
  void plan_host();
  std::optional<Shortage> try_host();
  void set_gradient_tier(const UnitPlace& unit, Tier tier);
  void send_gradients_away();
  void take_gradients_back();
  bool shrink_buffers(std::uint32_t staging, std::uint32_t lanes, std::uint32_t lanes_least);
  void clear_records();
  void fill_host(bool parameters, bool records, std::uint64_t room_bytes);
  std::uint32_t lanes_for_bursts() const;
  void size_buffers(std::uint32_t staging_slots, std::uint32_t lanes);
  std::uint64_t minimum_host_bytes(std::uint32_t lanes);

  void add_nvme_bytes();
  std::uint64_t unit_slot_bytes(const UnitPlace& unit) const;
  std::uint64_t gradient_bytes(const UnitPlace& unit) const;
  std::uint64_t largest_block() const;
  std::uint64_t largest_piece() const;
  bool device_updates_all() const;
  bool spills_gradients() const;
  bool lanes_fetch_gradients() const;
  std::uint32_t staging_least() const;

  const Layout& layout_;
  const ModelSpec& model_;
  const Config::Placement& choices_;
  const PassNeeds& pass_;
  Schedule schedule_;
  std::vector<std::uint64_t> sizes_;  // in the window, by unit; 0 once homed on the device
  Placement placement_;
  std::uint32_t activation_places_least_ = 0;
};

// A budget that is too small: the pools that have to fit, and the size that would hold them.
[[noreturn]] void fail_budget(Tier tier, const char* key, std::uint64_t budget_bytes,
                              std::uint64_t needed_bytes, const std::vector<Pool>& pools);

}  // namespace sluice
