// The functions convert between the values of one block's state and the bytes of the block's
// planes.
//
// Thread rule: the functions are pure, except that they read from `source`. `source` has its own
// thread rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/state.h>
#include <sluice/state_source.h>
#include "engine/plan/layout.h"

namespace sluice {

// This struct shows where the planes of a block lie in host memory. Another object owns the memory.
struct BlockView {
  BlockId block{};
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
};

// Sets the state of every tensor that has elements in the block.
// Requires: the planes contain only zeros. The padding between tensors stays zero.
// Fails with:
// - kNonFinite: a value is not finite in the parameters' type, a moment is not finite, or an
//   exp_avg_sq is negative. The message names tensor and element.
// - The errors that `source` throws.
void set_values(const Layout& layout, const BlockView& view, StateSource& source);

// Reads the masters of every tensor that has elements in the block. The moments are not read. The
// masters are stored in the memory of the block itself. If the block has no memory for all masters,
// the function returns false and reads nothing.
bool read_masters(const Layout& layout, const BlockView& view, StateSource& source);

// Does the same as set_values(), but with the masters that read_masters() has read, and with
// moments of zero.
// Requires: the planes were zero before read_masters().
// Fails with kNonFinite in the same cases as set_values().
void set_initial_values(const Layout& layout, const BlockView& view);

// Fills `target` with elements of the block, beginning with element `begin`. Parameters are copied
// in their own type, and everything else is copied as fp32. If the optimizer does not keep a
// moment, zeros are copied.
// Requires: the elements are inside the block.
void read_values(const Layout& layout, const BlockView& view, StateKind kind, std::uint64_t begin,
                 std::span<std::byte> target);

}  // namespace sluice
