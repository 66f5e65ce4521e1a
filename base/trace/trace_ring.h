// A ring with one writer and one reader. The ring carries the records of one thread to the drainer.
//
// Thread rule: only the ring's own thread calls append(). Only one other thread at a time calls
// drain(). Invariants: append() never waits. If the ring is full, append() drops the record and
// counts the loss. While few records are waiting, the ring reuses the same few places and never
// touches the other places.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/trace/trace_recorder.h"

namespace sluice {

class TraceRing {
 public:
  // `capacity` is rounded up to a power of two. A place in the ring takes no memory before its
  // first use.
  TraceRing(std::uint32_t capacity, std::uint32_t thread, std::string name)
      : thread_(thread),
        name_(std::move(name)),
        capacity_(std::bit_ceil(std::max(capacity, 2u))),
        records_(std::make_unique_for_overwrite<Storage[]>(capacity_)) {}

  void append(const TraceRecord& record) {
    const std::uint64_t head = head_.load(std::memory_order_relaxed);  // written by this thread
    // The load uses the memory order acquire, because the writer must not reuse a place before the
    // reader has finished with the place. The reader advances the tail only about forty times per
    // second, so the tail is usually in this thread's cache.
    const std::uint64_t tail = tail_.load(std::memory_order_acquire);
    if (head - tail == capacity_) {
      // The memory order is relaxed, because only this thread writes the count.
      lost_.store(lost_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return;
    }
    // While the ring is empty, the reader takes nothing. The reader sees the new base together with
    // the next record.
    if (head == tail) base_ = head;
    records_[(head - base_) & (capacity_ - 1)].record = record;
    head_.store(head + 1, std::memory_order_release);  // publishes the record
  }

  // Moves at most target.size() records to `target`, oldest first, and frees the places of these
  // records.
  std::size_t drain(std::span<TraceRecord> target) {
    const std::uint64_t tail = tail_.load(std::memory_order_relaxed);  // written by the reader
    const std::uint64_t waiting = head_.load(std::memory_order_acquire) - tail;
    const std::size_t taken = std::min<std::uint64_t>(waiting, target.size());
    if (taken == 0) return 0;  // the writer may be moving the base
    // All waiting records were written with this base. The base cannot change while records are
    // waiting.
    const std::uint64_t first = tail - base_;
    for (std::size_t i = 0; i < taken; ++i)
      target[i] = records_[(first + i) & (capacity_ - 1)].record;
    tail_.store(tail + taken, std::memory_order_release);  // the places may be reused
    return taken;
  }

  std::uint64_t waiting() const {
    return head_.load(std::memory_order_acquire) - tail_.load(std::memory_order_acquire);
  }
  std::uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }  // a count
  std::uint32_t thread() const { return thread_; }
  const std::string& name() const { return name_; }
  std::uint32_t capacity() const { return capacity_; }

  // The thread calls close() after its last record.
  void close() { is_closed_.store(true, std::memory_order_release); }
  bool is_closed() const { return is_closed_.load(std::memory_order_acquire); }

 private:
  // The places are not initialized, so that only used places take memory.
  union Storage {
    Storage() {}
    TraceRecord record;
  };

  // Constant after construction.
  std::uint32_t thread_;
  std::string name_;
  std::uint32_t capacity_;
  std::unique_ptr<Storage[]> records_;

  // The writer's data and the reader's data are on separate cache lines.
  alignas(64) std::atomic<std::uint64_t> head_{0};
  std::uint64_t base_ = 0;  // the number of the record in records_[0]; published by head_
  std::atomic<std::uint64_t> lost_{0};
  std::atomic<bool> is_closed_{false};
  alignas(64) std::atomic<std::uint64_t> tail_{0};
};

}  // namespace sluice
