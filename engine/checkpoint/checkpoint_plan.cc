#include "engine/checkpoint/checkpoint_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

const char* dtype_of(DType type) {
  switch (type) {
    case DType::kFp32: return "F32";
    case DType::kBf16: return "BF16";
    case DType::kFp16: break;
  }
  return "F16";
}

struct Item {
  std::uint32_t tensor = 0;
  CheckpointPart part = CheckpointPart::kWeight;
  SafetensorsEntry entry;
};

// "format": required by transformers.
const std::map<std::string, std::string> kFileMetadata{{"format", "pt"}};

// At least what the item takes of a file: its data, and its part of the header, where its two
// offsets may have up to 20 digits.
std::uint64_t bytes_in_file(const Item& item) {
  return item.entry.size_bytes() + 2 * 20 +
         safetensors_beginning(std::span(&item.entry, 1), {}).size();
}

// Cuts `items` into files, which all get their names once their number is known.
void add_files(CheckpointPlan& plan, const std::string& stem, std::vector<Item> items,
               std::uint64_t file_bytes_max) {
  if (items.empty()) return;
  std::vector<std::vector<Item>> files(1);
  const std::uint64_t start_bytes = safetensors_beginning({}, kFileMetadata, kPageBytes).size();
  std::uint64_t bytes = start_bytes;
  for (Item& item : items) {
    const std::uint64_t item_bytes = bytes_in_file(item);
    if (!files.back().empty() && bytes + item_bytes > file_bytes_max) {
      files.emplace_back();
      bytes = start_bytes;
    }
    bytes += item_bytes;
    files.back().push_back(std::move(item));
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::vector<Item>& file = files[i];
    // Data begin at a page, and tensors of whole pages come first, so that these tensors go to the
    // drive and come from there without partial pages. Then come wide types, so that every tensor
    // begins at a multiple of its elements' size.
    std::ranges::stable_sort(file, std::ranges::greater(), [](const Item& item) {
      return std::pair(is_aligned(item.entry.size_bytes(), kPageBytes),
                       safetensors_element_bytes(item.entry.dtype));
    });
    std::vector<SafetensorsEntry> entries;
    for (const Item& item : file) entries.push_back(item.entry);
    CheckpointPlan::File& added = plan.files.emplace_back();
    added.name = fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, files.size());
    added.beginning = safetensors_beginning(entries, kFileMetadata, kPageBytes);
    added.size_bytes = added.beginning.size();
    for (const Item& item : file) {
      plan.tensors.push_back({.tensor = item.tensor,
                              .part = item.part,
                              .file = static_cast<std::uint32_t>(plan.files.size() - 1),
                              .dtype = item.entry.dtype,
                              .begin_bytes = added.size_bytes});
      added.size_bytes += item.entry.size_bytes();
    }
    plan.size_bytes += added.size_bytes;
  }
}

std::string index_of_weights(const CheckpointPlan& plan, const StateDescription& state) {
  nlohmann::ordered_json index;
  std::uint64_t bytes = 0;
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const CheckpointPlan::Tensor& tensor : plan.tensors) {
    if (tensor.part != CheckpointPart::kWeight) continue;
    const StateDescription::Tensor& model = state.tensors[tensor.tensor];
    bytes += SafetensorsEntry{model.name, tensor.dtype, model.shape}.size_bytes();
    map[model.name] = plan.files[tensor.file].name;
  }
  index["metadata"] = {{"total_size", bytes}};
  index["weight_map"] = std::move(map);
  return index.dump(2) + "\n";
}

}  // namespace

CheckpointPlan plan_checkpoint(const StateDescription& state, const StateFormat& format,
                               std::uint64_t file_bytes_max) {
  std::vector<Item> weights;
  std::vector<Item> rest;
  const auto add = [&](std::vector<Item>& items, std::uint32_t tensor, CheckpointPart part,
                       const char* dtype) {
    const StateDescription::Tensor& model = state.tensors[tensor];
    const std::string name = part == CheckpointPart::kWeight
                                 ? model.name
                                 : fmt::format("{}.{}", model.name, name_of(part));
    items.push_back({.tensor = tensor,
                     .part = part,
                     .entry = {.name = name, .dtype = dtype, .shape = model.shape}});
  };
  for (std::uint32_t tensor = 0; tensor < state.tensors.size(); ++tensor) {
    add(weights, tensor, CheckpointPart::kWeight, dtype_of(format.parameter));
    if (state.tensors[tensor].is_frozen) continue;
    if (format.master == MasterLayout::kSplitBf16)
      add(rest, tensor, CheckpointPart::kMasterLow, "I16");
    if (format.master == MasterLayout::kFp16) add(rest, tensor, CheckpointPart::kMaster, "F32");
    if (format.keeps_exp_avg) add(rest, tensor, CheckpointPart::kExpAvg, "F32");
    if (format.keeps_exp_avg_sq) add(rest, tensor, CheckpointPart::kExpAvgSq, "F32");
  }
  CheckpointPlan plan;
  add_files(plan, "model", std::move(weights), file_bytes_max);
  add_files(plan, "optimizer", std::move(rest), file_bytes_max);
  plan.stored_of.resize(state.tensors.size());
  for (std::uint32_t i = 0; i < plan.tensors.size(); ++i)
    plan.stored_of[plan.tensors[i].tensor].push_back(i);
  plan.index = index_of_weights(plan, state);
  return plan;
}

}  // namespace sluice
