#include "tests/gpu/math/optimizer_math_kernels.h"

#include <cuda_runtime.h>

#include <memory>
#include <stdexcept>

namespace sluice::test {
namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

struct DeviceFree {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <class T>
using DeviceArray = std::unique_ptr<T[], DeviceFree>;

template <class T>
DeviceArray<T> allocate(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  return DeviceArray<T>(static_cast<T*>(memory));
}

template <class Out, class In, class Function>
__global__ void map_kernel(Out* outputs, const In* inputs, std::size_t count, Function function) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) outputs[i] = function(inputs[i]);
}

// outputs[i] = function(inputs[i]), on the GPU.
template <class Out, class In, class Function>
std::vector<Out> map_on_gpu(std::span<const In> inputs, Function function) {
  constexpr unsigned kThreads = 256;
  const std::size_t count = inputs.size();
  const DeviceArray<In> device_inputs = allocate<In>(count);
  const DeviceArray<Out> device_outputs = allocate<Out>(count);
  check(cudaMemcpy(device_inputs.get(), inputs.data(), inputs.size_bytes(), cudaMemcpyDefault),
        "cudaMemcpy to the device");
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  map_kernel<<<blocks, kThreads>>>(device_outputs.get(), device_inputs.get(), count, function);
  check(cudaGetLastError(), "kernel launch");
  std::vector<Out> outputs(count);
  check(cudaMemcpy(outputs.data(), device_outputs.get(), count * sizeof(Out), cudaMemcpyDefault),
        "cudaMemcpy from the device");
  return outputs;
}

// Function objects, because extended lambdas need a flag of their own.
struct FloatBitsFromBf16 {
  __device__ std::uint32_t operator()(std::uint16_t value) const {
    return bits_from_float(float_from_bf16(value));
  }
};
struct FloatBitsFromFp16 {
  __device__ std::uint32_t operator()(std::uint16_t value) const {
    return bits_from_float(float_from_fp16(value));
  }
};
struct Bf16FromFloatBits {
  __device__ std::uint16_t operator()(std::uint32_t bits) const {
    return bf16_from_float(float_from_bits(bits));
  }
};
struct Fp16FromFloatBits {
  __device__ std::uint16_t operator()(std::uint32_t bits) const {
    return fp16_from_float(float_from_bits(bits));
  }
};
struct SplitMasterBits {
  __device__ SplitMaster operator()(std::uint32_t bits) const {
    return split_master(float_from_bits(bits));
  }
};
struct JoinMasterBits {
  __device__ std::uint32_t operator()(SplitMaster split) const {
    return bits_from_float(join_master(split));
  }
};
__device__ AdamElement element(const AdamCoefficients& c, const AdamInput& input) {
  return adam_element(c, input.state, input.gradient);
}
__device__ AdamElement element(const AdamL2Coefficients& c, const AdamInput& input) {
  return adam_l2_element(c, input.state, input.gradient);
}
__device__ AdamElement element(const LionCoefficients& c, const AdamInput& input) {
  return lion_element(c, input.state, input.gradient);
}
__device__ AdamElement element(const AdagradCoefficients& c, const AdamInput& input) {
  return adagrad_element(c, input.state, input.gradient);
}
__device__ AdamElement element(const SgdCoefficients& c, const AdamInput& input) {
  return sgd_element(c, input.state, input.gradient);
}
template <class Coefficients>
struct Update {
  Coefficients coefficients;
  __device__ AdamElement operator()(const AdamInput& input) const {
    return element(coefficients, input);
  }
};

}  // namespace

std::string why_no_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return std::string("no GPU: ") + cudaGetErrorString(status);
  if (count == 0) return "no GPU: the driver lists none";
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(
      &attributes, map_kernel<std::uint32_t, std::uint16_t, FloatBitsFromBf16>);
  if (code != cudaSuccess)
    return std::string("no kernel for this GPU: ") + cudaGetErrorString(code) +
           "; set SLUICE_CUDA_ARCHITECTURES";
  return {};
}

std::vector<std::uint32_t> gpu_float_bits_from_bf16(std::span<const std::uint16_t> values) {
  return map_on_gpu<std::uint32_t>(values, FloatBitsFromBf16{});
}
std::vector<std::uint32_t> gpu_float_bits_from_fp16(std::span<const std::uint16_t> values) {
  return map_on_gpu<std::uint32_t>(values, FloatBitsFromFp16{});
}
std::vector<std::uint16_t> gpu_bf16_from_float_bits(std::span<const std::uint32_t> bits) {
  return map_on_gpu<std::uint16_t>(bits, Bf16FromFloatBits{});
}
std::vector<std::uint16_t> gpu_fp16_from_float_bits(std::span<const std::uint32_t> bits) {
  return map_on_gpu<std::uint16_t>(bits, Fp16FromFloatBits{});
}
std::vector<SplitMaster> gpu_split_master(std::span<const std::uint32_t> bits) {
  return map_on_gpu<SplitMaster>(bits, SplitMasterBits{});
}
std::vector<std::uint32_t> gpu_join_master(std::span<const SplitMaster> splits) {
  return map_on_gpu<std::uint32_t>(splits, JoinMasterBits{});
}
std::vector<AdamElement> gpu_update_elements(const ElementCoefficients& coefficients,
                                             std::span<const AdamInput> inputs) {
  return std::visit(
      [&](const auto& c) {
        return map_on_gpu<AdamElement>(inputs, Update<std::decay_t<decltype(c)>>{c});
      },
      coefficients);
}

}  // namespace sluice::test
