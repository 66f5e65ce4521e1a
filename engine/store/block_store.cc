#include "engine/store/block_store.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "engine/store/transfer_error.h"
#include "io/checksum.h"

namespace sluice {
namespace {

std::uint8_t trace_detail_of(Plane plane) {
  switch (plane) {
    case Plane::kParameter: return kTraceParameters;
    case Plane::kRecord: return kTraceOptimizerState;
    case Plane::kGradient: return kTraceGradients;
    case Plane::kActivation: break;
  }
  return kTraceActivations;
}

}  // namespace

// A transfer that the application's thread waits for. On the heap: if the drive never answers, the
// waiter leaves, and the completion, should it ever come, frees it.
struct BlockStore::Blocking {
  void start();
  // Waits, but not forever.
  static void await(std::unique_ptr<Blocking>& blocking);

  Transfer transfer;
  std::mutex mutex;
  std::condition_variable arrived;
  bool is_done = false;
  bool is_abandoned = false;
};

BlockStore::BlockStore(const Config::Storage& storage, const Layout& layout, const Tiers& tiers,
                       IoQueue& queue, Scheduler& scheduler)
    : layout_(layout),
      tiers_(tiers),
      queue_(queue),
      scheduler_(scheduler),
      planes_(layout, tiers),
      entries_(planes_.count()),
      copies_(copies_of(tiers)),
      integrity_(storage.verify, entries_.size() * tiers.storage_copies()),
      watch_(storage.timeout_s,
             {.describe = [this](const Transfer& transfer) { return describe(transfer); },
              .on_stuck =
                  [this](const Error& error) {
                    scheduler_.fail(error);
                    scheduler_.post([] {});  // waiters check again, even if an earlier failure
                                             // was latched
                  }}) {}

void BlockStore::fetch(Transfer& transfer, BlockId block, Plane plane, std::byte* target,
                       std::uint64_t version) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(!home.storing && home.version == version,
               "a fetch must ask for the version that the home holds");
  ++home.fetches;
  transfer.version = version;
  transfer.target = StoreTarget::kHome;
  start(transfer, block, plane, IoKind::kRead, target);
}

void BlockStore::store(Transfer& transfer, BlockId block, Plane plane, std::byte* source,
                       std::uint64_t version, StoreTarget target) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(!home.storing && home.version < version &&
                   (target == StoreTarget::kShadow || home.fetches == 0),
               "a store brings a later version of a block that is not being read");
  home.storing = true;
  if (target == StoreTarget::kShadow && !std::exchange(home.has_shadow, true))
    scheduler_.pools().lend(MemoryPool::kShadows, stored_bytes(block, plane));
  transfer.version = version;
  transfer.target = target;
  start(transfer, block, plane, IoKind::kWrite, source);
}

void BlockStore::start(Transfer& transfer, BlockId block, Plane plane, IoKind kind,
                       std::byte* data) {
  prepare(transfer, block, plane, kind, data);
  scheduler_.work().begin(Work::kStorage);
  transfer.request.context = &transfer;
  transfer.request.on_complete = [](IoRequest& request) {
    auto* ended = static_cast<Transfer*>(request.context);
    BlockStore* store = ended->store;
    store->take_sum(*ended);
    store->watch_.remove(*ended);
    store->scheduler_.post([ended] { ended->store->complete(*ended); });
  };
  submit(transfer);
}

void BlockStore::prepare(Transfer& transfer, BlockId block, Plane plane, IoKind kind,
                         std::byte* data) {
  transfer.store = this;
  transfer.block = block;
  transfer.plane = plane;
  const std::uint32_t index = planes_.index(block, plane);
  transfer.copy = kind == IoKind::kRead ? home_copy(index) : copy_to_write(index, transfer.target);
  if (transfer.target == StoreTarget::kShadow) entries_[index].shadow = transfer.copy;
  const Extent& extent = extent_of(transfer);
  transfer.begin_ns = trace_now_ns();
  transfer.is_reread = false;
  transfer.request = {.kind = kind,
                      .priority = kind == IoKind::kRead ? transfer.read_priority : IoPriority::kLow,
                      .drive = tiers_.drive(extent.file),
                      .descriptor = tiers_.file(extent.file).descriptor(),
                      .offset_bytes = extent.offset_bytes,
                      .data = data,
                      .length_bytes = extent.length_bytes};
}

void BlockStore::submit(Transfer& transfer) {
  watch_.add(transfer, transfer.request);
  transfer.range = begin_trace_range(record_of(transfer));
  IoRequest* const request = &transfer.request;
  queue_.submit({&request, 1});
}

