// What a step is asked for and what it reports. Plain data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/memory_marks.h>
#include <sluice/trace_reason.h>

namespace sluice {

// What works beside computation: storage, copies to the device, and the processor.
enum class Work : std::uint8_t { kStorage, kCopyUp, kCpu };
inline constexpr std::size_t kWorkCount = 3;

// How long each was at work, and how long at least one of them was.
struct WorkTimes {
  std::array<std::int64_t, kWorkCount> busy_ns{};  // by Work
  std::int64_t any_ns = 0;

  std::int64_t busy(Work work) const { return busy_ns[static_cast<std::size_t>(work)]; }
};

// Where the time of one step went, from begin_step() until finish() returns. The parts add up to
// the total.
struct StepTimes {
  std::int64_t total_ns = 0;
  std::int64_t compute_ns = 0;            // under leases, and between them on their stream
  std::int64_t exposed_io_ns = 0;         // waits for storage, copies and their buffers
  std::int64_t exposed_optimizer_ns = 0;  // waits for the update: its reads and writes, Adam, norms
  std::int64_t other_ns = 0;              // before the first lease; what nobody is to blame for
  std::array<std::int64_t, kTraceReasons> wait_ns{};  // by TraceReason
  // Of the waits, those of computation before a unit; and of these, for updates.
  std::int64_t stall_ns = 0;
  std::int64_t stall_for_update_ns = 0;
  WorkTimes work;  // what was at work beside computation, in this time

  std::int64_t exposed_ns() const { return exposed_io_ns + exposed_optimizer_ns; }
  // The time in which storage, copies or the optimizer worked and nothing waited for them. Waits
  // for other ranks do not count.
  std::int64_t hidden_ns() const;
  // The same as a share of work.any_ns; 1 when they did nothing.
  double hidden_share() const;
};

// Seconds of computation for each use of a unit.
struct UnitTime {
  double forward_s = 0;
  double backward_s = 0;
};

// Bytes that a rank's collectives have moved for a step: for every operation the length of the
// whole unit without padding. Of a gather or a reduction (N - 1) / N of it comes in, and as much
// goes out.
struct RankTraffic {
  std::uint64_t gathered_bytes = 0;
  std::uint64_t reduced_bytes = 0;
  // Hybrid: of the rank's shard, in fp32 out of the group and in the gradients' type back. With G
  // groups, (G - 1) / G of it goes out, and comes in.
  std::uint64_t crossed_bytes = 0;
};

// The bytes that one step moves between memory and storage, and of activations.
struct Traffic {
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  // Under overlap, reads may be as few as this: parameters that are still in host memory are not
  // read again for the update, or for the next forward. Serial: the same as nvme_read_bytes.
  std::uint64_t nvme_read_bytes_least = 0;
  // Of boundary activations, from the device to their homes and back; where those are on storage,
  // part of the above.
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  // Of gradients that wait on storage, written, and as much read; part of the above.
  std::uint64_t gradient_spill_bytes = 0;
};

struct StepOptions {
  double learning_rate = 0;
  std::uint32_t micro_batches = 1;
  // The order in which the application goes through units and micro-batches.
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  // The divisor of the sum of the micro-batches' gradients. Nothing = micro_batches, which
  // gives their mean; 1 leaves the sum, for an application that scales its losses itself.
  std::optional<double> gradient_divisor = {};
  // The learning rates of Config::Optimizer::groups, in their order, each instead of
  // `learning_rate` times the group's factor. Empty = by the factors.
  std::vector<double> group_learning_rates = {};
};

// What an application may know only when the gradients have come, such as the rate that a scheduler
// sets between backward and update. What is not given is as begin_step() was told.
struct FinishOptions {
  std::optional<double> learning_rate = {};
  std::optional<double> gradient_divisor = {};
  std::optional<std::vector<double>> group_learning_rates = {};
  // With a durable store: what the application needs to go on behind this step, such as its
  // position in the data; at most 1 MiB. Nothing = as it was said last.
  std::optional<std::string> application = {};
};

struct StepReport {
  double loss_scale = 1;   // what the loss had been multiplied with
  std::uint64_t step = 0;  // updates that the state has seen, or is about to, after this step
  // Of the gradient behind its divisor, the mean over ranks, before clipping.
  double gradient_norm = 0;
  double clip_factor = 1;  // what the gradient was multiplied with to respect clip_norm
  bool skipped = false;    // non-finite gradient under policy "skip": nothing was updated
  // When blocks were updated: not kAuto, which has decided by now.
  OverlapPolicy policy = OverlapPolicy::kSerial;
  bool redone = false;        // speculative: clipping bit, so the update was made again
  StepTimes times;            // where the step's time went
  std::int64_t stall_ns = 0;  // computation waited for units, gradient slots, activations
  std::int64_t stall_for_update_ns = 0;  // of that, for parameters that were still being updated
  // Times that computation left the schedule: each costs a wait for what is now needed.
  std::uint32_t schedule_changes = 0;
  std::int64_t optimizer_ns = 0;  // finish() waited from the norm on; serial: to the last write
  // Since the report before: under overlap, with the update that the step before left running.
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  RankTraffic rank_traffic;  // likewise
  PhaseMarks buffers;        // likewise: the most in use, with homes and gradients
  // Likewise of boundary activations, from the device to their homes and back; on storage, part of
  // the above.
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  std::vector<std::string> notes;  // for the user: slow transfers, reads that were repeated
};

// One line for people: "step 12: norm 1.25, 45.6 ms (compute 81 %, I/O 12 %, optimizer 4 %), ...".
std::string to_string(const StepReport& report);

}  // namespace sluice
