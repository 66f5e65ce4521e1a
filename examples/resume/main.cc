// A training program that outlives its process: its state lies in a durable store, each run of
// the program trains 20 steps more, and every run goes on with the bits of a training that never
// stopped, also after kill -9. Each run leaves the weights as safetensors. An argument names the
// folder for all of it; the current one is the default. Without another argument it does three
// runs in turn, and compares them with one that never stopped.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/safetensors.h>

using namespace sluice;

constexpr std::size_t kCount = 1000;

// The loss is the mean of (weight - target)^2 / 2; the targets come from a random generator, whose
// state goes with every commit.
struct Position {
  std::uint64_t random = 1;

  float next() {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(random >> 40) / (1 << 24);
  }
};

struct Trained {
  std::vector<float> weights;
  std::uint64_t step = 0;
};

// Trains over the store of that name: 20 steps further, or up to the step `end`.
Trained run(const std::string& folder, const std::string& name, std::uint64_t end = 0) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = 1 << 20, .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {folder};
  config.storage.state.name = name;
  ModelSpec model;
  model.units = {{"layer", {{"layer.weight", {kCount}}}}};

  const auto device = make_host_device({.memory_bytes = 1 << 20});
  Engine engine(config, model, *device);
  // The state of the last commit, or, where there is no store of that name yet, zeros.
  const OpenedState opened =
      engine.open_or_create([](const TensorPlace&, std::uint64_t, std::span<float> values) {
        for (float& value : values) value = 0;
      });
  Position position;
  if (!opened.application.empty()) position.random = std::stoull(opened.application);
  std::printf("%s: %s step %llu\n", name.c_str(), opened.is_new ? "begins at" : "goes on behind",
              static_cast<unsigned long long>(opened.step));

  const Stream stream(*device, "compute");
  Trained trained{.weights = std::vector<float>(kCount), .step = opened.step};
  if (end == 0) end = opened.step + 20;
  for (; trained.step < end; ++trained.step) {
    Step step = engine.begin_step({.learning_rate = 0.01});
    { const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream); }
    {
      const Lease lease = step.acquire(UnitId{0}, Pass::kBackward, stream);
      const auto* weight = lease.parameter<float>(0);
      auto* gradient = lease.gradient<float>(0);
      device->launch(stream.id(), [=, &position] {
        for (std::size_t k = 0; k < kCount; ++k)
          gradient[k] += (weight[k] - position.next()) / kCount;
      });
      device->synchronize(stream.id());
    }
    // Committed beside the next step, with what this program needs to go on.
    (void)step.finish({.application = std::to_string(position.random)});
  }
  engine.read_state(TensorId{0}, StateKind::kMaster, 0,
                    std::as_writable_bytes(std::span(trained.weights)));
  engine.close();  // waits for the last commit
  return trained;
}

// For other programs: safetensors.torch.load_file() reads it.
void save(const std::string& path, const std::vector<float>& weights) {
  const SafetensorsTensor tensor{.name = "layer.weight", .dtype = "F32", .shape = {kCount}};
  write_safetensors_file(path, {&tensor, 1}, {{"format", "pt"}},
                         [&](std::size_t, std::uint64_t first, std::span<std::byte> bytes) {
                           const auto all = std::as_bytes(std::span(weights));
                           std::ranges::copy(all.subspan(first, bytes.size()), bytes.begin());
                         });
}

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : ".";
  if (argc > 2) {
    save(folder + "/weights.safetensors", run(folder, argv[2]).weights);
    return 0;
  }
  Trained in_pieces;
  for (int runs = 0; runs < 3; ++runs) in_pieces = run(folder, "in-pieces");
  save(folder + "/weights.safetensors", in_pieces.weights);
  const SafetensorsReader saved(folder + "/weights.safetensors");
  std::vector<float> read(kCount);
  saved.read("layer.weight", 0, read);
  // More than 60 steps, if this program was killed before.
  const bool is_equal = read == run(folder, "at-once", in_pieces.step).weights;
  std::printf("the runs of 20 steps %s one of %llu\n",
              is_equal ? "came to the bits of" : "differ from",
              static_cast<unsigned long long>(in_pieces.step));
  return is_equal ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
