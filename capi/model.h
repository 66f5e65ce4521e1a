// Converts the C interface's description of a model to the engine's description, and back. The
// functions are pure.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>

#include "capi/sluice.h"

namespace sluice {

// Fails with kInvalidArgument if values are needed but their pointer is null. The message names the
// pointer. The engine makes all other checks of the model. `parameters` is the dtype of the
// parameters. In an opaque tensor, an element is a word that has the size of this dtype.
ModelSpec model_from_c(const sluice_model& model, DType parameters);
// The result has one entry per tensor. For an opaque tensor, the entry is the number of bytes. For
// any other tensor, the entry is 0.
std::vector<std::uint64_t> opaque_bytes_of(const sluice_model& model);

// Fails with kInvalidArgument if the unit does not exist.
sluice_unit_info describe_unit(const ModelSpec& model, std::span<const TensorPlace> tensors,
                               const Config::Precision& precision, std::uint32_t unit);

}  // namespace sluice
