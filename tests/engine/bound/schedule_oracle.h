// The oracle implements the schedule of engine/bound/bound_simulation.h a second time, in a
// different way. All jobs of several steps are listed in advance. Each job has a predicate that
// says when the job may start. The time moves from the end of one job to the end of the next job.
// Whenever a job ends, all jobs are checked. The oracle is slow and plain. The oracle knows rates
// and unit times, but no layouts.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include <sluice/config.h>

namespace sluice::test {

struct OracleUse {
  int unit = 0;
  bool is_backward = false;
  bool fetches = false;
  std::vector<int> evicted_uses;
};

// Times are in ticks. The blocks differ only in the homes of their state. Blocks and uses are
// listed in order.
struct OracleCase {
  OverlapPolicy policy = OverlapPolicy::kSerial;
  std::vector<int> unit_blocks;
  std::vector<long> forward, backward;                 // by unit
  std::vector<bool> parameters_in_ram, record_in_ram;  // by block
  std::vector<bool> gradients_on_storage;              // by unit
  std::vector<bool> on_device;                         // by unit; covers all of the unit's state
  std::vector<bool> leased_at_home;                    // by unit; in RAM, and never fetched
  bool gradients_in_set = false;                       // gradients are computed in the set, in RAM
  std::vector<OracleUse> uses;
  bool half_duplex = false;
  long read_parameters = 0, read_record = 0, write_parameters = 0, write_record = 0, latency = 0;
  long read_gradients = 0, write_gradients = 0;
  long copy_up = 0, copy_down = 0, adam = 0, norm = 0, device_adam = 0;  // for one block
  int streamed = 0;  // places for blocks that the device updates; 0: the CPU makes all updates
  int lanes = 1, slots = 2, kept_slots = 0, gradient_slots = 1, staging = 2;

  // Returns whether the unit's gradient is computed directly in the gradient set. Such a gradient
  // takes no gradient slot.
  bool is_in_set(int unit) const {
    return gradients_in_set && !on_device[unit] && !gradients_on_storage[unit];
  }
};

// Returns the times at which the steps 0..count-1 begin.
std::vector<long> step_begins(const OracleCase& given, int count);

// The kinds of events that a block can have in a step.
enum class OracleWork {
  kNone,
  kReadParameters,
  kReadRecord,
  kAdam,
  kWriteRecord,
  kWriteParameters
};
struct OracleEvent {
  OracleWork work = OracleWork::kNone;
  int step = 0;
  int block = 0;

  auto operator<=>(const OracleEvent&) const = default;
};

// Returns the work of the drive and the CPU in steps 0..count-1, in the order in which the work
// starts.
std::vector<OracleEvent> step_events(const OracleCase& given, int count);

}  // namespace sluice::test
