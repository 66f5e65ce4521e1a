// Converts the values of one block's state from and to the bytes of the block's planes.
//
// Thread rule: pure functions, except for `source`, which has its own rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/state.h>
#include <sluice/state_source.h>
#include "engine/plan/layout.h"

namespace sluice {

// The planes of a block in host memory. Another object owns that memory.
struct BlockView {
  BlockId block{};
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
};

// Sets the state of every tensor that has elements in the block.
// Requires: the planes are zero; the padding between tensors stays zero.
// Fails with:
// - kNonFinite: a value is not finite in the parameters' type, a moment is not finite, or an
//   exp_avg_sq is negative. The message names tensor and element.
// - The source's own errors.
void set_values(const Layout& layout, const BlockView& view, StateSource& source);

// The function reads only the masters of every tensor that has elements in the block. The function
// puts them into the memory that set_values() would use. Returns false, and reads nothing, if the
// block has no such memory.
bool read_masters(const Layout& layout, const BlockView& view, StateSource& source);

// Does the work of set_values() for masters that read_masters() has read, with zero moments.
// Requires: the planes were zero before read_masters().
// Fails with kNonFinite in the cases of set_values().
void set_initial_values(const Layout& layout, const BlockView& view);

// The function copies elements [begin, ...) of the block to `target`. Parameters are copied in
// their own type, and everything else is copied as fp32. A moment that is not kept reads as zero.
// Requires: the range is inside the block.
void read_values(const Layout& layout, const BlockView& view, StateKind kind, std::uint64_t begin,
                 std::span<std::byte> target);

}  // namespace sluice
