// Converts the C interface's description of a model to the engine's description, and back. Pure.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>

#include "capi/sluice.h"

namespace sluice {

// Fails with: kInvalidArgument for a null pointer where values are needed; the message names the
// place. Does not repeat the engine's own checks of the model.
// `parameters` is the type of the parameters. Opaque tensors are counted in words of this type.
ModelSpec model_from_c(const sluice_model& model, DType parameters);
// For each tensor: its bytes if the tensor is opaque, otherwise 0.
std::vector<std::uint64_t> opaque_bytes_of(const sluice_model& model);

// Fails with: kInvalidArgument for a unit that does not exist.
sluice_unit_info describe_unit(const ModelSpec& model, std::span<const TensorPlace> tensors,
                               const Config::Precision& precision, std::uint32_t unit);

}  // namespace sluice
