#include "engine/checkpoint/universal_source.h"

#include <filesystem>
#include <set>
#include <sstream>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMasterFile = "/fp32.pt";
constexpr const char* kStepFile = "/step.pt";
constexpr const char* kTensorKey = "param";
constexpr std::uint64_t kTagBytesMax = 64_KiB;  // far more than any name has
// Where the model was inside of another module.
constexpr std::string_view kWrapper = "module.";

const char* file_name_of(StateKind kind) {
  if (kind == StateKind::kExpAvg) return "/exp_avg.pt";
  return kind == StateKind::kExpAvgSq ? "/exp_avg_sq.pt" : kMasterFile;
}

std::size_t slot_of(StateKind kind) {
  if (kind == StateKind::kExpAvg) return 1;
  return kind == StateKind::kExpAvgSq ? 2 : 0;
}

// The first word of a file. Empty if there is no file.
std::string tag_of(const std::string& path) {
  const auto fail = [&](const std::string& why) -> std::string {
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" {}; remove it, or name the folder that has \"zero\" in it", path, why));
  };
  std::error_code unknown;
  if (!fs::exists(path, unknown)) return {};
  if (!fs::is_regular_file(path, unknown)) return fail("is no regular file");
  std::string why;
  const auto text = read_text_file(path, kTagBytesMax, why);
  if (!text) return fail("cannot be read: " + why);
  std::string tag;
  std::istringstream(*text) >> tag;
  return tag;
}

void require_shape(const TorchFile& file, const std::vector<std::uint64_t>& shape) {
  if (file.has_tensor() && file.shape() == shape) return;
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\" has the shape [{}], but the model [{}]", file.path(),
                          file.has_tensor() ? fmt::format("{}", fmt::join(file.shape(), ", "))
                                            : "of no tensor",
                          fmt::join(shape, ", ")));
}

}  // namespace

std::optional<std::string> universal_parameters(const std::string& folder) {
  std::error_code error;
  if (fs::is_directory(folder + "/zero", error)) return folder + "/zero";
  const std::string tag = tag_of(folder + "/latest_universal");
  if (tag.empty() || tag.find('/') != std::string::npos) return std::nullopt;
  const std::string parameters = folder + "/" + tag + "/zero";
  return fs::is_directory(parameters, error) ? std::optional(parameters) : std::nullopt;
}

UniversalSource::UniversalSource(const std::string& parameters) : parameters_(parameters) {
  std::error_code error;
  for (fs::directory_iterator entry(parameters, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    std::error_code ignored;
    if (!fs::exists(entry->path().string() + kMasterFile, ignored)) continue;
    const std::string tensor = name.starts_with(kWrapper) ? name.substr(kWrapper.size()) : name;
    const auto [other, is_first] = folders_.emplace(tensor, entry->path());
    if (!is_first)
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\" and \"{}\" are both of the parameter \"{}\"; remove the one "
                              "that is not of this checkpoint",
                              other->second, entry->path().string(), tensor));
  }
  if (error || folders_.empty())
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" has no parameters of a universal checkpoint (NAME/fp32.pt); write it "
                    "again with DeepSpeed's ds_to_universal",
                    parameters));
  for (const auto& [tensor, folder] : folders_) add_step(tensor);
  if (first_stepped_.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" does not say how many updates its moments have seen: no "
                            "parameter has a step.pt; write it again with DeepSpeed's "
                            "ds_to_universal from an optimizer that counts steps by parameter, as "
                            "torch's AdamW does, or begin with the weights alone",
                            parameters));
}

// All of the state is at one step; a parameter without a file of its own goes with the others.
void UniversalSource::add_step(const std::string& tensor) {
  const std::string path = folder_of(tensor) + kStepFile;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return;
  const std::uint64_t step = TorchFile(path, kTensorKey).count();
  if (first_stepped_.empty()) {
    first_stepped_ = tensor;
    position_.step = step;
  }
  if (step != position_.step)
    throw Error(
        ErrorCode::kInput,
        fmt::format(
            "\"{}\" is at step {}, but \"{}\" at step {}; Sluice keeps one step for "
            "all parameters, so write the checkpoint again with DeepSpeed's ds_to_universal",
            path, step, first_stepped_, position_.step));
}

const std::string& UniversalSource::folder_of(const std::string& tensor) const {
  const auto found =
      folders_.find(tensor.starts_with(kWrapper) ? tensor.substr(kWrapper.size()) : tensor);
  if (found == folders_.end())
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" has no parameter \"{}\": it is a checkpoint "
                                               "of another model",
                                               parameters_, tensor));
  return found->second;
}

void UniversalSource::prepare(const StateDescription& wanted) {
  if (wanted.optimizer != OptimizerKind::kAdamW && wanted.optimizer != OptimizerKind::kAdam)
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has the moments of Adam, but the config asks for {}",
                            parameters_, name_of(wanted.optimizer)));
  std::set<std::string> superfluous;
  for (const auto& [tensor, folder] : folders_) superfluous.insert(folder);
  for (const StateDescription::Tensor& tensor : wanted.tensors) {
    if (tensor.is_opaque)
      throw Error(
          ErrorCode::kInput,
          fmt::format("the model keeps the bits of \"{}\", which is opaque, but a universal "
                      "checkpoint has fp32 numbers; restore from a checkpoint of Sluice, or "
                      "start from the weights",
                      tensor.name));
    superfluous.erase(folder_of(tensor.name));
    require_shape(file_of(tensor.name, StateKind::kMaster), tensor.shape);
    if (tensor.is_frozen) continue;
    require_shape(file_of(tensor.name, StateKind::kExpAvg), tensor.shape);
    require_shape(file_of(tensor.name, StateKind::kExpAvgSq), tensor.shape);
  }
  if (!superfluous.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("the model has no tensor for \"{}\": it is a checkpoint of another "
                            "model",
                            *superfluous.begin()));
}

TorchFile& UniversalSource::file_of(const std::string& tensor, StateKind kind) {
  Open& open = open_[slot_of(kind)];
  if (open.file == nullptr || open.tensor != tensor) {
    open.file = std::make_unique<TorchFile>(folder_of(tensor) + file_name_of(kind), kTensorKey);
    open.tensor = tensor;
  }
  return *open.file;
}

void UniversalSource::read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                           std::span<float> values) {
  file_of(tensor.name, kind).read(first_element, values);
}

}  // namespace sluice
