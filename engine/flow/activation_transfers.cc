#include "engine/flow/activation_transfers.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

std::vector<Event> make_events(Device& device, std::uint32_t count) {
  std::vector<Event> events;
  for (std::uint32_t i = 0; i < count; ++i) events.emplace_back(device);
  return events;
}

}  // namespace

ActivationTransfers::ActivationTransfers(const FlowParts& parts)
    : model_(parts.model),
      placement_(parts.placement),
      tiers_(parts.tiers),
      store_(parts.store),
      device_(parts.device),
      scheduler_(parts.scheduler),
      is_on_storage_(parts.placement.nvme_activation_bytes != 0),
      used_events_(make_events(parts.device, parts.placement.activation_window.count)),
      arrived_events_(make_events(parts.device, parts.placement.activation_window.count)),
      left_events_(make_events(parts.device, parts.placement.activation_window.count)),
      home_events_(make_events(parts.device, parts.placement.host_activation_bytes != 0
                                                 ? parts.placement.activation_homes.count()
                                                 : 0)),
      slots_(parts.placement.activation_staging.count),
      up_stream_(parts.device, "activations up"),
      down_stream_(parts.device, "activations down") {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot].transfer.read_priority = IoPriority::kHigh;
    slots_[slot].transfer.done = [this, slot] { transferred(slot); };
  }
}

void ActivationTransfers::begin(const ActivationPlan& plan, std::uint64_t step) {
  SLUICE_CHECK(idle(), "a plan begins when the one before it has ended");
  plan_ = &plan;
  step_ = step;
  issued_ = next_piece_ = ready_ = 0;
  released_.assign(plan.accesses.size(), false);
  store_states_.assign(plan.accesses.size(), StoreState::kNone);
  pieces_out_.assign(plan.accesses.size(), 0);
  is_stopped_ = false;
  pump();
}

void ActivationTransfers::release(std::uint32_t access) {
  released_[access] = true;
  if (access_at(access).action == ActivationAction::kSave && access_at(access).moves)
    stores_.push_back({.access = access});
  pump();
}

void ActivationTransfers::stop() {
  is_stopped_ = true;
  drop_pending();
}

// One event stands for all users of the place: each waits for the one before.
EventId ActivationTransfers::used_event(std::uint32_t access) const {
  return used_events_[access_at(access).place].id();
}

void ActivationTransfers::wait_until_usable(StreamId stream, std::uint32_t access) {
  const std::uint32_t place = access_at(access).place;
  if (access_at(access).action == ActivationAction::kSave) return wait_for_place(stream, place);
  // After its save, or the copy that brought it back.
  device_.wait(stream, used_events_[place].id());
  device_.wait(stream, arrived_events_[place].id());
}

void ActivationTransfers::pump() {
  if (is_over()) return drop_pending();
  process_arrivals();
  start_stores();
  while (issue_next()) process_arrivals();
}

// Forgets pending work. Slots with transfers or copies under way free themselves.
void ActivationTransfers::drop_pending() {
  stores_.clear();
  for (const Arrival& arrival : arrivals_) {
    if (arrival.slot != kNoSlot && slots_[arrival.slot].is_read) free_slot(arrival.slot);
  }
  arrivals_.clear();
}

// --- To their homes ---

void ActivationTransfers::start_stores() {
  while (!stores_.empty()) {
    Store& store = stores_.front();
    if (is_on_storage_) {
      while (store.next_piece < piece_count(store.access)) {
        if (!store_piece(store)) return;
      }
      device_.record(left_events_[access_at(store.access).place].id(), down_stream_.id());
    } else {
      store_to_host(store.access);
    }
    store_states_[store.access] = is_on_storage_ ? StoreState::kLeaving : StoreState::kHome;
    stores_.pop_front();
  }
}

void ActivationTransfers::store_to_host(std::uint32_t access) {
  const std::uint32_t home = home_of(access);
  const std::uint32_t place = access_at(access).place;
  device_.wait(down_stream_.id(), used_events_[place].id());
  device_.wait(down_stream_.id(), home_events_[home].id());
  device_.copy(tiers_.host_activations(home), place_of(access),
               placement_.activation_homes.value_bytes(home), down_stream_.id());
  device_.record(left_events_[place].id(), down_stream_.id());
  device_.record(home_events_[home].id(), down_stream_.id());
  moved_.out_bytes += align_up(placement_.activation_homes.value_bytes(home), kStorageAlignBytes);
  call_back(down_stream_, access, placement_.activation_homes.value_bytes(home), [] {});
}

