// The place where a unit's gradient waits for its update. There are three kinds of homes: host
// memory (engine/flow/host_gradients.h), device memory (engine/flow/device_gradients.h) and storage
// (engine/flow/gradient_spill.h). A home takes gradients out of the device's slots, adds up the
// gradients of one step, and knows the norm of the sum. The sum has the same bits in each home.
//
// Thread rule: scheduler's thread only, except where stated.
// Progress: a home waits for copies on its stream and for the worker. A home in host memory also
// waits for its staging slots, and a home on storage for transfers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include <sluice/ids.h>
#include "base/norm_accumulator.h"
#include "engine/plan/layout.h"
#include "engine/store/tiers.h"

namespace sluice {

// Elements of a unit, counted from the unit's start.
struct GradientRange {
  UnitId unit{};
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
};

// A gradient of a unit, on its way home.
struct GradientMove {
  GradientRange range;              // goes home
  const std::byte* data = nullptr;  // on the device, from the unit's start; null: all zeros
  bool is_first = false;            // the unit's first in the step, so nothing is added
  std::uint64_t step = 0;           // for traces
};

// A unit's complete sum.
struct GradientSum {
  UnitId unit{};
  bool has_gradient = true;  // otherwise nothing has been moved, and the sum is to be zeros
  std::uint64_t step = 0;    // for traces
};

class GradientHome {
 public:
  // A home calls each of these functions from a task of the scheduler, or while another function of
  // the home runs.
  struct Callbacks {
    std::function<void()> on_left;        // the gradient under way has left `data`
    std::function<void()> on_home;        // later: it is in the sum
    std::function<void(UnitId)> on_norm;  // the norm that take_norm() asked for is known
  };

  virtual ~GradientHome() = default;

  // Starts to bring a gradient home. The copies go through `stream`, behind the work that is
  // already on `stream`.
  // Requires: the previous gradient is home.
  virtual void start(const GradientMove& move, StreamId stream) = 0;
  // Whether units without a gradient have to be moved as well, as zeros.
  virtual bool moves_zeros() const { return false; }
  // Starts to take the norm of this rank's part of the sum. Requires: no norm of the unit is being
  // taken.
  virtual void take_norm(const GradientSum& sum, StreamId stream) = 0;

  // The norm that was taken last.
  virtual const NormAccumulator& norm(UnitId unit) const = 0;
  // Finds the first element of the range that is not finite, counted from the range's start. Any
  // thread may call this function while no gradient is under way.
  virtual std::optional<std::uint64_t> first_non_finite(const GradientRange& range) const = 0;

 protected:
  explicit GradientHome(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  const Callbacks callbacks_;
};

// The part of the unit that this rank updates.
GradientRange owned_range(const Layout& layout, UnitId unit);
// The address of the range in the sum, for homes in memory.
std::byte* in_set(const Layout& layout, const Tiers& tiers, const GradientRange& range);
// Enqueues one copy straight into the sum, because a unit's first gradient of the step needs no
// addition.
void copy_to_set(const Layout& layout, const Tiers& tiers, Device& device, const GradientMove& move,
                 StreamId stream);

}  // namespace sluice
