// The schedule of the learning rate.
#include <fmt/format.h>

#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

const std::string kSchedulerParams = "scheduler.params.";

double number_of(const ImportPass& pass, const std::string& key) {
  return pass.number(kSchedulerParams + key).value_or(pass.default_number(kSchedulerParams + key));
}

void require(ImportPass& pass, const std::string& type, const char* key) {
  if (pass.find(kSchedulerParams + key) == nullptr && !pass.is_auto(kSchedulerParams + key))
    pass.refuse(kSchedulerParams + key, fmt::format("{} needs it", type));
}

void import_total(ImportPass& pass, const std::string& type) {
  std::optional<std::uint64_t> total = pass.integer(kSchedulerParams + "total_num_steps");
  if (!total && !pass.is_auto(kSchedulerParams + "total_num_steps")) {
    total = pass.given_integer(kSchedulerParams + "total_num_steps");
    if (!total) require(pass, type, "total_num_steps");
  }
  if (!total) return;
  pass.map(kSchedulerParams + "total_num_steps", "optimizer.schedule_steps", *total);
  pass.map(kSchedulerParams + "total_num_steps", "run.steps", *total);
}

void import_warmup(ImportPass& pass, const std::string& type) {
  pass.map("scheduler.type", "optimizer.schedule_count", "deepspeed",
           "DeepSpeed moves its scheduler after each update");
  pass.map(kSchedulerParams + "warmup_type", "optimizer.warmup",
           pass.text(kSchedulerParams + "warmup_type").value_or("log"));
  const auto steps = static_cast<std::uint64_t>(number_of(pass, "warmup_num_steps"));
  if (steps == 0)
    pass.understood(
        kSchedulerParams + "warmup_num_steps",
        "DeepSpeed has refused 0 since 0.19.6; before, it was two steps, as it is here");
  pass.map(kSchedulerParams + "warmup_num_steps", "optimizer.warmup_steps", steps);
  if (type == "WarmupCosineLR") return;
  const double start = number_of(pass, "warmup_min_lr");
  pass.map(kSchedulerParams + "warmup_min_lr", "optimizer.warmup_start", start);
  if (type == "WarmupDecayLR")
    pass.map(kSchedulerParams + "warmup_min_lr", "optimizer.minimum_learning_rate", start);
  if (const auto peak = pass.number(kSchedulerParams + "warmup_max_lr")) {
    // A program's learning rate has to be the same, as in transformers.
    const std::optional<double> given = pass.values().learning_rate;
    if (given && !pass.values().names.empty() && *given != *peak)
      pass.refuse_conflict(kSchedulerParams + "warmup_max_lr", OrderedJson(*peak).dump(), "--lr",
                           OrderedJson(*given).dump());
    return pass.map(kSchedulerParams + "warmup_max_lr", "optimizer.learning_rate", *peak);
  }
  const bool is_of_optimizer =
      type == "WarmupLR" || pass.is_auto(kSchedulerParams + "warmup_max_lr");
  if (!is_of_optimizer)
    pass.map(kSchedulerParams + "warmup_max_lr", "optimizer.learning_rate", 1e-3);
  if (is_of_optimizer && !pass.config["optimizer"].contains("learning_rate") &&
      !pass.is_auto("optimizer.params.lr")) {
    pass.ask_for("--lr");
    pass.refuse(kSchedulerParams + "warmup_max_lr",
                "it is the optimizer's learning rate, which the file does not have: give --lr");
  }
}

void import_cosine(ImportPass& pass) {
  const OrderedJson& optimizer = pass.config["optimizer"];
  if (!optimizer.contains("learning_rate")) {
    if (pass.is_auto("optimizer.params.lr")) return;  // asked for already
    pass.ask_for("--lr");
    return pass.refuse("scheduler.type",
                       "its ratios are of the optimizer's learning rate, which "
                       "the file does not have: give --lr");
  }
  const double rate = optimizer["learning_rate"].get<double>();
  pass.map(kSchedulerParams + "warmup_min_ratio", "optimizer.warmup_start",
           number_of(pass, "warmup_min_ratio") * rate);
  pass.map(kSchedulerParams + "cos_min_ratio", "optimizer.minimum_learning_rate",
           number_of(pass, "cos_min_ratio") * rate);
}

void map_given(ImportPass& pass, const char* key, const std::string& new_key) {
  if (const ImportPass::Entry* entry = pass.find(kSchedulerParams + key))
    pass.map(kSchedulerParams + key, new_key, entry->value);
}

