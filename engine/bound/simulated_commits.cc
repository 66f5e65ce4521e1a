#include "engine/bound/simulated_commits.h"

#include <algorithm>
#include <utility>

#include "engine/plan/commit_turn.h"

namespace sluice {
namespace {

// The data files, then each twin of the record; the record itself is small.
constexpr std::uint32_t kFlushes = 3;

}  // namespace

SimulatedCommits::SimulatedCommits(const StepShape& shape, SimulatedMachine& machine,
                                   std::function<void(std::uint32_t block)> on_saved)
    : layout_(shape.layout),
      placement_(shape.placement),
      machine_(machine),
      on_saved_(std::move(on_saved)),
      commit_every_(std::max<std::uint64_t>(shape.commit_every, 1)),
      flush_s_(shape.rates.flush_s),
      is_saving_(shape.layout.blocks().size(), false) {
  const std::vector<bool> is_updated = updated_units(shape.layout, shape.placement, shape.schedule);
  for (const BlockPlace& block : layout_.blocks()) {
    if (!is_updated[index_of(block.unit)]) continue;
    const std::uint32_t index = index_of(block.id);
    ++trained_blocks_;
    if (bytes_in(index, Tier::kHost) + bytes_in(index, Tier::kDevice) != 0) ++memory_blocks_;
  }
}

// The block's state that is at home in `tier`.
std::uint64_t SimulatedCommits::bytes_in(std::uint32_t block, Tier tier) const {
  const BlockId id{block};
  return (placement_.parameter_tier[block] == tier ? layout_.parameter_slot_bytes(id) : 0) +
         (placement_.record_tier[block] == tier ? layout_.record_slot_bytes(id) : 0);
}

bool SimulatedCommits::may_store(std::uint64_t version) const {
  if (!are_made()) return true;
  const std::uint64_t due = last_due(version);
  return due <= begun_ && (placement_.durable_copies > 2 || due <= durable_);
}

void SimulatedCommits::updated(std::uint32_t block, std::uint64_t version) {
  if (!are_made() || version % commit_every_ != 0) return;
  ++stored_[version];
  if (bytes_in(block, Tier::kHost) + bytes_in(block, Tier::kDevice) == 0) return;
  is_saving_[block] = true;
  saves_.push_back({.block = block, .version = version});
}

void SimulatedCommits::step_began() {
  const double now_s = machine_.account().step_s;
  last_step_s_ = now_s - std::exchange(step_begin_s_, now_s);
}

bool SimulatedCommits::may_wait() const {
  return are_made() && layout_.shard().count == 1 && commit_may_wait(flush_s_, last_step_s_);
}

bool SimulatedCommits::pump(std::uint64_t held_version) {
  return are_made() && (start_save() || begin_commit(held_version));
}

bool SimulatedCommits::start_save() {
  if (saves_.empty() || !may_store(saves_.front().version)) return false;
  const std::uint32_t block = saves_.front().block;
  saves_.pop_front();
  const std::uint64_t device_bytes = bytes_in(block, Tier::kDevice);
  const SimulatedJob copy{SimulatedTask::kSaveCopy, block, ranked(3, save_count_++)};
  if (device_bytes == 0)
    end(copy);
  else
    machine_.copy_down(copy, device_bytes);
  return true;
}

// Once every block is on storage at the version.
bool SimulatedCommits::begin_commit(std::uint64_t held_version) {
  const std::uint64_t next = begun_ + commit_every_;
  const auto stored = stored_.find(next);
  if (flushes_left_ != 0 || next == held_version || stored == stored_.end() ||
      stored->second < trained_blocks_ || saved_ < memory_blocks_)
    return false;
  stored_.erase(stored);
  begun_ = next;
  saved_ = 0;
  flushes_left_ = kFlushes;
  flush();
  return true;
}

void SimulatedCommits::flush() {
  machine_.flush({SimulatedTask::kFlush, 0, ranked(1, UINT64_MAX >> 8)}, flush_s_);
}

void SimulatedCommits::end(const SimulatedJob& job) {
  const auto block = static_cast<std::uint32_t>(job.subject);
  if (job.task == SimulatedTask::kFlush) {
    if (--flushes_left_ != 0) return flush();
    durable_ = begun_;
    return;
  }
  if (job.task == SimulatedTask::kSaveCopy) {
    machine_.write({SimulatedTask::kSave, block, job.rank},
                   bytes_in(block, Tier::kHost) + bytes_in(block, Tier::kDevice));
    return;
  }
  is_saving_[block] = false;
  ++saved_;
  on_saved_(block);
}

}  // namespace sluice
