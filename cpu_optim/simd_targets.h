// The instruction sets that the vector kernels are compiled for. A source includes this file before
// <hwy/foreach_target.h>.
#pragma once

// Vectors of a length known only at run time cannot be kept in structs and arrays, as the kernels
// do. Under sanitizers, each set takes ten seconds to compile: SSSE3 and SSE4 are left out there,
// since the same templates make the accesses of the scalar set, AVX2 and AVX3.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4)
#else
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
