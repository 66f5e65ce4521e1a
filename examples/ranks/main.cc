// Several processes train one network on Sluice and share its state: each keeps a part of the
// parameters and of Adam's moments on NVMe, and computes on a part of the samples. Start it with
// `mpirun -n 2 ranks FOLDER`, or alone: one process then does the work of all.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <optional>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/rank_world.h>

using namespace sluice;

constexpr std::size_t kSamples = 64, kWidth = 256;
constexpr UnitId kHidden{0}, kOutput{1};

// y = sum over j of output[j] * tanh(slope[j] * x + shift[j]), for this rank's part of the samples.
struct Network {
  std::vector<float> x, hidden, error;  // error = y - sin(x)

  Network(std::uint32_t rank, std::uint32_t count) {
    for (std::size_t i = rank; i < kSamples; i += count)
      x.push_back(6.0f * static_cast<float>(i) / kSamples - 3.0f);
    hidden.resize(x.size() * kWidth);
    error.resize(x.size());
  }

  void forward(UnitId unit, const float* weight) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      float* h = &hidden[i * kWidth];
      if (unit == kOutput) error[i] = std::inner_product(h, h + kWidth, weight, -std::sin(x[i]));
      for (std::size_t j = 0; unit == kHidden && j < kWidth; ++j)
        h[j] = std::tanh(weight[j] * x[i] + weight[kWidth + j]);
    }
  }

  // Adds the gradient of the mean loss of these samples. Sluice takes the mean over the ranks.
  void backward(UnitId unit, const float* weight, float* gradient) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < kWidth; ++j) {
        float& h = hidden[i * kWidth + j];
        const float own = error[i] / static_cast<float>(x.size());
        if (unit == kOutput) {
          gradient[j] += own * h;
          h = own * weight[j] * (1 - h * h);
        } else {
          gradient[j] += h * x[i];
          gradient[kWidth + j] += h;
        }
      }
    }
  }

  double loss() const {
    return std::inner_product(error.begin(), error.end(), error.begin(), 0.0) /
           (2 * static_cast<double>(x.size()));
  }
};

void train_step(Step& step, HostDevice& device, const Stream& stream, Network& network) {
  for (const UnitId unit : {kHidden, kOutput}) {
    const Lease lease = step.acquire(unit, Pass::kForward, stream);
    const auto* weight = lease.parameter<float>(0);
    device.launch(stream.id(), [=, &network] { network.forward(unit, weight); });
  }
  for (const UnitId unit : {kOutput, kHidden}) {
    const Lease lease = step.acquire(unit, Pass::kBackward, stream);
    const auto* weight = lease.parameter<float>(0);
    auto* gradient = lease.gradient<float>(0);
    device.launch(stream.id(), [=, &network] { network.backward(unit, weight, gradient); });
  }
  (void)step.finish();
}

Config config_in(const char* folder) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 2 << 20, .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {folder};
  return config;
}

// Ends all ranks. No destructor runs: those of a step, of a stream and of the engine wait for the
// other ranks, which wait for this one.
[[noreturn]] void end_all(RankWorld& world, const std::exception& failure) {
  std::fprintf(stderr, "rank %u: %s\n", world.rank(), failure.what());
  std::fflush(stdout);  // abort() may end this process
  world.abort();
  std::_Exit(1);
}

bool train(RankWorld& world, const Config& config) {
  ModelSpec model;
  model.units = {{"hidden", {{"hidden.slope_and_shift", {2, kWidth}}}},
                 {"output", {{"output.weight", {kWidth}}}}};
  const auto device = make_host_device({.memory_bytes = 2 << 20});
  const auto ranks = world.join(*device);
  Engine engine(world.shared(config), model, *device, ranks.get());
  Network network(world.rank(), world.count());
  const Stream stream(*device, "compute");  // declared after what its work uses
  std::optional<Step> step;                 // out here, so that a failure ends the ranks first
  try {
    engine.initialize([](const TensorPlace& tensor, std::uint64_t element,
                         std::span<float> values) {
      for (float& value : values)
        value =
            std::sin(static_cast<float>(element++) * (tensor.unit == kHidden ? 7.7f : 3.3f)) / 4;
    });
    double first = 0, last = 0;
    for (int number = 1; number <= 200; ++number) {
      step.emplace(engine.begin_step({.learning_rate = 0.01}));
      train_step(*step, *device, stream, network);
      last = 0;
      for (const double of_rank : engine.exchange(network.loss())) last += of_rank / world.count();
      if (number == 1) first = last;
      if (number % 50 == 0 && world.rank() == 0)
        std::printf("step %3d: loss %.5f on %u ranks\n", number, last, world.count());
    }
    engine.close();
    return last < first / 10;
  } catch (const std::exception& failure) {
    end_all(world, failure);  // while the step, the stream and the engine live
  }
}

int main(int argc, char** argv) {
  try {
    RankWorld world;
    try {
      return train(world, config_in(argc > 1 ? argv[1] : ".")) ? 0 : 1;
    } catch (const std::exception& failure) {
      end_all(world, failure);
    }
  } catch (const std::exception& failure) {  // there is no world
    std::fprintf(stderr, "%s\n", failure.what());
    std::_Exit(1);
  }
}
