// The drainer of a trace is a thread that empties the rings into the trace file, block by block.
//
// Thread rule: any thread may call add_ring() and add_section(). Only one thread calls finish().
// Invariants: after append(), a record reaches the file within kDrainPeriod plus the time that the
// disk needs. If the disk or the memory fails, the file ends early, but the run continues. The
// first failure is kept, and finish() reports this failure.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/process_fd.h"
#include "base/trace/trace_format.h"
#include "base/trace/trace_ring.h"

namespace sluice {

class TraceWriter {
 public:
  // The drainer empties all rings in rounds. This constant is the time from one round to the next.
  // A round takes about ten microseconds. If the process is killed, the records of one round are
  // lost.
  static constexpr std::chrono::milliseconds kDrainPeriod{25};

  // Fails with kInput if the file cannot be created, and with kUnsupported if the process has no
  // descriptor left.
  explicit TraceWriter(const TraceOptions& options);
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  void add_ring(std::shared_ptr<TraceRing> ring);
  void add_section(std::string_view name, std::string_view text);
  // Takes the remaining records and closes the file. `lost_without_ring` is the number of records
  // that were lost because their thread has no ring.
  TraceResult finish(std::uint64_t lost_without_ring = 0);

 private:
  void run();
  bool drain_all();
  void count_lost(std::uint64_t lost_without_ring);
  void drain(TraceRing& ring);
  void add_block(TraceBlockHeader header, std::string_view name,
                 std::span<const std::byte> payload);
  void flush();
  void write_all(std::span<const std::byte> bytes);
  void fail(int error);

  std::string path_;
  ProcessFd file_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<TraceRing>> added_;
  bool is_stopping_ = false;

  // Guarded by file_mutex_, so that only one block is written at a time.
  std::mutex file_mutex_;
  TraceResult result_;
  std::vector<std::byte> buffer_;       // whole blocks that are not in the file yet
  std::uint64_t records_buffered_ = 0;  // records in buffer_

  // Only the drainer uses these members.
  std::vector<std::shared_ptr<TraceRing>> rings_;
  std::uint64_t lost_by_ended_ = 0;
  std::vector<TraceRecord> records_;

  std::thread thread_;  // last, so that the thread starts after all other members are ready
};

}  // namespace sluice
