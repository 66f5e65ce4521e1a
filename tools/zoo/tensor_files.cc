// Models of any architecture, from the names and shapes in the headers of their safetensors files.
// A prefix with a number behind it ("model.layers.0.", "model.layers.1.") is a stack, and each
// number is a unit. Everything else is the embedding or the head, by its name.
#include <algorithm>
#include <array>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/safetensors.h>
#include "tools/zoo/zoo_readers.h"

namespace sluice {
namespace {

constexpr std::uint64_t kContextDefault = 2048;

// The parts of a name around its first number.
struct Place {
  std::string stack;  // "model.layers"; empty: not in a stack
  std::uint64_t index = 0;
};

bool is_layer_number(std::string_view word) {
  return !word.empty() && word.size() < 10 &&
         std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
}

Place place_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = std::string_view(name).substr(begin, end - begin);
    if (begin != 0 && is_layer_number(word))
      return {name.substr(0, begin - 1), std::stoull(std::string(word))};
    begin = end + 1;
  }
  return {};
}

bool has_word(const std::string& name, std::string_view word) {
  return name.find(word) != std::string::npos;
}

bool is_embedding(const std::string& name) {
  if (has_word(name, "embed_out") || has_word(name, "unembed")) return false;  // heads
  constexpr std::array<std::string_view, 6> kWords{"embed",   "wte",   "wpe",
                                                   "shared.", "patch", "conv"};
  return std::ranges::any_of(kWords, [&](std::string_view word) { return has_word(name, word); });
}

// The tensors of a stack's experts: one of three extents, or one for each number behind "experts.".
bool is_expert(const std::string& name) {
  return has_word(name, "experts.") && !has_word(name, "shared_expert");
}

bool has_expert_number(const std::string& name) {
  return !place_of(name.substr(name.find("experts."))).stack.empty();
}

bool is_encoder(const std::string& stack) {
  return has_word(stack, "encoder");
}

bool is_weight(const SafetensorsTensor& tensor) {
  return tensor.dtype.starts_with('F') || tensor.dtype == "BF16";
}

// Packed weights of a few bits. Masks, too, may be integers; their first extent is 1.
bool is_quantized(const SafetensorsTensor& tensor) {
  constexpr std::array<std::string_view, 6> kTypes{"U8", "I8", "U16", "I16", "U32", "I32"};
  return tensor.shape.size() >= 2 && tensor.shape.front() > 1 &&
         std::ranges::find(kTypes, tensor.dtype) != kTypes.end();
}

double idle_share(const SafetensorsReader& files, const std::vector<std::string>& names,
                  std::uint64_t used) {
  std::uint64_t experts = 0;
  for (const std::string& name : names) {
    if (!is_expert(name)) continue;
    const Place place = place_of(name.substr(name.find("experts.")));
    if (!place.stack.empty()) {
      experts = std::max(experts, place.index + 1);
    } else if (files.find(name)->shape.size() == 3) {
      experts = std::max(experts, files.find(name)->shape.front());
    }
  }
  return used == 0 || experts <= used
             ? 0
             : static_cast<double>(experts - used) / static_cast<double>(experts);
}

class TensorFiles {
 public:
  TensorFiles(const std::string& path, const ConfigJson* config)
      : files_(path), used_(config ? config->count_from_zero("num_experts_per_tok", 0) : 0) {
    model_.context =
        config ? config->count_or("max_position_embeddings", kContextDefault) : kContextDefault;
    model_.limit = config && config->has("max_position_embeddings") ? PositionLimit::kTraining
                                                                    : PositionLimit::kNone;
    is_tied_ = config && config->flag("tie_word_embeddings", false);
  }

  ZooModel read() {
    for (const std::string& name : files_.names()) {
      const SafetensorsTensor& tensor = *files_.find(name);
      if (!is_weight(tensor) && !is_quantized(tensor)) continue;
      check_extents(tensor);
      if (is_weight(tensor)) sort_in(name);
    }
    refuse_quantized();
    if (stacks_.empty())
      throw Error(
          ErrorCode::kConfig,
          fmt::format("\"{}\" has {} tensors, but none of their names has a number that "
                      "repeats, such as model.layers.0; --parameters and --layers come near",
                      files_.path(), files_.names().size()));
    find_width();
    add("embedding", embedding_, /*is_lookup=*/true);
    for (const std::string& stack : ordered_stacks()) {
      for (const auto& [index, names] : stacks_[stack]) {
        add(fmt::format("{}.{}", stack, index), names, /*is_lookup=*/false);
        ++model_.layers;
      }
    }
    if (!head_.empty()) add("head", head_, /*is_lookup=*/false);
    model_.kept_values /= model_.layers;
    find_tie();
    return std::move(model_);
  }

 private:
  // A header may state any extents for a type whose size the reader does not know.
  void check_extents(const SafetensorsTensor& tensor) const {
    if (!has_usable_extents(tensor.shape))
      throw Error(
          ErrorCode::kInput,
          fmt::format("\"{}\": tensor \"{}\" of type {} has the shape [{}], but a tensor has "
                      "from 1 to {} elements; the file is damaged",
                      files_.path(), tensor.name, tensor.dtype, fmt::join(tensor.shape, ", "),
                      kElementsMax));
  }

