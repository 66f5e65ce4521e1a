#include "engine/flow/state_saver.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/trace/trace_recorder.h"

namespace sluice {
namespace {

std::optional<Error> failure_of(const std::function<void()>& task) {
  try {
    task();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
  return std::nullopt;
}

}  // namespace

StateSaver::StateSaver(const FlowParts& parts, Hooks hooks)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      store_(parts.store),
      device_(parts.device),
      scheduler_(parts.scheduler),
      versions_(parts.versions),
      hooks_(std::move(hooks)),
      room_bytes_(save_room(parts.layout).size_bytes()),
      places_(parts.placement.save_buffers.count),
      stream_(parts.device, "checkpoint") {
  for (std::uint32_t place = 0; place < places_.size(); ++place) {
    for (Transfer* const transfer : {&places_[place].parameters, &places_[place].record}) {
      transfer->read_priority = IoPriority::kLow;
      transfer->done = [this, place] { loaded(place); };
    }
  }
}

void StateSaver::prepare() {
  if (!threads_) threads_.emplace(static_cast<std::uint32_t>(places_.size()));
}

void StateSaver::begin(std::uint64_t step, std::vector<BlockId> blocks, Work work) {
  SLUICE_CHECK(!is_under_way_ && busy_ == 0, "one save is under way at a time");
  SLUICE_CHECK(threads_.has_value(), "a save has threads that write");
  is_under_way_ = true;
  is_over_ = is_finishing_ = false;
  step_ = step;
  unit_versions_.assign(versions_.all().begin(), versions_.all().end());
  blocks_ = std::move(blocks);
  next_ = 0;
  work_ = std::move(work);
  is_taken_.assign(layout_.blocks().size(), false);
  may_change_.assign(layout_.blocks().size(), true);
  for (const BlockId block : blocks_) may_change_[index_of(block)] = false;
  saved_count_ = 0;
  wanted_.reset();
  update_wait_ns_ = 0;
  failure_.reset();
  hooks_.on_change();
}

// The step after may have left the block as it was.
bool StateSaver::holds(BlockId block, std::uint64_t step) const {
  if (!is_under_way_ || step < step_ || may_change_[index_of(block)]) return false;
  return !has_stopped() || is_taken_[index_of(block)];
}

void StateSaver::want(BlockId block) {
  if (wanted_) return;  // one at a time
  wanted_ = block;
  wait_begin_ns_ = trace_now_ns();
  hooks_.on_change();
}

void StateSaver::end_wait() {
  if (!wanted_) return;
  update_wait_ns_ += static_cast<std::int64_t>(trace_now_ns() - wait_begin_ns_);
  wanted_.reset();
}

StateSaver::End StateSaver::end() {
  SLUICE_CHECK(is_over() && busy_ == 0, "a save ends once everything is written");
  is_under_way_ = false;
  work_ = {};
  return {.failure = failure_, .update_wait_ns = update_wait_ns_};
}

bool StateSaver::may_load(BlockId block) const {
  if (layout_.is_frozen(block)) return true;
  const std::uint64_t version = unit_versions_[index_of(layout_.block(block).unit)];
  // The device says that a unit's update has ended once it has the unit's last block.
  const BlockId last = layout_.blocks_of(layout_.block(block).unit).back().id;
  if (placement_.record_tier[index_of(block)] == Tier::kDevice &&
      store_.version(last, Plane::kRecord) != version)
    return false;
  return store_.version(block, Plane::kParameter) == version &&
         store_.version(block, Plane::kRecord) == version &&
         !store_.is_storing(block, Plane::kParameter) &&
         !store_.is_storing(block, Plane::kRecord) && hooks_.is_at_rest(block);
}

// The block that an update waits for, or else the first one in order.
std::optional<BlockId> StateSaver::next() {
  if (wanted_ && !is_taken_[index_of(*wanted_)] && may_load(*wanted_)) return wanted_;
  while (next_ < blocks_.size() && is_taken_[index_of(blocks_[next_])]) ++next_;
  if (next_ == blocks_.size() || !may_load(blocks_[next_])) return std::nullopt;
  return blocks_[next_];
}

void StateSaver::pump() {
  if (!is_under_way_ || is_over_) return;
  for (std::uint32_t place = 0; place < places_.size() && !has_stopped(); ++place) {
    if (places_[place].phase != Phase::kFree) continue;
    const std::optional<BlockId> block = next();
    if (!block) break;
    load(place, *block);
  }
  if (busy_ != 0) return;
  if (!has_stopped() && saved_count_ == blocks_.size() && !std::exchange(is_finishing_, true))
    return run(0, work_.finish);
  if (!has_stopped() && !is_finishing_) return;
  if (!failure_ && !is_finishing_)
    failure_ = Error(ErrorCode::kPoisoned, "the engine stopped before the checkpoint was written");
  end_wait();
  is_over_ = true;
  hooks_.on_change();
}

void StateSaver::load(std::uint32_t index, BlockId block) {
  Place& place = places_[index];
  is_taken_[index_of(block)] = true;
  ++busy_;
  place.phase = Phase::kLoading;
  place.is_in_place = false;
  place.view.block = block;
  place.pending = 1;  // this function
  std::byte* const buffer = tiers_.save_buffer(index).data();
  place.view.parameters = load_plane(index, Plane::kParameter, buffer);
  place.view.record =
      layout_.is_frozen(block)  // its masters are its parameters
          ? nullptr
          : load_plane(index, Plane::kRecord, buffer + placement_.parameter_slots.slot_bytes);
  loaded(index);
}

// Returns where the plane is, or will be.
std::byte* StateSaver::load_plane(std::uint32_t index, Plane plane, std::byte* buffer) {
  Place& place = places_[index];
  const BlockId block = place.view.block;
  const bool is_parameter = plane == Plane::kParameter;
  switch (is_parameter ? placement_.parameter_tier[index_of(block)]
                       : placement_.record_tier[index_of(block)]) {
    case Tier::kHost:
      place.is_in_place = true;
      return is_parameter ? tiers_.host_parameters(block) : tiers_.host_record(block);
    case Tier::kNvme:
      ++place.pending;
      store_.fetch(is_parameter ? place.parameters : place.record, block, plane, buffer,
                   store_.version(block, plane));
      return buffer;
    case Tier::kDevice: break;
  }
  ++place.pending;
  device_.copy(
      buffer,
      is_parameter ? tiers_.device_parameters(layout_.block(block)) : tiers_.device_record(block),
      is_parameter ? layout_.parameter_bytes(block) : layout_.record_bytes(block), stream_.id());
  device_.notify(stream_.id(),
                 [this, index] { scheduler_.post([this, index] { loaded(index); }); });
  return buffer;
}

void StateSaver::loaded(std::uint32_t index) {
  Place& place = places_[index];
  if (--place.pending != 0) return;
  if (scheduler_.failed()) {
    let_go(place.view.block);
    return ended(index, std::nullopt);
  }
  if (!place.is_in_place) let_go(place.view.block);
  write(index);
}

void StateSaver::let_go(BlockId block) {
  may_change_[index_of(block)] = true;
  if (wanted_ == block) end_wait();
  hooks_.on_change();
}

void StateSaver::write(std::uint32_t index) {
  Place& place = places_[index];
  place.phase = Phase::kWriting;
  const std::span<std::byte> room = tiers_.save_buffer(index).last(room_bytes_);
  --busy_;
  run(index, [this, &place, index, room] { work_.write(place.view, index, room); });
}

// The thread's last task has posted its end, so it is free at once.
void StateSaver::run(std::uint32_t place, std::function<void()> task) {
  ++busy_;
  places_[place].phase = Phase::kWriting;
  threads_->await(place);
  threads_->start(place, [this, place, task = std::move(task)] {
    const std::optional<Error> failure = failure_of(task);
    scheduler_.post([this, place, failure] {
      if (!is_finishing_) {
        saved_count_ += failure ? 0 : 1;
        let_go(places_[place].view.block);
      }
      ended(place, failure);
    });
  });
}

void StateSaver::ended(std::uint32_t place, const std::optional<Error>& failure) {
  if (failure && !failure_) failure_ = failure;
  places_[place].phase = Phase::kFree;
  --busy_;
  hooks_.on_change();
}

}  // namespace sluice
