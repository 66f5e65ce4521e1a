// A GPT saved as safetensors. The file has the fp32 master weights under GPT-2's names, and the
// model's shape in the metadata. Published GPT-2 models lack this metadata. The shape of a
// published model is read from the config.json in the model's folder, also if the path names a file
// there. If there is no config.json, the shape follows from the tensors, and 64 elements per head
// are a guess. A folder may have several files and an index. Hugging Face and
// `sluice train --checkpoint` write such folders. Names may have a prefix, such as "transformer.",
// and elements may be fp32, bf16 or fp16.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/safetensors.h>
#include "tools/gpt/model/gpt_config.h"
#include "tools/report/safetensors_output.h"

namespace sluice {

// All ranks must make this call. Rank 0 writes the file. The caller commits the file.
// Fails with the errors of write_safetensors().
// Requires: no step is active.
void save_model(OutputFile& output, const gpt::GptConfig& config, Engine& engine);

// Returns the text of the config.json that belongs in the folder of a checkpoint. With this file,
// the Python library `transformers` can read the folder.
std::string gpt2_config_text(const gpt::GptConfig& model);

// Returns the config.json that ModelFile reads beside the file `path`, if the file has no metadata.
// Returns an empty text if `path` is no file, or if no config.json of a model is beside it. A
// config.json that cannot be read counts as one of a model.
std::string config_beside(const std::string& path);

class ModelFile {
 public:
  // Opens the file at `path` for a model of the shape `config`. Returns null if `path` is empty.
  // Fails with the errors of the constructor and of require_shape_of().
  static std::unique_ptr<ModelFile> open(const std::string& path, const gpt::GptConfig& config);

  // `path` names a file or a folder that SafetensorsReader can read.
  // Fails with kInput if the file is no GPT, lacks a tensor, or has a tensor of a wrong shape.
  explicit ModelFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const gpt::GptConfig& config() const { return config_; }
  // Whether neither metadata nor a config.json says how many heads the model has. No tensor's shape
  // shows the number. guess_of_heads() says so, with the number that config() has instead.
  bool has_guessed_heads() const;
  std::string guess_of_heads() const;
  // Does the same as SafetensorsReader::read(). `tensor` is this project's name for the tensor, not
  // the name in the file.
  void read(const std::string& tensor, std::uint64_t first_element, std::span<float> values) const;

  // Fails with kInput if the file's shape differs from `config`. The message names the first
  // differing key of the section "model".
  void require_shape_of(const gpt::GptConfig& config) const;

  // Returns the saved master weights, bit for bit, for Engine::initialize(). This object must
  // outlive the result.
  InitialValues initial_values() const;

 private:
  std::string find_prefix() const;
  std::string find_config_file() const;
  bool has_metadata() const;
  gpt::GptConfig read_config() const;
  gpt::GptConfig config_from_metadata() const;
  gpt::GptConfig config_from_shapes() const;
  gpt::GptConfig config_from_file() const;
  bool is_head_tied(bool says_tied) const;
  bool head_equals_embedding() const;
  void check_tensors() const;
  std::string name_in_file(const std::string& tensor) const;
  const std::vector<std::uint64_t>& shape(const std::string& tensor) const;

  SafetensorsReader file_;
  std::string prefix_;
  std::string config_file_;  // the config.json that describes the model; empty = none
  gpt::GptConfig config_;
};

}  // namespace sluice