  // The floats beside packed layers are only their scales and norms.
  void refuse_quantized() const {
    double weights = 0, packed = 0;
    const SafetensorsTensor* example = nullptr;
    for (const std::string& name : files_.names()) {
      const SafetensorsTensor& tensor = *files_.find(name);
      if (place_of(name).stack.empty()) continue;
      if (is_weight(tensor)) weights += static_cast<double>(tensor.element_count());
      if (!is_quantized(tensor)) continue;
      packed += static_cast<double>(tensor.element_count());
      if (example == nullptr) example = &tensor;
    }
    if (packed > weights)
      throw Error(ErrorCode::kConfig,
                  fmt::format("\"{}\" has quantized tensors ({} is {}); plan with the unquantized "
                              "model, or --parameters and --layers",
                              files_.path(), example->name, example->dtype));
  }

  void sort_in(const std::string& name) {
    const Place place = place_of(name);
    if (!place.stack.empty()) {
      stacks_[place.stack][place.index].push_back(name);
    } else {
      (is_embedding(name) ? embedding_ : head_).push_back(name);
    }
  }

  // An encoder comes before what reads it.
  std::vector<std::string> ordered_stacks() const {
    std::vector<std::string> order;
    for (const auto& [stack, units] : stacks_) order.push_back(stack);
    std::ranges::stable_sort(order, {},
                             [](const std::string& stack) { return !is_encoder(stack); });
    return order;
  }

  // The most frequent length of the stacks' vectors is that of the norms.
  void find_width() {
    std::map<std::uint64_t, std::size_t> lengths;
    for (const auto& [stack, units] : stacks_)
      for (const auto& [index, names] : units)
        for (const std::string& name : names)
          if (const auto& shape = files_.find(name)->shape; shape.size() == 1) ++lengths[shape[0]];
    const auto most =
        std::ranges::max_element(lengths, {}, [](const auto& entry) { return entry.second; });
    if (most != lengths.end()) model_.hidden = most->first;
    for (const std::string& name : embedding_) {
      const auto& shape = files_.find(name)->shape;
      if (shape.size() != 2) continue;
      if (model_.hidden == 0) model_.hidden = shape[1];
      if (shape[1] == model_.hidden) model_.vocabulary = std::max(model_.vocabulary, shape[0]);
    }
    if (model_.hidden == 0) model_.hidden = 1;
  }

  void add(const std::string& unit_name, const std::vector<std::string>& names, bool is_lookup) {
    if (names.empty()) return;
    UnitBuilder unit(unit_name, "");
    const double idle = idle_share(files_, names, used_);
    double idle_elements = 0, kept = 0;
    bool has_experts = false;
    for (const std::string& name : names) {
      const SafetensorsTensor& tensor = *files_.find(name);
      std::vector<std::uint64_t> shape = tensor.shape;
      if (shape.empty()) shape = {1};
      const auto elements = static_cast<double>(tensor.element_count());
      if (is_expert(name)) {
        idle_elements += idle * elements;
        has_experts = true;
      }
      if (!is_lookup) kept += kept_inputs(name, shape, idle);
      unit.add(name, std::move(shape));
    }
    const bool is_layer = !is_lookup && unit_name != "head";
    if (is_layer) model_.kept_values += static_cast<std::uint64_t>(kept) + 2 * model_.hidden;
    if (has_experts && used_ == 0) model_.counts_all_experts = true;
    const std::uint64_t attention = is_encoder(unit_name) ? 2 * model_.hidden : model_.hidden;
    is_lookup ? add_lookup(model_, std::move(unit))
              : add_unit(model_, std::move(unit), is_layer ? attention : 0);
    model_.work.back().product_elements -= idle_elements;
    model_.active_parameters -= idle_elements;
  }

  // The input of every product is kept, per token: of the experts, that of those it reaches. The
  // matrices of all experts are one tensor, [experts, outputs, inputs], or one for each expert.
  static double kept_inputs(const std::string& name, const std::vector<std::uint64_t>& shape,
                            double idle) {
    if (!is_expert(name)) return shape.size() == 2 ? static_cast<double>(shape[1]) : 0;
    if (shape.size() == 3)
      return (1 - idle) * static_cast<double>(shape[0]) * static_cast<double>(shape[2]);
    const bool is_matrix = shape.size() == 2 && has_expert_number(name);
    return is_matrix ? (1 - idle) * static_cast<double>(shape[1]) : 0;
  }

  // A head that the files leave out is the embedding.
  void find_tie() {
    const bool has_head = std::ranges::any_of(head_, [&](const std::string& name) {
      const auto& shape = files_.find(name)->shape;
      return shape.size() == 2 && shape[0] == model_.vocabulary;
    });
    if (has_head || !is_tied_ || embedding_.empty()) return;
    for (const std::string& name : embedding_) {
      const auto& shape = files_.find(name)->shape;
      if (shape.size() != 2 || shape[0] != model_.vocabulary) continue;
      model_.tied = {name, "lm_head.weight"};
      model_.has_tied_head = true;
    }
  }

  SafetensorsReader files_;
  const std::uint64_t used_;  // experts of a token; 0 = not known
  bool is_tied_ = false;
  std::map<std::string, std::map<std::uint64_t, std::vector<std::string>>> stacks_;
  std::vector<std::string> embedding_, head_;
  ZooModel model_;
};

}  // namespace

ZooModel read_tensor_files(const std::string& path, const ConfigJson* config) {
  if (config == nullptr) return TensorFiles(path, nullptr).read();
  const ConfigJson values = config->with_part("text_config");
  return TensorFiles(path, &values).read();
}

}  // namespace sluice