// Returns false while no slot is free.
bool ActivationTransfers::store_piece(Store& store) {
  const std::uint32_t slot = take_slot(store.access, store.next_piece);
  if (slot == kNoSlot) return false;
  if (store.next_piece == 0) {
    device_.wait(down_stream_.id(), used_events_[access_at(store.access).place].id());
    pieces_out_[store.access] = piece_count(store.access);
  }
  const std::uint64_t size_bytes = piece_bytes(store.access, store.next_piece);
  device_.copy(tiers_.activation_staging(slot),
               place_of(store.access) + store.next_piece * placement_.activation_staging.slot_bytes,
               size_bytes, down_stream_.id());
  ++store.next_piece;
  call_back(down_stream_, store.access, size_bytes, [this, slot] { copied_out(slot); });
  return true;
}

void ActivationTransfers::copied_out(std::uint32_t slot) {
  if (is_over()) return free_slot(slot);
  const BlockId piece{tiers_.first_activation_piece(home_of(slots_[slot].access)) +
                      slots_[slot].piece};
  const std::uint64_t size_bytes = tiers_.activation_extent(index_of(piece)).length_bytes;
  scheduler_.pools().lend(MemoryPool::kNvmeActivations, size_bytes);
  on_storage_bytes_ += size_bytes;
  store_.store(slots_[slot].transfer, piece, Plane::kActivation, tiers_.activation_staging(slot),
               store_.version(piece, Plane::kActivation) + 1);
}

// --- And back ---

// Issues the next access, or one piece of it. Returns false if something else has to happen first.
bool ActivationTransfers::issue_next() {
  if (issued_ == plan_->accesses.size()) return false;
  const ActivationAccess& access = access_at(issued_);
  if (next_piece_ == 0 && !may_start(access)) return false;
  if (access.action == ActivationAction::kLoad && access.moves) {
    if (is_on_storage_) return fetch_piece();
    fetch_from_host();
  }
  arrivals_.push_back({.access = issued_++});
  return true;
}

// Whether the activation that it overwrites may go once the device gets there, and the one that it
// loads is at its home.
bool ActivationTransfers::may_start(const ActivationAccess& access) const {
  if (access.evicted) {
    const std::uint32_t source = access_at(*access.evicted).source;
    if (!released_[*access.evicted]) return false;
    if (access_at(source).moves && store_states_[source] == StoreState::kNone) return false;
  }
  return access.action == ActivationAction::kSave || !access.moves ||
         store_states_[access.source] == StoreState::kHome;
}

void ActivationTransfers::fetch_from_host() {
  const std::uint32_t home = home_of(issued_);
  const std::uint32_t place = access_at(issued_).place;
  wait_for_place(up_stream_.id(), place);
  device_.wait(up_stream_.id(), home_events_[home].id());
  device_.copy(place_of(issued_), tiers_.host_activations(home),
               placement_.activation_homes.value_bytes(home), up_stream_.id());
  device_.record(home_events_[home].id(), up_stream_.id());
  device_.record(arrived_events_[place].id(), up_stream_.id());
  moved_.in_bytes += align_up(placement_.activation_homes.value_bytes(home), kStorageAlignBytes);
  call_back(up_stream_, issued_, placement_.activation_homes.value_bytes(home), [] {});
}

bool ActivationTransfers::fetch_piece() {
  const std::uint32_t slot = take_slot(issued_, next_piece_);
  if (slot == kNoSlot) return false;
  const BlockId piece{tiers_.first_activation_piece(home_of(issued_)) + next_piece_};
  store_.fetch(slots_[slot].transfer, piece, Plane::kActivation, tiers_.activation_staging(slot),
               store_.version(piece, Plane::kActivation));
  const bool is_last = ++next_piece_ == piece_count(issued_);
  arrivals_.push_back({.access = issued_, .slot = slot, .is_last = is_last});
  if (is_last) {
    ++issued_;
    next_piece_ = 0;
  }
  return true;
}

// Queues the copies of the pieces that have been read at the front, in order.
void ActivationTransfers::process_arrivals() {
  while (!arrivals_.empty()) {
    const Arrival arrival = arrivals_.front();
    if (arrival.slot != kNoSlot) {
      if (!slots_[arrival.slot].is_read) return;
      copy_piece_up(arrival.slot);
      if (arrival.is_last)
        device_.record(arrived_events_[access_at(arrival.access).place].id(), up_stream_.id());
    }
    arrivals_.pop_front();
    if (arrival.is_last) ready_ = arrival.access + 1;
  }
}

