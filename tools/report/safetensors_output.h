// These functions write fp32 tensors with names to a command's output file in the safetensors
// format. engine/checkpoint/safetensors_file.h reads such files.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/output_file.h"

namespace sluice {

struct SavedTensor {
  std::string name;
  std::vector<std::uint64_t> shape;

  std::uint64_t element_count() const;
};

// A function that fills `values` with the elements [first_element, first_element + values.size())
// of tensor `index`.
using TensorSource =
    std::function<void(std::size_t index, std::uint64_t first_element, std::span<float> values)>;

// Writes `tensors` in their order. `source` provides the values piece by piece. The header of the
// file contains `metadata`. The caller commits the file.
// Fails with the errors of OutputFile. After a failure, the target is unchanged.
void write_safetensors(OutputFile& file, std::span<const SavedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const TensorSource& source);

// Calls `source` in the same way and order as write_safetensors(), but writes nothing.
void read_as_if_written(std::span<const SavedTensor> tensors, const TensorSource& source);

}  // namespace sluice
