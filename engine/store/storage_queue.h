// The queues behind the storage paths. There is one queue per path, with its own thread, so that
// every drive is kept busy and no drive waits for a slower one. The config or the kernel decides
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

// The function wraps a queue that has been opened. Tests, for example, slow the queue down or make
// requests fail.
using QueueDecorator = std::function<std::unique_ptr<IoQueue>(std::unique_ptr<IoQueue> queue)>;

// The transfers that a queue should expect. Memory and files must outlive the queue.
struct TransferPool {
  std::uint32_t transfers_max = 0;   // at once, over all drives
  std::span<std::byte> memory = {};  // that they use
  // Descriptors, one per drive in the order of IoRequest::drive. If the list is empty, one queue
  // serves all drives.
  std::span<const int> files = {};
};

// Returns the queue that `storage` asks for. With "auto" and without io_uring, the result is a
// queue of threads. The queue's submit() does not block for the transfers of `pool`. `explanation`
// says in one line which feature cannot be used, and why.
// Fails with kUnsupported if the kernel lacks the queue, and with kInvalidArgument if queue_depth
// is not valid.
std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, const TransferPool& pool,
                                       std::string& explanation);

}  // namespace sluice