// Runs on the thread that completes the transfer: it has the time while the kernel moves other
// requests, and the bytes still belong to the transfer.
void BlockStore::take_sum(Transfer& transfer) {
  const IoRequest& request = transfer.request;
  transfer.sum.reset();
  const bool is_committed =
      copies_.has_value() && request.kind == IoKind::kWrite && is_state(transfer.plane);
  if (request.error != 0) return;
  if (!is_committed &&
      !integrity_.wants(planes_.index(transfer.block, transfer.plane), transfer.version))
    return;
  transfer.sum = checksum({request.data, request.length_bytes});
  checksum_bytes_ += request.length_bytes;
}

void BlockStore::complete(Transfer& transfer) {
  Entry& home = entry(transfer.block, transfer.plane);
  const bool is_read = transfer.request.kind == IoKind::kRead;
  if (const std::optional<Error> fault = fault_of(transfer)) {
    if (repeat_read(transfer, *fault)) {
      trace(transfer);
      return submit(transfer);
    }
    has_lost_state_ = has_lost_state_ || (is_read && is_state(transfer.plane));
    scheduler_.fail(*fault);
  } else if (!is_read) {
    if (transfer.target == StoreTarget::kHome) {
      home.version = transfer.version;
      make_home(planes_.index(transfer.block, transfer.plane), transfer.copy);
    }
    accept_write(transfer);
  }
  if (is_read) {
    --home.fetches;
  } else {
    home.storing = false;
  }
  scheduler_.work().end(Work::kStorage);
  trace(transfer);
  transfer.done();
}

TraceRecord BlockStore::record_of(const Transfer& transfer) const {
  const IoRequest& request = transfer.request;
  const bool is_read = request.kind == IoKind::kRead;
  const bool is_block = transfer.plane != Plane::kActivation;
  return {
      .begin_ns = transfer.begin_ns,
      .size_bytes = request.length_bytes,
      .step = transfer.step.value_or(is_read ? transfer.version + 1 : transfer.version),
      .unit = is_block ? index_of(layout_.block(transfer.block).unit) : transfer.activation_unit,
      .block = is_block ? index_of(transfer.block) : kTraceNone,
      .kind = is_read ? TraceKind::kRead : TraceKind::kWrite,
      .lane = static_cast<std::uint8_t>(request.drive),
      .detail = trace_detail_of(transfer.plane)};
}

// Traces what the queue counts: transfers that moved their bytes.
void BlockStore::trace(Transfer& transfer) const {
  end_trace_range(transfer.range);
  const IoRequest& request = transfer.request;
  if (request.error != 0) return;
  TraceRecord record = record_of(transfer);
  record.started_ns = std::max(request.started_ns, transfer.begin_ns);
  record.moved_ns = std::max(request.moved_ns, record.started_ns);
  record.end_ns = std::max(trace_now_ns(), record.started_ns);
  trace_span(record);
}

void BlockStore::accept_write(const Transfer& transfer) {
  integrity_.stored(sum_index(transfer), transfer.version, transfer.sum);
}

// Returns the fault of a transfer that has ended, if there is one.
std::optional<Error> BlockStore::fault_of(const Transfer& transfer) const {
  const IoRequest& request = transfer.request;
  if (request.error != 0) return transfer_error(transfer, describe(transfer));
  if (request.kind == IoKind::kWrite || !transfer.sum) return std::nullopt;
  const std::optional<Damage> damage = integrity_.find_damage(
      sum_index(transfer), {request.data, request.length_bytes}, *transfer.sum);
  if (!damage) return std::nullopt;
  return describe_damage(transfer, *damage);
}

bool BlockStore::repeat_read(Transfer& transfer, const Error& fault) {
  if (!repeats_read(transfer)) return false;
  watch_.note(fmt::format("storage: a block is read again, because {}", fault.what()));
  return true;
}

void BlockStore::advance(BlockId block, Plane plane, std::uint64_t version) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(home.version + 1 == version, "an update makes the next version");
  home.version = version;
}

void BlockStore::adopt(BlockId block, Plane plane) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(!home.storing && home.fetches == 0,
               "a shadow becomes home when nothing is in flight");
  make_home(planes_.index(block, plane), home.shadow);
  ++home.version;
  drop_shadow(block, plane);  // the former home
}

void BlockStore::drop_shadow(BlockId block, Plane plane) {
  Entry& home = entry(block, plane);
  if (std::exchange(home.has_shadow, false))
    scheduler_.pools().take_back(MemoryPool::kShadows, stored_bytes(block, plane));
}

std::uint64_t BlockStore::stored_bytes(BlockId block, Plane plane) const {
  return plane == Plane::kRecord ? layout_.record_slot_bytes(block)
                                 : layout_.parameter_slot_bytes(block);
}

void BlockStore::begin_at(BlockId block, std::uint64_t version) {
  for (const Plane plane : {Plane::kParameter, Plane::kRecord}) {
    Entry& home = entry(block, plane);
    SLUICE_CHECK(!home.storing && home.fetches == 0, "a state is given while nothing moves");
    home.version = version;
  }
}

