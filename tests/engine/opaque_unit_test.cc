// Units of bits instead of numbers: every pattern comes back as it was given, wherever the unit
// lives, and through checkpoints, durable stores and other values.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <tuple>
#include <vector>

#include <sluice/checkpoint.h>
#include <sluice/error.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kOpaqueUnit = 1;
// Patterns of bits that a conversion of numbers changes: signaling NaNs, denormals, negative zero.
constexpr std::uint32_t kPatterns[] = {0x7f800001u, 0xffbfffffu, 0x00000001u, 0x80000000u,
                                       0x7c017c01u, 0xfc01fd55u, 0xffffffffu, 0x00010203u};

std::uint32_t word_at(std::uint32_t tensor, std::uint64_t element, std::uint64_t word_bytes) {
  const std::uint64_t i = element * 7 + tensor;
  const std::uint32_t word = i % 3 == 0 ? kPatterns[i / 3 % std::size(kPatterns)]
                                        : static_cast<std::uint32_t>(i * 2654435761u);
  return word >> (32 - 8 * word_bytes);
}

InitialValues values_of(DType type) {
  return [type](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    if (!tensor.is_opaque) return toy_values()(tensor, first, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] =
          float_of_word(word_at(index_of(tensor.id), first + i, size_of(type)), size_of(type));
  };
}

ModelSpec opaque_model() {
  ModelSpec model = toy_model({kOpaqueUnit});
  model.units[kOpaqueUnit].is_opaque = true;
  return model;
}

Config config_of(const TempDirectory& directory, const Case& place, DType type) {
  Config config = toy_config(directory.path());
  place.change(config);
  config.precision.parameters = type;
  config.precision.gradients = type == DType::kBf16 ? DType::kBf16 : DType::kFp32;
  if (config.memory.device_bytes) *config.memory.device_bytes *= 2;
  if (config.memory.host_bytes) *config.memory.host_bytes *= 2;
  config.optimizer.overlap = OverlapPolicy::kSerial;
  return config;
}

struct Running {
  explicit Running(const Config& given, bool is_gpu = false)
      : config(given),
        device(make_host_device(
            {.memory_bytes = host_device_bytes(config), .has_own_memory = is_gpu})),
        engine(config, model, *device),
        stream(*device, "compute") {}

  StepReport train() {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model, engine, *device, stream, config, 1);
    return step.finish();
  }
  // Compares a use's bytes and read_state()'s with the words that were given.
  void expect_words() {
    const std::uint64_t word_bytes = size_of(config.precision.parameters);
    for (const TensorPlace& tensor : engine.tensors()) {
      if (!tensor.is_opaque) continue;
      std::vector<std::byte> expected(tensor.element_count * word_bytes);
      for (std::uint64_t i = 0; i < tensor.element_count; ++i) {
        const std::uint32_t word = word_at(index_of(tensor.id), i, word_bytes);
        std::memcpy(expected.data() + i * word_bytes, &word, word_bytes);
      }
      std::vector<std::byte> found(expected.size());
      engine.read_state(tensor.id, StateKind::kParameter, 0, found);
      EXPECT_EQ(found, expected) << tensor.name;
      if (device->has_own_memory()) continue;  // the host must not look there
      Inference inference = engine.begin_inference();
      const Lease lease = inference.acquire(tensor.unit, stream);
      device->synchronize(stream.id());
      const std::size_t place = index_of(tensor.id) - first_tensor();
      std::memcpy(found.data(), lease.parameter(place), found.size());
      EXPECT_EQ(found, expected) << tensor.name;
    }
  }
  std::size_t first_tensor() const {
    std::size_t count = 0;
    for (std::uint32_t unit = 0; unit < kOpaqueUnit; ++unit)
      count += model.units[unit].tensors.size();
    return count;
  }

  ModelSpec model = opaque_model();
  Config config;
  std::unique_ptr<HostDevice> device;
  Engine engine;
  Stream stream;
};

template <class Body>
void expect_says(ErrorCode code, const Body& body, const std::string& words) {
  const std::string message = expect_error(code, body);
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

class OpaqueUnit : public testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(OpaqueUnit, KeepsEveryBit) {
  const auto& [place, type] = GetParam();
  const TempDirectory directory;
  Running run(config_of(directory, place, type), place.is_gpu);
  run.engine.initialize(values_of(type));
  run.expect_words();
  for (int step = 0; step < 3; ++step) {
    const StepReport report = run.train();
    if (step == 0) continue;  // the first report counts the bytes of expect_words(), too
    const Traffic predicted = run.engine.predicted_traffic(1);
    EXPECT_EQ(report.nvme_read_bytes, predicted.nvme_read_bytes);
    EXPECT_EQ(report.nvme_write_bytes, predicted.nvme_write_bytes);
  }
  run.expect_words();

  const SavedCheckpoint saved = run.engine.save(directory.file("checkpoints"), {});
  Running other(config_of(directory, kCases[0], type));
  CheckpointSource source(saved.path);
  other.engine.restore(source);
  other.expect_words();
}

INSTANTIATE_TEST_SUITE_P(, OpaqueUnit,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::Values(DType::kBf16, DType::kFp16,
                                                          DType::kFp32)),
                         [](const auto& value) {
                           return std::get<0>(value.param).name + "_" +
                                  std::string(name_of(std::get<1>(value.param)));
                         });

