// This class makes one attempt to place the state under given budgets. The device's pools are
// planned first (engine/plan/placement_planner.cc), and the host's pools next
// (engine/plan/placement_host.cc). Only three files use this header: placement_planner.cc,
// placement_host.cc and engine/plan/placement_budget.cc. The file placement_budget.cc decides which
// attempts are made.
//
// If the state of one more unit stays on the device, the whole placement can become too large. For
// example, the first unit on the device no longer needs host memory for its parameters. But the
// update of this unit's parameters then needs buffers in host memory. So the caller chooses for
// each attempt which kinds of state stay off the device (PlacementThrift).
//
// Thread rule: only one thread uses the object, because one call of plan_placement() owns the
// object. An object makes one attempt. To make another attempt, copy the object first.
#pragma once

#include <optional>
#include <vector>

#include "engine/plan/placement.h"
#include "engine/plan/schedule.h"

namespace sluice {

// The kinds of state that stay off the device even if the device has room.
struct PlacementThrift {
  bool buffers = false;     // buffers beyond the least number; other state gets their room
  bool records = false;     // records of units whose parameters are on the device
  bool parameters = false;  // parameters that need not be there; records stay off, too
  bool gradients = false;   // gradients that do not fit into host memory go to storage
};

// The tier whose budget is too small for the tier's pools. `needed_bytes` is the planner's estimate
// of the smallest budget that is large enough.
struct PlacementShortage {
  Tier tier = Tier::kHost;
  std::uint64_t needed_bytes = 0;
};

// home_slot_bytes() returns the bytes that a unit's parameters take at home. set_slot_bytes()
// returns the bytes that a unit's gradients take in the gradient set. Both results are rounded up
// to multiples of kStorageAlignBytes.
std::uint64_t home_slot_bytes(const Layout& layout, const UnitPlace& unit);
std::uint64_t set_slot_bytes(const Layout& layout, const UnitPlace& unit);

class PlacementPlanner {
 public:
  // All arguments must outlive the planner.
  PlacementPlanner(const Layout& layout, const ModelSpec& model, const Config::Placement& choices,
                   const PassNeeds& pass);

  // If everything fits, the result is empty, and take() may be called.
  std::optional<PlacementShortage> attempt(const Budgets& budgets, const PlacementThrift& thrift);
  Placement take() { return std::move(placement_); }

 private:
  // The homes that are in use. The sizes of buffers depend on these homes. The search for these
  // homes goes through all blocks, so the planner searches only once for each choice of homes.
  struct HomesInUse {
    bool parameters_on_storage = false;
    bool parameters_on_device = false;
    bool records_on_storage = false;
    bool records_on_device = false;
    bool gradients_on_storage = false;
    bool lanes_fetch_gradients = false;
    bool streams_device_gradients = false;
    bool device_updates_all = true;
  };

  void plan_activation_pools();

  // Device.
  std::optional<PlacementShortage> plan_device();
  std::uint64_t least_window() const;
  std::uint64_t window_wanted(std::uint64_t least_bytes) const;
  bool may_be_resident() const;
  void plan_window_pool(std::uint64_t budget, std::uint64_t window_minimum);
  void add_homes(std::uint64_t rest_bytes);
  void make_resident(const UnitPlace& unit);
  void lease_in_host();
  void update_on_device(const UnitPlace& unit);
  void fill_device();

  // Host.
  std::optional<PlacementShortage> plan_host();
  std::optional<PlacementShortage> try_host(std::uint32_t buffers_most);
  void set_gradient_tier(const UnitPlace& unit, Tier tier);
  void send_gradients_away();
  void take_gradients_back();
  bool shrink_buffers(std::uint32_t staging, std::uint32_t lanes, std::uint32_t lanes_least);
  void clear_records();
  void fill_host(bool parameters, bool records, std::uint64_t room_bytes);
  void size_buffers(const HomesInUse& homes, std::uint32_t staging_slots, std::uint32_t lanes);
  std::uint64_t minimum_host_bytes(std::uint32_t lanes);
  void add_lanes();

  void add_nvme_bytes();
  HomesInUse homes_in_use() const;
  std::uint32_t staging_least(const HomesInUse& homes) const;

  const Layout& layout_;
  const ModelSpec& model_;
  const Config::Placement& choices_;
  const PassNeeds& pass_;
  PlacementThrift thrift_;
  Schedule schedule_;
  std::vector<Schedule> all_schedules_;  // the window has to serve all of them
  std::vector<std::uint64_t> sizes_;     // in the window, by unit; 0 if the home is the device
  Placement placement_;
  std::uint32_t activation_places_least_ = 0;
  std::uint64_t largest_block_ = 0;  // elements
};

}  // namespace sluice
