#include "engine/config/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr const char* kMinimum = "optimizer.minimum_learning_rate";

ScheduleShape shape_from(const std::string& name) {
  if (name == "constant") return ScheduleShape::kConstant;
  if (name == "linear") return ScheduleShape::kLinear;
  if (name == "one_cycle") return ScheduleShape::kOneCycle;
  return name == "range_test" ? ScheduleShape::kRangeTest : ScheduleShape::kCosine;
}

ScheduleOptions schedule_from(const ConfigDocument& document) {
  ScheduleOptions schedule;
  schedule.shape = shape_from(document.string("optimizer.schedule"));
  schedule.count = document.string("optimizer.schedule_count") == "deepspeed"
                       ? ScheduleCount::kDeepspeed
                       : ScheduleCount::kSluice;
  schedule.warmup =
      document.string("optimizer.warmup") == "log" ? WarmupShape::kLog : WarmupShape::kLinear;
  schedule.warmup_start = document.number("optimizer.warmup_start");
  schedule.steps = document.find_integer("optimizer.schedule_steps");
  schedule.one_cycle = {.first_steps = document.integer("optimizer.one_cycle.first_steps"),
                        .second_steps = document.find_integer("optimizer.one_cycle.second_steps"),
                        .first_stairs = document.integer("optimizer.one_cycle.first_stairs"),
                        .second_stairs = document.find_integer("optimizer.one_cycle.second_stairs"),
                        .decay_steps = document.integer("optimizer.one_cycle.decay_steps"),
                        .decay_rate = document.number("optimizer.one_cycle.decay_rate")};
  schedule.range_test = {.step_size = document.integer("optimizer.range_test.step_size"),
                         .step_rate = document.number("optimizer.range_test.step_rate"),
                         .is_staircase = document.boolean("optimizer.range_test.staircase")};
  return schedule;
}

double between(const LearningRateOptions& options, double share) {
  return options.minimum_learning_rate +
         share * (options.learning_rate - options.minimum_learning_rate);
}

double warmed_up(const LearningRateOptions& options, double share) {
  const double start = options.schedule.warmup_start;
  return start + (options.learning_rate - start) * share;
}

// 1 at progress 0, 0 at progress 1.
double cosine(double progress) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(progress, 1.0)));
}

double counted_by_sluice(const LearningRateOptions& options, std::uint64_t step) {
  const ScheduleOptions& schedule = options.schedule;
  const auto warmup = static_cast<double>(options.warmup_steps);
  if (step < options.warmup_steps) {
    const auto reached = static_cast<double>(step + 1);
    if (schedule.warmup == WarmupShape::kLog)
      return warmed_up(options, std::log(reached + 1) / std::log(warmup + 1));
    // The product comes first instead of a share, as in earlier versions, to keep the same bits.
    return schedule.warmup_start +
           (options.learning_rate - schedule.warmup_start) * reached / warmup;
  }
  const std::uint64_t steps = schedule.steps.value_or(options.steps);
  if (schedule.shape == ScheduleShape::kConstant) return options.learning_rate;
  if (steps <= options.warmup_steps + 1)  // there is no room to fall: one step at the peak
    return step <= options.warmup_steps ? options.learning_rate : options.minimum_learning_rate;
  const double progress =
      (static_cast<double>(step) - warmup) / (static_cast<double>(steps) - warmup - 1);
  return between(options, schedule.shape == ScheduleShape::kCosine ? cosine(progress)
                                                                   : 1 - std::min(progress, 1.0));
}

