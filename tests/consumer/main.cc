// A whole training program on Sluice: a network of two layers learns sin(x) with its parameters and
// its Adam state on NVMe. An argument names the folder for them; the current one is the default.
#include <cmath>
#include <cstdio>
#include <vector>

#include "engine/engine.h"
#include "gpu/host_device.h"

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
      if (unit == kOutput) error[i] = -std::sin(x(i));
      for (std::size_t j = 0; j < kWidth; ++j) {
        if (unit == kHidden) h[j] = std::tanh(weight[j] * x(i) + weight[kWidth + j]);
        if (unit == kOutput) error[i] += weight[j] * h[j];
      }
    }
  }

  // Adds the gradient of the mean of error^2 / 2. `hidden` turns into its own gradient on the way.
  void backward(UnitId unit, const float* weight, float* gradient) {
    for (std::size_t i = 0; i < kSamples; ++i) {
      float* h = &hidden[i * kWidth];
      for (std::size_t j = 0; j < kWidth; ++j) {
        if (unit == kOutput) {
          gradient[j] += error[i] / kSamples * h[j];
          h[j] = error[i] / kSamples * weight[j] * (1.0f - h[j] * h[j]);
        } else {
          gradient[j] += h[j] * x(i);
          gradient[kWidth + j] += h[j];
        }
      }
    }
  }

  float loss() const {
    float sum = 0;
    for (const float e : error) sum += e * e / (2 * kSamples);
    return sum;
  }
};

int main(int argc, char** argv) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 1 << 20, .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {argc > 1 ? argv[1] : "."};

  // A unit is what computation needs at a time: here, each layer is one.
  ModelSpec model;
  model.units = {{"hidden", {{"hidden.slope_and_shift", {2, kWidth}}}},
                 {"output", {{"output.weight", {kWidth}}}}};

  const auto device = make_host_device({.memory_bytes = 1 << 20});
  Engine engine(config, model, *device);
  engine.initialize([](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] =
          std::sin(static_cast<float>(first + i) * (tensor.name[0] == 'h' ? 7.7f : 3.3f)) / 4;
  });

  Network network;
  const Stream stream(*device, "compute");  // after what its work uses: its destructor waits
  float first_loss = 0;
  for (int number = 0; number < 200; ++number) {
    Step step = engine.begin_step({.learning_rate = 0.01});
    // A lease keeps its unit on the device for the work queued on the stream while it is held.
    for (const UnitId unit : {kHidden, kOutput}) {
      const Lease lease = step.acquire(unit, Pass::kForward, stream);
      const auto* weight = reinterpret_cast<const float*>(lease.parameter(0));
      device->launch(stream.id(), [&network, unit, weight] { network.forward(unit, weight); });
    }
    for (const UnitId unit : {kOutput, kHidden}) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      const auto* weight = reinterpret_cast<const float*>(lease.parameter(0));
      auto* gradient = reinterpret_cast<float*>(lease.gradient(0));
      device->launch(stream.id(), [&network, unit, weight, gradient] {
        network.backward(unit, weight, gradient);
      });
    }
    const StepReport report = step.finish();  // Adam, on the CPU, block by block; then home to NVMe
    if (number == 0) first_loss = network.loss();
    if (number % 20 == 19)
      std::printf("step %3d  loss %.5f  read %llu B, wrote %llu B\n", number + 1, network.loss(),
                  static_cast<unsigned long long>(report.nvme_read_bytes),
                  static_cast<unsigned long long>(report.nvme_write_bytes));
  }
  return network.loss() < first_loss / 10 ? 0 : 1;
}
