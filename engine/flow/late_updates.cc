#include "engine/flow/late_updates.h"

#include <sys/mman.h>

#include <algorithm>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/error.h>

namespace sluice {

LateUpdates::LateUpdates(const FlowParts& parts)
    : layout_(parts.layout),
      placement_(parts.placement),
      store_(parts.store),
      versions_(parts.versions),
      lazy_max_(parts.config.optimizer.lazy_max),
      wanted_(parts.layout.blocks().size(), 0) {
  if (!is_lazy()) return;
  for (const BlockPlace& block : layout_.blocks())
    zeros_bytes_ = std::max<std::size_t>(zeros_bytes_,
                                         block.element_count * layout_.format().gradient_bytes());
  void* const pages =
      ::mmap(nullptr, zeros_bytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED)
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("no {} bytes of address space for a gradient of zeros", zeros_bytes_));
  zeros_ = static_cast<std::byte*>(pages);
}

LateUpdates::~LateUpdates() {
  if (zeros_ != nullptr) ::munmap(zeros_, zeros_bytes_);
}

void LateUpdates::applied(std::uint64_t step, const UnitCoefficients& of_units) {
  if (!is_lazy()) return;
  last_step_ = step;
  applied_.push_back(std::make_shared<const UnitCoefficients>(of_units));
  std::uint64_t missed = 1;
  for (const BlockPlace& block : layout_.blocks()) {
    if (layout_.is_frozen(block.id)) continue;
    missed = std::max(missed, versions_.of(block.unit) - store_.version(block.id, Plane::kRecord));
  }
  while (applied_.size() > missed) applied_.pop_front();
}

bool LateUpdates::has_missed_most(UnitId unit) const {
  const BlockId first = layout_.blocks_of(unit).front().id;
  const std::uint64_t version = store_.version(first, Plane::kRecord);
  return wanted_[index_of(first)] <= version && versions_.of(unit) - version >= lazy_max_;
}

void LateUpdates::want(const BlockPlace& block) {
  const std::uint64_t version = versions_.of(block.unit);
  std::uint64_t& wanted = wanted_[index_of(block.id)];
  if (store_.version(block.id, Plane::kRecord) >= version || wanted >= version) return;
  wanted = version;
  queue_.push_back({.block = block.id, .step = last_step_, .version = version});
}

std::vector<std::shared_ptr<const UnitCoefficients>> LateUpdates::missed(
    const Entry& entry, std::uint64_t version) const {
  const std::uint64_t count = entry.version - version;
  const std::uint64_t behind = last_step_ - entry.step;  // updates applied since
  SLUICE_CHECK(count + behind <= applied_.size(), "the coefficients of missed updates are kept");
  const auto end = applied_.end() - static_cast<std::ptrdiff_t>(behind);
  return {end - static_cast<std::ptrdiff_t>(count), end};
}

}  // namespace sluice
