// The building blocks of kernel bodies. There are two kinds of building blocks: stored elements
// with conversions to fp32, and teams of threads that share a row. With these blocks, the same
// source runs on the GPU and, in tests, on the host. A body is a function object with a call
// operator for one index. The header gpu/cuda/cuda_launcher.h runs bodies on a GPU, and
// gpu/math/host_launcher.h runs bodies on the host device. The functions are pure.
//
// A team has rank(), size(), sum() and max(). The functions sum() and max() combine the values of
// all members. All members must call sum() and max(), and all members get the same result. On the
// host, a team is one thread. A team of one warp has kSize, its number of threads, instead of
// size(), and no sum().
#pragma once

#include <cstdint>

#include <sluice/device_function.h>
#include "base/stored_elements.h"

namespace sluice {

// One thread reads or writes the eight elements of a pack together, in accesses of 16 bytes. The
// array of the elements is aligned to 16 bytes.
inline constexpr std::uint64_t kPackElements = 8;
template <class T>
struct alignas(16) Pack {
  T values[kPackElements];
};

struct SerialTeam {
  static constexpr unsigned kSize = 1;
  unsigned rank() const { return 0; }
  unsigned size() const { return 1; }
  float sum(float value) const { return value; }
  float max(float value) const { return value; }
};

}  // namespace sluice
