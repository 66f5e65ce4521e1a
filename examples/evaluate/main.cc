// Evaluation and a frozen unit: random features, which stay as they are, feed a layer that learns
// sin(x). After every 50 steps, points between those of training are evaluated, without gradients.
// A frozen unit needs room for its parameters alone, and no drive ever writes it again. An argument
// names the folder for the state; the current one is the default.
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>

using namespace sluice;

constexpr std::size_t kSamples = 64, kWidth = 512;
constexpr UnitId kFeatures{0}, kOutput{1};

// y = sum over j of output[j] * cos(slope[j] * x + shift[j]), at points that begin at `first`.
struct Network {
  float first;
  std::vector<float> feature = std::vector<float>(kSamples * kWidth);
  std::vector<float> error = std::vector<float>(kSamples);  // y - sin(x)

  float x(std::size_t i) const { return first + 6.0f * static_cast<float>(i) / kSamples; }

  void forward(UnitId unit, const float* weight) {
    for (std::size_t i = 0; i < kSamples; ++i) {
      float* f = &feature[i * kWidth];
      if (unit == kOutput) error[i] = std::inner_product(f, f + kWidth, weight, -std::sin(x(i)));
      for (std::size_t j = 0; unit == kFeatures && j < kWidth; ++j)
        f[j] = std::cos(weight[j] * x(i) + weight[kWidth + j]);
    }
  }

  void backward(float* gradient) const {
    for (std::size_t i = 0; i < kSamples; ++i)
      for (std::size_t j = 0; j < kWidth; ++j)
        gradient[j] += error[i] / kSamples * feature[i * kWidth + j];
  }

  float loss() const {
    return std::inner_product(error.begin(), error.end(), error.begin(), 0.0f) / (2 * kSamples);
  }
};

// The loss at the points of `network`: one forward pass that keeps nothing and changes nothing. It
// computes with the state after the last finished step.
float evaluate(Engine& engine, HostDevice& device, const Stream& stream, Network& network) {
  Inference inference = engine.begin_inference();
  for (const UnitId unit : {kFeatures, kOutput}) {
    const Lease lease = inference.acquire(unit, stream);
    const auto* weight = lease.parameter<float>(0);
    device.launch(stream.id(), [=, &network] { network.forward(unit, weight); });
  }
  device.synchronize(stream.id());
  return network.loss();
}

int main(int argc, char** argv) try {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 1 << 20, .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {argc > 1 ? argv[1] : "."};

  ModelSpec model;
  model.units = {{"features", {{"features.slope_and_shift", {2, kWidth}}}, /*is_frozen=*/true},
                 {"output", {{"output.weight", {kWidth}}}}};
  // Nothing before the output learns, so backward needs the output alone.
  model.backward_order = {kOutput};

  const auto device = make_host_device({.memory_bytes = 1 << 20});
  Engine engine(config, model, *device);
  engine.initialize([](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (float& value : values)
      value = tensor.unit == kOutput ? 0 : 3 * std::sin(7.7f * static_cast<float>(first++));
  });

  Network training{.first = -3}, validation{.first = -3 + 3.0f / kSamples};
  const Stream stream(*device, "compute");
  const float before = evaluate(engine, *device, stream, validation);
  float after = before;
  for (int number = 1; number <= 200; ++number) {
    Step step = engine.begin_step({.learning_rate = 0.003});
    for (const UnitId unit : {kFeatures, kOutput}) {
      const Lease lease = step.acquire(unit, Pass::kForward, stream);
      const auto* weight = lease.parameter<float>(0);
      device->launch(stream.id(), [=, &training] { training.forward(unit, weight); });
    }
    {
      const Lease lease = step.acquire(kOutput, Pass::kBackward, stream);
      auto* gradient = lease.gradient<float>(0);
      device->launch(stream.id(), [=, &training] { training.backward(gradient); });
    }
    const StepReport report = step.finish();
    if (number % 50 != 0) continue;
    after = evaluate(engine, *device, stream, validation);
    std::printf("step %3d: loss %.5f, validation %.5f, %s written\n", number, training.loss(),
                after, format_bytes(report.nvme_write_bytes).c_str());
  }
  engine.close();
  return after < before / 100 ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
