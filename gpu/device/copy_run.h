// The copies on one stream. Adjacent copies become one call of the device. Each call takes a
// microsecond or more of the link, and a block of 2 MiB takes only 40 us.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/device.h>

namespace sluice {

class CopyRun {
 public:
  // `device` must outlive the run.
  CopyRun(Device& device, StreamId stream) : device_(device), stream_(stream) {}

  // Adds a copy. If nothing else enqueues the joined copy, flush() does. Every other call that
  // enqueues work on the stream first calls flush(). A copy joins the previous copies if its source
  // begins where their source ends, and its target begins where their target ends.
  // Requires: where two ends meet, both belong to one piece of registered memory.
  void add(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
    if (target != target_ + size_bytes_ || source != source_ + size_bytes_) {
      flush();
      target_ = target;
      source_ = source;
    }
    size_bytes_ += size_bytes;
  }

  void flush() {
    if (size_bytes_ != 0) device_.copy(target_, source_, size_bytes_, stream_);
    target_ = nullptr;
    source_ = nullptr;
    size_bytes_ = 0;
  }

 private:
  Device& device_;
  StreamId stream_;
  std::byte* target_ = nullptr;
  const std::byte* source_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace sluice
