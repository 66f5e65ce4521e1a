// The keys that the other functions have left over, so that the report has a line for each key.
#include <fmt/format.h>

#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

std::string why_unused(const ImportPass& pass, const std::string& key) {
  const OrderedJson precision = pass.config.value("precision", OrderedJson::object());
  const std::string type = precision.value("parameters", "");
  if ((key.starts_with("fp16.") || key.starts_with("bf16.")) && !type.empty())
    return type == "fp16" && key.starts_with("fp16.") ? "fp16.loss_scale keeps the scale as it is"
                                                      : fmt::format("the precision is {}", type);
  if (key == "train_batch_size" && pass.config.contains("batch"))
    return "the product of the other keys of the batch and the ranks";
  if (key.ends_with(".nvme_path")) return "the device beside it is not nvme";
  if (key.ends_with(".ratio")) return "no part of the state stays on the device";
  return pass.report.refused.empty() ? "it changes nothing here"
                                     : "not used, because other keys are refused";
}

}  // namespace

void import_rest(ImportPass& pass) {
  for (const std::string& key : pass.unmentioned()) pass.not_needed(key, why_unused(pass, key));
}

}  // namespace sluice
