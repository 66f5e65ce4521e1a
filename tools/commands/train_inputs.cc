#include "tools/commands/train_inputs.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <sluice/config_document.h>
#include "tools/cli/option_words.h"
#include "tools/deepspeed/config_source.h"

namespace sluice {
namespace {

// The schedule is to fall, and has nowhere to fall to.
bool falls_nowhere(const LearningRateOptions& options) {
  const ScheduleShape shape = options.schedule.shape;
  return (shape == ScheduleShape::kCosine || shape == ScheduleShape::kLinear) &&
         options.minimum_learning_rate == options.learning_rate;
}

}  // namespace

TrainConfig read_train_config(const TrainOptions& options, std::string& introduction) {
  DeepspeedValues values = options.deepspeed;
  // As --set, and not as one of the values for "auto": it overrides a total in a DeepSpeed file.
  std::vector<std::string> assignments = options.assignments;
  if (options.steps) assignments.push_back(fmt::format("run.steps={}", *options.steps));
  ConfigSource source = read_config_source(options.config_file, values, assignments);
  ConfigDocument& document = source.document;
  if (source.report)
    introduction = fmt::format("{}; `sluice config import` lists them\n",
                               summary_of(*source.report, name_of_source(options.config_file)));
  if (options.seed) document.set(fmt::format("run.seed={}", *options.seed));
  TrainConfig config = train_config(document);
  if (falls_nowhere(config))
    introduction += fmt::format(
        "the learning rate stays at {} after its warm-up: optimizer.minimum_learning_rate is "
        "{}{}\n",
        config.learning_rate, config.minimum_learning_rate,
        source.origin_of("optimizer.minimum_learning_rate") == "default" ? ", the default" : "");
  if (!options.data_file.empty()) config.data_file = options.data_file;
  if (!options.tokenizer.empty()) config.tokenizer = options.tokenizer;
  if (!options.trace_file.empty()) config.trace_file = options.trace_file;
  return config;
}

Error in_words_of(const TrainOptions& options, const Error& error) {
  // A value of --set may be what is wrong.
  const auto is_assigned = [&](std::string_view key) {
    return std::ranges::any_of(options.assignments, [&](const std::string& assignment) {
      return assignment.starts_with(key) && assignment.substr(key.size()).starts_with('=');
    });
  };
  const bool is_steps = options.steps.has_value() && !is_assigned("run.steps");
  const bool is_seed = options.seed.has_value() && !is_assigned("run.seed");
  return in_words_of(
      {{"--set run.steps=", "--steps ", is_steps},
       {"--set run.seed=", "--seed ", is_seed},
       {"run.steps", "--steps", is_steps},
       {"run.seed", "--seed", is_seed},
       {"in data.file or with --data FILE", "with --data FILE", !options.data_file.empty()},
       {"data.file", "--data", !options.data_file.empty()},
       {"data.tokenizer", "--tokenizer", !options.tokenizer.empty()},
       {"trace.file", "--trace", !options.trace_file.empty()}},
      error);
}

}  // namespace sluice
