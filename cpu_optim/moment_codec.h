// Converts runs of moments to 8-bit codes (base/moment_codes.h) and back. A run is a part of one
// tensor's moment that begins at the start of a group. The last group of a run may be shorter. All
// functions ignore the caller's floating-point settings. Pure, callable from any thread on disjoint
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/moment_codes.h"

namespace sluice {

// A moment's codes, one per element, and its scales, one per group. A pointer is null if there are
// no codes.
struct MomentCodes {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;

  bool exist() const { return codes != nullptr; }
  // The part from element `begin` on.
  // Requires: `begin` is a multiple of kMomentGroupElements.
  MomentCodes from(std::uint64_t begin) const;
};

// Straight lines that count the codes above that of zero, one line for each power of ten.
struct CodeLines {
  static constexpr std::size_t kCount = 7;

  float begins[kCount];  // the smallest magnitude of each; the first one has all smaller ones, too
  float slopes[kCount];
  float offsets[kCount];
};
// The numbers that the vector kernels need of a code book.
struct CodeKernelTable {
  alignas(64) float values[256];
  alignas(64) float limits[256];  // the largest value of each code, by rounding
  CodeLines lines;
};
const CodeKernelTable& code_kernel_table(CodeBook book);

// Makes the codes and the scales of `values`, which begin at the start of a group.
void encode_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment);
// Does the same by the definition. This function is slow. Tests compare encode_moments() with this
// function.
void encode_moments_reference(CodeBook book, std::span<const float> values,
                              const MomentCodes& moment);
// Encodes like encode_moments(), with one difference: if the values of a group come from
// decode_moments(), the new codes mean exactly these values. The scale of such a group cannot be
// found from the largest magnitude alone, because the lowest signed code has the value -0.993.
void encode_saved_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment);

// The function reads elements [begin, begin + values.size()) of a run. These elements may begin
// inside a group.
void decode_moments(CodeBook book, const MomentCodes& moment, std::uint64_t begin,
                    std::span<float> values);

}  // namespace sluice
