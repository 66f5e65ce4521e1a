// A GPT with a mixture of experts learns to guess the next letter of a text. Each layer has
// attention and 16 experts, of which a router chooses one for each letter while the step runs. The
// step announces the chosen ones: those are read from NVMe and updated, and the others stay as they
// are. Start it as `experts FOLDER [TEXT]`, alone or with `mpirun -n 2`; the state is in FOLDER.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/rank_world.h>

using namespace sluice;

constexpr std::size_t kLetters = 128, kLength = 24, kSequences = 4, kTokens = kLength * kSequences;
constexpr std::size_t kWidth = 32, kHeads = 2, kHeadWidth = kWidth / kHeads, kHidden = 64;
constexpr std::size_t kLayers = 2, kExperts = 16;
constexpr float kScale = 0.25f;  // 1 / sqrt(kHeadWidth)
// The units: embedding, output, the layers' attention with their routers, the layers' experts.
constexpr UnitId kEmbedding{0}, kOutput{1};
constexpr UnitId attention_of(std::size_t layer) {
  return UnitId{static_cast<std::uint32_t>(2 + layer)};
}
constexpr UnitId expert_of(std::size_t layer, std::size_t expert) {
  return UnitId{static_cast<std::uint32_t>(2 + kLayers + layer * kExperts + expert)};
}

const std::string kText =
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. ";

// Values of all tokens, `width` for each, and the gradient of the loss by them.
struct Rows {
  explicit Rows(std::size_t of_token)
      : width(of_token), values(kTokens * of_token), gradient(kTokens * of_token) {}
  void clear() { *this = Rows(width); }
  float* at(std::size_t token) { return &values[token * width]; }
  float* gradient_at(std::size_t token) { return &gradient[token * width]; }
  std::size_t width;
  std::vector<float> values, gradient;
};

// For one token: result += matrix * from.
void multiply(const float* matrix, Rows& from, Rows& result, std::size_t token) {
  for (std::size_t row = 0; row < result.width; ++row)
    result.at(token)[row] += std::inner_product(from.at(token), from.at(token) + from.width,
                                                matrix + row * from.width, 0.0f);
}
// Adds the gradients of the matrix and of `from`.
void multiply_back(const float* matrix, float* matrix_gradient, Rows& from, Rows& result,
                   std::size_t token) {
  for (std::size_t row = 0; row < result.width; ++row) {
    const float own = result.gradient_at(token)[row];
    for (std::size_t i = 0; i < from.width; ++i) {
      matrix_gradient[row * from.width + i] += own * from.at(token)[i];
      from.gradient_at(token)[i] += own * matrix[row * from.width + i];
    }
  }
}

float root_mean_square(const float* values) {
  return std::sqrt(std::inner_product(values, values + kWidth, values, 1e-5f) / kWidth);
}
void normalize(Rows& from, Rows& result, std::size_t token) {
  const float root = root_mean_square(from.at(token));
  for (std::size_t i = 0; i < kWidth; ++i) result.at(token)[i] = from.at(token)[i] / root;
}
void normalize_back(Rows& from, Rows& result, std::size_t token) {
  const float root = root_mean_square(from.at(token));
  const float* own = result.gradient_at(token);
  const float mean = std::inner_product(own, own + kWidth, result.at(token), 0.0f) / kWidth;
  for (std::size_t i = 0; i < kWidth; ++i)
    from.gradient_at(token)[i] += (own[i] - result.at(token)[i] * mean) / root;
}

void softmax(float* values, std::size_t count) {
  const float most = *std::max_element(values, values + count);
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - most);
  for (std::size_t i = 0; i < count; ++i) values[i] /= sum;
}
// `gradient` becomes that of the scores of which softmax() has made `values`.
void softmax_back(const float* values, float* gradient, std::size_t count) {
  const float mean = std::inner_product(values, values + count, gradient, 0.0f);
  for (std::size_t i = 0; i < count; ++i) gradient[i] = values[i] * (gradient[i] - mean);
}

// A unit's parameters and, in backward, its gradients.
struct Weights {
  std::vector<const float*> values;
  std::vector<float*> gradients;
};

// middle = input + out * attention(norm(input)); output = middle + gate * expert(norm(middle)).
struct Layer {
  Rows normed{kWidth}, query{kWidth}, key{kWidth}, value{kWidth}, mixed{kWidth};
  Rows shares{kHeads * kLength};  // of the letters before, in what a letter attends to
  Rows middle{kWidth}, normed_middle{kWidth}, scores{kExperts}, hidden{kHidden}, answer{kWidth};
  Rows output{kWidth};
  std::vector<std::size_t> expert = std::vector<std::size_t>(kTokens);

