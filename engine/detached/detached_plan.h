// How the state of a detached optimizer is cut into blocks, and where each block lives. Pure; any
// thread.
//
// A block's record has up to four arrays, one after the other, each padded to 256 elements. The
// arrays are the 16 bits that the parameter got last, the master (only the low half for bf16, the
// whole master for fp16), exp_avg and exp_avg_sq. Arrays that the parameters and the optimizer do
// not need are missing.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/config.h>
#include <sluice/detached_optimizer.h>
#include "cpu_optim/update.h"

namespace sluice {

// The offsets of a record's arrays, in bytes. A missing array has the offset of the next array.
struct RecordFormat {
  MasterLayout layout = MasterLayout::kFp32;
  bool has_exp_avg = false;
  bool has_exp_avg_sq = false;
  std::uint64_t padded_elements = 0;

  std::uint64_t given_offset() const { return 0; }  // uint16_t: the parameter's last value
  std::uint64_t low_offset() const {
    return layout == MasterLayout::kFp32 ? 0 : padded_elements * 2;
  }
  std::uint64_t exp_avg_offset() const;
  std::uint64_t exp_avg_sq_offset() const;
  std::uint64_t size_bytes() const;  // with padding to whole pages
};
RecordFormat record_format(OptimizerKind optimizer, DType parameter, std::uint64_t element_count);

struct DetachedBlock {
  std::uint32_t tensor = 0;
  std::uint64_t first_element = 0;  // of the tensor
  std::uint64_t element_count = 0;
  RecordFormat format;
  bool is_on_storage = false;
};

struct DetachedPlan {
  std::vector<DetachedBlock> blocks;       // in the order of the tensors
  std::vector<std::uint32_t> first_block;  // by tensor, then the number of all
  std::uint64_t host_record_bytes = 0;
  std::uint64_t storage_bytes = 0;
  std::uint64_t lane_bytes = 0;  // of each; 0 without blocks on storage
  std::uint32_t lanes = 0;
  // Places for the parameters and gradients of blocks whose tensors are on a device.
  std::uint64_t staging_bytes = 0;  // of each; 0 without such tensors
  std::uint32_t staging_slots = 0;

  // Records and lanes.
  std::uint64_t state_bytes() const { return host_record_bytes + lanes * lane_bytes; }
  std::uint64_t host_bytes() const { return state_bytes() + staging_slots * staging_bytes; }
};

// A tensor of at most this many elements stays in host memory under any placement, if memory.host
// has room. For so few elements, a transfer costs more than the memory is worth.
inline constexpr std::uint64_t kSmallElements = 16 << 10;

// The parameters of a block in its place of the staging memory, and the gradients behind them.
std::uint64_t staged_gradient_offset(const DetachedBlock& block);

// `host_budget_bytes` is used if the config has no host budget.
// Fails with kConfig or kOutOfMemory.
DetachedPlan plan_detached(const Config& config, std::span<const DetachedTensor> tensors,
                           std::uint64_t host_budget_bytes);

}  // namespace sluice