void import_one_cycle(ImportPass& pass) {
  require(pass, "OneCycle", "cycle_min_lr");
  require(pass, "OneCycle", "cycle_max_lr");
  map_given(pass, "cycle_min_lr", "optimizer.minimum_learning_rate");
  map_given(pass, "cycle_max_lr", "optimizer.learning_rate");
  map_given(pass, "cycle_first_step_size", "optimizer.one_cycle.first_steps");
  map_given(pass, "cycle_second_step_size", "optimizer.one_cycle.second_steps");
  map_given(pass, "cycle_first_stair_count", "optimizer.one_cycle.first_stairs");
  map_given(pass, "cycle_second_stair_count", "optimizer.one_cycle.second_stairs");
  map_given(pass, "decay_step_size", "optimizer.one_cycle.decay_steps");
  map_given(pass, "decay_lr_rate", "optimizer.one_cycle.decay_rate");
  if (pass.boolean(kSchedulerParams + "cycle_momentum") != false)
    pass.refuse(kSchedulerParams + "cycle_momentum",
                "it is true unless the file says otherwise; " +
                    find_deepspeed_key(kSchedulerParams + "cycle_momentum")->why);
}

void import_range_test(ImportPass& pass) {
  pass.map(kSchedulerParams + "lr_range_test_min_lr", "optimizer.learning_rate",
           number_of(pass, "lr_range_test_min_lr"));
  map_given(pass, "lr_range_test_step_size", "optimizer.range_test.step_size");
  map_given(pass, "lr_range_test_step_rate", "optimizer.range_test.step_rate");
  map_given(pass, "lr_range_test_staircase", "optimizer.range_test.staircase");
}

// Refuses an option for a learning rate that the scheduler replaces. If the file has a rate of the
// optimizer, or "auto" there, the scheduler replaces this rate in DeepSpeed, too.
void check_rate(ImportPass& pass, const std::string& type) {
  const std::optional<double> given = pass.values().learning_rate;
  const bool is_open = pass.values().names.empty() && !pass.is_written("optimizer.params.lr");
  if (!given || !is_open || pass.given_number("optimizer.params.lr") != given) return;
  const OrderedJson& optimizer = pass.config["optimizer"];
  if (!optimizer.contains("learning_rate") || optimizer["learning_rate"] == *given) return;
  const std::string key = kSchedulerParams + (type == "OneCycle"      ? "cycle_max_lr"
                                              : type == "LRRangeTest" ? "lr_range_test_min_lr"
                                                                      : "warmup_max_lr");
  pass.refuse_conflict(
      key,
      optimizer["learning_rate"].dump() + (pass.is_written(key) ? "" : ", by DeepSpeed's default,"),
      "--lr", OrderedJson(*given).dump());
}

// Without a scheduler the rate stays what it is.
void import_no_scheduler(ImportPass& pass) {
  if (pass.has_section("scheduler"))
    return pass.refuse("scheduler", "scheduler.type is missing; write \"type\": \"WarmupLR\"");
  if (!pass.text("optimizer.type")) {  // the program makes both
    if (pass.values().names.empty() && pass.values().warmup_steps)
      pass.map("--warmup-steps", "optimizer.warmup_steps", *pass.values().warmup_steps);
    return;
  }
  pass.map("scheduler", "optimizer.schedule", "constant",
           "no scheduler in the file (the Trainer of transformers makes its own)");
  pass.map("scheduler", "optimizer.warmup_steps",
           pass.given_integer(kSchedulerParams + "warmup_num_steps").value_or(0));
}

}  // namespace

void import_scheduler(ImportPass& pass) {
  const auto type = pass.text("scheduler.type");
  // A scheduler with a total may replace it.
  if (pass.values().steps) pass.map("--steps", "run.steps", *pass.values().steps);
  if (!type) return import_no_scheduler(pass);
  const bool is_warmup =
      *type == "WarmupLR" || *type == "WarmupDecayLR" || *type == "WarmupCosineLR";
  if (!is_warmup && *type != "OneCycle" && *type != "LRRangeTest")
    return pass.refuse("scheduler.type",
                       "Sluice has WarmupLR, WarmupDecayLR, WarmupCosineLR, "
                       "OneCycle and LRRangeTest; write one of them");
  const char* schedule = *type == "WarmupLR"         ? "constant"
                         : *type == "WarmupDecayLR"  ? "linear"
                         : *type == "WarmupCosineLR" ? "cosine"
                         : *type == "OneCycle"       ? "one_cycle"
                                                     : "range_test";
  pass.map("scheduler.type", "optimizer.schedule", schedule);
  pass.settle_section(kSchedulerParams, *type, *type);
  if (is_warmup) import_warmup(pass, *type);
  if (*type == "WarmupCosineLR") import_cosine(pass);
  if (*type == "WarmupDecayLR" || *type == "WarmupCosineLR") import_total(pass, *type);
  if (*type == "OneCycle") import_one_cycle(pass);
  if (*type == "LRRangeTest") import_range_test(pass);
  check_rate(pass, *type);
}

}  // namespace sluice
