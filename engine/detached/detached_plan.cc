#include "engine/detached/detached_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "cpu_optim/optimizer_options.h"
#include "gpu/math/device_math.h"

namespace sluice {
namespace {

constexpr std::uint64_t kRecordAlignBytes = 4096;
constexpr std::uint64_t kBlockElements = 256 << 10;  // records of 2 or 3 MiB
// Where no record moves, blocks are as large as tensors, up to this limit: all threads wait for the
// end of each block, and blocks of kBlockElements would take a tenth longer.
constexpr std::uint64_t kHostBlockElements = 16 << 20;
// Blocks of a tensor on a device are copied, updated and copied back, several at the same time.
constexpr std::uint64_t kDeviceBlockElements = 4 << 20;
constexpr std::uint32_t kStagingSlots = 6;  // two on each of these ways
constexpr std::uint64_t kGradientBytesMax = 4;
// One is read, one updated, one written.
constexpr std::uint32_t kLanesMin = 3;
constexpr std::uint32_t kLanesMax = 16;

// Cuts the tensors into blocks of at most `length` elements.
void cut(DetachedPlan& plan, const Config& config, std::span<const DetachedTensor> tensors,
         std::uint64_t length) {
  plan.blocks.clear();
  plan.first_block.clear();
  for (std::uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    plan.first_block.push_back(static_cast<std::uint32_t>(plan.blocks.size()));
    const std::uint64_t count = tensors[tensor].element_count;
    const std::uint64_t most =
        tensors[tensor].is_on_device ? std::min(length, kDeviceBlockElements) : length;
    for (std::uint64_t first = 0; first < count; first += most) {
      const std::uint64_t elements = std::min(most, count - first);
      const DType type = tensors[tensor].parameter;
      const bool has_digests = tensors[tensor].is_on_device && type != DType::kFp32;
      plan.blocks.push_back(
          {.tensor = tensor,
           .first_element = first,
           .element_count = elements,
           .format = record_format(config.optimizer, type, elements),
           .digest_count = has_digests ? div_ceil(elements * size_of(type), kDigestBytes) : 0});
    }
  }
  plan.first_block.push_back(static_cast<std::uint32_t>(plan.blocks.size()));
  plan.staging_bytes = plan.digest_bytes = 0;
  for (const DetachedBlock& block : plan.blocks) {
    if (!tensors[block.tensor].is_on_device) continue;
    const std::uint64_t digest_bytes = block.digest_count * sizeof(std::uint64_t);
    plan.digest_bytes += digest_bytes;
    plan.staging_bytes =
        std::max(plan.staging_bytes,
                 align_up(staged_digest_offset(block) + digest_bytes, kRecordAlignBytes));
  }
  plan.staging_slots = plan.staging_bytes == 0 ? 0 : kStagingSlots;
}

// Puts the blocks that `wanted` selects onto storage, and counts them.
template <typename Wanted>
void place(DetachedPlan& plan, const Wanted& wanted) {
  plan.host_record_bytes = plan.storage_bytes = plan.lane_bytes = 0;
  for (DetachedBlock& block : plan.blocks) {
    const std::uint64_t bytes = block.format.size_bytes();
    block.is_on_storage = wanted(block);
    if (block.is_on_storage) {
      plan.storage_bytes += bytes;
      plan.lane_bytes = std::max(plan.lane_bytes, bytes);
    } else {
      plan.host_record_bytes += bytes;
    }
  }
}

[[noreturn]] void throw_too_small(std::uint64_t budget_bytes, std::uint64_t smallest_bytes,
                                  std::string_view what) {
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format("memory.host is {}, but {} need {} KiB; raise memory.host to that, or give "
                  "placement.optimizer \"auto\" or \"nvme\"",
                  format_bytes(budget_bytes), what, div_ceil(smallest_bytes, 1_KiB)));
}

void choose_lanes(DetachedPlan& plan, std::uint64_t budget_bytes) {
  if (plan.lane_bytes == 0) return;
  // While a lane waits for a record, its parameters and gradients wait, too.
  const std::uint64_t room =
      (budget_bytes - plan.host_bytes()) / (plan.lane_bytes + plan.staging_bytes);
  plan.lanes = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(room, kLanesMin, kLanesMax));
  if (room >= plan.lanes && plan.staging_bytes != 0) plan.staging_slots += plan.lanes;
}

}  // namespace

std::uint64_t RecordFormat::size_bytes() const {
  return align_up(state_offset() + state.record_bytes(padded_elements), kRecordAlignBytes);
}

std::uint64_t staged_gradient_offset(const DetachedBlock& block) {
  const bool is_wide = block.format.state.master == MasterLayout::kFp32;
  return align_up(block.element_count * (is_wide ? 4 : 2), kRecordAlignBytes);
}

std::uint64_t staged_digest_offset(const DetachedBlock& block) {
  return align_up(staged_gradient_offset(block) + block.element_count * kGradientBytesMax,
                  sizeof(std::uint64_t));
}

RecordFormat record_format(const Config::Optimizer& optimizer, DType parameter,
                           std::uint64_t element_count) {
  MasterLayout master = MasterLayout::kFp32;
  if (parameter == DType::kBf16) master = MasterLayout::kSplitBf16;
  if (parameter == DType::kFp16) master = MasterLayout::kFp16;
  return {.state = {.parameter = parameter,
                    .master = master,
                    .keeps_exp_avg = keeps_exp_avg(optimizer.kind),
                    .keeps_exp_avg_sq = keeps_exp_avg_sq(optimizer.kind),
                    .moments = optimizer.state},
          .padded_elements = align_up(element_count, kAlignElements)};
}

DetachedPlan plan_detached(const Config& config, std::span<const DetachedTensor> tensors,
                           std::uint64_t host_budget_bytes) {
  const TierChoice tier = config.placement.optimizer;
  if (tier == TierChoice::kDevice)
    throw Error(ErrorCode::kConfig,
                "placement.optimizer is \"device\", but this optimizer keeps nothing there; give "
                "\"host\", \"nvme\" or \"auto\"");
  const std::uint64_t budget = config.memory.host_bytes.value_or(host_budget_bytes);
  DetachedPlan plan;
  cut(plan, config, tensors, kHostBlockElements);
  place(plan, [](const DetachedBlock&) { return false; });
  const std::uint64_t all_bytes = plan.host_bytes();
  if (tier == TierChoice::kHost && all_bytes > budget)
    throw_too_small(budget, all_bytes, "moments and masters in host memory");
  if (tier == TierChoice::kHost || (tier == TierChoice::kAuto && all_bytes <= budget)) return plan;

  cut(plan, config, tensors, config.storage.block_elements.value_or(kBlockElements));
  place(plan, [](const DetachedBlock&) { return true; });
  const std::uint64_t lanes_bytes =
      kLanesMin * plan.lane_bytes + plan.staging_slots * plan.staging_bytes + plan.digest_bytes;
  if (lanes_bytes > budget)
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("memory.host is {}, but the {} buffers through which state comes from "
                            "storage need {} KiB; raise memory.host to that, or lower "
                            "storage.block_elements",
                            format_bytes(budget), kLanesMin, div_ceil(lanes_bytes, 1_KiB)));
  std::uint64_t room = budget - lanes_bytes;
  place(plan, [&](const DetachedBlock& block) {
    const bool is_small = tensors[block.tensor].element_count <= kSmallElements;
    const std::uint64_t bytes = block.format.size_bytes();
    if ((tier == TierChoice::kNvme && !is_small) || bytes > room) return true;
    room -= bytes;
    return false;
  });
  choose_lanes(plan, budget);
  return plan;
}

}  // namespace sluice
