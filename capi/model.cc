#include "capi/model.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/config/element_limit.h"

namespace sluice {
namespace {

void require(const void* pointer, const std::string& what) {
  if (pointer == nullptr) throw Error(ErrorCode::kInvalidArgument, "model: " + what + " is null");
}

constexpr std::int32_t kFlags = SLUICE_ANNOUNCED | SLUICE_PINNED | SLUICE_LOCAL;

// A sluice_frozen, unless the unit has a number that is none.
std::int32_t frozen_of(const sluice_unit& unit) {
  return unit.is_frozen < 0 ? unit.is_frozen : unit.is_frozen & ~kFlags;
}

TensorSpec tensor_from_c(const sluice_tensor& tensor, const std::string& place) {
  require(tensor.name, place + ".name");
  TensorSpec spec{.name = tensor.name, .shape = {}};
  if (tensor.dimensions != 0) require(tensor.shape, place + ".shape");
  spec.shape.assign(tensor.shape, tensor.shape + tensor.dimensions);
  if (spec.shape.empty()) spec.shape = {1};
  spec.weight_decay = tensor.has_decay != 0 ? WeightDecay::kApply : WeightDecay::kNone;
  return spec;
}

std::vector<UnitId> order_from_c(const std::uint32_t* order, std::uint32_t count,
                                 const char* name) {
  if (count != 0) require(order, name);
  std::vector<UnitId> units;
  for (std::uint32_t i = 0; i < count; ++i) units.push_back(UnitId{order[i]});
  return units;
}

// Fails if the shape has more bytes than the words of a model may have.
std::uint64_t opaque_bytes(const TensorSpec& tensor, std::uint64_t word_bytes) {
  const std::uint64_t most = kElementsMax * word_bytes;
  std::uint64_t bytes = 1;
  if (std::ranges::count(tensor.shape, 0u) != 0) return 0;
  for (const std::uint64_t extent : tensor.shape) {
    if (bytes > most / extent)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("model: the opaque tensor \"{}\" of shape [{}] has more than {} bytes",
                      tensor.name, fmt::join(tensor.shape, ", "), most));
    bytes *= extent;
  }
  return bytes;
}

}  // namespace

ModelSpec model_from_c(const sluice_model& model, DType parameters) {
  ModelSpec spec;
  if (model.unit_count != 0) require(model.units, "units");
  for (std::uint32_t i = 0; i < model.unit_count; ++i) {
    const sluice_unit& unit = model.units[i];
    const std::string place = fmt::format("units[{}]", i);
    require(unit.name, place + ".name");
    const std::int32_t frozen = frozen_of(unit);
    if (frozen < SLUICE_TRAINED || frozen > SLUICE_OPAQUE)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("model: {}.is_frozen is {}; it must be a sluice_frozen", place,
                              unit.is_frozen));
    UnitSpec made{.name = unit.name,
                  .tensors = {},
                  .is_frozen = frozen != SLUICE_TRAINED,
                  .is_announced = (unit.is_frozen & SLUICE_ANNOUNCED) != 0,
                  .is_opaque = frozen == SLUICE_OPAQUE,
                  .is_pinned = (unit.is_frozen & SLUICE_PINNED) != 0,
                  .is_local = (unit.is_frozen & SLUICE_LOCAL) != 0};
    if (unit.tensor_count != 0) require(unit.tensors, place + ".tensors");
    for (std::uint32_t j = 0; j < unit.tensor_count; ++j)
      made.tensors.push_back(
          tensor_from_c(unit.tensors[j], fmt::format("{}.tensors[{}]", place, j)));
    for (TensorSpec& tensor : made.tensors) {
      if (made.is_opaque) {
        const std::uint64_t word_bytes = size_of(parameters);
        tensor.shape = {div_ceil(opaque_bytes(tensor, word_bytes), word_bytes)};
      }
    }
    spec.units.push_back(std::move(made));
  }
  spec.forward_order = order_from_c(model.forward_order, model.forward_count, "forward_order");
  spec.backward_order = order_from_c(model.backward_order, model.backward_count, "backward_order");
  spec.concurrent_leases = model.concurrent_leases;
  return spec;
}

std::vector<std::uint64_t> opaque_bytes_of(const sluice_model& model) {
  std::vector<std::uint64_t> all;
  for (const sluice_unit& unit : std::span(model.units, model.unit_count)) {
    for (const sluice_tensor& tensor : std::span(unit.tensors, unit.tensor_count)) {
      std::uint64_t bytes = frozen_of(unit) == SLUICE_OPAQUE ? 1 : 0;
      for (std::uint32_t i = 0; i < tensor.dimensions; ++i) bytes *= tensor.shape[i];
      all.push_back(bytes);
    }
  }
  return all;
}

sluice_unit_info describe_unit(const ModelSpec& model, std::span<const TensorPlace> tensors,
                               const Config::Precision& precision, std::uint32_t unit) {
  constexpr std::uint64_t kPadElements = 256;
  if (unit >= model.units.size())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("sluice_unit_describe: unit {} does not exist; the model has {}", unit,
                            model.units.size()));
  const auto first = std::ranges::find(tensors, UnitId{unit}, &TensorPlace::unit);
  const std::size_t count = model.units[unit].tensors.size();
  const TensorPlace& last = *(first + static_cast<std::ptrdiff_t>(count - 1));
  const std::uint64_t elements =
      std::max(align_up(last.offset_elements + last.element_count, kPadElements), kPadElements);
  return {
      .parameter_bytes = elements * size_of(precision.parameters),
      .gradient_bytes = model.units[unit].is_frozen ? 0 : elements * size_of(precision.gradients),
      .first_tensor = index_of(first->id),
      .tensor_count = static_cast<std::uint32_t>(count)};
}

}  // namespace sluice