  void attend(Rows& input, const Weights& weights) {
    *this = Layer();  // all zeros
    for (std::size_t token = 0; token < kTokens; ++token) {
      normalize(input, normed, token);
      multiply(weights.values[0], normed, query, token);
      multiply(weights.values[1], normed, key, token);
      multiply(weights.values[2], normed, value, token);
      for (std::size_t head = 0; head < kHeads; ++head) look_back(token, head);
      std::copy_n(input.at(token), kWidth, middle.at(token));
      multiply(weights.values[3], mixed, middle, token);
      normalize(middle, normed_middle, token);
      multiply(weights.values[4], normed_middle, scores, token);
      softmax(scores.at(token), kExperts);
      const float* of_token = scores.at(token);
      expert[token] =
          static_cast<std::size_t>(std::max_element(of_token, of_token + kExperts) - of_token);
    }
  }
  void attend_back(Rows& input, const Weights& weights) {
    for (std::size_t token = 0; token < kTokens; ++token) {
      softmax_back(scores.at(token), scores.gradient_at(token), kExperts);
      multiply_back(weights.values[4], weights.gradients[4], normed_middle, scores, token);
      std::copy_n(output.gradient_at(token), kWidth, middle.gradient_at(token));
      normalize_back(middle, normed_middle, token);
      multiply_back(weights.values[3], weights.gradients[3], mixed, middle, token);
      for (std::size_t head = 0; head < kHeads; ++head) look_back_gradient(token, head);
    }
    for (std::size_t token = 0; token < kTokens; ++token) {  // later tokens have looked at it
      multiply_back(weights.values[0], weights.gradients[0], normed, query, token);
      multiply_back(weights.values[1], weights.gradients[1], normed, key, token);
      multiply_back(weights.values[2], weights.gradients[2], normed, value, token);
      std::copy_n(middle.gradient_at(token), kWidth, input.gradient_at(token));
      normalize_back(input, normed, token);
    }
  }
  void ask(std::size_t number, const Weights& weights) {
    for (std::size_t token = 0; token < kTokens; ++token) {
      if (expert[token] != number) continue;
      multiply(weights.values[0], normed_middle, hidden, token);
      for (std::size_t i = 0; i < kHidden; ++i)
        hidden.at(token)[i] = std::tanh(hidden.at(token)[i]);
      multiply(weights.values[1], hidden, answer, token);
      const float gate = scores.at(token)[number];
      for (std::size_t i = 0; i < kWidth; ++i)
        output.at(token)[i] = middle.at(token)[i] + gate * answer.at(token)[i];
    }
  }
  void ask_back(std::size_t number, const Weights& weights) {
    for (std::size_t token = 0; token < kTokens; ++token) {
      if (expert[token] != number) continue;
      const float* own = output.gradient_at(token);
      scores.gradient_at(token)[number] =
          std::inner_product(own, own + kWidth, answer.at(token), 0.0f);
      const float gate = scores.at(token)[number];
      for (std::size_t i = 0; i < kWidth; ++i) answer.gradient_at(token)[i] = gate * own[i];
      multiply_back(weights.values[1], weights.gradients[1], hidden, answer, token);
      for (std::size_t i = 0; i < kHidden; ++i)
        hidden.gradient_at(token)[i] *= 1 - hidden.at(token)[i] * hidden.at(token)[i];
      multiply_back(weights.values[0], weights.gradients[0], normed_middle, hidden, token);
    }
  }
  // Adds all that the token's head takes from the letters of its sequence up to itself.
  void look_back(std::size_t token, std::size_t head) {
    const std::size_t first = token / kLength * kLength, count = token - first + 1;
    const std::size_t begin = head * kHeadWidth;
    float* share = shares.at(token) + head * kLength;
    for (std::size_t i = 0; i < count; ++i)
      share[i] =
          kScale * std::inner_product(query.at(token) + begin, query.at(token) + begin + kHeadWidth,
                                      key.at(first + i) + begin, 0.0f);
    softmax(share, count);
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t j = begin; j < begin + kHeadWidth; ++j)
        mixed.at(token)[j] += share[i] * value.at(first + i)[j];
  }
  void look_back_gradient(std::size_t token, std::size_t head) {
    const std::size_t first = token / kLength * kLength, count = token - first + 1;
    const std::size_t begin = head * kHeadWidth;
    const float* share = shares.at(token) + head * kLength;
    const float* own = mixed.gradient_at(token);
    float* gradient = shares.gradient_at(token) + head * kLength;
    for (std::size_t i = 0; i < count; ++i) {
      gradient[i] = std::inner_product(own + begin, own + begin + kHeadWidth,
                                       value.at(first + i) + begin, 0.0f);
      for (std::size_t j = begin; j < begin + kHeadWidth; ++j)
        value.gradient_at(first + i)[j] += share[i] * own[j];
    }
    softmax_back(share, gradient, count);
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t j = begin; j < begin + kHeadWidth; ++j) {
        query.gradient_at(token)[j] += kScale * gradient[i] * key.at(first + i)[j];
        key.gradient_at(first + i)[j] += kScale * gradient[i] * query.at(token)[j];
      }
  }
};

