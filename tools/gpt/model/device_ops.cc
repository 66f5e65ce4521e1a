#include "tools/gpt/model/device_ops.h"

#include <fmt/core.h>

#include <sluice/error.h>

namespace sluice::gpt {

void check_device_types(DType type, DType gradient_type) {
  if (type != DType::kFp16 && (gradient_type == type || gradient_type == DType::kFp32)) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("a GPU computes with {} parameters and {} gradients no GPT; set "
                          "precision.parameters to bf16 or fp32 and precision.gradients to the "
                          "same or to fp32, or run.device to host",
                          name_of(type), name_of(gradient_type)));
}

}  // namespace sluice::gpt
