// This file names the instruction sets for which the vector kernels are compiled. A source includes
// this file before <hwy/foreach_target.h>.
#pragma once

// SVE and RVV are left out, because the kernels keep vectors in structs and arrays. A vector in a
// struct or an array needs a length that is known at compile time. Sets beyond AVX3 (AVX-512 as in
// Skylake) are left out, because nothing in the kernels would use what they add; on x86 a better
// set has a lower bit. SSSE3 is left out, because processors that have it and not SSE4 are older
// than NVMe. A build with a sanitizer also leaves out SSE4, because each set takes ten seconds to
// compile. The sanitizer still checks the memory accesses, because the same templates make the
// accesses of the scalar set, AVX2 and AVX3.
#define SLUICE_SETS_LEFT_OUT \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | (HWY_AVX3 - 1))
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HWY_DISABLED_TARGETS (SLUICE_SETS_LEFT_OUT | HWY_SSE4)
#else
#define HWY_DISABLED_TARGETS SLUICE_SETS_LEFT_OUT
#endif
