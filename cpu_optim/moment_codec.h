// Converts runs of moments to 8-bit codes (base/moment_codes.h) and back. A run is a part of one
// tensor's moment, and begins at the start of a group. The last group of a run may be shorter. All
// functions ignore the caller's floating-point settings. The functions are pure, and any thread may
// call them on disjoint memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/moment_codes.h"

namespace sluice {

// The codes and the scales of one moment. There is one code per element, and one scale per group.
// The pointers are null if the moment is not encoded.
struct MomentCodes {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;

  bool exist() const { return codes != nullptr; }
  // Returns the codes and scales of element `begin` and of all later elements.
  // Requires: `begin` is a multiple of kMomentGroupElements.
  MomentCodes from(std::uint64_t begin) const;
};

// A piecewise linear function of a value's magnitude. The result is the position of the value's
// code. The code of zero has the position 0. There is one line for each power of ten.
struct CodeLines {
  static constexpr std::size_t kCount = 7;

  float begins[kCount];  // where each line begins; line 0 also covers smaller magnitudes
  float slopes[kCount];
  float offsets[kCount];
};
// The numbers of a code book, in the form that the vector kernels need.
struct CodeKernelTable {
  alignas(64) float values[256];
  alignas(64) float limits[256];  // the largest value that rounds to each code
  CodeLines lines;
};
const CodeKernelTable& code_kernel_table(CodeBook book);

// Makes the codes and the scales of `values`. The first value is the first element of a group.
void encode_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment);
// Does the same as encode_moments(), but follows the definition literally. This version is slow.
// Tests compare encode_moments() with this version.
void encode_moments_reference(CodeBook book, std::span<const float> values,
                              const MomentCodes& moment);
// Does the same as encode_moments(), but does not change values that were decoded before. If the
// values of a group come from decode_moments(), the new codes stand for exactly these values. The
// largest magnitude of a decoded group does not determine the group's scale, because the lowest
// signed code stands for -0.993.
void encode_saved_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment);

// Decodes elements [begin, begin + values.size()) of a run. `begin` may lie inside a group.
void decode_moments(CodeBook book, const MomentCodes& moment, std::uint64_t begin,
                    std::span<float> values);

}  // namespace sluice
