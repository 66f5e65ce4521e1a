#include "tools/deepspeed/config_source.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "gpu/ranks/launcher_environment.h"
#include "tools/deepspeed/deepspeed_keys.h"

namespace sluice {
namespace {

constexpr std::size_t kNameLengthMax = 255;

// The values that --set gives to keys from which others of an imported config follow. A wrong value
// is refused here.
std::map<std::string, std::string> assigned_values(const std::vector<std::string>& assignments,
                                                   const std::string& name) {
  std::set<std::string> used = {"run.device"};
  for (const DeepspeedKey& row : deepspeed_keys())
    if (!row.option.empty()) used.insert(row.to.begin(), row.to.end());
  ConfigDocument document("{}", name);
  std::map<std::string, std::string> values;
  for (const std::string& assignment : assignments) {
    const std::string key = assignment.substr(0, assignment.find('='));
    const std::string section = key + ".";
    if (std::ranges::any_of(used, [&](const std::string& name) {
          return name == key || name.starts_with(section);
        }))
      document.set(assignment);
  }
  for (const std::string& key : used)
    if (document.origin_of(key) != "default") values[key] = document.json_of(key);
  return values;
}

}  // namespace

std::string ConfigSource::origin_of(const std::string& key) const {
  const std::string origin = document.origin_of(key);
  if (!report || origin == "default" || origin.starts_with("--set")) return origin;
  for (auto line = report->mapped.rbegin(); line != report->mapped.rend(); ++line) {
    if (line->new_key == key) return fmt::format("{} ({})", line->place, line->key);
  }
  return origin;
}

ConfigSource read_config_source(const std::string& argument, DeepspeedValues values,
                                const std::vector<std::string>& assignments) {
  const std::string text = config_text(argument);
  const std::string name = name_of_source(argument);
  const auto assigned = [&assignments](ConfigDocument document) {
    for (const std::string& assignment : assignments) document.set(assignment);
    return document;
  };
  const bool is_deepspeed = is_deepspeed_file(text);
  if (!is_deepspeed) refuse_deepspeed_values(values, name);
  if (!is_deepspeed)
    return {.document = assigned(ConfigDocument(text, name)), .report = std::nullopt};
  values.assigned = assigned_values(assignments, name);
  if (const auto device = values.assigned.find("run.device"); device != values.assigned.end())
    values.device = nlohmann::json::parse(device->second).get<std::string>();
  const auto launch = find_launch([](const char* variable) { return std::getenv(variable); });
  if (launch && launch->rank_count > 1) values.ranks = launch->rank_count;
  ImportedConfig imported = import_deepspeed(text, name, values);
  if (!imported.report.refused.empty())
    throw Error(ErrorCode::kConfig, refusals(imported.report, name));
  return {.document = assigned(ConfigDocument(imported.config, name + " (imported)")),
          .report = std::move(imported.report)};
}

void refuse_deepspeed_values(const DeepspeedValues& values, const std::string& name) {
  const auto refuse = [&name](const char* option, const std::string& key) {
    throw Error(ErrorCode::kConfig,
                fmt::format("{} is a value for \"auto\" in a DeepSpeed file, and {} is a config of "
                            "Sluice; give --set {} instead",
                            option, name, key));
  };
  const auto number = [&refuse](const char* option, const char* key, const auto& value) {
    if (value) refuse(option, fmt::format("{}={}", key, *value));
  };
  number("--batch", "batch.sequences", values.batch);
  number("--micro-batches", "batch.micro_batches", values.micro_batches);
  number("--lr", "optimizer.learning_rate", values.learning_rate);
  number("--eps", "optimizer.epsilon", values.epsilon);
  number("--weight-decay", "optimizer.weight_decay", values.weight_decay);
  number("--clip-norm", "optimizer.clip_norm", values.clip_norm);
  number("--warmup-steps", "optimizer.warmup_steps", values.warmup_steps);
  if (values.betas.size() == 2)
    refuse("--betas", fmt::format("optimizer.beta1={} --set optimizer.beta2={}", values.betas[0],
                                  values.betas[1]));
  if (!values.precision.empty()) refuse("--precision", "precision.parameters=" + values.precision);
}

std::string name_of_source(const std::string& argument) {
  return argument.size() > kNameLengthMax ? "the config in base64" : argument;
}

}  // namespace sluice
