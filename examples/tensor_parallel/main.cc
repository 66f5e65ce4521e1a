// Tensor parallelism of the application's own: two processes have the two halves of one network's
// hidden layer, and compute each sample together. Further pairs of processes compute on other
// samples. The norm group makes all of them clip by the norm of the whole network, skip the same
// steps and keep the same loss scale. Start it with `mpirun -n 4 tensor_parallel FOLDER`, with any
// other even number, or alone; every way prints the same numbers, but for roundings.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/rank_world.h>

using namespace sluice;

constexpr std::size_t kSamples = 64, kWidth = 256;
constexpr UnitId kHidden{0}, kOutput{1};
constexpr TensorId kBias{2};

// Where this rank stands: its half of the network, and its share of the samples.
struct Place {
  std::uint32_t half = 0, halves = 1, share = 0, shares = 1;
  std::size_t width() const { return kWidth / halves; }
};

// y = bias + sum over j of output[j] * tanh(slope[j] * x + shift[j]). Each rank has the sum over
// its own j; the tensor's ranks add their sums before they go on.
struct Network {
  const std::size_t width;
  std::vector<float> x, hidden;
  int number = 0;      // of the step
  float* const error;  // device memory, which the ranks add: y - sin(x)

  Network(const Place& place, float* sums) : width(place.width()), error(sums) {
    for (std::size_t i = place.share; i < kSamples; i += place.shares)
      x.push_back(6.0f * static_cast<float>(i) / kSamples - 3.0f);
    hidden.resize(x.size() * width);
  }

  void hide(const float* weight) {
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t j = 0; j < width; ++j)
        hidden[i * width + j] = std::tanh(weight[j] * x[i] + weight[width + j]);
  }
  void add_own(const float* weight) {
    for (std::size_t i = 0; i < x.size(); ++i)
      error[i] = static_cast<float>(
          std::inner_product(&hidden[i * width], &hidden[i * width] + width, weight, 0.0));
  }
  // One target of the fifth step is so large that its gradient overflows; the step is skipped.
  void compare(const float* bias) {
    for (std::size_t i = 0; i < x.size(); ++i)
      error[i] += bias[0] - (number == 5 && x[i] == -3.0f ? 3e38f : std::sin(x[i]));
  }
  // Adds the gradient of `scale` times the mean loss of these samples.
  void backward(UnitId unit, const float* weight, float* gradient, float* bias, float scale) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float own = scale * error[i] / static_cast<float>(x.size());
      if (bias != nullptr) bias[0] += own;
      for (std::size_t j = 0; j < width; ++j) {
        float& h = hidden[i * width + j];
        if (unit == kOutput) {
          gradient[j] += own * h;
          h = own * weight[j] * (1 - h * h);
        } else {
          gradient[j] += h * x[i];
          gradient[width + j] += h;
        }
      }
    }
  }
};

// `halves` are the ranks that have the whole network between them; null for one rank.
StepReport train_step(Step& step, HostDevice& device, const Stream& stream, Network& network,
                      Collectives* halves) {
  const auto scale = static_cast<float>(step.loss_scale());
  {
    const Lease lease = step.acquire(kHidden, Pass::kForward, stream);
    const auto* weight = lease.parameter<float>(0);
    device.launch(stream.id(), [=, &network] { network.hide(weight); });
  }
  {
    const Lease lease = step.acquire(kOutput, Pass::kForward, stream);
    const auto* weight = lease.parameter<float>(0);
    device.launch(stream.id(), [=, &network] { network.add_own(weight); });
    if (halves != nullptr)
      halves->all_reduce({.data = reinterpret_cast<std::byte*>(network.error),
                          .element_count = network.x.size(),
                          .subject = "outputs of the halves"},
                         stream.id());
    const auto* bias = lease.parameter<float>(1);
    device.launch(stream.id(), [=, &network] { network.compare(bias); });
  }
  for (const UnitId unit : {kOutput, kHidden}) {
    const Lease lease = step.acquire(unit, Pass::kBackward, stream);
    const auto* weight = lease.parameter<float>(0);
    auto* gradient = lease.gradient<float>(0);
    auto* bias = unit == kOutput ? lease.gradient<float>(1) : nullptr;
    device.launch(stream.id(),
                  [=, &network] { network.backward(unit, weight, gradient, bias, scale); });
  }
  return step.finish();
}

