// Converts the C interface's description of a model to the engine's description, and back. Pure.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>

#include "capi/sluice.h"

namespace sluice {

// Fails with kInvalidArgument if a pointer is null although values are needed. The message says
// which pointer. Other checks of the model are left to the engine. `parameters` is the dtype of the
// parameters. Opaque tensors are counted in words of this dtype's size.
ModelSpec model_from_c(const sluice_model& model, DType parameters);
// One entry per tensor: the number of bytes of an opaque tensor, and 0 for any other tensor.
std::vector<std::uint64_t> opaque_bytes_of(const sluice_model& model);

// Fails with kInvalidArgument if the unit does not exist.
sluice_unit_info describe_unit(const ModelSpec& model, std::span<const TensorPlace> tensors,
                               const Config::Precision& precision, std::uint32_t unit);

}  // namespace sluice