struct Network {
  std::vector<const char*> texts = std::vector<const char*>(kSequences);
  Rows embedded{kWidth}, normed{kWidth}, logits{kLetters};
  std::vector<Layer> layers = std::vector<Layer>(kLayers);
  double loss = 0;

  std::size_t letter(std::size_t token, std::size_t ahead = 0) const {
    return static_cast<unsigned char>(texts[token / kLength][token % kLength + ahead]) % kLetters;
  }
  Rows& before(std::size_t layer) { return layer == 0 ? embedded : layers[layer - 1].output; }
  // The experts that this rank's letters go to, in the order of the model.
  std::vector<UnitId> chosen(std::size_t layer) const {
    std::vector<UnitId> units;
    for (std::size_t expert = 0; expert < kExperts; ++expert)
      if (std::ranges::count(layers[layer].expert, expert) != 0)
        units.push_back(expert_of(layer, expert));
    return units;
  }
  void embed(const Weights& weights) {
    embedded.clear();
    for (std::size_t token = 0; token < kTokens; ++token)
      for (std::size_t i = 0; i < kWidth; ++i)
        embedded.at(token)[i] = weights.values[0][letter(token) * kWidth + i] +
                                weights.values[1][token % kLength * kWidth + i];
  }
  void embed_back(const Weights& weights) {
    for (std::size_t token = 0; token < kTokens; ++token)
      for (std::size_t i = 0; i < kWidth; ++i) {
        const float own = embedded.gradient_at(token)[i];
        weights.gradients[0][letter(token) * kWidth + i] += own;
        weights.gradients[1][token % kLength * kWidth + i] += own;
      }
  }
  void guess(const Weights& weights) {
    normed.clear();
    logits.clear();
    loss = 0;
    for (std::size_t token = 0; token < kTokens; ++token) {
      normalize(layers.back().output, normed, token);
      multiply(weights.values[0], normed, logits, token);
      softmax(logits.at(token), kLetters);
      const std::size_t next = letter(token, 1);
      loss -= std::log(logits.at(token)[next]) / kTokens;
      for (std::size_t i = 0; i < kLetters; ++i)
        logits.gradient_at(token)[i] = (logits.at(token)[i] - (i == next ? 1.0f : 0.0f)) / kTokens;
    }
  }
  void guess_back(const Weights& weights) {
    for (std::size_t token = 0; token < kTokens; ++token) {
      multiply_back(weights.values[0], weights.gradients[0], normed, logits, token);
      normalize_back(layers.back().output, normed, token);
    }
  }
};

// Each rank has sequences of its own, and also acquires the experts that other ranks have chosen.
StepReport train_step(const Engine& engine, Step& step, HostDevice& device, const Stream& stream,
                      Network& network) {
  const auto use = [&](UnitId unit, Pass pass, auto compute) {
    const Lease lease = step.acquire(unit, pass, stream);
    Weights weights;
    const auto tensors =
        static_cast<std::size_t>(std::ranges::count(engine.tensors(), unit, &TensorPlace::unit));
    for (std::size_t i = 0; i < tensors; ++i) {
      weights.values.push_back(lease.parameter<float>(i));
      if (pass == Pass::kBackward) weights.gradients.push_back(lease.gradient<float>(i));
    }
    device.launch(stream.id(), [=] { compute(weights); });
  };
  const auto number_of = [](UnitId unit) { return (index_of(unit) - 2 - kLayers) % kExperts; };
  use(kEmbedding, Pass::kForward, [&network](const Weights& of) { network.embed(of); });
  for (std::size_t i = 0; i < kLayers; ++i) {
    Layer& layer = network.layers[i];
    Rows& input = network.before(i);
    use(attention_of(i), Pass::kForward,
        [&layer, &input](const Weights& of) { layer.attend(input, of); });
    device.synchronize(stream.id());  // the router has spoken
    for (const UnitId unit : step.announce(network.chosen(i), Pass::kForward))
      use(unit, Pass::kForward,
          [&layer, number = number_of(unit)](const Weights& of) { layer.ask(number, of); });
  }
  // All of backward is known by now, so that its experts can be read ahead.
  std::vector<std::vector<UnitId>> experts(kLayers);
  for (std::size_t i = kLayers; i-- > 0;)
    experts[i] = step.announce(network.chosen(i), Pass::kBackward);
  use(kOutput, Pass::kForward, [&network](const Weights& of) { network.guess(of); });
  use(kOutput, Pass::kBackward, [&network](const Weights& of) { network.guess_back(of); });
  for (std::size_t i = kLayers; i-- > 0;) {
    Layer& layer = network.layers[i];
    Rows& input = network.before(i);
    for (const UnitId unit : experts[i])
      use(unit, Pass::kBackward,
          [&layer, number = number_of(unit)](const Weights& of) { layer.ask_back(number, of); });
    use(attention_of(i), Pass::kBackward,
        [&layer, &input](const Weights& of) { layer.attend_back(input, of); });
  }
  use(kEmbedding, Pass::kBackward, [&network](const Weights& of) { network.embed_back(of); });
  return step.finish();
}

