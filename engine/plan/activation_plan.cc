#include "engine/plan/activation_plan.h"

#include <algorithm>
#include <limits>
#include <set>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/layout.h"

namespace sluice {
namespace {

constexpr std::uint32_t kNoUse = std::numeric_limits<std::uint32_t>::max();
// Backward loads a value and a gradient and saves a gradient.
constexpr std::uint32_t kAccessesOfUse = 3;

std::vector<ActivationAccess> sequence_of(const ActivationShape& shape) {
  std::vector<ActivationAccess> sequence;
  const auto boundaries = static_cast<std::uint32_t>(shape.model.boundary_bytes.size());
  const auto add = [&](ActivationAction action, ActivationKind kind, std::uint32_t boundary,
                       std::uint32_t micro_batch) {
    sequence.push_back({.ref = {.boundary = boundary, .micro_batch = micro_batch, .kind = kind},
                        .action = action});
  };
  const auto forward = [&](std::uint32_t use, std::uint32_t micro_batch) {
    if (use > 0) add(ActivationAction::kLoad, ActivationKind::kValue, use - 1, micro_batch);
    if (use < boundaries) add(ActivationAction::kSave, ActivationKind::kValue, use, micro_batch);
  };
  const auto backward = [&](std::uint32_t use, std::uint32_t micro_batch) {
    if (use > 0) add(ActivationAction::kLoad, ActivationKind::kValue, use - 1, micro_batch);
    if (use < boundaries) add(ActivationAction::kLoad, ActivationKind::kGradient, use, micro_batch);
    if (use > 0) add(ActivationAction::kSave, ActivationKind::kGradient, use - 1, micro_batch);
  };
  const std::uint32_t at_once = shape.order == MicroBatchOrder::kVertical ? shape.micro_batches : 1;
  for (std::uint32_t first = 0; first < shape.micro_batches; first += at_once) {
    for (std::uint32_t use = 0; use <= boundaries; ++use) {
      for (std::uint32_t i = 0; i < at_once; ++i) forward(use, first + i);
    }
    if (!shape.has_backward) continue;
    for (std::uint32_t use = boundaries + 1; use-- > 0;) {
      for (std::uint32_t i = 0; i < at_once; ++i) backward(use, first + i);
    }
  }
  return sequence;
}

// The places that all activations of the declared step need, and those of each horizontal step. The
// first accesses of a micro-batch come while the last ones of the micro-batches before are held. So
// the places stop growing with the micro-batch before which as many accesses have come as are held.
std::uint32_t places_for_all(const ModelSpec& model, const Config::Activations& activations) {
  const std::size_t accesses_of_one = sequence_of({model}).size();
  if (accesses_of_one == 0) return 0;
  const auto enough = static_cast<std::uint32_t>(2 + activations_held_max(model) / accesses_of_one);
  const std::uint32_t horizontal =
      plan_activations({model, enough, MicroBatchOrder::kHorizontal}, 0).places;
  if (activations.order == MicroBatchOrder::kHorizontal) return horizontal;
  return std::max(
      horizontal,
      plan_activations({model, activations.micro_batches, activations.order}, 0).places);
}

// Places of one size, assigned by Belady's rule: the activation needed last gives way.
class ActivationPlanner {
 public:
  ActivationPlanner(const ActivationShape& shape, std::uint32_t places_max)
      : model_(shape.model), places_max_(places_max), held_(activations_held_max(shape.model)) {
    plan_.accesses = sequence_of(shape);
    chain();
  }

  ActivationPlan plan() {
    for (std::uint32_t access = 0; access < plan_.accesses.size(); ++access) place(access);
    plan_.places = static_cast<std::uint32_t>(places_.size());
    find_last_loads();
    add_bytes();
    return std::move(plan_);
  }

 private:
  struct Place {
    std::uint32_t next_access = kNoUse;
    std::uint32_t last_access = 0;
    std::uint32_t index = 0;

    // The better one to give away comes first: needed last, else used longest ago.
    bool operator<(const Place& other) const {
      if (next_access != other.next_access) return next_access > other.next_access;
      return last_access < other.last_access;
    }
  };

  void find_last_loads() {
    std::vector<bool> is_found(plan_.accesses.size(), false);  // by source
    for (std::size_t i = plan_.accesses.size(); i-- > 0;) {
      ActivationAccess& access = plan_.accesses[i];
      if (!access.moves || access.action == ActivationAction::kSave) continue;
      access.empties_home = !is_found[access.source];
      is_found[access.source] = true;
    }
  }

  void add_bytes() {
    std::uint64_t at_home_bytes = 0;
    for (const ActivationAccess& access : plan_.accesses) {
      if (!access.moves) continue;
      const std::uint64_t bytes =
          align_up(model_.boundary_bytes[access.ref.boundary], kStorageAlignBytes);
      if (access.action == ActivationAction::kSave) {
        plan_.stored_bytes += bytes;
        at_home_bytes += bytes;
      } else {
        plan_.fetched_bytes += bytes;
        if (access.empties_home) at_home_bytes -= bytes;
      }
      plan_.at_home_most_bytes = std::max(plan_.at_home_most_bytes, at_home_bytes);
    }
  }