void BlockStore::read_now(BlockId block, Plane plane, std::byte* target) {
  const bool is_record = plane == Plane::kRecord;
  transfer_now(block, IoKind::kRead, is_record ? nullptr : target, is_record ? target : nullptr);
}

void BlockStore::write_now(BlockId block, Plane plane, std::byte* source) {
  const bool is_record = plane == Plane::kRecord;
  transfer_now(block, IoKind::kWrite, is_record ? nullptr : source, is_record ? source : nullptr);
}

void BlockStore::read_now(BlockId block, std::byte* parameters, std::byte* record) {
  transfer_now(block, IoKind::kRead, parameters, record);
}

void BlockStore::write_now(BlockId block, std::byte* parameters, std::byte* record) {
  transfer_now(block, IoKind::kWrite, parameters, record);
}

void BlockStore::transfer_now(BlockId block, IoKind kind, std::byte* parameters,
                              std::byte* record) {
  std::array<std::unique_ptr<Blocking>, 2> under_way;
  const auto prepare_plane = [&](std::size_t i, Plane plane, std::byte* data) {
    if (data == nullptr) return;
    under_way[i] = std::make_unique<Blocking>();
    prepare(under_way[i]->transfer, block, plane, kind, data);
    under_way[i]->transfer.version = entry(block, plane).version;
  };
  prepare_plane(0, Plane::kParameter, parameters);
  prepare_plane(1, Plane::kRecord, record);
  for (const auto& blocking : under_way)
    if (blocking) blocking->start();
  std::exception_ptr failure;
  for (auto& blocking : under_way) {
    if (!blocking) continue;
    try {
      end_blocking(std::move(blocking));
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void BlockStore::Blocking::start() {
  is_done = false;
  transfer.request.context = this;
  transfer.request.on_complete = [](IoRequest& request) {
    auto* ended = static_cast<Blocking*>(request.context);
    ended->transfer.store->watch_.remove(ended->transfer);
    std::unique_lock lock(ended->mutex);
    ended->is_done = true;
    if (ended->is_abandoned) {
      lock.unlock();
      delete ended;
      return;
    }
    ended->arrived.notify_one();  // under the lock: the waiter frees it as soon as it sees is_done
  };
  transfer.store->submit(transfer);
}

void BlockStore::Blocking::await(std::unique_ptr<Blocking>& blocking) {
  const BlockStore& store = *blocking->transfer.store;
  std::unique_lock lock(blocking->mutex);
  while (!blocking->arrived.wait_for(lock, std::chrono::milliseconds(50),
                                     [&] { return blocking->is_done; })) {
    if (!store.watch_.is_stuck() || !store.scheduler_.failed()) continue;
    blocking->is_abandoned = true;
    lock.unlock();
    (void)blocking.release();
    store.scheduler_.throw_if_failed();
  }
}

void BlockStore::end_blocking(std::unique_ptr<Blocking> blocking) {
  Transfer& transfer = blocking->transfer;
  while (true) {
    Blocking::await(blocking);
    take_sum(transfer);
    const std::optional<Error> fault = fault_of(transfer);
    if (!fault) break;
    trace(transfer);
    if (!repeat_read(transfer, *fault)) throw *fault;
    blocking->start();
  }
  trace(transfer);
  if (transfer.request.kind == IoKind::kRead) return;
  accept_write(transfer);
  make_home(planes_.index(transfer.block, transfer.plane), transfer.copy);
}

std::string BlockStore::describe(const Transfer& transfer) const {
  if (!transfer.subject.empty()) return transfer.subject;
  const Extent& extent = extent_of(transfer);
  return fmt::format("{} of {} in {} [{}, +{})",
                     transfer.request.kind == IoKind::kRead ? "read" : "write",
                     planes_.describe(planes_.index(transfer.block, transfer.plane)),
                     tiers_.file(extent.file).name(), extent.offset_bytes, extent.length_bytes);
}

Error BlockStore::describe_damage(const Transfer& transfer, const Damage& damage) const {
  std::string what;
  switch (damage.kind) {
    case DamageKind::kFlipped: what = "damaged: its bytes are no block's (flipped bits)"; break;
    case DamageKind::kNeverWritten: what = "stale: it reads as zeros (a lost write)"; break;
    case DamageKind::kStale:
      what = fmt::format("stale: its bytes are those of update {} (a lost write)", damage.version);
      break;
    case DamageKind::kMisdirected:
      what = fmt::format(
          "misdirected: its bytes are those of {} at update {} (a write or a read at the wrong "
          "place)",
          planes_.describe(damage.owner % static_cast<std::uint32_t>(entries_.size())),
          damage.version);
      break;
  }
  return {ErrorCode::kDamaged,
          fmt::format("{}: the block is {}; expected update {} with checksum {:016x}, found "
                      "{:016x}{}; check the drive (smartctl, dmesg)",
                      describe(transfer), what, transfer.version, damage.expected, damage.found,
                      transfer.is_reread ? ", twice" : "")};
}

}  // namespace sluice
