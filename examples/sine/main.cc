// A whole training program on Sluice: a network of two layers learns sin(x) with its parameters and
// its Adam state on NVMe. An argument names the folder for them; the current one is the default.
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/trace.h>
#include <sluice/units.h>

using namespace sluice;

constexpr std::size_t kSamples = 64, kWidth = 256;
constexpr UnitId kHidden{0}, kOutput{1};

// The mathematics, in plain loops: y = sum over j of output[j] * tanh(slope[j] * x + shift[j]).
struct Network {
  std::vector<float> hidden = std::vector<float>(kSamples * kWidth);
  std::vector<float> error = std::vector<float>(kSamples);  // y - sin(x)

  static float x(std::size_t i) { return 6.0f * static_cast<float>(i) / kSamples - 3.0f; }

  void forward(UnitId unit, const float* weight) {
    for (std::size_t i = 0; i < kSamples; ++i) {
      float* h = &hidden[i * kWidth];
      if (unit == kOutput) error[i] = std::inner_product(h, h + kWidth, weight, -std::sin(x(i)));
      for (std::size_t j = 0; unit == kHidden && j < kWidth; ++j)
        h[j] = std::tanh(weight[j] * x(i) + weight[kWidth + j]);
    }
  }

  // Adds the gradient of the loss. `hidden` turns into its own gradient on the way.
  void backward(UnitId unit, const float* weight, float* gradient) {
    for (std::size_t i = 0; i < kSamples; ++i) {
      for (std::size_t j = 0; j < kWidth; ++j) {
        float& h = hidden[i * kWidth + j];
        if (unit == kOutput) {
          gradient[j] += error[i] / kSamples * h;
          h = error[i] / kSamples * weight[j] * (1 - h * h);
        } else {
          gradient[j] += h * x(i);
          gradient[kWidth + j] += h;
        }
      }
    }
  }

  float loss() const {
    return std::inner_product(error.begin(), error.end(), error.begin(), 0.0f) / (2 * kSamples);
  }
};

int main(int argc, char** argv) try {
  if (argc > 2)
    trace_start({.file = argv[2]});  // `sluice trace summary FILE` says what took how long

  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 1 << 20, .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {argc > 1 ? argv[1] : "."};

  ModelSpec model;  // a unit is what computation needs at a time: here, one layer
  model.units = {{"hidden", {{"hidden.slope_and_shift", {2, kWidth}}}},
                 {"output", {{"output.weight", {kWidth}}}}};

  const auto device = make_host_device({.memory_bytes = 1 << 20});
  Engine engine(config, model, *device);
  engine.set_last_words(
      [](const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
  engine.initialize([](const TensorPlace& tensor, std::uint64_t at, std::span<float> values) {
    const float spread = tensor.unit == kHidden ? 7.7f : 3.3f;
    for (float& value : values) value = std::sin(static_cast<float>(at++) * spread) / 4;
  });

  Network network;
  const Stream stream(*device, "compute");  // declared after what its work uses
  float first_loss = 0;
  for (int number = 1; number <= 200; ++number) {
    Step step = engine.begin_step({.learning_rate = 0.01});
    for (const UnitId unit : {kHidden, kOutput}) {
      const Lease lease = step.acquire(unit, Pass::kForward, stream);
      const auto* weight = lease.parameter<float>(0);
      device->launch(stream.id(), [=, &network] { network.forward(unit, weight); });
    }
    for (const UnitId unit : {kOutput, kHidden}) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      const auto* weight = lease.parameter<float>(0);
      auto* gradient = lease.gradient<float>(0);
      device->launch(stream.id(), [=, &network] { network.backward(unit, weight, gradient); });
    }
    const StepReport report = step.finish();  // Adam over all blocks, then home to NVMe
    if (number == 1) first_loss = network.loss();
    if (number % 20 == 0)
      std::printf("step %3d: loss %.5f, %s read, %s written\n", number, network.loss(),
                  format_bytes(report.nvme_read_bytes).c_str(),
                  format_bytes(report.nvme_write_bytes).c_str());
  }
  engine.close();  // brings what the last update has failed with, if it has
  trace_stop();    // does nothing without a trace
  return network.loss() < first_loss / 10 ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
