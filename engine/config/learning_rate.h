// Computes the learning rate of each update of a run. A run begins with a warm-up, and then follows
// the schedule that `optimizer.schedule` names. The rate depends only on the step, so a resumed run
// continues with the right rate.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/config_document.h>

namespace sluice {

enum class ScheduleShape : std::uint8_t { kConstant, kLinear, kCosine, kOneCycle, kRangeTest };

enum class WarmupShape : std::uint8_t { kLinear, kLog };

// The way in which updates are counted for the warm-up and the decay. With `kSluice`, the first
// update is the first step of the warm-up, and the last update of the run is the end of the decay.
// With `kDeepspeed`, updates are counted in the same way as in DeepSpeed's engine. That engine
// advances its scheduler after each update. So with `kDeepspeed`, update number s has the rate of
// the scheduler's step number s - 1. With `kDeepspeed`, the first two updates have the starting
// rate.
enum class ScheduleCount : std::uint8_t { kSluice, kDeepspeed };

struct ScheduleOptions {
  ScheduleShape shape = ScheduleShape::kCosine;
  ScheduleCount count = ScheduleCount::kSluice;
  WarmupShape warmup = WarmupShape::kLinear;
  double warmup_start = 0;  // the rate from which the warm-up rises
  // The number of updates until the decay has ended; empty = all updates of the run.
  std::optional<std::uint64_t> steps;

  // The rate rises from the minimum to the peak, and falls back to the minimum. After this cycle,
  // the rate decays: the rate is the minimum divided by 1 + decay_rate * updates / decay_steps. If
  // decay_rate or decay_steps is 0, the rate stays at the minimum.
  struct OneCycle {
    std::uint64_t first_steps = 2000;            // upwards; at least 1
    std::optional<std::uint64_t> second_steps;   // downwards; empty = first_steps
    std::uint64_t first_stairs = 0;              // levels upwards; 0 = continuous
    std::optional<std::uint64_t> second_stairs;  // downwards; empty = first_stairs
    std::uint64_t decay_steps = 0;               // after the cycle
    double decay_rate = 0;                       // per decay_steps updates
  } one_cycle;

  // The rate has no limit. The rate is the learning rate times 1 + step_rate * updates / step_size.
  struct RangeTest {
    std::uint64_t step_size = 2000;  // at least 1
    double step_rate = 1;
    bool is_staircase = false;  // the quotient is rounded down
  } range_test;
};

// The options that determine the learning rates of a run.
struct LearningRateOptions {
  double learning_rate = 1e-3;
  double minimum_learning_rate = 1e-4;
  std::uint64_t warmup_steps = 20;
  ScheduleOptions schedule;
  std::uint64_t steps = 100;  // of the run
};

// Fails with kConfig if the minimum is above the learning rate. The message names the place in the
// file.
LearningRateOptions learning_rate_options(const ConfigDocument& document);

// Returns all options as one line of text. If two runs have the same options, their lines are
// equal.
std::string describe(const ScheduleOptions& schedule);

// Returns the learning rate of update `step`. The first update is update 0. The cosine schedule
// follows Loshchilov & Hutter 2017. The one-cycle schedule and the range test follow Smith 2018, in
// the form that DeepSpeed defines.
double learning_rate_at(const LearningRateOptions& options, std::uint64_t step);

}  // namespace sluice