Config config_in(const char* folder) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.precision.loss_scale = {.static_scale = 0, .initial_scale_power = 8, .hysteresis = 1};
  config.optimizer.clip_norm = 0.05;
  config.optimizer.non_finite = NonFinitePolicy::kSkip;
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

void train(RankWorld& world, Collectives* all, HostDevice& device, const char* folder) {
  Place place;
  std::unique_ptr<Collectives> halves, replicas;
  if (all != nullptr) {
    place = {.half = world.rank() % 2,
             .halves = 2,
             .share = world.rank() / 2,
             .shares = world.count() / 2};
    halves = split_ranks(*all, device, place.share);
    replicas = split_ranks(*all, device, place.half);
  }
  ModelSpec model;
  model.units = {{"hidden", {{"hidden.slope_and_shift", {2, place.width()}}}},
                 {"output", {{"output.weight", {place.width()}}, {"output.bias", {1}}}}};
  Engine engine(world.shared(config_in(folder)), model, device, replicas.get());
  const DeviceBuffer sums(device, kSamples * sizeof(float), "outputs");
  Network network(place, reinterpret_cast<float*>(sums.data()));
  const Stream stream(device, "compute");  // declared after what its work uses
  std::optional<Step> step;                // out here, so that a failure ends the ranks first
  try {
    // Both halves have the bias, with the same gradient. The second half does not count it again.
    if (halves != nullptr)
      engine.set_norm_group(norm_group_over(
          *halves, device, place.half == 0 ? std::vector<TensorId>() : std::vector{kBias}));
    // As the whole network's elements, of which this rank has some columns.
    engine.initialize(
        [&](const TensorPlace& tensor, std::uint64_t element, std::span<float> values) {
          for (float& value : values) {
            const std::uint64_t row = element / place.width(), column = element % place.width();
            const std::uint64_t whole = row * kWidth + place.half * place.width() + column;
            const float pace = tensor.unit == kHidden ? 7.7f : 3.3f;
            value = tensor.id == kBias ? 0.1f : std::sin(static_cast<float>(whole) * pace) / 4;
            ++element;
          }
        });
    for (int number = 1; number <= 12; ++number) {
      network.number = number;
      step.emplace(engine.begin_step({.learning_rate = 0.0005}));
      const StepReport report = train_step(*step, device, stream, network, halves.get());
      if (world.rank() == 0)
        std::printf("step %2d: norm %.8f, clipped by %.8f, loss scale %g%s\n", number,
                    report.gradient_norm, report.clip_factor, report.loss_scale,
                    report.skipped ? ", skipped" : "");
    }
    engine.close();
  } catch (const std::exception& failure) {
    end_all(world, failure);  // while the step, the stream and the engine live
  }
}

int main(int argc, char** argv) {
  try {
    RankWorld world;
    try {
      const auto device = make_host_device({.memory_bytes = 3 << 20});
      const auto all = world.join(*device);
      if (world.are_several() && world.count() % 2 != 0)
        throw Error(ErrorCode::kInvalidArgument,
                    "the network has two halves: start 1, 2, 4, ... ranks");
      train(world, all.get(), *device, argc > 1 ? argv[1] : ".");
    } catch (const std::exception& failure) {
      end_all(world, failure);
    }
  } catch (const std::exception& failure) {  // there is no world
    std::fprintf(stderr, "%s\n", failure.what());
    std::_Exit(1);
  }
}
