// The class implements DeviceMath with the kernel bodies of math_bodies.h. A launcher runs the
// bodies. The launcher is CudaLauncher on a GPU and HostLauncher in tests. Thread rule: the same as
// for DeviceMath.
#pragma once

#include <cstdint>
#include <variant>

#include <sluice/error.h>
#include "gpu/math/math_bodies.h"

namespace sluice {

template <class Launcher>
class DeviceMathOver final : public DeviceMath {
 public:
  explicit DeviceMathOver(const Launcher& launcher) : launcher_(launcher) {}

  void accumulate(DType type, void* target, const void* source, std::uint64_t count,
                  StreamId stream) override {
    check_aligned({target, source});
    with_element_type(type, [&]<class T>(T*) {
      launcher_.elements(
          stream, packs(count),
          AccumulateBody<T>{static_cast<T*>(target), static_cast<const T*>(source), count});
    });
  }

  void norm_leaves(DType type, const void* gradient, std::uint64_t count, double* leaves,
                   StreamId stream) override {
    with_element_type(type, [&]<class T>(T*) {
      launcher_.leaves(stream, (count + kNormLeafElements - 1) / kNormLeafElements,
                       NormLeavesBody<T>{static_cast<const T*>(gradient), count, leaves});
    });
  }

  void digest(const void* values, std::uint64_t size_bytes, std::uint64_t* digests,
              StreamId stream) override {
    check_aligned({values});
    launcher_.leaves(stream, (size_bytes + kDigestBytes - 1) / kDigestBytes,
                     DigestBody{static_cast<const unsigned char*>(values), size_bytes, digests});
  }

  void update(const DeviceCoefficients& coefficients, const DeviceUpdate& a,
              StreamId stream) override {
    check_aligned({a.parameter, a.low, a.master, a.exp_avg, a.exp_avg_sq, a.exp_avg_codes,
                   a.exp_avg_sq_codes, a.exp_avg_bf16, a.exp_avg_sq_bf16, a.gradient});
    std::visit(
        [&](const auto& c) {
          switch (a.parameter_type) {
            case DType::kFp32:
              return update_with(c, Fp32Masters{static_cast<float*>(a.parameter)}, a, stream);
            case DType::kBf16:
              return update_with(c, SplitMasters{static_cast<std::uint16_t*>(a.parameter), a.low},
                                 a, stream);
            case DType::kFp16:
              return update_with(c, Fp16Masters{static_cast<Fp16*>(a.parameter), a.master}, a,
                                 stream);
          }
        },
        coefficients);
  }

 private:
  static std::uint64_t packs(std::uint64_t count) {
    return (count + kPackElements - 1) / kPackElements;
  }
  static void check_aligned(std::initializer_list<const void*> arrays) {
    for (const void* array : arrays)
      SLUICE_CHECK(reinterpret_cast<std::uintptr_t>(array) % 16 == 0,
                   "arrays on the device are aligned to 16 bytes");
  }

  template <class Coefficients, class Masters>
  void update_with(const Coefficients& c, const Masters& masters, const DeviceUpdate& a,
                   StreamId stream) {
    const bool has_codes = a.exp_avg_codes != nullptr || a.exp_avg_sq_codes != nullptr;
    if (has_codes) return update_codes_with(c, masters, a, stream);
    using R = Rule<Coefficients>;
    SLUICE_CHECK(!R::kExpAvg || a.exp_avg != nullptr || a.exp_avg_bf16 != nullptr,
                 "it keeps exp_avg");
    SLUICE_CHECK(!R::kExpAvgSq || a.exp_avg_sq != nullptr || a.exp_avg_sq_bf16 != nullptr,
                 "it keeps exp_avg_sq");
    with_element_type(a.gradient_type, [&]<class G>(G*) {
      launcher_.elements(stream, packs(a.element_count),
                         UpdateBody<Masters, G, Coefficients>{masters,
                                                              c,
                                                              static_cast<const G*>(a.gradient),
                                                              {a.exp_avg, a.exp_avg_bf16},
                                                              {a.exp_avg_sq, a.exp_avg_sq_bf16},
                                                              a.rounding,
                                                              a.element_count,
                                                              a.non_finite});
    });
  }

  template <class Coefficients, class Masters>
  void update_codes_with(const Coefficients& c, const Masters& masters, const DeviceUpdate& a,
                         StreamId stream) {
    using R = Rule<Coefficients>;
    SLUICE_CHECK(!R::kExpAvg || a.exp_avg_codes != nullptr, "it keeps exp_avg");
    SLUICE_CHECK(!R::kExpAvgSq || a.exp_avg_sq_codes != nullptr, "it keeps exp_avg_sq");
    with_element_type(a.gradient_type, [&]<class G>(G*) {
      launcher_.warps(
          stream, (a.element_count + kMomentGroupElements - 1) / kMomentGroupElements,
          UpdateCodesBody<Masters, G, Coefficients>{masters,
                                                    c,
                                                    static_cast<const G*>(a.gradient),
                                                    {a.exp_avg_codes, a.exp_avg_scales},
                                                    {a.exp_avg_sq_codes, a.exp_avg_sq_scales},
                                                    a.element_count,
                                                    a.non_finite});
    });
  }

  const Launcher launcher_;
};

}  // namespace sluice
