// hwy::SupportedTargets() answers the same. But it lies in libhwy, and that library of Highway 1.0
// measures the clock for 4 to 10 ms whenever a process starts, even one that computes nothing. So
// this file asks the processor itself, and of Highway only the headers are used.

#include "cpu_optim/simd_support.h"

#include <hwy/detect_targets.h>

#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace sluice {

#if HWY_ARCH_X86
namespace {

// The two whose names not every compiler's __builtin_cpu_supports() knows.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_lzcnt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & (1u << 5)) != 0;
}

}  // namespace

std::int64_t supported_instruction_sets() {
  // The compiler's function also asks whether the operating system saves the registers.
  if (!__builtin_cpu_supports("ssse3") || !__builtin_cpu_supports("sse4.1") ||
      !__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul") ||
      !__builtin_cpu_supports("aes")) {
    return 0;
  }
  std::int64_t sets = HWY_SSE4;
  if (!__builtin_cpu_supports("avx") || !__builtin_cpu_supports("avx2") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
      !__builtin_cpu_supports("fma") || !has_f16c() || !has_lzcnt()) {
    return sets;
  }
  sets |= HWY_AVX2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw")) {
    sets |= HWY_AVX3;
  }
  return sets;
}
#else
std::int64_t supported_instruction_sets() {
  return 0;
}
#endif

}  // namespace sluice