  // Finds each access's source, and the next access to the same activation.
  void chain() {
    const std::size_t count = plan_.accesses.size();
    next_.assign(count, kNoUse);
    const std::size_t boundaries = model_.boundary_bytes.size();
    std::vector<std::uint32_t> latest;  // by activation
    for (std::uint32_t access = 0; access < count; ++access) {
      const ActivationRef& ref = plan_.accesses[access].ref;
      const std::size_t about = (ref.micro_batch * boundaries + ref.boundary) * 2 +
                                (ref.kind == ActivationKind::kGradient ? 1 : 0);
      if (about >= latest.size()) latest.resize(about + 1, kNoUse);
      if (plan_.accesses[access].action == ActivationAction::kSave) {
        plan_.accesses[access].source = access;
      } else {
        plan_.accesses[access].source = plan_.accesses[latest[about]].source;
        next_[latest[about]] = access;
      }
      latest[about] = access;
    }
    place_of_.assign(count, kNoUse);
  }

  void place(std::uint32_t index) {
    ActivationAccess& access = plan_.accesses[index];
    std::uint32_t place = place_of_[access.source];  // the activation's place, while it has one
    if (place == kNoUse) {
      place = choose(index);
      if (place == places_.size()) {
        places_.push_back(by_use_.end());
      } else {
        access.evicted = places_[place]->last_access;
        place_of_[plan_.accesses[*access.evicted].source] = kNoUse;
      }
      place_of_[access.source] = place;
      if (access.action == ActivationAction::kLoad)
        access.moves = plan_.accesses[access.source].moves = true;
    }
    access.place = place;
    if (places_[place] != by_use_.end()) by_use_.erase(places_[place]);
    places_[place] =
        by_use_.insert({.next_access = next_[index], .last_access = index, .index = place}).first;
  }

  // A place without useful content; else a new one; else the one whose content is needed last. A
  // load avoids the place in use until just before: it could not overlap with any computation.
  std::uint32_t choose(std::uint32_t access) const {
    const bool is_load = plan_.accesses[access].action == ActivationAction::kLoad;
    const auto is_late = [&](const Place& place) {
      return is_load && place.last_access + held_ == access;
    };
    const Place* best = nullptr;
    for (const Place& place : by_use_) {  // ends soon: few places have recent accesses
      if (place.last_access + held_ > access) continue;
      if (best == nullptr || !is_late(place)) best = &place;
      if (!is_late(place)) break;
    }
    const bool may_add = places_max_ == 0 || places_.size() < places_max_;
    if (may_add && (best == nullptr || best->next_access != kNoUse || is_late(*best)))
      return static_cast<std::uint32_t>(places_.size());
    SLUICE_CHECK(best != nullptr, "there are as many places as held accesses");
    return best->index;
  }

  const ModelSpec& model_;
  const std::uint32_t places_max_;
  const std::uint32_t held_;
  ActivationPlan plan_;
  std::set<Place> by_use_;
  std::vector<std::set<Place>::iterator> places_;  // by index
  std::vector<std::uint32_t> next_;                // by access
  std::vector<std::uint32_t> place_of_;            // by saving access
};

}  // namespace

std::string describe(const ActivationRef& ref) {
  return fmt::format("{} {} of micro-batch {}",
                     ref.kind == ActivationKind::kValue ? "activation" : "activation gradient",
                     ref.boundary, ref.micro_batch);
}

std::uint32_t activations_held_max(const ModelSpec& model) {
  return kAccessesOfUse * model.concurrent_leases;
}

ActivationPlan plan_activations(const ActivationShape& shape, std::uint32_t places_max) {
  return ActivationPlanner(shape, places_max).plan();
}

ActivationHomes::ActivationHomes(const ModelSpec& model, const Config::Activations& activations)
    : alive_(activations.order == MicroBatchOrder::kVertical ? activations.micro_batches : 1),
      bytes_(model.boundary_bytes),
      units_(model.forward_order) {
  for (const std::uint64_t bytes : bytes_) {
    for (std::uint32_t i = 0; i < alive_; ++i) {
      offsets_.push_back(size_bytes_);
      size_bytes_ += align_up(bytes, kStorageAlignBytes);
    }
  }
}

std::uint64_t ActivationHomes::largest_bytes() const {
  return bytes_.empty() ? 0 : align_up(std::ranges::max(bytes_), kStorageAlignBytes);
}

ActivationNeeds activation_needs(const ModelSpec& model, const Config::Activations& activations,
                                 std::uint32_t uses_ahead) {
  if (model.boundary_bytes.empty() && model.forward_order.size() > 1)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("activations is \"{}\", but the model does not say what crosses from "
                            "unit to unit (ModelSpec::boundary_bytes); it has to be \"keep\"",
                            name_of(activations.home)));
  const std::uint32_t all = places_for_all(model, activations);
  ActivationNeeds needs{
      .homes = ActivationHomes(model, activations), .places_least = all, .places_wanted = all};
  if (activations.home == ActivationHome::kRecompute || all == 0) return needs;
  const std::uint32_t held = activations_held_max(model);
  // Not fewer, even if the declared step has fewer activations: other steps may have more.
  needs.places_least = held;
  needs.places_wanted = std::max(held, std::min(all, held + uses_ahead * held));
  return needs;
}

}  // namespace sluice
