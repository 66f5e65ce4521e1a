#include "engine/flow/block_update.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

UpdateArrays arrays_of(const StateFormat& format, const BlockPlace& block,
                       const BlockPlanes& planes, const UpdateRun& run,
                       std::uint64_t rounding_key) {
  const std::uint64_t begin_element = run.begin;
  UpdateArrays arrays{.master_layout = format.master,
                      .gradient_dtype = format.gradient,
                      .element_count = run.element_count};
  arrays.parameter = planes.parameters + begin_element * format.parameter_bytes();
  if (format.master == MasterLayout::kSplitBf16)
    arrays.low = reinterpret_cast<std::int16_t*>(planes.record) + begin_element;
  if (format.master == MasterLayout::kFp16)
    arrays.master = reinterpret_cast<float*>(planes.record) + begin_element;
  const RecordMoments moments = moments_of(format, block.element_count, planes.record);
  if (moments.exp_avg != nullptr) arrays.exp_avg = moments.exp_avg + begin_element;
  if (moments.exp_avg_sq != nullptr) arrays.exp_avg_sq = moments.exp_avg_sq + begin_element;
  arrays.exp_avg_codes = moments.exp_avg_codes.from(begin_element);
  arrays.exp_avg_sq_codes = moments.exp_avg_sq_codes.from(begin_element);
  if (moments.exp_avg_bf16 != nullptr) arrays.exp_avg_bf16 = moments.exp_avg_bf16 + begin_element;
  if (moments.exp_avg_sq_bf16 != nullptr)
    arrays.exp_avg_sq_bf16 = moments.exp_avg_sq_bf16 + begin_element;
  arrays.rounding = {.key = rounding_key_of_tensor(rounding_key, index_of(run.first_tensor)),
                     .first_element = run.first_element};
  if (planes.gradients != nullptr)
    arrays.gradient = planes.gradients + begin_element * format.gradient_bytes();
  return arrays;
}

namespace {

[[noreturn]] void fail_overflow(const Layout& layout, UnitId unit, std::uint64_t unit_element,
                                std::string_view part, std::uint64_t step) {
  for (const TensorPlace& tensor : layout.tensors_of(unit)) {
    const std::uint64_t element = unit_element - tensor.offset_elements;  // huge when before it
    if (element >= tensor.element_count) continue;
    throw Error(
        ErrorCode::kNonFinite,
        fmt::format("the update of \"{}\" (unit \"{}\") makes its {} at element {} overflow in "
                    "step {}, though every gradient is finite. {}",
                    tensor.name, layout.unit(unit).name, part, element, step,
                    part == "weight" ? "Lower the learning rate"
                                     : "The gradient there is too large for fp32 to keep its "
                                       "moments: set optimizer.clip_norm, or scale the loss down"));
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("an update of padding in unit \"{}\" at element {} is not finite",
                          layout.unit(unit).name, unit_element));
}

}  // namespace

void throw_if_overflowed(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                         std::uint64_t step) {
  for_each_run(layout, block, [&](const UpdateRun& run) {
    const NonFiniteState found =
        find_non_finite_state(arrays_of(layout.format(), block, planes, run, 0));
    if (!found.part.empty())
      fail_overflow(layout, block.unit, block.offset_elements + run.begin + found.element,
                    found.part, step);
  });
}

void for_each_run(const Layout& layout, const BlockPlace& block,
                  const std::function<void(const UpdateRun&)>& function) {
  const auto tensors = layout.tensors_of(block.unit);
  const bool is_by_tensor = layout.format().moments == OptimizerState::kBf16;
  const std::uint64_t block_end = block.offset_elements + block.element_count;
  std::uint64_t begin = block.offset_elements;
  auto tensor = std::ranges::find_if(tensors, [&](const TensorPlace& place) {
    return place.offset_elements + place.element_count > begin;
  });
  // A block may begin in the padding after the last tensor that touches it.
  if (tensor == tensors.end()) tensor = std::prev(tensors.end());
  while (begin < block_end) {
    const auto first = tensor++;
    while (tensor != tensors.end() && !is_by_tensor &&
           tensor->hyperparameter_set == first->hyperparameter_set)
      ++tensor;
    const std::uint64_t end =
        tensor == tensors.end() ? block_end : std::min(block_end, tensor->offset_elements);
    if (end <= begin) continue;
    function({.begin = begin - block.offset_elements,
              .element_count = end - begin,
              .hyperparameter_set = first->hyperparameter_set,
              .first_tensor = first->id,
              .first_element = begin - first->offset_elements});
    begin = end;
  }
}

void update_block(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                  const StepCoefficients& coefficients, std::uint64_t step,
                  CpuOptimizer& optimizer) {
  for_each_run(layout, block, [&](const UpdateRun& run) {
    const UpdateArrays arrays =
        arrays_of(layout.format(), block, planes, run, coefficients.rounding_key);
    if (optimizer.update(coefficients.of_set[run.hyperparameter_set], arrays) ==
        NewState::kNonFinite) {
      throw_if_overflowed(layout, block, planes, step);
      throw Error(ErrorCode::kInternal,
                  fmt::format("the update of block {} has noticed a value that is not finite, but "
                              "all values are finite",
                              index_of(block.id)));
    }
  });
}

}  // namespace sluice
