#include "engine/checkpoint/same_state.h"

#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr const char* kOtherModel =
    "it is a checkpoint of another model; name a checkpoint of this model (with `sluice train`: "
    "--checkpoint DIR), or make the model as it was when the checkpoint was saved";
constexpr const char* kConverting =
    "--convert (in C++ CheckpointPrecision::kConvert, in C `converts`)";

}  // namespace

void require_same_state(const StateDescription& own, const StateDescription& wanted,
                        CheckpointPrecision precision, const std::string& where) {
  const auto refuse = [&](const std::string& field, const std::string& found,
                          const std::string& expected, const std::string& remedy) {
    throw Error(ErrorCode::kInput,
                fmt::format("{}: field \"{}\" is {}, but the config asks for {}; {}", where, field,
                            found, expected, remedy));
  };
  const bool converts = precision == CheckpointPrecision::kConvert;
  if (own.optimizer != wanted.optimizer)
    refuse("optimizer.type", std::string(name_of(own.optimizer)),
           std::string(name_of(wanted.optimizer)),
           "their moments mean different things; start from the weights alone (--init, in a "
           "program initialize())");
  if (own.parameter != wanted.parameter && !converts)
    refuse("precision", std::string(name_of(own.parameter)), std::string(name_of(wanted.parameter)),
           fmt::format("{} changes the precision, and rounds the parameters from the masters again",
                       kConverting));
  if (own.moments != wanted.moments && !converts)
    refuse("optimizer.state", std::string(name_of(own.moments)),
           std::string(name_of(wanted.moments)),
           wanted.moments == OptimizerState::kFp32
               ? fmt::format("{} continues from the rounded moments, in fp32", kConverting)
               : fmt::format("{} rounds the moments to {}", kConverting, name_of(wanted.moments)));
  std::map<std::string, const StateDescription::Tensor*> by_name;
  for (const StateDescription::Tensor& tensor : own.tensors) by_name[tensor.name] = &tensor;
  for (const StateDescription::Tensor& tensor : wanted.tensors) {
    const auto found = by_name.find(tensor.name);
    if (found == by_name.end())
      throw Error(ErrorCode::kInput,
                  fmt::format("{}: it has no tensor \"{}\", which the model has; {}", where,
                              tensor.name, kOtherModel));
    if (found->second->shape != tensor.shape)
      refuse(fmt::format("model.{}.shape", tensor.name),
             fmt::format("[{}]", fmt::join(found->second->shape, ", ")),
             fmt::format("[{}]", fmt::join(tensor.shape, ", ")), kOtherModel);
    if (found->second->is_frozen != tensor.is_frozen && !converts)
      refuse(fmt::format("model.{}.frozen", tensor.name),
             found->second->is_frozen ? "true" : "false", tensor.is_frozen ? "true" : "false",
             fmt::format("{} starts with zero moments where a tensor was frozen", kConverting));
    if (found->second->is_opaque != tensor.is_opaque)
      refuse(fmt::format("model.{}.opaque", tensor.name),
             found->second->is_opaque ? "true" : "false", tensor.is_opaque ? "true" : "false",
             "bits are not numbers; make the model as it was saved");
    if (tensor.is_opaque && size_of(own.parameter) != size_of(wanted.parameter))
      refuse(
          "precision", std::string(name_of(own.parameter)), std::string(name_of(wanted.parameter)),
          fmt::format("the words of \"{}\", which is opaque, have another size then", tensor.name));
    by_name.erase(found);
  }
  if (!by_name.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("{}: it has a tensor \"{}\", which the model does not have; {}", where,
                            by_name.begin()->first, kOtherModel));
}

void restart_unfrozen(const StateDescription& own, const StateDescription& wanted,
                      StatePosition& position) {
  std::set<std::string_view> frozen;
  for (const StateDescription::Tensor& tensor : own.tensors)
    if (tensor.is_frozen) frozen.insert(tensor.name);
  for (const StateDescription::Tensor& tensor : wanted.tensors)
    if (!tensor.is_frozen && frozen.contains(tensor.name)) position.tensor_updates[tensor.name] = 0;
}

}  // namespace sluice
