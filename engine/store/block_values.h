// The values of one block's state in its planes: what the bytes of parameters and record mean.
//
// Thread rule: pure functions; `source` says its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/state.h>
#include <sluice/state_source.h>
#include "engine/plan/layout.h"

namespace sluice {

// A block's planes in host memory, whoever owns that.
struct BlockView {
  BlockId block{};
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
};

// Sets the state of every tensor that reaches into the block.
// Requires: the planes are zero; what lies between tensors stays so.
// Fails with: kNonFinite naming tensor and element of a value that is not finite in the parameters'
// type; what the source fails with.
void set_values(const Layout& layout, const BlockView& view, StateSource& source);

// Copies elements [begin, ...) of the block to `target`: parameters in their type, all else as
// fp32. A moment that is not kept reads as zeros.
// Requires: the range is inside of the block.
void read_values(const Layout& layout, const BlockView& view, StateKind kind, std::uint64_t begin,
                 std::span<std::byte> target);

}  // namespace sluice
