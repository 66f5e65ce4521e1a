// Tensors without elements, alone in a unit and between others: the training of the same model
// without them, to the bit, and checkpoints and durable stores that have them.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/safetensors.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

TensorSpec tensor(const std::string& name, std::vector<std::uint64_t> shape) {
  return {.name = name, .shape = std::move(shape)};
}

// Empty tensors are first, last, between others, beside each other, and all that a unit has.
ModelSpec with_empty_tensors() {
  ModelSpec model;
  model.units = {{"a",
                  {tensor("a.none", {0}), tensor("a.w", {300}), tensor("a.gap", {3, 0, 2}),
                   tensor("a.v", {77})}},
                 {"nothing", {tensor("nothing.0", {0, 4}), tensor("nothing.1", {0})}},
                 {"z", {tensor("z.x", {5000}), tensor("z.y", {4, 0}), tensor("z.last", {0})}}};
  return model;
}

ModelSpec without_them() {
  ModelSpec model = with_empty_tensors();
  std::erase_if(model.units, [](const UnitSpec& unit) { return unit.name == "nothing"; });
  for (UnitSpec& unit : model.units)
    std::erase_if(unit.tensors, [](const TensorSpec& t) { return t.element_count() == 0; });
  return model;
}

class EmptyTensors : public testing::Test {
 protected:
  struct Result {
    std::vector<double> norms;
    std::map<std::string, std::vector<float>> state;  // masters and both moments, by tensor
  };

  // A function of the name and not of the number, which differs between the two models.
  static float value_of(const std::string& name, std::uint64_t element) {
    std::uint64_t x = element * 0x9e3779b97f4a7c15u;
    for (const char c : name) x = (x ^ static_cast<unsigned char>(c)) * 0xbf58476d1ce4e5b9u;
    return static_cast<float>(static_cast<std::int64_t>(x) >> 40) * 0x1p-23f;
  }

  static void start(Engine& engine) {
    engine.initialize([](const TensorPlace& place, std::uint64_t first, std::span<float> values) {
      EXPECT_NE(place.element_count, 0u) << "no values are wanted of " << place.name;
      for (float& value : values) value = value_of(place.name, first++);
    });
  }

  // Each gradient is a number of its own and half of the parameter.
  static void train(Engine& engine, const ModelSpec& model, HostDevice& device, int steps,
                    Result& result) {
    const Stream stream(device, "compute");
    const auto last = static_cast<std::uint32_t>(model.units.size()) - 1;
    for (int i = 0; i < steps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      for (std::uint32_t unit = 0; unit <= last; ++unit)
        (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
      for (std::uint32_t unit = 0; unit <= last; ++unit) {
        const UnitSpec& of = model.units[last - unit];
        const Lease lease = step.acquire(UnitId{last - unit}, Pass::kBackward, stream);
        for (std::size_t t = 0; t < of.tensors.size(); ++t) {
          const auto* const parameter = lease.parameter<float>(t);
          auto* const gradient = lease.gradient<float>(t);
          device.launch(stream.id(), [&place = of.tensors[t], parameter, gradient] {
            for (std::uint64_t e = 0; e < place.element_count(); ++e)
              gradient[e] = value_of(place.name + "'", e) + 0.5f * parameter[e];
          });
        }
      }
      result.norms.push_back(step.finish().gradient_norm);
    }
    engine.drain();
  }

  static void read(Engine& engine, Result& result) {
    for (const TensorPlace& place : engine.tensors()) {
      std::vector<float> values(3 * place.element_count);
      std::size_t kind = 0;
      for (const StateKind state : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
        const auto part =
            std::span(values).subspan(kind++ * place.element_count, place.element_count);
        engine.read_state(place.id, state, 0, std::as_writable_bytes(part));
      }
      if (!values.empty()) result.state[place.name] = std::move(values);
    }
  }

  Result run(const ModelSpec& model) const {
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(config_, model, *device);
    start(engine);
    Result result;
    train(engine, model, *device, 3, result);
    read(engine, result);
    engine.close();
    return result;
  }

  static Config config_in(const std::string& folder) {
    Config config = toy_config(folder);
    config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
    config.memory = {.device_bytes = 4_MiB, .host_bytes = 4_MiB};
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    return config;
  }

  TempDirectory directory_;
  Config config_ = config_in(directory_.path());
};

TEST_F(EmptyTensors, ChangeNoBitOfTheOthers) {
  using enum TierChoice;
  for (const OptimizerState moments :
       {OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit}) {
    for (const auto& [parameters, gradients] :
         {std::pair{kNvme, kHost}, {kHost, kNvme}, {kDevice, kDevice}}) {
      for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kSpeculative}) {
        SCOPED_TRACE(fmt::format("{} {} {}", static_cast<int>(moments), name_of(parameters),
                                 name_of(policy)));
        config_.optimizer.state = moments;
        config_.optimizer.overlap = policy;
        config_.placement = {parameters, kNvme, gradients};
        const Result expected = run(without_them());
        const Result actual = run(with_empty_tensors());
        EXPECT_EQ(actual.norms.front(), expected.norms.front());
        // Rounding of moments to bf16 depends on the number of the tensor.
        if (moments != OptimizerState::kBf16) {
          EXPECT_EQ(actual.norms, expected.norms);
          EXPECT_EQ(actual.state, expected.state);
        }
        EXPECT_EQ(actual.state.size(), expected.state.size());
      }
    }
  }
}

