#include <sluice/model_spec.h>

#include <algorithm>
#include <ranges>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/utf8.h"
#include "engine/config/element_limit.h"

namespace sluice {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "model: " + message);
}

// Returns kElementsMax + 1 for every larger product.
std::uint64_t bounded_count(const TensorSpec& tensor) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : tensor.shape) {
    if (extent == 0) return 0;
    count = count > kElementsMax / extent ? kElementsMax + 1 : count * extent;
  }
  return count;
}

// Names stand in files of JSON and of safetensors.
void check_name(const std::string& name) {
  if (!is_utf8(name)) fail(fmt::format("the tensor name \"{}\" is not UTF-8", valid_utf8(name)));
  if (name == "__metadata__")
    fail("a tensor cannot have the name \"__metadata__\", which files of safetensors reserve");
}

void check_tensors(const ModelSpec& spec) {
  std::unordered_set<std::string_view> names;
  for (const UnitSpec& unit : spec.units) {
    if (!names.insert(unit.name).second)
      fail(fmt::format("the name \"{}\" is used twice", unit.name));
    if (unit.tensors.empty()) fail(fmt::format("unit \"{}\" has no tensors", unit.name));
  }
  names.clear();
  std::uint64_t elements = 0;
  for (const UnitSpec& unit : spec.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (!names.insert(tensor.name).second)
        fail(fmt::format("tensor \"{}\" of unit \"{}\" has a name that is used twice", tensor.name,
                         unit.name));
      if (tensor.shape.empty())
        fail(fmt::format("tensor \"{}\" has no extents; a single number has shape [1]",
                         tensor.name));
      check_name(tensor.name);
      if (tensor.weight_decay > WeightDecay::kNone)
        fail(fmt::format("tensor \"{}\" has WeightDecay {}, which does not exist", tensor.name,
                         static_cast<int>(tensor.weight_decay)));
      const std::uint64_t count = bounded_count(tensor);
      if (count > kElementsMax - elements)
        fail(fmt::format("with tensor \"{}\" of shape [{}], the model has more than {} elements",
                         tensor.name, fmt::join(tensor.shape, ", "), kElementsMax));
      elements += count;
    }
  }
}

void check_order(const ModelSpec& spec, const std::vector<UnitId>& order, std::string_view what) {
  for (const UnitId unit : order) {
    if (index_of(unit) >= spec.units.size())
      fail(fmt::format("{} names unit {}, but there are only {}", what, index_of(unit),
                       spec.units.size()));
    if (spec.units[index_of(unit)].is_announced)
      fail(
          fmt::format("{} names unit \"{}\", which is announced; leave it out of the order, or "
                      "do not set UnitSpec::is_announced",
                      what, spec.units[index_of(unit)].name));
  }
}

void check_boundaries(const ModelSpec& spec) {
  if (spec.boundary_bytes.empty()) return;
  if (spec.boundary_bytes.size() + 1 != spec.forward_order.size())
    fail(fmt::format("boundary_bytes has {} entries, but there are {} between {} forward uses",
                     spec.boundary_bytes.size(), spec.forward_order.size() - 1,
                     spec.forward_order.size()));
  if (std::ranges::count(spec.boundary_bytes, 0u) != 0)
    fail("boundary_bytes has a 0; every forward use passes something to the next");
  if (!std::ranges::equal(spec.forward_order, std::views::reverse(spec.backward_order)))
    fail("boundary_bytes needs a backward_order that is the reverse of forward_order");
}

}  // namespace

std::uint64_t TensorSpec::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

std::uint64_t ModelSpec::element_count() const {
  std::uint64_t count = 0;
  for (const UnitSpec& unit : units) {
    for (const TensorSpec& tensor : unit.tensors) count += tensor.element_count();
  }
  return count;
}

ModelSpec validated(ModelSpec spec) {
  if (spec.units.empty()) fail("it has no units");
  if (spec.concurrent_leases == 0)
    fail("concurrent_leases is 0; computation needs at least one lease");
  check_tensors(spec);
  if (spec.forward_order.empty()) {
    for (std::uint32_t unit = 0; unit < spec.units.size(); ++unit)
      if (!spec.units[unit].is_announced) spec.forward_order.push_back(UnitId{unit});
  }
  if (spec.forward_order.empty())
    fail("every unit is announced; at least one has to stand in forward_order");
  if (spec.backward_order.empty())
    spec.backward_order.assign(spec.forward_order.rbegin(), spec.forward_order.rend());
  check_order(spec, spec.forward_order, "forward_order");
  check_order(spec, spec.backward_order, "backward_order");
  std::vector<bool> is_in_backward(spec.units.size(), false);
  for (const UnitId unit : spec.backward_order) is_in_backward[index_of(unit)] = true;
  for (std::uint32_t unit = 0; unit < spec.units.size(); ++unit) {
    const bool is_expected = !spec.units[unit].is_frozen && !spec.units[unit].is_announced;
    if (is_expected && !is_in_backward[unit])
      fail(fmt::format("unit \"{}\" is not in backward_order, so its gradient would never come",
                       spec.units[unit].name));
  }
  check_boundaries(spec);
  for (const UnitSpec& unit : spec.units) {
    if (unit.is_opaque && !unit.is_frozen)
      fail(fmt::format("unit \"{}\" is opaque, but not frozen; bits cannot be trained", unit.name));
    if (unit.is_local && !unit.is_announced)
      fail(
          fmt::format("unit \"{}\" is local, but not announced, and the orders are those of all "
                      "ranks; set UnitSpec::is_announced",
                      unit.name));
  }
  for (const UnitSpec& unit : spec.units) {
    if (unit.is_pinned && unit.is_announced)
      fail(
          fmt::format("unit \"{}\" is pinned and announced; a pinned unit is always on the "
                      "device, so leave is_announced out",
                      unit.name));
  }
  if (std::ranges::all_of(spec.units, &UnitSpec::is_frozen))
    fail("every unit is frozen; there is nothing to train");
  return spec;
}

}  // namespace sluice