TEST(OpaqueUnits, OtherWordsBesideOthersInTheirBlock) {
  for (const DType type : {DType::kBf16, DType::kFp16, DType::kFp32}) {
    SCOPED_TRACE(name_of(type));
    const TempDirectory directory;
    Running run(config_of(directory, kCases[0], type));
    const InitialValues values = values_of(type);
    std::vector<TensorId> wrong;
    run.engine.initialize(
        [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> target) {
          values(tensor, first, target);
          const bool is_second = tensor.is_opaque && index_of(tensor.id) != run.first_tensor();
          for (float& value : target.first(is_second ? target.size() : 0)) value = 0;
        });
    for (const TensorPlace& tensor : run.engine.tensors())
      if (tensor.is_opaque && index_of(tensor.id) != run.first_tensor()) wrong.push_back(tensor.id);
    ASSERT_FALSE(wrong.empty());
    run.engine.replace_values(wrong, values);
    run.expect_words();
  }
}

TEST(OpaqueUnits, ADurableStoreKeepsThemAndKnowsThem) {
  const TempDirectory directory;
  Config config = config_of(directory, kCases[0], DType::kFp16);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 8_MiB;
  config.storage.state.name = "opaque";
  {
    Running run(config);
    (void)run.engine.open_or_create(values_of(DType::kFp16));
    (void)run.train();
    run.engine.close();
  }
  {
    Running again(config);
    EXPECT_EQ(again.engine.open_or_create(values_of(DType::kFp16)).step, 1u);
    again.expect_words();
  }
  ModelSpec frozen = opaque_model();
  frozen.units[kOpaqueUnit].is_opaque = false;
  const auto device = make_host_device({.memory_bytes = host_device_bytes(config)});
  expect_says(
      ErrorCode::kInput,
      [&] {
        Engine engine(config, frozen, *device);
        (void)engine.open_or_create(values_of(DType::kFp16));
      },
      "frozen units");
}

TEST(OpaqueUnits, AreRefusedWhereTheirWordsWouldBeNumbers) {
  ModelSpec trained = opaque_model();
  trained.units[kOpaqueUnit].is_frozen = false;
  expect_says(
      ErrorCode::kInvalidArgument, [&] { (void)validated(trained); }, "opaque, but not frozen");

  const TempDirectory directory;
  Running run(config_of(directory, kCases[0], DType::kBf16));
  run.engine.initialize(values_of(DType::kBf16));
  const SavedCheckpoint saved = run.engine.save(directory.file("checkpoints"), {});
  const auto prepare = [&](const ModelSpec& model, DType type) {
    CheckpointSource source(saved.path, CheckpointPrecision::kConvert);
    source.prepare(describe_state(model, type, OptimizerKind::kAdamW, OptimizerState::kFp32));
  };
  EXPECT_NO_THROW(prepare(run.model, DType::kFp16));  // words of the same size
  expect_says(
      ErrorCode::kInput, [&] { prepare(run.model, DType::kFp32); }, "another size");
  ModelSpec frozen = run.model;
  frozen.units[kOpaqueUnit].is_opaque = false;
  expect_says(
      ErrorCode::kInput, [&] { prepare(frozen, DType::kBf16); }, ".opaque\" is true");
}

// Words of another size would be read as other words.
TEST(OpaqueUnits, StoredWordsHaveTheSizeOfTheStates) {
  const TempDirectory directory;
  Running run(config_of(directory, kCases[0], DType::kBf16));
  run.engine.initialize(values_of(DType::kBf16));
  const SavedCheckpoint saved = run.engine.save(directory.file("checkpoints"), {});
  CheckpointManifest manifest = CheckpointSource(saved.path).manifest();
  const std::string name = run.model.units[kOpaqueUnit].tensors[0].name;
  for (CheckpointManifest::Stored& stored : manifest.stored)
    if (stored.tensor == name) stored.dtype = "F32";
  std::ofstream(saved.path + "/sluice_state.json") << manifest_text(manifest);
  expect_says(
      ErrorCode::kInput, [&] { const CheckpointSource source(saved.path); },
      "dtype \"F32\" of 4 bytes for the weight of \"" + name +
          "\", which is opaque and has words of 2 bytes");
}

}  // namespace
}  // namespace sluice::test
