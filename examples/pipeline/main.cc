// Pipeline parallelism of the application's own: one process has a network's hidden layer, another
// its output layer, and they send each other activations and gradients. Further pairs of processes
// compute on other samples. The norm group makes all of them clip by the norm of the whole network,
// skip the same steps and keep the same loss scale. Start it with `mpirun -n 4 pipeline FOLDER`,
// with any other even number, or alone; every way prints the same numbers, but for roundings.
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

// Where this rank stands: its stage, and its share of the samples. Alone it is both stages.
struct Place {
  std::uint32_t stage = 0, stages = 1, share = 0, shares = 1;
  bool has_hidden() const { return stage == 0; }
  bool has_output() const { return stage + 1 == stages; }
};

// y = sum over j of output[j] * tanh(slope[j] * x + shift[j]). The stages hand on the
// hidden values and, in backward, their gradients, both in device memory.
struct Network {
  std::vector<float> x, error;  // error = y - sin(x)
  int number = 0;               // of the step
  float* const hidden;

  Network(const Place& place, float* handed_on) : hidden(handed_on) {
    for (std::size_t i = place.share; i < kSamples; i += place.shares)
      x.push_back(6.0f * static_cast<float>(i) / kSamples - 3.0f);
    error.resize(x.size());
  }

  void hide(const float* weight) {
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t j = 0; j < kWidth; ++j)
        hidden[i * kWidth + j] = std::tanh(weight[j] * x[i] + weight[kWidth + j]);
  }
  // One target of the fifth step is so large that its gradient overflows; the step is skipped.
  void compare(const float* weight) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float* const h = hidden + i * kWidth;
      const float target = number == 5 && x[i] == -3.0f ? 3e38f : std::sin(x[i]);
      error[i] = static_cast<float>(std::inner_product(h, h + kWidth, weight, 0.0)) - target;
    }
  }
  // Both add the gradient of `scale` times the mean loss of these samples.
  void output_backward(const float* weight, float* gradient, float scale) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float own = scale * error[i] / static_cast<float>(x.size());
      for (std::size_t j = 0; j < kWidth; ++j) {
        float& h = hidden[i * kWidth + j];
        gradient[j] += own * h;
        h = own * weight[j] * (1 - h * h);
      }
    }
  }
  void hidden_backward(float* gradient) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < kWidth; ++j) {
        gradient[j] += hidden[i * kWidth + j] * x[i];
        gradient[kWidth + j] += hidden[i * kWidth + j];
      }
    }
  }
};

// `stages` are the ranks that have the whole network between them; null for one rank.
StepReport train_step(Engine& engine, Step& step, const Place& place, HostDevice& device,
                      const Stream& stream, Network& network, Collectives* stages) {
  const auto hand_on = [&](std::uint32_t from, const char* subject) {
    if (stages == nullptr) return;
    stages->broadcast({.data = reinterpret_cast<std::byte*>(network.hidden),
                       .size_bytes = network.x.size() * kWidth * sizeof(float),
                       .root = from,
                       .subject = subject},
                      stream.id());
  };
  if (place.has_hidden()) {
    const Lease lease = step.acquire(engine.unit("hidden"), Pass::kForward, stream);
    const auto* weight = lease.parameter<float>(0);
    device.launch(stream.id(), [=, &network] { network.hide(weight); });
  }
  hand_on(0, "hidden values");
  if (place.has_output()) {
    const UnitId output = engine.unit("output");
    {
      const Lease lease = step.acquire(output, Pass::kForward, stream);
      const auto* weight = lease.parameter<float>(0);
      device.launch(stream.id(), [=, &network] { network.compare(weight); });
    }
    const Lease lease = step.acquire(output, Pass::kBackward, stream);
    const auto* weight = lease.parameter<float>(0);
    auto* gradient = lease.gradient<float>(0);
    const auto scale = static_cast<float>(step.loss_scale());
    device.launch(stream.id(), [=, &network] { network.output_backward(weight, gradient, scale); });
  }
  hand_on(1, "gradients of the hidden values");
  if (place.has_hidden()) {
    const Lease lease = step.acquire(engine.unit("hidden"), Pass::kBackward, stream);
    auto* gradient = lease.gradient<float>(0);
    device.launch(stream.id(), [=, &network] { network.hidden_backward(gradient); });
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
  std::unique_ptr<Collectives> stages, norms, replicas;
  if (all != nullptr) {
    place = {.stage = world.rank() % 2,
             .stages = 2,
             .share = world.rank() / 2,
             .shares = world.count() / 2};
    stages = split_ranks(*all, device, place.share);
    norms = split_ranks(*all, device, place.share);  // beside the last message of a step
    replicas = split_ranks(*all, device, place.stage);
  }
  ModelSpec model;
  if (place.has_hidden())
    model.units.push_back({"hidden", {{"hidden.slope_and_shift", {2, kWidth}}}});
  if (place.has_output()) model.units.push_back({"output", {{"output.weight", {kWidth}}}});
  Engine engine(world.shared(config_in(folder)), model, device, replicas.get());
  const DeviceBuffer handed_on(device, kSamples * kWidth * sizeof(float), "hidden values");
  Network network(place, reinterpret_cast<float*>(handed_on.data()));
  const Stream stream(device, "compute");  // declared after what its work uses
  std::optional<Step> step;                // out here, so that a failure ends the ranks first
  try {
    if (norms != nullptr) engine.set_norm_group(norm_group_over(*norms, device));
    engine.initialize(
        [&](const TensorPlace& tensor, std::uint64_t element, std::span<float> values) {
          const float pace = tensor.name == "output.weight" ? 3.3f : 7.7f;
          for (float& value : values) value = std::sin(static_cast<float>(element++) * pace) / 4;
        });
    for (int number = 1; number <= 12; ++number) {
      network.number = number;
      step.emplace(engine.begin_step({.learning_rate = 0.0005}));
      const StepReport report =
          train_step(engine, *step, place, device, stream, network, stages.get());
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
        throw Error(ErrorCode::kInvalidArgument, "there are two stages: start 1, 2, 4, ... ranks");
      train(world, all.get(), *device, argc > 1 ? argv[1] : ".");
    } catch (const std::exception& failure) {
      end_all(world, failure);
    }
  } catch (const std::exception& failure) {  // there is no world
    std::fprintf(stderr, "%s\n", failure.what());
    std::_Exit(1);
  }
}
