// There are two kinds of boundary activations: values and gradients. Each forward use of a unit
// passes a value to the next use. Each backward use passes a gradient back. If the engine keeps
// activations (Config::Activations), the application saves and loads activations in a sequence that
// the schedule determines. So the movement of activations can be planned in the same way as the
// movement of parameters. The plan gives each activation a place in the device's activation window.
// The plan also says which activations have to move from the window to their homes and back. The
// plan depends only on the shape and on the number of places, and determines the exact number of
// bytes that are moved. Any thread may call the functions.
//
// The sequence follows from these rules. Forward use k of a micro-batch loads value k - 1 and saves
// value k. Forward use k has a counterpart in the backward pass, with the same number. The
// counterpart loads value k - 1 for the recomputation, loads gradient k and saves gradient k - 1.
// At the first use and at the last use, some of these accesses do not exist, and are left out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/use.h>

namespace sluice {

enum class ActivationAction : std::uint8_t { kSave, kLoad };

struct ActivationAccess {
  ActivationRef ref;
  ActivationAction action = ActivationAction::kSave;
  std::uint32_t source = 0;  // the access that saved the activation
  std::uint32_t place = 0;   // in the window
  // If a save has this flag, the activation also goes to its home. The activation needs its home
  // because another activation gets the place in the window before the load. If a load has this
  // flag, the activation comes from its home.
  bool moves = false;
  bool empties_home = false;                  // the last load that moves the activation of `source`
  std::optional<std::uint32_t> evicted = {};  // last access of the overwritten activation
};

struct ActivationPlan {
  std::vector<ActivationAccess> accesses;
  std::uint32_t places = 0;  // used in the window
  // These members are the numbers of bytes that move to homes and from homes, in whole storage
  // units.
  std::uint64_t stored_bytes = 0;
  std::uint64_t fetched_bytes = 0;
  // The peak number of bytes in the homes, rounded up to whole storage units.
  std::uint64_t at_home_most_bytes = 0;
};

// The shape of a step or an inference. The shape determines the accesses.
struct ActivationShape {
  const ModelSpec& model;  // must outlive the call
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  bool has_backward = true;
};

// The largest number of accesses that an application may hold at the same time. An application with
// N leases may hold the accesses of N uses.
std::uint32_t activations_held_max(const ModelSpec& model);

// Returns a plan for a window of `places_max` places, each as large as the largest boundary. When
// an access comes, the plan assumes that the last activations_held_max() - 1 accesses before this
// access are still held.
// Requires: `places_max` is 0 or at least activations_held_max(). If `places_max` is 0, the window
// has enough places for all activations.
ActivationPlan plan_activations(const ActivationShape& shape, std::uint32_t places_max);

// The class lists the homes that the activations of the largest step need. The homes lie one after
// the other in a pool. In horizontal order, there is one home per boundary. In vertical order,
// there is one home per boundary and micro-batch. A gradient uses the home of the value at the same
// boundary, because this value is no longer needed. A horizontal step may have more micro-batches
// than there are homes at a boundary. Then, a later micro-batch uses the home of an earlier one,
// whose activations are no longer needed.
class ActivationHomes {
 public:
  ActivationHomes() = default;
  ActivationHomes(const ModelSpec& model, const Config::Activations& activations);

  std::uint32_t count() const { return static_cast<std::uint32_t>(offsets_.size()); }
  std::uint32_t home_of(const ActivationRef& ref) const {
    return ref.boundary * alive_ + ref.micro_batch % alive_;
  }
  std::uint64_t offset_bytes(std::uint32_t home) const { return offsets_[home]; }
  std::uint64_t value_bytes(std::uint32_t home) const { return bytes_[home / alive_]; }
  std::uint64_t largest_bytes() const;  // in whole storage units, like each home
  std::uint64_t size_bytes() const { return size_bytes_; }
  // The unit whose forward use fills the home.
  UnitId unit(std::uint32_t home) const { return units_[home / alive_]; }
  std::uint32_t micro_batch(std::uint32_t home) const { return home % alive_; }
  // Returns whether every activation of a step with this number of micro-batches has a home.
  bool hold(std::uint32_t micro_batches, MicroBatchOrder order) const {
    return order == MicroBatchOrder::kHorizontal || micro_batches <= alive_;
  }
  bool operator==(const ActivationHomes&) const = default;

 private:
  std::uint32_t alive_ = 1;             // micro-batches whose activations exist at once
  std::vector<std::uint64_t> bytes_;    // by boundary
  std::vector<UnitId> units_;           // by boundary
  std::vector<std::uint64_t> offsets_;  // by home
  std::uint64_t size_bytes_ = 0;
};

// The struct says how many homes and places the activations of the largest step need.
struct ActivationNeeds {
  ActivationHomes homes;
  // Both members are numbers of places in the window. Each place is as large as the largest
  // boundary. If no activation may leave the window, both numbers include a place for every
  // activation of the declared step, and of each horizontal step. If activations may leave the
  // window, `places_least` includes only places for the held accesses, which a step of any shape
  // has. `places_wanted` also includes places for the accesses that are read ahead.
  std::uint32_t places_least = 0;
  std::uint32_t places_wanted = 0;
};

// `uses_ahead` is the number of uses whose accesses are read ahead.
// Fails with kInvalidArgument if the model has boundaries, but does not give
// ModelSpec::boundary_bytes.
ActivationNeeds activation_needs(const ModelSpec& model, const Config::Activations& activations,
                                 std::uint32_t uses_ahead);

}  // namespace sluice
