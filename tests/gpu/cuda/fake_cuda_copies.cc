// The copies of the stand-in for the CUDA runtime, and those functions of the driver that the
// runtime looks up.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "tests/gpu/cuda/fake_cuda_state.h"

namespace sluice::test {
namespace {

// A copy between the GPU and host memory that is not registered blocks its caller.
bool is_pageable(const std::byte* memory, std::uint64_t size_bytes) {
  const std::scoped_lock lock(runtime().mutex);
  return std::ranges::none_of(runtime().registered, [&](const auto& span) {
    return memory >= span.first && memory + size_bytes <= span.first + span.second;
  });
}

void start_copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                cudaStream_t stream, bool is_continued) {
  const bool is_up = !is_device_memory(source);
  const bool is_inside = !is_up && is_device_memory(target);
  add_fake_cuda_call(
      {.kind = is_up       ? FakeCudaCall::Kind::kCopyUp
               : is_inside ? FakeCudaCall::Kind::kCopyInside
                           : FakeCudaCall::Kind::kCopyDown,
       .stream = reinterpret_cast<std::uintptr_t>(stream),
       .size_bytes = size_bytes,
       .target = target,
       .source = source,
       .is_continued = is_continued,
       .is_pageable = !is_inside && is_pageable(is_up ? source : target, size_bytes)});
  runtime().device->copy(target, source, size_bytes, id_of_stream(stream));
}

}  // namespace

void set_fake_cuda_batches(FakeCudaBatches batches) {
  runtime().batches = batches;
}

}  // namespace sluice::test

using namespace sluice;
using namespace sluice::test;

extern "C" {

int fake_cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  const std::scoped_lock lock(runtime().mutex);
  *flags = 0;
  *active = static_cast<int>(runtime().contexts.count(device));
  return 0;
}
// As of CUDA 12.8, with the place of the copy that failed. From the pieces' ends the driver knows
// the direction of each.
CUresult fake_cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* sizes,
                                 std::size_t count, CUmemcpyAttributes* attributes,
                                 std::size_t* attribute_begins, std::size_t attribute_count,
                                 std::size_t* failed, CUstream stream) {
  if (!has_current_context()) {
    *failed = SIZE_MAX;  // none of the copies
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int status = enter_fake_cuda("cuMemcpyBatchAsync");
  if (status != 0) return static_cast<CUresult>(status);
  if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;  // the default stream
  if (runtime().batches == FakeCudaBatches::kRefused) return CUDA_ERROR_NOT_SUPPORTED;
  SLUICE_CHECK(gpu_of_stream(stream) == current_device(),
               "a batch's stream is one of the current GPU");
  SLUICE_CHECK(count > 0 && attribute_count == 1 && attribute_begins[0] == 0 &&
                   attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
               "copies read their sources in the stream's order");
  const auto end_of = [](CUdeviceptr address) {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
  };
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* const target = end_of(targets[i]);
    const std::byte* const source = end_of(sources[i]);
    SLUICE_CHECK(sizes[i] != 0 && (is_device_memory(target) || is_device_memory(source)),
                 "a copy of a batch has bytes, and an end on the GPU");
    start_copy(target, source, sizes[i], stream, /*is_continued=*/i != 0);
  }
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (symbol == std::string_view("cuDevicePrimaryCtxGetState"))
    *function = reinterpret_cast<void*>(&fake_cuDevicePrimaryCtxGetState);
  if (symbol == std::string_view("cuMemcpyBatchAsync") && version == 12080 &&
      runtime().batches != FakeCudaBatches::kUnknown)
    *function = reinterpret_cast<void*>(&fake_cuMemcpyBatchAsync);
  if (found != nullptr)
    *found =
        *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 12000, flags, found);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  FAKE_CUDA_ENTER;
  *attributes = {};
  attributes->type = is_device_memory(memory) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
// Between host and host the call is synchronous: it would wait for the stream.
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t size_bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  FAKE_CUDA_ENTER;
  const bool to_device = is_device_memory(target);
  const bool from_device = is_device_memory(source);
  SLUICE_CHECK(kind == cudaMemcpyDefault ||
                   (to_device ? from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                              : cudaMemcpyDeviceToHost) == kind,
               "the kind of a copy says where its ends lie");
  SLUICE_CHECK(to_device || from_device, "copies between host and host are not the runtime's");
  start_copy(static_cast<std::byte*>(target), static_cast<const std::byte*>(source), size_bytes,
             stream, /*is_continued=*/false);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size_bytes, cudaStream_t stream) {
  FAKE_CUDA_ENTER;
  SLUICE_CHECK(value == 0, "memory is filled with zeros");
  log_call(FakeCudaCall::Kind::kFill, stream);
  runtime().device->fill_zero(static_cast<std::byte*>(memory), size_bytes, id_of_stream(stream));
  return cudaSuccess;
}

}  // extern "C"
