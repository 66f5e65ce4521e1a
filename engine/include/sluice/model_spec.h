// The engine's view of a model: the tensors that form each unit, and the order in which computation
// uses the units. The application gives shapes and names; values are not included. Plain data,
// written by the application and read by the layout.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/export.h>
#include <sluice/ids.h>

namespace sluice {

enum class WeightDecay : std::uint8_t { kApply, kNone };

struct SLUICE_EXPORT TensorSpec {
  std::string name;                  // unique in the model
  std::vector<std::uint64_t> shape;  // row-major; at least one extent; 0: the tensor is empty
  WeightDecay weight_decay = WeightDecay::kApply;

  std::uint64_t element_count() const;
};

// The tensors that computation needs together: the unit of prefetch and of leases.
struct UnitSpec {
  std::string name;  // unique in the model
  std::vector<TensorSpec> tensors;
  // A frozen unit has only parameters: no gradient, no master, no moments. Backward may acquire a
  // frozen unit to compute the gradients of other units. Only the initial values rounded to the
  // compute dtype are kept.
  bool is_frozen = false;
  // Neither of the two orders below contains the unit. Each step says while it runs whether it uses
  // the unit, for example after a router has chosen experts (Step::announce). In a step that does
  // not use the unit, its gradient is zero, or the unit stays as it is (optimizer.untouched).
  bool is_announced = false;
  // The tensors of an opaque unit hold bits instead of numbers, such as quantized weights. Their
  // elements are words of the size of a parameter (precision.parameters), and every word keeps its
  // bits. An opaque unit is frozen. The call float_of_word() puts a word into initial values.
  bool is_opaque = false;
  // The home of the unit's parameters is device memory, whatever placement.parameters says. Every
  // rank has all of them there. So a lease on the unit in forward or in an inference does not count
  // in ModelSpec::concurrent_leases: computation may hold the lease while it uses all other units,
  // until the step ends. Examples are small units that surround others, such as a position table
  // that the whole model uses. A pinned unit is not announced.
  bool is_pinned = false;
  // Every rank has a different unit at this place of the model, such as some of the experts (expert
  // parallelism). In one place, the units have the same shapes on all ranks, but other names and
  // other values. A local unit is not gathered, its gradient is not added over the ranks, and it
  // counts once in the norm. A local unit is an announced unit, and only its own rank announces it.
  bool is_local = false;
};

struct SLUICE_EXPORT ModelSpec {
  std::vector<UnitSpec> units;

  // The order in which one micro-batch acquires units, without announced ones. An empty
  // forward_order means 0, 1, ...; an empty backward_order means the reverse of forward_order. A
  // unit may appear more than once, and then its gradients are added. For example, a tied head
  // acquires the embedding again. A step that uses the units in another order has to wait for
  // transfers (sluice/step.h).
  std::vector<UnitId> forward_order;
  std::vector<UnitId> backward_order;

  // The largest number of leases that computation holds at the same time, without leases on pinned
  // units in forward. The device window has room for at least this many units.
  std::uint32_t concurrent_leases = 1;

  // Entry i is the number of bytes that forward use i of a micro-batch passes to use i + 1.
  // Backward passes a gradient of the same size in the other direction. There is one entry less
  // than in forward_order. If the list is empty, the application keeps its activations.
  std::vector<std::uint64_t> boundary_bytes;

  std::uint64_t element_count() const;
};

// Returns `spec`, with the default in place of each order that is empty.
// Fails with:
// - kInvalidArgument: there is a model without units, a unit without tensors, a tensor without
//   extents, or a name used twice.
// - kInvalidArgument: an order names an unknown or an announced unit.
// - kInvalidArgument: a trained unit is not announced, and backward_order leaves it out.
// - kInvalidArgument: the model has no trained units, or announced units only.
// - kInvalidArgument: an opaque unit is not frozen, a pinned unit is announced, or a local unit is
//   not announced.
// - kInvalidArgument: boundaries are empty, differ in number from forward_order, or come with a
//   backward_order that is not the reverse of forward_order.
SLUICE_EXPORT ModelSpec validated(ModelSpec spec);

}  // namespace sluice
