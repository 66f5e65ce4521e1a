// These functions work on the record of one block. The functions update the elements of the block,
// and read or change parts of the record.
//
// Thread rule: the worker's thread. Work on one block is independent of work on other blocks.
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

// An update of a block reads and writes this host memory, in addition to the record.
struct BlockValues {
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  DType gradient_dtype = DType::kFp32;
  std::uint64_t rounding_key = 0;  // of the tensor's step, for moments in bf16
  // A 16-bit parameter has the values of the record. `parameter` is only written.
  bool parameter_is_known = false;
};

// Completes a new record, in which all bytes are still zero. The call sets 8-bit moments to the
// code that stands for the value zero.
void make_fresh(const DetachedBlock& block, std::byte* record);

// Applies an update with `coefficients` to the elements of `block`. The update runs on the threads
// of `arena`.
BlockOutcome update_detached(const DetachedBlock& block, const BlockValues& values,
                             const UpdateCoefficients& coefficients, std::byte* record,
                             WorkerArena& arena);

// These functions do the work of DetachedOptimizer::read() and write() for elements [begin, begin +
// size) of the block.
void read_detached(const DetachedBlock& block, StateKind kind, const std::byte* record,
                   std::uint64_t begin, std::span<float> target);
void write_detached(const DetachedBlock& block, StateKind kind, std::byte* record,
                    std::uint64_t begin, std::span<const float> source);

}  // namespace sluice
