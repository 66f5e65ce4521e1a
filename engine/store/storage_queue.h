// The queues behind the storage paths: one per path, with its own thread, so that every drive is
// kept busy and none waits for a slower one. The config or the kernel decides which kind.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <sluice/config.h>
#include "io/io_queue.h"

namespace sluice {

// The transfers to expect. Memory and files must outlive the queue.
struct TransferPool {
  std::uint32_t transfers_max = 0;   // at once, over all drives
  std::span<std::byte> memory = {};  // that they use
  // Descriptors, one per drive in the order of IoRequest::drive. None: one queue for all.
  std::span<const int> files = {};
};

// The queue that `storage` asks for; its submit() does not block for the transfers of `pool`. With
// "auto" and no io_uring it uses threads. `explanation` says in one line what it cannot use, and
// why.
// Fails with: kUnsupported; kInvalidArgument (queue_depth).
std::unique_ptr<IoQueue> open_io_queue(const Config::Storage& storage, const TransferPool& pool,
                                       std::string& explanation);

}  // namespace sluice
