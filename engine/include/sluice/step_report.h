// The options and the report of a step. Plain data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/export.h>
#include <sluice/memory_marks.h>
#include <sluice/trace_reason.h>

namespace sluice {

// The workers that run at the same time as computation: storage, copies to the device, and the
// processor.
enum class Work : std::uint8_t { kStorage, kCopyUp, kCpu };
inline constexpr std::size_t kWorkCount = 3;

// The time for which each worker was busy, and the time for which at least one worker was busy.
struct WorkTimes {
  std::array<std::int64_t, kWorkCount> busy_ns{};  // by Work
  std::int64_t any_ns = 0;

  std::int64_t busy(Work work) const { return busy_ns[static_cast<std::size_t>(work)]; }
};

// The parts of a step's time, from begin_step() until finish() returns. The parts add up to the
// total.
struct SLUICE_EXPORT StepTimes {
  std::int64_t total_ns = 0;
  std::int64_t compute_ns = 0;            // under leases, and on the same stream between leases
  std::int64_t exposed_io_ns = 0;         // waits for storage, copies and their buffers
  std::int64_t exposed_optimizer_ns = 0;  // waits for the update: its reads and writes, Adam, norms
  std::int64_t other_ns = 0;              // time before the first lease, and without another cause
  std::array<std::int64_t, kTraceReasons> wait_ns{};  // by TraceReason
  // The time for which computation waited for units, and the part of this time that updates caused.
  std::int64_t stall_ns = 0;
  std::int64_t stall_for_update_ns = 0;
  WorkTimes work;  // the workers' times in this step
  // The workers' times from the end of the step before to the beginning of this step. The times of
  // inferences are not included. So this is the rest of the last update. The traffic of a
  // StepReport includes what the workers moved during both times.
  WorkTimes work_before;