ModelSpec make_model() {
  ModelSpec model;
  model.units = {{"embedding", {{"letters", {kLetters, kWidth}}, {"places", {kLength, kWidth}}}},
                 {"output", {{"output.weight", {kLetters, kWidth}}}}};
  for (std::size_t i = 0; i < kLayers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    UnitSpec unit{.name = name, .tensors = {}};
    for (const char* part : {".query", ".key", ".value", ".out"})
      unit.tensors.push_back({name + part, {kWidth, kWidth}});
    unit.tensors.push_back({name + ".router", {kExperts, kWidth}});
    model.units.push_back(unit);
  }
  for (std::size_t i = 0; i < kLayers * kExperts; ++i) {
    const std::string name = "expert." + std::to_string(i);
    model.units.push_back(
        {.name = name,
         .tensors = {{name + ".up", {kHidden, kWidth}}, {name + ".down", {kWidth, kHidden}}},
         .is_announced = true});
  }
  model.forward_order.push_back(kEmbedding);
  for (std::size_t i = 0; i < kLayers; ++i) model.forward_order.push_back(attention_of(i));
  model.forward_order.push_back(kOutput);
  return model;
}

std::string text_of(const char* path) {
  std::string text;
  std::ifstream file(path);
  if (!std::getline(file, text, '\0') || text.size() < 2 * kLength)
    throw Error(ErrorCode::kInput, std::string(path) + " cannot be read, or has hardly any text");
  return text;
}

// Ends all ranks. No destructor runs: those of a step, of a stream and of the engine wait for the
// other ranks, which wait for this one.
[[noreturn]] void end_all(RankWorld& world, const std::exception& failure) {
  std::fprintf(stderr, "rank %u: %s\n", world.rank(), failure.what());
  std::fflush(stdout);  // abort() may end this process
  world.abort();
  std::_Exit(1);
}

void train(RankWorld& world, const char* folder, const std::string& text) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 512 << 10, .host_bytes = 4 << 20};
  config.optimizer.untouched = UntouchedPolicy::kSkip;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {folder};
  const auto device = make_host_device({.memory_bytes = 512 << 10});
  const auto ranks = world.join(*device);
  Engine engine(world.shared(config), make_model(), *device, ranks.get());
  Network network;
  const Stream stream(*device, "compute");  // declared after what its work uses
  std::optional<Step> step;                 // out here, so that a failure ends the ranks first
  try {
    engine.initialize([](const TensorPlace& tensor, std::uint64_t i, std::span<float> values) {
      const float pace = 3.3f + 0.7f * static_cast<float>(index_of(tensor.id));
      for (float& value : values) value = std::sin(static_cast<float>(i++) * pace) / 8;
    });
    double first = 0, last = 0;
    std::uint64_t changes = 0, at = world.rank() * 7919;
    for (int number = 1; number <= 200; ++number) {
      for (const char*& sequence : network.texts)
        sequence = &text[(at += 7919 * world.count() + 31) % (text.size() - kLength)];
      step.emplace(engine.begin_step({.learning_rate = 0.003}));
      const StepReport report = train_step(engine, *step, *device, stream, network);
      last = 0;
      for (const double of_rank : engine.exchange(network.loss)) last += of_rank / world.count();
      if (number == 1) first = last;
      changes += report.schedule_changes;
      if (number % 40 == 0 && world.rank() == 0)
        std::printf("step %3d: loss %.3f; %u uses of experts, %u untouched, %llu KiB read\n",
                    number, last, report.announced_uses, report.untouched_units,
                    static_cast<unsigned long long>(report.nvme_read_bytes >> 10));
    }
    engine.close();
    if (last >= first * 3 / 4 || changes != 0)
      throw std::runtime_error("the loss has not fallen by a quarter, or the schedule changed");
  } catch (const std::exception& failure) {
    end_all(world, failure);  // while the step, the stream and the engine live
  }
}

int main(int argc, char** argv) try {
  RankWorld world;
  try {
    train(world, argc > 1 ? argv[1] : ".", argc > 2 ? text_of(argv[2]) : kText);
  } catch (const std::exception& failure) {
    end_all(world, failure);
  }
} catch (const std::exception& failure) {  // there is no world
  std::fprintf(stderr, "%s\n", failure.what());
  std::_Exit(1);
}
