// Moves the bytes of a detached optimizer. Jobs on blocks start in the order in which they were
// given. Several jobs run at the same time. The record of a block on storage is read into a lane,
// changed in the lane, and written back to storage. At the same time, records of other blocks are
// read and written. The record of a block in host memory is changed in place. If a tensor is on a
// device, the parameters and gradients of a block are copied to the host before the work. After the
// work, the parameters are copied back to the device. When there are no more jobs, free lanes read
// the blocks that are expected next. The flow expects blocks to follow each other in the same order
// as the last time.
//
// Thread rule: functions run on the scheduler's thread, unless their comments say otherwise.
// Invariants: a block is in at most one flight at a time. The checksum of a record changes together
// with the record's bytes. A lane that reads ahead may read a block that no job uses later. If no
// job has used the block in a lane, this block is not written back when another block gets the
// lane.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "engine/detached/detached_plan.h"
#include "engine/detached/detached_staging.h"
#include "engine/run/scheduler.h"
#include "engine/run/worker.h"
#include "engine/store/block_store.h"
#include "engine/store/integrity.h"
#include "engine/store/storage_queue.h"
#include "engine/store/transfer_watch.h"
#include "io/direct_file.h"
#include "io/io_queue.h"

namespace sluice {

// A task on one block's record.
struct DetachedJob {
  enum class Kind : std::uint8_t { kUpdate, kRead, kWrite };

  Kind kind = Kind::kUpdate;
  std::uint32_t block = 0;
  // The memory that the function `work` uses. This function runs on the worker's thread. If
  // `is_fresh` is true, the record has never been changed, and consists of zeros. The staging place
  // `place` holds the values of `remote`.
  struct Ground {
    std::byte* record = nullptr;
    bool is_fresh = false;
    DetachedStaging::Place place = 0;
  };
  std::function<void(const Ground&)> work;
  // The function runs on the scheduler's thread after the work is done. When the function runs, a
  // parameter on the device already has its new values. A changed record may still be on the way to
  // its home.
  std::function<void()> worked;
  std::optional<DeviceValues> remote = std::nullopt;  // the values of a block on the device
};

class DetachedFlow {
 public:
  struct Parts {
    const DetachedPlan& plan;
    const std::vector<DetachedTensor>& tensors;
    Scheduler& scheduler;
    Worker& worker;
    DetachedStaging* staging;  // null without tensors on a device
  };
  // All arguments must outlive the object.
  DetachedFlow(const Config::Storage& storage, const Parts& parts, const QueueDecorator& decorate);
  // The destructor drops jobs that have not begun, and waits for the other jobs. Any thread may
  // call the destructor.
  ~DetachedFlow();
  DetachedFlow(const DetachedFlow&) = delete;
  DetachedFlow& operator=(const DetachedFlow&) = delete;

  void add(DetachedJob job) { jobs_.push_back(std::move(job)); }
  // Starts everything that can start. Returns whether anything has started.
  bool settle();
  // Returns whether every job is done and every record has reached its home.
  bool is_idle() const { return jobs_.empty() && flights_with_job_ == 0 && !is_staging(); }

  // Returns true if the worker has a record, or if values are on the way to or from the device.
  bool is_working() const { return working_ != 0 || is_staging(); }

  // Any thread may call counters() at any time.
  IoCounters counters() const { return queue_ ? queue_->counters() : IoCounters{}; }
  // Lines of text for the user since the last call: repeated reads and slow transfers, too. Any
  // thread may call take_notes() at any time.
  std::vector<std::string> take_notes() { return watch_.take_notes(); }

 private:
  // A place in which a record is changed. For a record on storage, this place is a lane.
  struct Flight {
    DetachedFlow* flow = nullptr;
    std::byte* lane = nullptr;
    std::optional<std::uint32_t> block;  // its record is in this place or on the way here
    std::optional<DetachedJob> job;      // empty if the block is read ahead
    bool is_moving = false;              // a transfer, or work, is under way
    // The staging place for the job's values, if the job's tensor is on a device. The values may
    // still be on the way.
    std::optional<DetachedStaging::Place> place;
    bool is_coming = false;
    Transfer transfer;  // the request, and its data for the watch
  };
  struct Home {
    Extent extent;                // on storage
    std::byte* record = nullptr;  // in host memory
    std::uint64_t version = 0;    // number of changes so far
    Flight* flight = nullptr;
    bool is_leaving = false;            // new parameters are on their way to the device
    std::optional<std::uint32_t> next;  // the block that came next the last time
  };

  void place_homes(const Config::Storage& storage);
  void open_queue(const Config::Storage& storage, const QueueDecorator& decorate);
  bool start_next();
  bool read_ahead();
  Flight* free_flight(bool needs_lane);
  void forget(Flight& flight);
  void board(Flight& flight, std::uint32_t block);
  void move(Flight& flight, IoKind kind);
  void submit(Flight& flight);
  void complete(Flight& flight);
  void take_sum(Transfer& transfer) const;
  void trace(const Transfer& transfer) const;
  std::optional<Error> fault_of(const Transfer& transfer) const;
  bool is_at_rest() const;
  bool is_staging() const { return staging_ != nullptr && !staging_->is_idle(); }
  void bring(Flight& flight);
  void work_if_ready(Flight& flight);
  void work(Flight& flight);
  void worked(Flight& flight);
  void land(Flight& flight);
  std::string describe(const Transfer& transfer) const;
  static std::uint32_t block_of(const Transfer& transfer) { return index_of(transfer.block); }
  static std::uint32_t plane_of(const Transfer& transfer) { return 2 * block_of(transfer); }

  const DetachedPlan& plan_;
  const std::vector<DetachedTensor>& tensors_;
  Scheduler& scheduler_;
  Worker& worker_;
  DetachedStaging* const staging_;
  std::vector<DirectFile> files_;
  AlignedBuffer memory_;

  // Scheduler's thread only.
  std::deque<DetachedJob> jobs_;
  std::deque<Flight> flights_;  // first those with lanes, then the others
  std::vector<Home> homes_;     // by block
  std::uint32_t flights_with_job_ = 0;
  std::uint32_t working_ = 0;
  std::optional<std::uint32_t> last_updated_;
  bool is_closing_ = false;

  Integrity integrity_;
  std::unique_ptr<IoQueue> queue_;  // null without storage
  TransferWatch watch_;             // last, because its thread describes transfers
};

}  // namespace sluice
