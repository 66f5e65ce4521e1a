// The engine's view of a model: the tensors that form each unit, and the order in which computation
// uses the units. The application gives shapes and names, but no values. Plain data. The
// application writes the description, and the layout reads it.
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
  std::vector<std::uint64_t> shape;  // row-major; at least one extent; extents may be 0
  WeightDecay weight_decay = WeightDecay::kApply;

  std::uint64_t element_count() const;
};

// A unit consists of the tensors that computation needs together. A unit is always fetched and
// leased as a whole.
struct UnitSpec {
  std::string name;  // unique in the model
  std::vector<TensorSpec> tensors;
  // A frozen unit has parameters, but no gradient, no master and no moments. A backward pass may
  // acquire a frozen unit to compute the gradients of other units. For a frozen unit, the engine
  // keeps only the initial values, rounded to the compute dtype.
  bool is_frozen = false;
  // ModelSpec::forward_order and backward_order do not contain an announced unit. A running step
  // announces that it will use the unit (Step::announce), for example after a router has chosen
  // experts. The setting optimizer.untouched says how an update treats a unit that the step did not
  // use.
  bool is_announced = false;
  // The tensors of an opaque unit hold arbitrary bits, such as quantized weights. Each element is a
  // word with the size of a parameter (precision.parameters), and every word keeps its bits. An
  // opaque unit is frozen. float_of_word() converts a word to an initial value.
  bool is_opaque = false;
  // The parameters of a pinned unit always stay in device memory, even if placement.parameters
  // names another tier. The device of every rank has all parameters of the unit. So
  // ModelSpec::concurrent_leases does not include the leases on pinned units in forward or in an
  // inference. Computation may hold such a lease until the step ends, and may use other units in
  // the meantime. An example is a small unit that the whole model uses, such as a position table. A
  // pinned unit is never an announced unit.
  bool is_pinned = false;
  // A local unit is different on every rank: at the same place in the model, each rank has a unit
  // of its own. An example is an expert in expert parallelism. The units at one place have the same
  // shapes on all ranks, but different names and different values. A local unit is not gathered.
  // The gradient of a local unit is not added over the ranks, and counts once in the norm. A local
  // unit is always an announced unit, and only its own rank announces the unit.
  bool is_local = false;
};

struct SLUICE_EXPORT ModelSpec {
  std::vector<UnitSpec> units;

  // The orders in which one micro-batch acquires the units. Announced units are left out. If
  // forward_order is empty, the order is 0, 1, 2 and so on. If backward_order is empty, the order
  // is the reverse of forward_order. A unit may appear more than once. If a unit appears more than
  // once, the gradients of its uses are added. For example, a tied head acquires the embedding a
  // second time. A step that uses the units in another order has to wait for transfers
  // (sluice/step.h).
  std::vector<UnitId> forward_order;
  std::vector<UnitId> backward_order;

  // The largest number of leases that computation holds at the same time. Leases also end roughly
  // in order: use number i of a step begins after the lease of use i - concurrent_leases has ended.
  // A lease on a pinned unit counts only in backward. The device window has room for at least this
  // many units. With several ranks at sharding.stage 3, all ranks end leases at the same points
  // between their uses. If a use is unexpected while a rank still holds a lease that another rank
  // has ended, the ranks may wait for each other until sharding.timeout.
  std::uint32_t concurrent_leases = 1;

  // Whether every backward use writes all elements of its unit's gradient, and reads none of them
  // before. The engine then does not fill gradients with zeros first. An element that computation
  // leaves out has an arbitrary value, unless memory.guard is on: then the element is NaN. If the
  // flag is false, a gradient is zero at first. So an application may add to the gradient, and may
  // end a backward lease without any computation. The engine itself adds nothing to these zeros, so
  // the flag changes no bit of an application that writes all elements, and -0 stays -0.
  bool overwrites_gradients = false;

  // The forward pass of a micro-batch moves boundary_bytes[i] bytes from use number i to use number
  // i + 1. The backward pass moves a gradient of the same size in the other direction. The list has
  // one entry less than forward_order. If the list is empty, the application keeps its activations.
  std::vector<std::uint64_t> boundary_bytes;

  std::uint64_t element_count() const;
};

// Returns `spec` with the default order in place of each empty order.
// Fails with:
// - kInvalidArgument: there is a model without units, a unit without tensors, a tensor without
//   extents, or a name used twice.
// - kInvalidArgument: an order names an unknown or an announced unit.
// - kInvalidArgument: a trained unit is not announced, and backward_order leaves it out.
// - kInvalidArgument: no unit of the model is trained, or every unit is announced.
// - kInvalidArgument: there is an opaque unit that is not frozen, a pinned unit that is announced,
//   or a local unit that is not announced.
// - kInvalidArgument: the weight_decay of a tensor does not exist.
// - kInvalidArgument: boundary_bytes has an entry of 0, or the wrong number of entries.
// - kInvalidArgument: boundary_bytes is given, but backward_order is not the reverse of
//   forward_order.
SLUICE_EXPORT ModelSpec validated(ModelSpec spec);

}  // namespace sluice
