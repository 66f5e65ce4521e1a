// The request queues of the storage paths. Each path has a queue with its own thread. So every
// drive stays busy, and no drive waits for a slower drive. The config or the kernel determines
// which kind of queue is used.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include <sluice/config.h>
#include "io/io_queue.h"

namespace sluice {

// A function that wraps an open queue in another queue. For example, tests use such a function to
// slow requests down, or to make requests fail.
using QueueDecorator = std::function<std::unique_ptr<IoQueue>(std::unique_ptr<IoQueue> queue)>;

// The transfers that a queue should expect. `memory` and `files` must outlive the queue.
struct TransferPool {
  std::uint32_t transfers_max = 0;   // at the same time, over all drives
  std::span<std::byte> memory = {};  // the memory that these transfers use
  // File descriptors, one per drive, in the order of IoRequest::drive. If the list is empty, one
  // queue serves all drives.
  std::span<const int> files = {};
};

// Returns a queue of the kind that `storage` names. If the kind is "auto" and the kernel lacks
// io_uring, the result is a queue that uses threads. For the transfers of `pool`, the queue's
// submit() does not block. If a feature cannot be used, `explanation` gets one line that names the
// feature and the reason.
// Fails with kUnsupported if the kernel does not support this kind of queue.
// Fails with kInvalidArgument if queue_depth is not valid.
std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, const TransferPool& pool,
                                       std::string& explanation);

}  // namespace sluice
