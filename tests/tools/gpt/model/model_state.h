// The parameters and gradients of a whole model in plain memory, in the engine's format. There is
// one 256-byte-aligned array per tensor. With these arrays, the tests of GptCompute need no engine.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "tools/gpt/model/counter_random.h"
#include "tools/gpt/model/gpt_compute.h"

namespace sluice::gpt {

inline std::uint16_t half_from_float(DType dtype, float value) {
  return dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
}
inline float float_from_half(DType dtype, std::uint16_t half) {
  return dtype == DType::kBf16 ? float_from_bf16(half) : float_from_fp16(half);
}

// There is one array per tensor of every unit. `shift` moves all arrays by `shift` * 256 bytes.
class TensorMemory {
 public:
  TensorMemory(const ModelSpec& spec, DType dtype, std::uint64_t shift = 0) {
    std::uint64_t bytes = shift * 256;
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors)
        bytes += align_up(tensor.element_count() * size_of(dtype), 256);
    buffer_ = AlignedBuffer(bytes, "test tensors");
    std::byte* next = buffer_.data() + shift * 256;
    for (const UnitSpec& unit : spec.units) {
      std::vector<std::byte*> pointers;
      for (const TensorSpec& tensor : unit.tensors) {
        pointers.push_back(next);
        next += align_up(tensor.element_count() * size_of(dtype), 256);
      }
      units_.push_back(pointers);
    }
  }

  GradientPointers pointers(std::uint32_t unit) const { return units_[unit]; }
  ParameterPointers const_pointers(std::uint32_t unit) const {
    return {units_[unit].data(), units_[unit].size()};
  }
  float* floats(std::size_t unit, std::size_t tensor) const {
    return reinterpret_cast<float*>(units_[unit][tensor]);
  }
  std::uint16_t* halves(std::size_t unit, std::size_t tensor) const {
    return reinterpret_cast<std::uint16_t*>(units_[unit][tensor]);
  }

 private:
  AlignedBuffer buffer_;
  std::vector<std::vector<std::byte*>> units_;
};

// Calls body(unit, tensor, spec) for every tensor of the model.
template <class Body>
void for_each_tensor(const ModelSpec& spec, const Body& body) {
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t tensor = 0; tensor < spec.units[unit].tensors.size(); ++tensor)
      body(unit, tensor, spec.units[unit].tensors[tensor]);
}

// The function fills `parameters` with random values. With these values, no gradient is tiny.
// Biases and norms are random, too. Matrices have larger values than at the start of a real
// training.
inline void fill_random(const ModelSpec& spec, const TensorMemory& parameters) {
  for_each_tensor(spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
    const CounterRandom random(7, t.name);
    const double center = t.name.ends_with("ln_1.weight") || t.name.ends_with("ln_2.weight") ||
                                  t.name.ends_with("ln_f.weight")
                              ? 1.0
                              : 0.0;
    for (std::uint64_t i = 0; i < t.element_count(); ++i)
      parameters.floats(unit, tensor)[i] = static_cast<float>(center + 0.3 * random.normal(i));
  });
}

inline std::vector<std::uint32_t> random_tokens(const char* stream, std::size_t count,
                                                std::uint32_t vocabulary) {
  const CounterRandom random(3, stream);
  std::vector<std::uint32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<std::uint32_t>(random.bits(i) % vocabulary);
  return tokens;
}

inline void run_forward(GptCompute& compute, const ModelSpec& spec,
                        const TensorMemory& parameters) {
  for (std::uint32_t use = 0; use < compute.use_count(); ++use)
    compute.forward(use, parameters.const_pointers(index_of(spec.forward_order[use])));
}

// The result of a forward and a backward pass in fp32 or bf16. If a unit is used twice, the two
// gradients are added in fp32. The engine also adds fp32 gradients in fp32. Gradient memory starts
// as NaN. A test therefore notices if the backward pass does not write an element.
struct PassResult {
  double loss;
  std::map<std::string, std::vector<float>> gradients;
};

inline PassResult run_training_pass(GptCompute& compute, const ModelSpec& spec,
                                    const TensorMemory& parameters, DType gradient_dtype,
                                    const std::vector<std::uint32_t>& tokens,
                                    const std::vector<std::uint32_t>& targets,
                                    std::uint64_t shift = 0) {
  const TensorMemory gradients(spec, gradient_dtype, shift);
  compute.start_training(tokens, targets);
  run_forward(compute, spec, parameters);
  PassResult result{compute.loss(), {}};
  for (std::uint32_t use = 0; use < compute.use_count(); ++use) {
    const std::uint32_t unit = index_of(spec.backward_order[use]);
    const std::vector<TensorSpec>& tensors = spec.units[unit].tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      std::memset(gradients.pointers(unit)[i], 0xff,
                  tensors[i].element_count() * size_of(gradient_dtype));
    compute.backward(use, parameters.const_pointers(unit), gradients.pointers(unit));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      std::vector<float>& sum = result.gradients[tensors[i].name];
      sum.resize(tensors[i].element_count(), -0.0f);
      for (std::size_t j = 0; j < sum.size(); ++j)
        sum[j] += gradient_dtype == DType::kFp32
                      ? gradients.floats(unit, i)[j]
                      : float_from_half(gradient_dtype, gradients.halves(unit, i)[j]);
    }
  }
  return result;
}

// Returns ||a - b|| / ||b||. The result is NaN if a or b has a NaN.
template <class A, class B>
double relative_difference(const A& a, const B& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::quiet_NaN();
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / norm);
}

}  // namespace sluice::gpt
