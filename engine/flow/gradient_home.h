// The place where a unit's gradient waits until the unit is updated. There are three kinds of
// homes: host memory (engine/flow/host_gradients.h), device memory (engine/flow/device_gradients.h)
// and storage (engine/flow/gradient_spill.h). A home takes gradients out of the device's gradient
// slots, adds up a unit's gradients of one step, and computes the norm of the sum. The sum has the
// same bits in every kind of home.
//
// Thread rule: scheduler's thread only, except where stated.
// Progress: a home waits for copies on its stream and for the worker. A home in host memory also
// waits for its staging slots. A home on storage waits for its staging slots and for transfers.
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

// A range of the elements of one unit. `begin` is counted from the unit's first element.
struct GradientRange {
  UnitId unit{};
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
};

// A gradient that moves from the device to its home.
struct GradientMove {
  GradientRange range;              // the part that moves home
  const std::byte* data = nullptr;  // on the device; begins at the unit's start; null = all zeros
  bool is_first = false;            // the unit's first gradient in the step; copied, not added
  bool is_last = false;             // take_norm() follows, unless another start() comes first
  std::uint64_t step = 0;           // for traces
};

// The complete sum of a unit's gradients in a step.
struct GradientSum {
  UnitId unit{};
  bool has_gradient = true;  // otherwise the home has got no gradient, and sets the sum to zeros
  std::uint64_t step = 0;    // for traces
};

class GradientHome {
 public:
  // A home calls these functions from a task of the scheduler, or from inside its own member
  // functions.
  struct Callbacks {
    std::function<void()> on_left;        // the gradient of the last start() has left `data`
    std::function<void()> on_home;        // called later: the same gradient is in the sum
    std::function<void(UnitId)> on_norm;  // the norm that take_norm() computes is known
  };

  virtual ~GradientHome() = default;

  // Starts to move a gradient to its home. The copies are enqueued on `stream`.
  // Requires: the previous gradient has reached its home.
  virtual void start(const GradientMove& move, StreamId stream) = 0;
  // Whether start() must be called with a gradient of zeros if a unit has no gradient.
  virtual bool moves_zeros() const { return false; }
  // Starts to compute the norm of this rank's part of the sum. Requires: no norm of the unit is
  // being computed.
  virtual void take_norm(const GradientSum& sum, StreamId stream) = 0;

  // The last norm that was computed for the unit.
  virtual const NormAccumulator& norm(UnitId unit) const = 0;
  // Returns the index of the first element that is not finite. The index is counted from the start
  // of the range. Any thread may call this function while no gradient is moving to its home.
  virtual std::optional<std::uint64_t> first_non_finite(const GradientRange& range) const = 0;

 protected:
  explicit GradientHome(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  const Callbacks callbacks_;
};

// The part of the unit that this rank updates.
GradientRange owned_range(const Layout& layout, UnitId unit);
// The address of the range in the gradient set. Requires: the gradient's home is in memory.
std::byte* in_set(const Layout& layout, const Tiers& tiers, const GradientRange& range);
// Enqueues one copy, which takes the gradient directly to the gradient set. The function is meant
// for a unit's first gradient of the step, because this gradient needs no addition.
void copy_to_set(const Layout& layout, const Tiers& tiers, Device& device, const GradientMove& move,
                 StreamId stream);

}  // namespace sluice
