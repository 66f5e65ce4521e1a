#include "engine/store/storage_queue.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

using MakeQueue = std::unique_ptr<IoQueue> (*)(const IoQueueOptions&);

std::unique_ptr<IoQueue> open_drives(MakeQueue make, const Config::Storage& storage,
                                     const TransferPool& pool) {
  IoQueueOptions options{.depth = storage.queue_depth,
                         .backlog = std::max(storage.queue_depth, pool.transfers_max),
                         .memory = pool.memory};
  if (pool.files.empty()) return make(options);
  std::vector<std::unique_ptr<IoQueue>> drives;
  for (std::size_t drive = 0; drive < pool.files.size(); ++drive) {
    options.files = pool.files.subspan(drive, 1);
    drives.push_back(make(options));
  }
  return drives.size() == 1 ? std::move(drives.front()) : make_drive_queues(std::move(drives));
}

}  // namespace

std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, const TransferPool& pool,
                                       std::string& explanation) {
  if (storage.backend == IoBackend::kSync) return open_drives(make_sync_queue, storage, pool);
  if (storage.backend == IoBackend::kThreads) return open_drives(make_thread_queue, storage, pool);
  try {
    auto queue = open_drives(make_uring_queue, storage, pool);
    explanation = queue->note();
    return queue;
  } catch (const Error& error) {
    if (storage.backend == IoBackend::kUring || error.code() != ErrorCode::kUnsupported) throw;
    explanation =
        fmt::format("storage: uses threads instead of io_uring, because {}", error.what());
    return open_drives(make_thread_queue, storage, pool);
  }
}

}  // namespace sluice
