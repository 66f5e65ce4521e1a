#include "engine/block_store.h"

#include <condition_variable>
#include <mutex>

#include <fmt/format.h>

#include "base/trace.h"

namespace sluice {
namespace {

// What a blocking transfer waits on.
struct Arrival {
  std::mutex mutex;
  std::condition_variable arrived;
  bool done = false;
};

void signal_arrival(IoRequest& request) {
  auto& arrival = *static_cast<Arrival*>(request.context);
  const std::scoped_lock lock(arrival.mutex);
  arrival.done = true;
  arrival.arrived
      .notify_one();  // under the lock: the waiter frees `arrival` as soon as it sees done
}

}  // namespace

std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, std::string& explanation) {
  const IoQueueOptions options{.depth = storage.queue_depth};
  if (storage.backend == IoBackend::kSync) return make_sync_queue(options);
  if (storage.backend == IoBackend::kUring) return make_uring_queue(options);
  try {
    return make_uring_queue(options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    explanation = fmt::format("storage: one transfer at a time, since {}", error.what());
    return make_sync_queue(options);
  }
}

BlockStore::BlockStore(const Layout& layout, const Tiers& tiers, IoQueue& queue,
                       Scheduler& scheduler)
    : layout_(layout),
      tiers_(tiers),
      queue_(queue),
      scheduler_(scheduler),
      entries_(2 * layout.blocks().size()) {}

void BlockStore::fetch(Transfer& transfer, BlockId block, Plane plane, std::byte* target,
                       std::uint64_t version) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(!home.storing && home.version == version,
               "a fetch must ask for the version that the home holds");
  ++home.fetches;
  transfer.version = version;
  start(transfer, block, plane, IoKind::kRead, target);
}

void BlockStore::store(Transfer& transfer, BlockId block, Plane plane, std::byte* source,
                       std::uint64_t version) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(!home.storing && home.fetches == 0 && home.version + 1 == version,
               "a store must bring the next version of a block that nobody reads");
  home.storing = true;
  transfer.version = version;
  start(transfer, block, plane, IoKind::kWrite, source);
}

void BlockStore::start(Transfer& transfer, BlockId block, Plane plane, IoKind kind,
                       std::byte* data) {
  transfer.store = this;
  transfer.block = block;
  transfer.plane = plane;
  transfer.begin_ns = steady_now_ns();
  transfer.request = request_for(block, plane, kind, data);
  transfer.request.context = &transfer;
  transfer.request.on_complete = [](IoRequest& request) {
    auto* ended = static_cast<Transfer*>(request.context);
    ended->store->scheduler_.post([ended] { ended->store->complete(*ended); });
  };
  IoRequest* const request = &transfer.request;
  queue_.submit({&request, 1});
}

void BlockStore::complete(Transfer& transfer) {
  Entry& home = entry(transfer.block, transfer.plane);
  const bool is_read = transfer.request.kind == IoKind::kRead;
  if (transfer.request.error != 0) {
    scheduler_.fail(
        Error(ErrorCode::kIo, describe(transfer.request, transfer.block, transfer.plane)));
  } else if (!is_read) {
    home.version = transfer.version;
  }
  if (is_read) {
    --home.fetches;
  } else {
    home.storing = false;
  }
  if (trace_enabled()) {
    trace_record({.begin_ns = transfer.begin_ns,
                  .end_ns = steady_now_ns(),
                  .size_bytes = transfer.request.length_bytes,
                  .step = transfer.version,
                  .unit = index_of(layout_.block(transfer.block).unit),
                  .block = index_of(transfer.block),
                  .kind = is_read ? TraceKind::kRead : TraceKind::kWrite});
  }
  transfer.done();
}

void BlockStore::advance(BlockId block, Plane plane, std::uint64_t version) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(home.version + 1 == version, "an update makes the next version");
  home.version = version;
}

void BlockStore::read_now(BlockId block, Plane plane, std::byte* target) {
  transfer_now(block, plane, IoKind::kRead, target);
}

void BlockStore::write_now(BlockId block, Plane plane, std::byte* source) {
  transfer_now(block, plane, IoKind::kWrite, source);
}

void BlockStore::transfer_now(BlockId block, Plane plane, IoKind kind, std::byte* data) {
  Arrival arrival;
  IoRequest request = request_for(block, plane, kind, data);
  request.context = &arrival;
  request.on_complete = signal_arrival;
  IoRequest* const submitted = &request;
  queue_.submit({&submitted, 1});
  std::unique_lock lock(arrival.mutex);
  arrival.arrived.wait(lock, [&] { return arrival.done; });
  if (request.error != 0) throw Error(ErrorCode::kIo, describe(request, block, plane));
}

IoRequest BlockStore::request_for(BlockId block, Plane plane, IoKind kind, std::byte* data) const {
  const Extent& extent =
      plane == Plane::kParameter ? tiers_.parameter_extent(block) : tiers_.record_extent(block);
  IoRequest request;
  request.kind = kind;
  request.descriptor = tiers_.file(extent.file).descriptor();
  request.offset_bytes = extent.offset_bytes;
  request.data = data;
  request.length_bytes = extent.length_bytes;
  return request;
}

std::string BlockStore::describe(const IoRequest& request, BlockId block, Plane plane) const {
  const Extent& extent =
      plane == Plane::kParameter ? tiers_.parameter_extent(block) : tiers_.record_extent(block);
  const UnitPlace& unit = layout_.unit(layout_.block(block).unit);
  return fmt::format(
      "{} of unit \"{}\" block {} ({}) in {} [{}, +{}) failed after {} bytes: {}; check the drive",
      request.kind == IoKind::kRead ? "read" : "write", unit.name,
      index_of(block) - unit.first_block,
      plane == Plane::kParameter ? "parameters" : "optimizer state",
      tiers_.file(extent.file).name(), extent.offset_bytes, extent.length_bytes,
      request.transferred_bytes, errno_text(request.error));
}

BlockStore::Entry& BlockStore::entry(BlockId block, Plane plane) {
  return entries_[2 * index_of(block) + (plane == Plane::kRecord ? 1 : 0)];
}

const BlockStore::Entry& BlockStore::entry(BlockId block, Plane plane) const {
  return entries_[2 * index_of(block) + (plane == Plane::kRecord ? 1 : 0)];
}

}  // namespace sluice