// WarmupLR, WarmupDecayLR and WarmupCosineLR. Their warm-up has two steps at least.
double counted_by_deepspeed(const LearningRateOptions& options, std::uint64_t step) {
  const ScheduleOptions& schedule = options.schedule;
  const bool is_cosine = schedule.shape == ScheduleShape::kCosine;
  if (step == 0) return is_cosine ? 0 : schedule.warmup_start;
  const auto now = static_cast<double>(step - 1);
  const auto warmup = static_cast<double>(std::max<std::uint64_t>(2, options.warmup_steps));
  if (now < warmup)
    return warmed_up(options, schedule.warmup == WarmupShape::kLog
                                  ? std::log(now + 1) / std::log(warmup)
                                  : now / warmup);
  if (schedule.shape == ScheduleShape::kConstant) return options.learning_rate;
  const auto total = static_cast<double>(schedule.steps.value_or(options.steps));
  const double decay = std::max(1.0, total - warmup);
  // The cosine is one step ahead of the line.
  return between(options, is_cosine ? cosine((now - warmup + 1) / decay)
                                    : std::max(0.0, (total - now) / decay));
}

double one_cycle(const LearningRateOptions& options, std::uint64_t step) {
  const ScheduleOptions::OneCycle& cycle = options.schedule.one_cycle;
  const std::uint64_t first = cycle.first_steps;
  const std::uint64_t second = cycle.second_steps.value_or(first);
  const std::uint64_t total = first + second;
  if (step > total) {
    if (cycle.decay_steps == 0 || cycle.decay_rate == 0) return options.minimum_learning_rate;
    const double intervals =
        static_cast<double>(step - total) / static_cast<double>(cycle.decay_steps);
    return options.minimum_learning_rate / (1 + cycle.decay_rate * intervals);
  }
  const bool is_rising = step <= first && step < total;
  const double position =
      static_cast<double>(is_rising ? step : total - step) /
      static_cast<double>(is_rising ? first : std::max<std::uint64_t>(second, 1));
  const std::uint64_t stairs =
      is_rising ? cycle.first_stairs : cycle.second_stairs.value_or(cycle.first_stairs);
  if (stairs == 0) return between(options, position);
  // Integers, so that no rounding loses a stair.
  const std::uint64_t reached = (is_rising ? step : total - step) * stairs /
                                (is_rising ? first : std::max<std::uint64_t>(second, 1));
  return between(options, static_cast<double>(reached) / static_cast<double>(stairs));
}

double range_test(const LearningRateOptions& options, std::uint64_t step) {
  const ScheduleOptions::RangeTest& test = options.schedule.range_test;
  const double intervals = static_cast<double>(step) / static_cast<double>(test.step_size);
  return options.learning_rate *
         (1 + test.step_rate * (test.is_staircase ? std::floor(intervals) : intervals));
}

}  // namespace

LearningRateOptions learning_rate_options(const ConfigDocument& document) {
  LearningRateOptions options{
      .learning_rate = document.number("optimizer.learning_rate"),
      .minimum_learning_rate = document.number("optimizer.minimum_learning_rate"),
      .warmup_steps = document.integer("optimizer.warmup_steps"),
      .schedule = schedule_from(document),
      .steps = document.integer("run.steps")};
  const ScheduleShape shape = options.schedule.shape;
  const bool has_minimum = shape != ScheduleShape::kConstant && shape != ScheduleShape::kRangeTest;
  if (has_minimum && options.minimum_learning_rate > options.learning_rate) {
    const bool is_default = document.origin_of(kMinimum) == "default";
    document.fail(
        is_default ? "optimizer.learning_rate" : kMinimum,
        fmt::format("\"{}\" is {}{}, more than \"optimizer.learning_rate\" = {}; set it to "
                    "0 or to another rate below",
                    kMinimum, options.minimum_learning_rate, is_default ? " (the default)" : "",
                    options.learning_rate));
  }
  return options;
}

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

double learning_rate_at(const LearningRateOptions& options, std::uint64_t step) {
  switch (options.schedule.shape) {
    case ScheduleShape::kOneCycle: return one_cycle(options, step);
    case ScheduleShape::kRangeTest: return range_test(options, step);
    default: break;
  }
  return options.schedule.count == ScheduleCount::kDeepspeed ? counted_by_deepspeed(options, step)
                                                             : counted_by_sluice(options, step);
}

}  // namespace sluice
