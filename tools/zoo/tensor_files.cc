// Models of any architecture, from the names and shapes in the headers of their safetensors files.
// A prefix that comes with several numbers ("model.layers.0.", "model.layers.1.") is a stack, and
// each number is a unit. Everything else is the embedding or the head, by its name.
#include <algorithm>
#include <array>
#include <map>
#include <set>

#include <fmt/format.h>

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

bool is_number(std::string_view word) {
  return !word.empty() && word.size() < 10 &&
         std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
}

Place place_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = std::string_view(name).substr(begin, end - begin);
    if (begin != 0 && is_number(word))
      return {name.substr(0, begin - 1), std::stoull(std::string(word))};
    begin = end + 1;
  }
  return {};
}

bool is_embedding(const std::string& name) {
  constexpr std::array<std::string_view, 6> kWords{"embed",   "wte",   "wpe",
                                                   "shared.", "patch", "conv"};
  return std::ranges::any_of(
      kWords, [&](std::string_view word) { return name.find(word) != std::string::npos; });
}

// The tensors of a stack's experts: one of three extents, or one for each number behind "experts.".
bool is_expert(const std::string& name) {
  return name.find("experts.") != std::string::npos &&
         name.find("shared_expert") == std::string::npos;
}

double idle_share(const SafetensorsReader& files, const std::vector<std::string>& names,
                  std::uint64_t used) {
  std::set<std::uint64_t> numbers;
  for (const std::string& name : names) {
    if (!is_expert(name)) continue;
    const Place place = place_of(name.substr(name.find("experts.")));
    if (!place.stack.empty()) {
      numbers.insert(place.index);
    } else if (files.find(name)->shape.size() == 3) {
      for (std::uint64_t i = 0; i < files.find(name)->shape.front(); ++i) numbers.insert(i);
    }
  }
  const std::uint64_t experts = numbers.size();
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
    is_tied_ = config && config->flag("tie_word_embeddings", false);
  }

  ZooModel read() {
    for (const std::string& name : files_.names()) {
      const SafetensorsTensor& tensor = *files_.find(name);
      if (tensor.dtype.front() == 'F' || tensor.dtype.front() == 'B') sort_in(name);
    }
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
    std::ranges::stable_sort(order, {}, [](const std::string& stack) {
      return stack.find("encoder") == std::string::npos;
    });
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
    double idle_elements = 0;
    for (const std::string& name : names) {
      const SafetensorsTensor& tensor = *files_.find(name);
      std::vector<std::uint64_t> shape = tensor.shape;
      if (shape.empty()) shape = {1};
      const auto elements = static_cast<double>(tensor.element_count());
      if (is_expert(name)) idle_elements += idle * elements;
      // The input of every product is kept.
      if (!is_lookup && shape.size() == 2) kept_ += shape[1];
      unit.add(name, std::move(shape));
    }
    const bool is_layer = !is_lookup && unit_name != "head";
    if (is_layer) model_.kept_values += kept_ + 2 * model_.hidden;
    kept_ = 0;
    is_lookup ? add_lookup(model_, std::move(unit))
              : add_unit(model_, std::move(unit), is_layer ? model_.hidden : 0);
    model_.work.back().product_elements -= idle_elements;
    model_.active_parameters -= idle_elements;
  }

  // A head that the files leave out is the embedding.
  void find_tie() {
    const bool has_head = std::ranges::any_of(head_, [&](const std::string& name) {
      const auto& shape = files_.find(name)->shape;
      return shape.size() == 2 && shape[0] == model_.vocabulary;
    });
    if (has_head || !is_tied_ || embedding_.empty()) return;
    for (const std::string& name : embedding_)
      if (files_.find(name)->shape.front() == model_.vocabulary)
        model_.tied = {name, "lm_head.weight"};
  }

  SafetensorsReader files_;
  const std::uint64_t used_;  // experts of a token; 0 = not known
  bool is_tied_ = false;
  std::map<std::string, std::map<std::uint64_t, std::vector<std::string>>> stacks_;
  std::vector<std::string> embedding_, head_;
  std::uint64_t kept_ = 0;
  ZooModel model_;
};

}  // namespace

ZooModel read_tensor_files(const std::string& path, const ConfigJson* config) {
  return TensorFiles(path, config).read();
}

}  // namespace sluice
