#include "tools/gpt/train/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "tools/gpt/train/train_config.h"

namespace sluice {
namespace {

double between(const TrainConfig& config, double share) {
  return config.minimum_learning_rate +
         share * (config.learning_rate - config.minimum_learning_rate);
}

double warmed_up(const TrainConfig& config, double share) {
  const double start = config.schedule.warmup_start;
  return start + (config.learning_rate - start) * share;
}

// 1 at progress 0, 0 at progress 1.
double cosine(double progress) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(progress, 1.0)));
}

double counted_by_sluice(const TrainConfig& config, std::uint64_t step) {
  const ScheduleOptions& schedule = config.schedule;
  const auto warmup = static_cast<double>(config.warmup_steps);
  if (step < config.warmup_steps) {
    const auto reached = static_cast<double>(step + 1);
    if (schedule.warmup == WarmupShape::kLog)
      return warmed_up(config, std::log(reached + 1) / std::log(warmup + 1));
    // Not as a share: the product comes first, as in earlier versions, for the same bits.
    return schedule.warmup_start +
           (config.learning_rate - schedule.warmup_start) * reached / warmup;
  }
  const std::uint64_t steps = schedule.steps.value_or(config.steps);
  if (schedule.shape == ScheduleShape::kConstant || steps <= config.warmup_steps + 1)
    return config.learning_rate;
  const double progress =
      (static_cast<double>(step) - warmup) / (static_cast<double>(steps) - warmup - 1);
  return between(config, schedule.shape == ScheduleShape::kCosine ? cosine(progress)
                                                                  : 1 - std::min(progress, 1.0));
}

// WarmupLR, WarmupDecayLR and WarmupCosineLR. Their warm-up has two steps at least.
double counted_by_deepspeed(const TrainConfig& config, std::uint64_t step) {
  const ScheduleOptions& schedule = config.schedule;
  const bool is_cosine = schedule.shape == ScheduleShape::kCosine;
  if (step == 0) return is_cosine ? 0 : schedule.warmup_start;
  const auto now = static_cast<double>(step - 1);
  const auto warmup = static_cast<double>(std::max<std::uint64_t>(2, config.warmup_steps));
  if (now < warmup)
    return warmed_up(config, schedule.warmup == WarmupShape::kLog
                                 ? std::log(now + 1) / std::log(warmup)
                                 : now / warmup);
  if (schedule.shape == ScheduleShape::kConstant) return config.learning_rate;
  const auto total = static_cast<double>(schedule.steps.value_or(config.steps));
  const double decay = std::max(1.0, total - warmup);
  // The cosine is one step ahead of the line.
  return between(config, is_cosine ? cosine((now - warmup + 1) / decay)
                                   : std::max(0.0, (total - now) / decay));
}

double one_cycle(const TrainConfig& config, std::uint64_t step) {
  const ScheduleOptions::OneCycle& cycle = config.schedule.one_cycle;
  const std::uint64_t first = cycle.first_steps;
  const std::uint64_t second = cycle.second_steps.value_or(first);
  const std::uint64_t total = first + second;
  if (step > total) {
    if (cycle.decay_steps == 0 || cycle.decay_rate == 0) return config.minimum_learning_rate;
    const double intervals =
        static_cast<double>(step - total) / static_cast<double>(cycle.decay_steps);
    return config.minimum_learning_rate / (1 + cycle.decay_rate * intervals);
  }
  const bool is_rising = step <= first && step < total;
  const double position =
      static_cast<double>(is_rising ? step : total - step) /
      static_cast<double>(is_rising ? first : std::max<std::uint64_t>(second, 1));
  const std::uint64_t stairs =
      is_rising ? cycle.first_stairs : cycle.second_stairs.value_or(cycle.first_stairs);
  if (stairs == 0) return between(config, position);
  // Whole numbers, so that no rounding loses a stair.
  const std::uint64_t reached = (is_rising ? step : total - step) * stairs /
                                (is_rising ? first : std::max<std::uint64_t>(second, 1));
  return between(config, static_cast<double>(reached) / static_cast<double>(stairs));
}

double range_test(const TrainConfig& config, std::uint64_t step) {
  const ScheduleOptions::RangeTest& test = config.schedule.range_test;
  const double intervals = static_cast<double>(step) / static_cast<double>(test.step_size);
  return config.learning_rate *
         (1 + test.step_rate * (test.is_staircase ? std::floor(intervals) : intervals));
}

}  // namespace

std::string describe(const ScheduleOptions& schedule) {
  const ScheduleOptions::OneCycle& cycle = schedule.one_cycle;
  const ScheduleOptions::RangeTest& test = schedule.range_test;
  return fmt::format(
      "{} {} {} {} {} | {} {} {} {} {} {} | {} {} {}", static_cast<int>(schedule.shape),
      static_cast<int>(schedule.count), static_cast<int>(schedule.warmup), schedule.warmup_start,
      schedule.steps.value_or(0), cycle.first_steps, cycle.second_steps.value_or(cycle.first_steps),
      cycle.first_stairs, cycle.second_stairs.value_or(cycle.first_stairs), cycle.decay_steps,
      cycle.decay_rate, test.step_size, test.step_rate, test.is_staircase);
}

double learning_rate_at(const TrainConfig& config, std::uint64_t step) {
  switch (config.schedule.shape) {
    case ScheduleShape::kOneCycle: return one_cycle(config, step);
    case ScheduleShape::kRangeTest: return range_test(config, step);
    default: break;
  }
  return config.schedule.count == ScheduleCount::kDeepspeed ? counted_by_deepspeed(config, step)
                                                            : counted_by_sluice(config, step);
}

}  // namespace sluice
