#include "engine/flow/device_block_update.h"

namespace sluice {
namespace {

DeviceUpdate on_device(const StateFormat& format, const UpdateArrays& arrays) {
  return {.parameter_type = format.parameter,
          .gradient_type = format.gradient,
          .parameter = arrays.parameter,
          .low = arrays.low,
          .master = arrays.master,
          .exp_avg = arrays.exp_avg,
          .exp_avg_sq = arrays.exp_avg_sq,
          .exp_avg_codes = arrays.exp_avg_codes.codes,
          .exp_avg_scales = arrays.exp_avg_codes.scales,
          .exp_avg_sq_codes = arrays.exp_avg_sq_codes.codes,
          .exp_avg_sq_scales = arrays.exp_avg_sq_codes.scales,
          .exp_avg_bf16 = arrays.exp_avg_bf16,
          .exp_avg_sq_bf16 = arrays.exp_avg_sq_bf16,
          .rounding = arrays.rounding,
          .gradient = arrays.gradient,
          .element_count = arrays.element_count};
}

}  // namespace

void update_block_on_device(const Layout& layout, const BlockPlace& block,
                            const BlockPlanes& planes, const StepCoefficients& coefficients,
                            std::uint32_t* overflow, DeviceMath& math, StreamId stream) {
  const StateFormat& format = layout.format();
  for_each_run(layout, block, [&](const UpdateRun& run) {
    DeviceUpdate arrays =
        on_device(format, arrays_of(format, block, planes, run, coefficients.rounding_key));
    arrays.non_finite = overflow;
    math.update(coefficients.of_set[run.hyperparameter_set], arrays, stream);
  });
}

}  // namespace sluice
