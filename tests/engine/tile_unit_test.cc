// A large tensor cut into several units by the application: the same bits as the whole tensor.
#include <gtest/gtest.h>

#include <cmath>

#include <sluice/units.h>
#include "engine/plan/layout.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kRows = 96;
constexpr std::uint64_t kColumns = 512;

// Masters, one tile after another, after three steps with clipping. A gradient depends on the
// parameter and on its place in the whole tensor.
std::vector<std::byte> train_tiles(std::uint64_t tiles) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 512_KiB;
  config.optimizer.clip_norm = 0.5;
  const std::uint64_t tile_elements = kRows * kColumns / tiles;
  ModelSpec model;
  for (std::uint64_t tile = 0; tile < tiles; ++tile) {
    const std::string name = "w." + std::to_string(tile);
    model.units.push_back(
        {.name = name, .tensors = {{.name = name, .shape = {kRows / tiles, kColumns}}}});
  }
  const ModelSpec valid = validated(model);
  const auto device = make_host_device({.memory_bytes = 512_KiB});
  Engine engine(config, model, *device);
  engine.initialize([&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::sin(static_cast<float>(index_of(tensor.unit) * tile_elements + first + i));
  });
  const Stream stream(*device, "compute");
  for (int number = 0; number < 3; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : valid.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : valid.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      const auto* from = reinterpret_cast<const std::uint16_t*>(lease.parameter(0));
      auto* to = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
      device->launch(stream.id(), [=, first = index_of(unit) * tile_elements] {
        for (std::uint64_t i = 0; i < tile_elements; ++i)
          to[i] =
              bf16_from_float(float_from_bf16(from[i]) * std::cos(static_cast<float>(first + i)));
      });
    }
    EXPECT_LT(step.finish().clip_factor, 1);
  }
  std::vector<std::byte> masters(kRows * kColumns * sizeof(float));
  for (const TensorPlace& tensor : engine.tensors())
    engine.read_state(
        tensor.id, StateKind::kMaster, 0,
        std::span(masters).subspan(index_of(tensor.unit) * tile_elements * sizeof(float),
                                   tile_elements * sizeof(float)));
  return masters;
}

TEST(TileUnits, GiveTheBitsOfTheWholeTensor) {
  const std::vector<std::byte> whole = train_tiles(1);
  EXPECT_TRUE(train_tiles(2) == whole);
  EXPECT_TRUE(train_tiles(6) == whole);
}

}  // namespace
}  // namespace sluice::test
