// This code adds the elements that ranks have exchanged. The sum is computed on a device, in the
// order of base/ordered_sum.h. This rank's own elements are not moved. The elements of the other
// ranks lie side by side in one buffer. The same kernel body runs on the GPU and, in tests, on the
// host. The functions are pure.
#pragma once

#include <cstdint>
#include <functional>

#include "gpu/math/math_bodies.h"

namespace sluice {

class CudaDevice;

struct ExchangedSum {
  void* target = nullptr;  // disjoint from the sources, or equal to `own` if the types are equal
  DType target_type = DType::kFp32;
  const void* own = nullptr;
  // The elements of rank r begin at r * received_stride if r < rank, and at (r - 1) *
  // received_stride if r > rank.
  const void* received = nullptr;
  std::uint64_t received_stride = 0;  // elements
  DType source_type = DType::kFp32;
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  std::uint64_t element_count = 0;
};

// A function that enqueues a sum.
using SumLauncher = std::function<void(const ExchangedSum& sum, StreamId stream)>;

template <class To, class From>
struct ExchangedSumBody {
  To* target;
  const From* own;
  const From* received;
  std::uint64_t stride;
  std::uint64_t count;
  std::uint32_t rank;
  std::uint32_t rank_count;

  SLUICE_HOST_DEVICE const From* source(std::uint32_t r) const {
    return r == rank ? own : received + (r < rank ? r : r - 1) * stride;
  }
};

// For each index, the body computes eight sums. Each sum is for one element of the target.
// Requires: every array begins at a multiple of 16 bytes.
template <class To, class From>
struct PackedSumBody : ExchangedSumBody<To, From> {
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    Pack<float> sum;
    Pack<From> next = load_pack(this->source(0), index, this->count);
    for (unsigned i = 0; i < kPackElements; ++i) sum.values[i] = load(next.values[i]);
    for (std::uint32_t r = 1; r < this->rank_count; ++r) {
      next = load_pack(this->source(r), index, this->count);
      for (unsigned i = 0; i < kPackElements; ++i) sum.values[i] += load(next.values[i]);
    }
    Pack<To> result;
    for (unsigned i = 0; i < kPackElements; ++i) store(sum.values[i], result.values[i]);
    store_pack(result, this->target, index, this->count);
  }
};

// For each index, the body computes one sum. This sum is for one element of the target. Arrays may
// begin at any address.
template <class To, class From>
struct SingleSumBody : ExchangedSumBody<To, From> {
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    float sum = load(this->source(0)[index]);
    for (std::uint32_t r = 1; r < this->rank_count; ++r) sum += load(this->source(r)[index]);
    store(sum, this->target[index]);
  }
};

// Launches the sum through CudaLauncher or HostLauncher.
template <class Launcher>
void launch_sum(const Launcher& launcher, const ExchangedSum& sum, StreamId stream) {
  with_element_type(sum.target_type, [&]<class To>(To*) {
    with_element_type(sum.source_type, [&]<class From>(From*) {
      const ExchangedSumBody<To, From> body{static_cast<To*>(sum.target),
                                            static_cast<const From*>(sum.own),
                                            static_cast<const From*>(sum.received),
                                            sum.received_stride,
                                            sum.element_count,
                                            sum.rank,
                                            sum.rank_count};
      const std::uintptr_t places =
          reinterpret_cast<std::uintptr_t>(sum.target) | reinterpret_cast<std::uintptr_t>(sum.own) |
          reinterpret_cast<std::uintptr_t>(sum.received) | sum.received_stride * sizeof(From);
      if (places % 16 == 0) {
        launcher.elements(stream, (sum.element_count + kPackElements - 1) / kPackElements,
                          PackedSumBody<To, From>{body});
      } else {
        launcher.elements(stream, sum.element_count, SingleSumBody<To, From>{body});
      }
    });
  });
}

// `device` must outlive the result.
// Fails with kUnsupported if the build has no CUDA.
SumLauncher make_cuda_sum(CudaDevice& device);

}  // namespace sluice
