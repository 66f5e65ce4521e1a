#include "tools/commands/generate_command.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/topology.h"
#include "engine/checkpoint/checkpoint_folder.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/gpt_model.h"
#include "tools/gpt/model/sampling.h"
#include "tools/gpt/text/tokenizer.h"
#include "tools/gpt/train/model_file.h"

namespace sluice {
namespace {

constexpr std::uint64_t kTensorAlignBytes = 256;

std::uint64_t largest_unit_bytes(const ModelSpec& model) {
  std::uint64_t largest = 0;
  for (const UnitSpec& unit : model.units) {
    std::uint64_t bytes = 0;
    for (const TensorSpec& tensor : unit.tensors)
      bytes += align_up(tensor.element_count() * sizeof(float), kTensorAlignBytes);
    largest = std::max(largest, bytes);
  }
  return largest;
}

// Brings one unit after the other from the file into the same buffer.
class UnitReader {
 public:
  UnitReader(const ModelFile& file, const ModelSpec& model)
      : file_(file), model_(model), buffer_(largest_unit_bytes(model), "one unit of the model") {}

  std::vector<const std::byte*> read(UnitId unit) {
    std::vector<const std::byte*> pointers;
    std::byte* next = buffer_.data();
    for (const TensorSpec& tensor : model_.units[index_of(unit)].tensors) {
      pointers.push_back(next);
      file_.read(tensor.name, 0, {reinterpret_cast<float*>(next), tensor.element_count()});
      next += align_up(tensor.element_count() * sizeof(float), kTensorAlignBytes);
    }
    return pointers;
  }

 private:
  const ModelFile& file_;
  const ModelSpec& model_;
  AlignedBuffer buffer_;
};

// The tokenizer's file in the folder of a model or beside its file. A file with one token per byte
// needs none, whatever else is in its folder.
std::string tokenizer_of_model(const GenerateOptions& options, std::uint32_t token_count) {
  const std::filesystem::path place(options.model_file);
  if (std::filesystem::is_directory(place)) return tokenizer_in_folder(place.string());
  return token_count == 256 ? "" : tokenizer_in_folder(place.parent_path().string());
}

// The tokens of a text, and back: a byte each without a tokenizer.
class Vocabulary {
 public:
  Vocabulary(const GenerateOptions& options, std::uint32_t token_count) {
    const std::string path =
        options.tokenizer.empty() ? tokenizer_of_model(options, token_count) : options.tokenizer;
    if (!path.empty()) {
      tokenizer_.emplace(path);
      if (tokenizer_->token_count() > token_count)
        throw Error(ErrorCode::kInput,
                    fmt::format("tokenizer \"{}\" has {} tokens, but \"{}\" has a vocabulary of "
                                "{}; it belongs to another model",
                                tokenizer_->path(), tokenizer_->token_count(), options.model_file,
                                token_count));
    } else if (token_count != 256) {
      throw Error(
          ErrorCode::kInput,
          fmt::format("\"{}\" has a vocabulary of {} tokens; pass --tokenizer FILE with the "
                      "tokenizer that it was trained with (without one, the tokens are the "
                      "256 bytes)",
                      options.model_file, token_count));
    }
  }

  std::vector<std::uint32_t> tokens_of(const std::string& text) {
    std::vector<std::uint32_t> tokens;
    if (tokenizer_) {
      tokenizer_->encode(text, tokens);
    } else {
      for (const char letter : text) tokens.push_back(static_cast<unsigned char>(letter));
    }
    return tokens;
  }

  // Tokens beyond the tokenizer's, which pad some models' vocabularies, have no bytes.
  std::string bytes_of(std::uint32_t token) const {
    return tokenizer_ ? std::string(tokenizer_->bytes_of(token))
                      : std::string(1, static_cast<char>(token));
  }

 private:
  std::optional<Tokenizer> tokenizer_;
};

// The newest checkpoint of a folder of checkpoints, or the path itself.
std::string newest_in(const std::string& path) {
  const std::filesystem::path root(path);
  std::error_code no_answer;
  if (std::filesystem::is_directory(root / "latest", no_answer)) return root / "latest";
  if (!std::filesystem::is_directory(root, no_answer)) return path;
  const std::vector<CheckpointName> all = list_checkpoints(path);  // where no link can be made
  return all.empty() ? path : (root / all.front().text()).string();
}

}  // namespace

int run_generate(const GenerateOptions& options) {
  // The first token takes the whole model from the drive, so the text begins with it.
  std::optional<Progress> progress(std::in_place, "loading the model");
  const ModelFile file(newest_in(options.model_file));
  const gpt::GptConfig& config = file.config();
  if (options.prompt.empty())
    throw Error(ErrorCode::kInput,
                "the prompt is empty; pass --prompt TEXT with at least one byte");
  Vocabulary vocabulary(options, config.vocabulary);
  if (file.has_guessed_heads())
    warn("sluice: {}; with other heads, the text is another one\n", file.guess_of_heads());
  const ModelSpec model = validated(gpt::gpt_model_spec(config));
  const unsigned threads = granted_threads(options.threads);
  // Without a backward pass, all layers can have the arrays of one.
  gpt::GptCompute compute(config, {.batch = 1, .sequence = config.context},
                          {.threads = threads, .checkpoints = gpt::Checkpoints::kUnits});
  // The value between two units changes in place.
  const AlignedBuffer between(std::uint64_t{config.context} * config.embedding * sizeof(float),
                              "activations");
  auto* const value = reinterpret_cast<float*>(between.data());
  UnitReader reader(file, model);
  std::vector<std::uint32_t> tokens = vocabulary.tokens_of(options.prompt);
  const auto begin_text = [&] {
    if (!progress) return;
    progress.reset();
    say_text(options.prompt);
  };
  for (std::uint64_t position = 0; position < options.tokens && said_failure() == 0; ++position) {
    const std::size_t seen = std::min<std::size_t>(tokens.size(), config.context);
    compute.start_generation(std::span(tokens).last(seen));
    for (std::uint32_t use = 0; use < compute.use_count(); ++use)
      compute.forward(use, reader.read(model.forward_order[use]),
                      {.input = value, .output = value});
    const std::span<const float> logits = compute.last_logits();
    if (!std::ranges::all_of(logits, [](float logit) { return std::isfinite(logit); }))
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\" gives a NaN or infinite logit: its weights are damaged",
                              options.model_file));
    const std::uint32_t token = gpt::sample_token(
        logits, {.temperature = options.temperature, .top_k = options.top_k, .seed = options.seed},
        position);
    tokens.push_back(token);
    begin_text();
    say_text(vocabulary.bytes_of(token));
    flush_said();
  }
  begin_text();
  say_text("\n");
  return kExitOk;
}

}  // namespace sluice
