// Config files, also DeepSpeed's, and the schedule of learning rates behind the C interface.
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/error.h>

#include "capi/call_guard.h"
#include "capi/sluice.h"
#include "capi/thread_text.h"
#include "engine/config/learning_rate.h"
#include "tools/deepspeed/deepspeed_import.h"

using namespace sluice;

namespace {

// Numbers up to this one are exact in doubles, and ten times as much is below 2^64.
constexpr std::uint64_t kWholeMax = std::uint64_t{1} << 53;

// A whole number may also be written as 4.0, which is the result of a division in Python.
std::uint64_t whole(const std::string& name, const nlohmann::json& value, std::uint64_t least,
                    std::uint64_t most = kWholeMax) {
  if (value.is_number()) {
    const double number = value.get<double>();
    if (number >= static_cast<double>(least) && number <= static_cast<double>(most) &&
        number == std::floor(number))
      return value.get<std::uint64_t>();
  }
  refuse(fmt::format(
      "sluice_import_deepspeed: \"{}\" is {}; it must be a whole number between {} and {}", name,
      value.dump(), least, most));
}

// The command's options by their names, as a JSON object: {"batch": 4, "lr": 1e-4}.
DeepspeedValues values_from_json(const std::string& text) {
  const nlohmann::json given = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!given.is_object()) refuse("sluice_import_deepspeed: values_json is no JSON object: " + text);
  DeepspeedValues values;
  values.device = "host";
  for (const auto& [name, value] : given.items()) {
    try {
      if (name == "batch")
        values.batch = whole(name, value, 1);
      else if (name == "micro_batches")
        values.micro_batches = whole(name, value, 1);
      else if (name == "lr")
        values.learning_rate = value.get<double>();
      else if (name == "betas")
        values.betas = value.get<std::vector<double>>();
      else if (name == "eps")
        values.epsilon = value.get<double>();
      else if (name == "weight_decay")
        values.weight_decay = value.get<double>();
      else if (name == "clip_norm")
        values.clip_norm = value.get<double>();
      else if (name == "warmup_steps")
        values.warmup_steps = whole(name, value, 0);
      else if (name == "steps")
        values.steps = whole(name, value, 1);
      else if (name == "precision")
        values.precision = value.get<std::string>();
      else if (name == "ranks")
        values.ranks = static_cast<std::uint32_t>(
            whole(name, value, 1, std::numeric_limits<std::uint32_t>::max()));
      else if (name == "hidden_size")
        values.hidden_size = whole(name, value, 1);
      else if (name == "names")
        values.names = value.get<std::map<std::string, std::string>>();
      else
        refuse(
            fmt::format("sluice_import_deepspeed: \"{}\" is none of batch, micro_batches, lr, "
                        "betas, eps, weight_decay, clip_norm, warmup_steps, steps, "
                        "precision, ranks, hidden_size, names",
                        name));
    } catch (const nlohmann::json::exception& error) {
      refuse(fmt::format("sluice_import_deepspeed: \"{}\" is {}: {}", name, value.dump(),
                         error.what()));
    }
  }
  if (!values.betas.empty() && values.betas.size() != 2)
    refuse(fmt::format("sluice_import_deepspeed: \"betas\" has {} values, but must have 2",
                       values.betas.size()));
  return values;
}

}  // namespace

extern "C" {

sluice_status sluice_is_deepspeed(const char* text, int* is_deepspeed) {
  const char* const name = __func__;
  return guarded([&] {
    require(text, name, "the text");
    require(is_deepspeed, name, "the place for the answer");
    *is_deepspeed = is_deepspeed_file(text) ? 1 : 0;
  });
}

sluice_status sluice_import_deepspeed(const char* text, const char* file_name,
                                      const char* values_json, const char** report) {
  const char* const name = __func__;
  return guarded([&] {
    require(report, name, "the place for the report");
    *report = nullptr;
    require(text, name, "the text");
    require(file_name, name, "the file's name");
    const DeepspeedValues values = values_from_json(values_json == nullptr ? "{}" : values_json);
    const ImportedConfig imported = import_deepspeed(text, file_name, values);
    if (!imported.report.refused.empty())
      throw Error(ErrorCode::kConfig, refusals(imported.report, file_name));
    *report = keep_text(ThreadText::kImportedConfig, report_json(imported, file_name));
  });
}

sluice_status sluice_read_config(const char* text, const char* file_name,
                                 const char** config_json) {
  const char* const name = __func__;
  return guarded([&] {
    require(config_json, name, "the place for the config");
    *config_json = nullptr;
    require(text, name, "the text");
    require(file_name, name, "the file's name");
    (void)ConfigDocument(text, file_name);  // or an error with line and column
    const nlohmann::json config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/true,
                                                        /*ignore_comments=*/true);
    *config_json = keep_text(ThreadText::kReadConfig, config.dump());
  });
}

sluice_status sluice_learning_rates(const char* config_json, uint64_t first, uint64_t count,
                                    double* rates) {
  const char* const name = __func__;
  return guarded([&] {
    require(config_json, name, "config_json");
    if (count != 0) require(rates, name, "the place for the rates");
    const LearningRateOptions options =
        learning_rate_options(ConfigDocument(config_json, "config"));
    for (double& rate : std::span(rates, count)) rate = learning_rate_at(options, first++);
  });
}

}  // extern "C"
