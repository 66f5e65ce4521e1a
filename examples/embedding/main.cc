// A table of embeddings that is larger than device memory: it is cut into units of rows, and one
// unit after the other passes through the device. A batch gathers the rows of its ids unit by unit;
// backward adds their gradients unit by unit. Ids are liked or not, by a rule that the table has
// to learn. An argument names the folder for the state; the current one is the default.
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>

using namespace sluice;

constexpr std::uint32_t kParts = 16, kPartRows = 4096, kRows = kParts * kPartRows;
constexpr std::size_t kWidth = 16, kBatch = 8192;
constexpr std::uint64_t kDeviceBytes = 2 << 20;  // the table takes 4 MiB, its Adam state 8 MiB more
constexpr UnitId kHead{kParts};                  // units 0 to kParts - 1 are the table's parts

bool is_liked(std::uint32_t id) {
  return id * 2654435761u >> 31 == 1;
}  // a hash's first bit

// The probability that an id is liked is sigmoid(row of the id * head).
struct Batch {
  std::vector<std::uint32_t> ids = std::vector<std::uint32_t>(kBatch);
  std::vector<float> rows = std::vector<float>(kBatch * kWidth);
  std::vector<float> error = std::vector<float>(kBatch);  // probability - truth
  double loss = 0;

  void draw(std::uint64_t& random) {
    for (std::uint32_t& id : ids) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      id = static_cast<std::uint32_t>(random >> 33) % kRows;
    }
  }

  // Calls visit(sample, row of the part) for each sample whose id lies in the part.
  template <class Visit>
  void for_each_in(std::uint32_t part, Visit visit) const {
    for (std::size_t i = 0; i < kBatch; ++i)
      if (ids[i] / kPartRows == part) visit(i, ids[i] % kPartRows);
  }

  void gather(std::uint32_t part, const float* table) {
    for_each_in(part, [&](std::size_t i, std::size_t row) {
      for (std::size_t j = 0; j < kWidth; ++j) rows[i * kWidth + j] = table[row * kWidth + j];
    });
  }

  void judge(const float* head) {
    loss = 0;
    for (std::size_t i = 0; i < kBatch; ++i) {
      float sum = 0;
      for (std::size_t j = 0; j < kWidth; ++j) sum += rows[i * kWidth + j] * head[j];
      const float probability = 1 / (1 + std::exp(-sum));
      const bool truth = is_liked(ids[i]);
      error[i] = probability - static_cast<float>(truth);
      loss -= std::log(truth ? probability : 1 - probability) / kBatch;
    }
  }

  // Adds the gradient of the head, and turns `rows` into the gradients of the rows.
  void backward_head(const float* head, float* gradient) {
    for (std::size_t i = 0; i < kBatch; ++i) {
      for (std::size_t j = 0; j < kWidth; ++j) {
        float& value = rows[i * kWidth + j];
        gradient[j] += error[i] / kBatch * value;
        value = error[i] / kBatch * head[j];
      }
    }
  }

  void scatter(std::uint32_t part, float* gradient) const {
    for_each_in(part, [&](std::size_t i, std::size_t row) {
      for (std::size_t j = 0; j < kWidth; ++j) gradient[row * kWidth + j] += rows[i * kWidth + j];
    });
  }
};

ModelSpec make_model() {
  ModelSpec model;
  for (std::uint32_t part = 0; part < kParts; ++part) {
    const std::string name = "table." + std::to_string(part);
    model.units.push_back({name, {{name + ".rows", {kPartRows, kWidth}, WeightDecay::kNone}}});
  }
  model.units.push_back({"head", {{"head.weight", {kWidth}}}});
  return model;
}

int main(int argc, char** argv) try {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = kDeviceBytes, .host_bytes = 8 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {argc > 1 ? argv[1] : "."};

  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  Engine engine(config, make_model(), *device);
  engine.initialize([](const TensorPlace&, std::uint64_t first, std::span<float> values) {
    for (float& value : values) value = std::sin(7.7f * static_cast<float>(first++)) / 4;
  });

  Batch batch;
  const Stream stream(*device, "compute");
  std::uint64_t random = 1;
  double first_loss = 0;
  for (int number = 1; number <= 40; ++number) {
    batch.draw(random);
    Step step = engine.begin_step({.learning_rate = 0.03});
    for (std::uint32_t part = 0; part < kParts; ++part) {
      const Lease lease = step.acquire(UnitId{part}, Pass::kForward, stream);
      const auto* table = lease.parameter<float>(0);
      device->launch(stream.id(), [=, &batch] { batch.gather(part, table); });
    }
    {
      const Lease lease = step.acquire(kHead, Pass::kForward, stream);
      const auto* head = lease.parameter<float>(0);
      device->launch(stream.id(), [=, &batch] { batch.judge(head); });
    }
    {
      const Lease lease = step.acquire(kHead, Pass::kBackward, stream);
      const auto* head = lease.parameter<float>(0);
      auto* gradient = lease.gradient<float>(0);
      device->launch(stream.id(), [=, &batch] { batch.backward_head(head, gradient); });
    }
    for (std::uint32_t part = kParts; part-- > 0;) {
      const Lease lease = step.acquire(UnitId{part}, Pass::kBackward, stream);
      auto* gradient = lease.gradient<float>(0);
      device->launch(stream.id(), [=, &batch] { batch.scatter(part, gradient); });
    }
    const StepReport report = step.finish();
    if (number == 1) first_loss = batch.loss;
    if (number % 10 == 0)
      std::printf("step %3d: loss %.5f, %s read, %s written\n", number, batch.loss,
                  format_bytes(report.nvme_read_bytes).c_str(),
                  format_bytes(report.nvme_write_bytes).c_str());
  }
  engine.close();
  return batch.loss < first_loss / 2 ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
