// One sequence of collectives. Each operation gets a trace record with its bytes and its time on
// the stream. The time includes waits for other ranks.
//
// Thread rule: the same as for Collectives. The scheduler's thread calls submit().
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <sluice/collectives.h>
#include <sluice/device.h>
#include <sluice/ids.h>
#include "base/trace/trace_ranges.h"
#include "engine/run/scheduler.h"
#include "engine/run/step_timeline.h"

namespace sluice {

// The trace's description of an operation.
struct CollectiveSpan {
  UnitId unit{};
  std::uint64_t size_bytes = 0;
  std::uint64_t step = 0;
  std::uint8_t detail = kTraceGather;
  BeginTime* begun_ns = nullptr;  // outlives the operation
};

class RankSequence {
 public:
  // `device` must outlive the sequence.
  RankSequence(std::unique_ptr<Collectives> collectives, Device& device)
      : collectives_(std::move(collectives)), device_(device) {}

  // Calls `issue`, and later `then`. The function `issue` enqueues operations of this sequence,
  // together with the work that belongs to these operations. `then` runs on the scheduler's thread.
  // If operations may block their caller, another thread calls `issue`, perhaps after submit() has
  // returned. If operations do not block their caller, submit() first calls `issue` and `then`, and
  // returns afterwards.
  template <class Issue, class Then>
  void submit(Scheduler& scheduler, const Issue& issue, const Then& then) {
    if (!collectives_->may_block()) {
      issue();
      then();
      return;
    }
    collectives_->hand_over([&scheduler, issue, then] {
      issue();
      scheduler.post(then);
    });
  }
  // The function `issue` enqueues operations of collectives() on `stream`. All of these operations
  // form one span.
  template <class Issue>
  void run(const CollectiveSpan& span, StreamId stream, const Issue& issue) {
    device_.notify(stream, [this, span] { begin(span); });
    issue();
    device_.notify(stream, [this] { end(); });
  }
  void all_gather(const AllGather& gather, const CollectiveSpan& span, StreamId stream) {
    run(span, stream, [&] { collectives_->all_gather(gather, stream); });
  }

  Collectives& collectives() const { return *collectives_; }

 private:
  void begin(const CollectiveSpan& span);
  void end();

  // Constant after construction.
  std::unique_ptr<Collectives> collectives_;
  Device& device_;

  // The device's threads use these members, in the order of the work on the stream.
  TraceRecord record_;
  TraceRangeId range_{};
};

}  // namespace sluice
