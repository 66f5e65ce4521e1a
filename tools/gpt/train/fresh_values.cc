#include "tools/gpt/train/fresh_values.h"

#include <vector>

#include "tools/gpt/model/gpt_model.h"

namespace sluice {

InitialValues fresh_values(const gpt::GptConfig& config, std::uint64_t seed) {
  std::vector<TensorSpec> tensors;  // by id
  for (UnitSpec& unit : gpt::gpt_model_spec(config).units)
    for (TensorSpec& tensor : unit.tensors) tensors.push_back(std::move(tensor));
  return [config, seed, tensors = std::move(tensors)](
             const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    gpt::fill_initial_values(config, seed, tensors[index_of(tensor.id)], first, values);
  };
}

}  // namespace sluice