void ActivationTransfers::copy_piece_up(std::uint32_t index) {
  Slot& slot = slots_[index];
  slot.is_read = false;
  if (slot.piece == 0) wait_for_place(up_stream_.id(), access_at(slot.access).place);
  device_.copy(place_of(slot.access) + slot.piece * placement_.activation_staging.slot_bytes,
               tiers_.activation_staging(index), piece_bytes(slot.access, slot.piece),
               up_stream_.id());
  call_back(up_stream_, slot.access, piece_bytes(slot.access, slot.piece),
            [this, index] { free_slot(index); });
}

// A slot's read or write has ended.
void ActivationTransfers::transferred(std::uint32_t index) {
  Slot& slot = slots_[index];
  if (is_over()) {
    free_slot(index);
  } else if (slot.transfer.request.kind == IoKind::kRead) {
    slot.is_read = true;
    moved_.in_bytes += slot.transfer.request.length_bytes;
    if (access_at(slot.access).empties_home) drop_from_storage(slot.transfer.request.length_bytes);
  } else {
    moved_.out_bytes += slot.transfer.request.length_bytes;
    if (--pieces_out_[slot.access] == 0) store_states_[slot.access] = StoreState::kHome;
    free_slot(index);
  }
  pump();
}

// --- Helpers ---

void ActivationTransfers::drop_from_storage(std::uint64_t size_bytes) {
  scheduler_.pools().take_back(MemoryPool::kNvmeActivations, size_bytes);
  on_storage_bytes_ -= size_bytes;
}

// Waits for the former users of the place, and for the copy that took their data out.
void ActivationTransfers::wait_for_place(StreamId stream, std::uint32_t place) {
  device_.wait(stream, used_events_[place].id());
  device_.wait(stream, left_events_[place].id());
}

std::uint32_t ActivationTransfers::take_slot(std::uint32_t access, std::uint32_t piece) {
  const auto found = std::ranges::find(slots_, true, &Slot::is_free);
  if (found == slots_.end()) return kNoSlot;
  found->access = access;
  found->piece = piece;
  found->is_free = false;
  scheduler_.pools().lend(MemoryPool::kActivationStaging, placement_.activation_staging.slot_bytes);
  found->is_read = false;
  found->transfer.activation_unit = unit_of(access);
  found->transfer.step = step_;
  ++in_flight_;
  return static_cast<std::uint32_t>(found - slots_.begin());
}

void ActivationTransfers::free_slot(std::uint32_t slot) {
  slots_[slot].is_free = true;
  scheduler_.pools().take_back(MemoryPool::kActivationStaging,
                               placement_.activation_staging.slot_bytes);
  --in_flight_;
}

std::uint32_t ActivationTransfers::home_of(std::uint32_t access) const {
  return placement_.activation_homes.home_of(access_at(access).ref);
}

std::uint32_t ActivationTransfers::piece_count(std::uint32_t access) const {
  const std::uint32_t home = home_of(access);
  return tiers_.first_activation_piece(home + 1) - tiers_.first_activation_piece(home);
}

std::uint64_t ActivationTransfers::piece_bytes(std::uint32_t access, std::uint32_t piece) const {
  const std::uint64_t slot_bytes = placement_.activation_staging.slot_bytes;
  const std::uint64_t value_bytes = placement_.activation_homes.value_bytes(home_of(access));
  return std::min(slot_bytes, value_bytes - piece * slot_bytes);
}

std::byte* ActivationTransfers::place_of(std::uint32_t access) const {
  return tiers_.activation_place(access_at(access).place);
}

void ActivationTransfers::call_back(const Stream& stream, std::uint32_t access,
                                    std::uint64_t size_bytes, std::function<void()> finished) {
  ++in_flight_;
  const bool is_down = &stream == &down_stream_;
  const TraceRecord record{.begin_ns = trace_now_ns(),
                           .size_bytes = size_bytes,
                           .step = step_,
                           .unit = unit_of(access),
                           .kind = is_down ? TraceKind::kCopyToHost : TraceKind::kCopyToDevice,
                           .detail = kTraceActivations};
  device_.notify(stream.id(), [this, record, finished = std::move(finished)] {
    scheduler_.post([this, record, finished] {
      --in_flight_;
      trace_copy(record);
      finished();
      pump();
    });
  });
}

void ActivationTransfers::trace_copy(TraceRecord record) {
  std::uint64_t& copied_ns = copied_ns_[record.kind == TraceKind::kCopyToHost ? 1 : 0];
  record.started_ns = std::max(record.begin_ns, copied_ns);
  record.end_ns = record.moved_ns = copied_ns = std::max(trace_now_ns(), record.started_ns);
  trace_span(record);
}

// The unit that computes the value: it crosses from that unit to the next.
std::uint32_t ActivationTransfers::unit_of(std::uint32_t access) const {
  return index_of(model_.forward_order[access_at(access).ref.boundary]);
}

}  // namespace sluice
