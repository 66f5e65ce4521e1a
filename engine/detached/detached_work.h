// The work on the record of one block: updating its elements, and reading and setting parts of the
// record.
//
// Thread rule: worker's thread. Distinct blocks are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/detached_optimizer.h>
#include "cpu_optim/update.h"
#include "cpu_optim/worker_arena.h"
#include "engine/detached/detached_plan.h"

namespace sluice {

struct BlockOutcome {
  std::uint64_t adopted_elements = 0;
  NewState state = NewState::kFinite;
};

// The memory on the host that an update of a block reads and writes beside the record.
struct BlockValues {
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  DType gradient_dtype = DType::kFp32;
  std::uint64_t rounding_key = 0;  // of the tensor's step, for moments in bf16
};

// Completes the zero bytes of a new record.
void make_fresh(const DetachedBlock& block, std::byte* record);

// Applies an update with its `coefficients` to the elements of `block`, on the threads of `arena`.
BlockOutcome update_detached(const DetachedBlock& block, const BlockValues& values,
                             const UpdateCoefficients& coefficients, std::byte* record,
                             WorkerArena& arena);

// These functions read or write elements [begin, begin + size) of the block, as
// DetachedOptimizer::read() and write() do.
void read_detached(const DetachedBlock& block, StateKind kind, const std::byte* record,
                   std::uint64_t begin, std::span<float> target);
void write_detached(const DetachedBlock& block, StateKind kind, std::byte* record,
                    std::uint64_t begin, std::span<const float> source);

}  // namespace sluice