  std::int64_t exposed_ns() const { return exposed_io_ns + exposed_optimizer_ns; }
  // Returns the time for which storage, copies or the optimizer worked, and computation did not
  // wait for this work. Waits for other ranks are not included.
  std::int64_t hidden_ns() const;
  // Returns hidden_ns() divided by work.any_ns. The result is 1 if no worker was busy.
  double hidden_share() const;
};

// The seconds that computation takes per use of a unit.
struct UnitTime {
  double forward_s = 0;
  double backward_s = 0;
};

// The bytes that a rank's collectives handle in one step. An operation has the length of the whole
// unit, without padding. In a gather or a reduction over N ranks, each rank receives (N - 1) / N of
// this length, and sends the same number of bytes.
struct RankTraffic {
  std::uint64_t gathered_bytes = 0;
  std::uint64_t reduced_bytes = 0;
  // With hybrid sharding, this member counts the bytes of the rank's shard. The shard leaves the
  // group in fp32, and comes back in the type of the gradients. With G groups, a rank sends (G - 1)
  // / G of these bytes and receives the same number. With sharding.reduction "nodes", this member
  // counts the bytes that are sent between nodes. These bytes are the fp32 sums of the nodes, and
  // the parts that are gathered from other nodes.
  std::uint64_t crossed_bytes = 0;
};

// The bytes that have been read from and written to one path of storage.paths.
struct DriveTraffic {
  std::uint64_t read_bytes = 0;
  std::uint64_t write_bytes = 0;
};

// The bytes that one step moves between memory and storage, and the bytes of activations.
struct Traffic {
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  // The smallest number of bytes that a step may read if the update overlaps with computation. The
  // step does not read parameters again if they are still in host memory. Under the serial policy,
  // nvme_read_bytes_least equals nvme_read_bytes.
  std::uint64_t nvme_read_bytes_least = 0;
  // The bytes of boundary activations that move from the device to the activations' homes, and the
  // bytes that move back. If the homes are on storage, nvme_read_bytes and nvme_write_bytes include
  // these bytes.
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  // The bytes of gradients that are written to storage, where the gradients wait for the update.
  // The step also reads the same number of bytes. nvme_read_bytes and nvme_write_bytes include
  // these bytes.
  std::uint64_t gradient_spill_bytes = 0;
};

// The bytes of parameters and gradients that one step copies between device memory and host memory.
// If computation and updates use the state at its home (memory.unified), nothing is copied.
struct CopyTraffic {
  std::uint64_t parameter_bytes = 0;  // to the device, for leases
  std::uint64_t gradient_bytes = 0;   // from the slots of leases to the places where gradients wait
  std::uint64_t update_bytes = 0;     // parameters and gradients for updates, in both directions
  std::uint64_t size_bytes() const { return parameter_bytes + gradient_bytes + update_bytes; }
  CopyTraffic& operator+=(const CopyTraffic& other) {
    parameter_bytes += other.parameter_bytes;
    gradient_bytes += other.gradient_bytes;
    update_bytes += other.update_bytes;
    return *this;
  }
};

// The bytes of host memory that the engine itself reads and writes in one step. Each read and each
// write of a byte counts, even if the byte is still in a cache. Two kinds of accesses are left out:
// the computation of the application, and the transfers of drives (StepReport::nvme_read_bytes and
// StepReport::nvme_write_bytes).
struct MemoryTraffic {
  std::uint64_t update_bytes = 0;  // updates by the CPU: gradients, parameters and state
  std::uint64_t copy_bytes = 0;    // the ends of the copies of CopyTraffic that are in host memory
  std::uint64_t sum_bytes = 0;     // additions of gradients, which also give the norms of sums
  std::uint64_t norm_bytes = 0;    // gradients that are read only for their norms
  std::uint64_t checksum_bytes = 0;  // checksums of what storage reads and writes
  std::uint64_t zero_bytes = 0;      // zeros for gradients
  std::uint64_t size_bytes() const {
    return update_bytes + copy_bytes + sum_bytes + norm_bytes + checksum_bytes + zero_bytes;
  }
};

struct StepOptions {
  double learning_rate = 0;
  std::uint32_t micro_batches = 1;
  // The order in which the application goes through units and micro-batches.
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  // The number by which the sum of the micro-batches' gradients is divided. If no divisor is given,
  // the divisor is micro_batches, which gives the mean. A divisor of 1 keeps the sum. An
  // application that scales its losses itself uses a divisor of 1.
  std::optional<double> gradient_divisor = {};
  // The learning rates of Config::Optimizer::groups, in the order of the groups. If the list is
  // empty, the rate of a group is `learning_rate` times the group's factor.
  std::vector<double> group_learning_rates = {};
};

// Values that an application may know only after the gradients are computed. An example is a
// learning rate that a scheduler sets between backward and update. If a value is not given, the
// value of begin_step() is used. The eager policy updates blocks before finish(), so it needs the
// rates and the divisor of begin_step(). OverlapPolicy says when kAuto may mean eager.
struct FinishOptions {
  std::optional<double> learning_rate = {};
  std::optional<double> gradient_divisor = {};
  std::optional<std::vector<double>> group_learning_rates = {};
  // The data that the application needs to continue after this step, such as its position in the
  // training data. The data is a UTF-8 text of at most 1 MiB, and is used only with a durable
  // store. If no data is given, the store keeps the data that was given last.
  std::optional<std::string> application = {};
};

struct StepReport {
  double loss_scale = 1;   // the factor that multiplied the loss
  std::uint64_t step = 0;  // number of updates of the state after this step's update
  // The norm of the gradient before clipping. This gradient is the mean over the ranks, and has
  // already been divided by the gradient divisor.
  double gradient_norm = 0;
  double clip_factor = 1;  // the factor by which clipping multiplied the gradient
  bool skipped = false;    // true: a gradient was not finite, so nothing was updated
  // The policy by which blocks were updated. The policy is never kAuto.
  OverlapPolicy policy = OverlapPolicy::kSerial;
  bool redone = false;        // speculative: the gradient was clipped, so the update was redone
  StepTimes times;            // how the step's time was spent
  std::int64_t stall_ns = 0;  // computation waited for units, gradient slots, activations
  std::int64_t stall_for_update_ns = 0;  // part of stall_ns: parameters were still being updated
  // The number of times that computation left the schedule. Each change of the schedule made
  // computation wait for the needed unit.
  std::uint32_t schedule_changes = 0;
  // The number of uses of announced units, and the bytes that these uses read from storage
  // according to the plan. Engine::predicted_traffic() includes neither these uses nor these bytes.
  std::uint32_t announced_uses = 0;
  std::uint64_t announced_read_bytes = 0;
  // These counts matter if optimizer.untouched is "skip" or "lazy":
  // - untouched_units counts the units that no rank has used in backward. The step's update does
  //   not change such units.
  // - announced_update_bytes counts the bytes that the update of announced units reads from
  //   storage. The update writes the same number of bytes. Engine::predicted_traffic() does not
  //   include these bytes. With "update", the number counts only if gradients wait on storage: a
  //   unit's gradients of a step, except the first one, are added there.
  // - With "lazy", late_update_bytes counts the bytes that were read to make up for missed updates.
  //   The late updates wrote the same number of bytes.
  std::uint32_t untouched_units = 0;
  std::uint64_t announced_update_bytes = 0;
  std::uint64_t late_update_bytes = 0;
  std::int64_t optimizer_ns = 0;  // finish()'s wait after the norm; serial: until the last write
  // The bytes that were moved since the previous report. These bytes include the bytes of an update
  // that was still running at the previous report.
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  std::vector<DriveTraffic> drives;  // the parts of the two numbers above, by path
  RankTraffic rank_traffic;          // since the previous report
  CopyTraffic copies;                // since the previous report
  MemoryTraffic memory;              // since the previous report, with the reads of inferences
  PhaseMarks buffers;                // peak use since the last report, with homes and gradients
  // The bytes of boundary activations that were moved since the previous report. One number counts
  // the bytes from the device to the activations' homes. The other number counts the bytes back to
  // the device. If the homes are on storage, nvme_read_bytes and nvme_write_bytes include these
  // bytes.
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  std::vector<std::string> notes;  // for the user: slow transfers, repeated reads
};

// Returns one line of text for people: "step 12: norm 1.25, 45.6 ms (compute 81 %, I/O 12 %,
// optimizer 4 %), ...".
SLUICE_EXPORT std::string to_string(const StepReport& report);

}  // namespace sluice
