// The plan of a detached optimizer. The plan says how the state is cut into blocks, and where each
// block lives. The functions are pure, and any thread may call them.
//
// A block's record has one or two parts. In each part, the number of elements is padded to a
// multiple of 256. The first part has the 16-bit values that the parameter received last. If the
// parameters are in fp32, the record has no first part. The second part is the same record as in an
// engine (engine/plan/layout.h). The second part has the rest of the master, and the moments in
// fp32, bf16 or 8-bit codes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/config.h>
#include <sluice/detached_optimizer.h>
#include "engine/plan/layout.h"

namespace sluice {

struct RecordFormat {
  StateFormat state;
  std::uint64_t padded_elements = 0;

  // The offset of the second part, in bytes.
  std::uint64_t state_offset() const {
    return state.master == MasterLayout::kFp32 ? 0 : padded_elements * 2;
  }
  std::uint64_t size_bytes() const;  // with padding to whole pages
};
RecordFormat record_format(const Config::Optimizer& optimizer, DType parameter,
                           std::uint64_t element_count);

struct DetachedBlock {
  std::uint32_t tensor = 0;
  std::uint64_t first_element = 0;  // of the tensor
  std::uint64_t element_count = 0;
  RecordFormat format;
  bool is_on_storage = false;
  // The number of digests of the block's parameter (engine/detached/detached_digests.h). Only
  // 16-bit parameters on a device have digests.
  std::uint64_t digest_count = 0;
};

struct DetachedPlan {
  std::vector<DetachedBlock> blocks;       // in the order of the tensors
  std::vector<std::uint32_t> first_block;  // by tensor; the last entry counts all blocks
  std::uint64_t host_record_bytes = 0;
  std::uint64_t storage_bytes = 0;
  std::uint64_t lane_bytes = 0;  // of each; 0 without blocks on storage
  std::uint32_t lanes = 0;
  // If a tensor is on a device, the staging memory has places for the parameters, gradients and
  // digests of the tensor's blocks.
  std::uint64_t staging_bytes = 0;  // of each; 0 without such tensors
  std::uint32_t staging_slots = 0;
  std::uint64_t digest_bytes = 0;  // the digests that are kept for all blocks

  // Records and lanes.
  std::uint64_t state_bytes() const { return host_record_bytes + lanes * lane_bytes; }
  std::uint64_t host_bytes() const {
    return state_bytes() + staging_slots * staging_bytes + digest_bytes;
  }
};

// If memory.host has room, a tensor with at most this many elements stays in host memory under any
// placement. For small tensors, the saved memory is not worth the time of the transfers.
inline constexpr std::uint64_t kSmallElements = 16 << 10;

// Each block has a place in the staging memory. The parameters are at the beginning of the place.
// The gradients follow, and then the digests. The functions return the offset of the gradients and
// of the digests in the place, in bytes.
std::uint64_t staged_gradient_offset(const DetachedBlock& block);
std::uint64_t staged_digest_offset(const DetachedBlock& block);

// `host_budget_bytes` is used if the config has no host budget.
// Fails with kConfig if placement.optimizer is "device", and with kOutOfMemory if the host budget
// is too small.
DetachedPlan plan_detached(const Config& config, std::span<const DetachedTensor> tensors,
                           std::uint64_t host_budget_bytes);

}  // namespace sluice
