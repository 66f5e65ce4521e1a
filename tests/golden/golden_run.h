// The functions read the files that twin.py has written. The files have the configuration and the
// results of a training run in PyTorch.
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/optimizer_math.h"
#include "tools/gpt/model/counter_random.h"
#include "tools/gpt/model/gpt_config.h"

namespace sluice::gpt {

struct GoldenRun {
  using Tensors = std::map<std::string, std::vector<float>>;

  GptConfig model;
  std::uint64_t seed = 0;
  std::uint32_t steps = 0;
  std::uint32_t batch = 0;
  AdamOptions adam;
  double learning_rate = 0;
  double clip_norm = 0;
  std::vector<double> losses;
  std::vector<double> gradient_norms;
  std::vector<Tensors> gradients;  // per step, before clipping
  Tensors parameters;              // after the last step

  // The tokens of one step. targets[t] is the token that follows tokens[t].
  struct MicroBatch {
    std::vector<std::uint32_t> tokens, targets;
  };
  MicroBatch micro_batch(std::uint32_t step) const {
    const CounterRandom random(seed, "golden data");
    MicroBatch result;
    for (std::uint64_t sequence = 0; sequence < batch; ++sequence) {
      const std::uint64_t first = (std::uint64_t{step} * batch + sequence) * (model.context + 1);
      const auto token = [&](std::uint64_t i) {
        return static_cast<std::uint32_t>(random.bits(first + i) % model.vocabulary);
      };
      for (std::uint64_t i = 0; i < model.context; ++i) {
        result.tokens.push_back(token(i));
        result.targets.push_back(token(i + 1));
      }
    }
    return result;
  }
};

// `path` has no file ending. An example is "<tests/golden>/gpt2_tied".
inline GoldenRun read_golden_run(const std::string& path) {
  std::ifstream json_file(path + ".json");
  std::ifstream values(path + ".f32", std::ios::binary);
  if (!json_file || !values) throw std::runtime_error("cannot read " + path + ".{json,f32}");
  const nlohmann::json json = nlohmann::json::parse(json_file);
  const nlohmann::json& model = json.at("model");
  const nlohmann::json& optimizer = json.at("optimizer");
  GoldenRun run;
  run.model = {.layers = model.at("layers"),
               .heads = model.at("heads"),
               .embedding = model.at("embedding"),
               .context = model.at("context"),
               .vocabulary = model.at("vocabulary"),
               .tied_head = model.at("tied_head")};
  run.seed = json.at("seed");
  run.steps = json.at("steps");
  run.batch = json.at("batch");
  run.adam = {.beta1 = optimizer.at("beta1"),
              .beta2 = optimizer.at("beta2"),
              .epsilon = optimizer.at("epsilon"),
              .weight_decay = optimizer.at("weight_decay")};
  run.learning_rate = optimizer.at("learning_rate");
  run.clip_norm = optimizer.at("clip_norm");
  run.losses = json.at("losses").get<std::vector<double>>();
  run.gradient_norms = json.at("gradient_norms").get<std::vector<double>>();

  const auto read_tensors = [&] {
    GoldenRun::Tensors tensors;
    for (const nlohmann::json& tensor : json.at("tensors")) {
      std::uint64_t count = 1;
      for (const std::uint64_t extent : tensor.at("shape")) count *= extent;
      std::vector<float>& data = tensors[tensor.at("name")];
      data.resize(count);
      values.read(reinterpret_cast<char*>(data.data()),
                  static_cast<std::streamsize>(count * sizeof(float)));
    }
    return tensors;
  };
  for (std::uint32_t step = 0; step < run.steps; ++step) run.gradients.push_back(read_tensors());
  run.parameters = read_tensors();
  if (!values || values.peek() != std::ifstream::traits_type::eof())
    throw std::runtime_error(path + ".f32 has not the size that the JSON file says");
  return run;
}

// Returns norm(parameters - the twin's parameters) / norm(the twin's whole update). `initial` holds
// the values before the run, and `parameters` holds the values after the run. Key biases (the
// middle third of c_attn.bias) are left out. Key biases do not change the softmax, so their
// gradient is rounding noise. Adam turns this noise into steps of full size.
inline double relative_update_error(const GoldenRun& run, const GoldenRun::Tensors& parameters,
                                    const GoldenRun::Tensors& initial) {
  double difference = 0;
  double total_update = 0;
  for (const auto& [name, expected] : run.parameters) {
    const bool has_key_bias = name.ends_with("attn.c_attn.bias");
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (has_key_bias && i / run.model.embedding == 1) continue;
      const double error = static_cast<double>(parameters.at(name)[i]) - expected[i];
      const double update = static_cast<double>(expected[i]) - initial.at(name)[i];
      difference += error * error;
      total_update += update * update;
    }
  }
  return std::sqrt(difference / total_update);
}

}  // namespace sluice::gpt