// Saved beside training and at rest, read as a checkpoint by another placement, and as a file by a
// program.
TEST_F(EmptyTensors, AreInCheckpoints) {
  const ModelSpec model = with_empty_tensors();
  const std::string root = directory_.file("checkpoints");
  config_.memory.save_buffers = 2;
  Result expected, actual;
  std::string path;
  {
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(config_, model, *device);
    start(engine);
    Result first;
    train(engine, model, *device, 2, first);
    engine.begin_save(root, {});
    const std::optional<SavedCheckpoint> beside = engine.finish_save();
    ASSERT_TRUE(beside);
    path = engine
               .save(root, {.sha256 =
                                [](const FileRanges& file) {
                                  return std::vector<std::string>(file.ranges.size(),
                                                                  std::string(64, '0'));
                                }})
               .path;
    train(engine, model, *device, 2, expected);
    read(engine, expected);
    engine.close();
  }
  for (const std::string& from : {path, path + "/../latest"}) {
    Config other = config_;
    other.placement = {TierChoice::kDevice, TierChoice::kHost};
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(other, model, *device);
    OpenCheckpoint checkpoint = open_checkpoint(from);
    engine.restore(*checkpoint.source);
    actual = {};
    train(engine, model, *device, 2, actual);
    read(engine, actual);
    engine.close();
    EXPECT_EQ(actual.norms, expected.norms);
    EXPECT_EQ(actual.state, expected.state);
  }
  const auto device = make_host_device({.memory_bytes = 4_MiB});
  ModelSpec other = model;
  other.units[1].tensors[1].shape = {1};
  Engine engine(config_, other, *device);
  OpenCheckpoint checkpoint = open_checkpoint(path);
  EXPECT_THROW(engine.restore(*checkpoint.source), Error) << "one of its tensors is not empty";
}

TEST_F(EmptyTensors, AreInDurableStores) {
  const ModelSpec model = with_empty_tensors();
  config_.storage.state.name = "run";
  Result expected, actual;
  {
    Config scratch = config_;
    scratch.storage.state.name = "";
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(scratch, model, *device);
    start(engine);
    train(engine, model, *device, 4, expected);
    read(engine, expected);
  }
  for (int part = 0; part < 2; ++part) {
    const auto device = make_host_device({.memory_bytes = 4_MiB});
    Engine engine(config_, model, *device);
    (void)engine.open_or_create(
        [](const TensorPlace& place, std::uint64_t first, std::span<float> values) {
          for (float& value : values) value = value_of(place.name, first++);
        });
    train(engine, model, *device, 2, actual);
    read(engine, actual);
    engine.close();
  }
  EXPECT_EQ(actual.norms, expected.norms);
  EXPECT_EQ(actual.state, expected.state);
}

// The files of other programs, too.
TEST_F(EmptyTensors, AreInSafetensorsFiles) {
  const std::string path = directory_.file("model.safetensors");
  const std::vector<float> values{1, 2, 3};
  const std::vector<SafetensorsTensor> tensors{{.name = "none", .dtype = "F32", .shape = {2, 0}},
                                               {.name = "three", .dtype = "F32", .shape = {3}},
                                               {.name = "end", .dtype = "BF16", .shape = {0}}};
  write_safetensors_file(path, tensors, {},
                         [&](std::size_t index, std::uint64_t first, std::span<std::byte> bytes) {
                           EXPECT_EQ(index, 1u);
                           const auto all = std::as_bytes(std::span(values));
                           std::ranges::copy(all.subspan(first, bytes.size()), bytes.begin());
                         });
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.names().size(), 3u);
  EXPECT_EQ(reader.find("none")->shape, (std::vector<std::uint64_t>{2, 0}));
  reader.read("none", 0, {});
  std::vector<float> found(3);
  reader.read("three", 0, found);
  EXPECT_EQ(found, values);
}

}  // namespace
}  // namespace sluice::test
