// Other masters between two steps: exact bits, moments and other tensors as they were, and training
// that continues like that of an engine which began from this state.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include <sluice/plan.h>

#include "tests/engine/exactness_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kFrozenUnit = 1;

float new_value(const TensorPlace& tensor, std::uint64_t element) {
  return static_cast<float>((element * 13 + index_of(tensor.id) * 877) % 4093 + 1) * 1e-3f;
}

void give_new(const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = new_value(tensor, first + i);
}

bool is_replaced(const TensorPlace& tensor) {
  return index_of(tensor.id) % 2 == 1;
}

// The state of an engine with other masters: what replace_values() has to make.
class Expected final : public StateSource {
 public:
  explicit Expected(Engine& engine) : before_(engine) {}
  StatePosition position() const override { return before_.position(); }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
            std::span<float> values) override {
    if (kind == StateKind::kMaster && is_replaced(tensor)) return give_new(tensor, first, values);
    before_.read(tensor, kind, first, values);
  }

 private:
  MemorySource before_;
};

struct Running {
  Running(const Config& given, const ModelSpec& given_model)
      : config(given),
        model(given_model),
        device(make_host_device({.memory_bytes = host_device_bytes(config)})),
        engine(config, model, *device),
        stream(*device, "compute") {}

  void train(std::uint32_t steps) {
    for (std::uint32_t i = 0; i < steps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model, engine, *device, stream, config, 1);
      (void)step.finish();
    }
  }
  std::vector<TensorId> replaced() const {
    std::vector<TensorId> ids;
    for (const TensorPlace& tensor : engine.tensors())
      if (is_replaced(tensor)) ids.push_back(tensor.id);
    return ids;
  }

  Config config;
  ModelSpec model;
  std::unique_ptr<HostDevice> device;
  Engine engine;
  Stream stream;
};

enum class Format { kBf16, kFp32, kFp16, kBf16With8Bits };

class ReplaceValues : public testing::TestWithParam<std::tuple<Case, Format>> {
 protected:
  Config config_with(const std::string& path) {
    Config config = toy_config(path);
    std::get<Case>(GetParam()).change(config);
    const Format format = std::get<Format>(GetParam());
    const DType type = format == Format::kFp32   ? DType::kFp32
                       : format == Format::kFp16 ? DType::kFp16
                                                 : DType::kBf16;
    config.precision.parameters = config.precision.gradients = type;
    if (format == Format::kBf16With8Bits) config.optimizer.state = OptimizerState::k8bit;
    return config;
  }
};

TEST_P(ReplaceValues, MakesTheStateThatTrainingContinuesFrom) {
  const TempDirectory directory;
  const Config config = config_with(directory.path());
  const ModelSpec model = toy_model({kFrozenUnit});
  Running first(config, model);
  first.engine.initialize(toy_values());
  first.train(2);
  Expected expected(first.engine);
  first.engine.replace_values(first.replaced(), give_new);
  Running second(config, model);
  second.engine.restore(expected);
  EXPECT_EQ(read_state(first.engine), read_state(second.engine));
  EXPECT_EQ(first.engine.applied_step(), 2u);
  first.train(2);
  second.train(2);
  EXPECT_EQ(read_state(first.engine), read_state(second.engine));
}

// Every home of parameters and of records.
std::vector<Case> chosen_cases() {
  std::vector<Case> chosen(std::begin(kCases), std::begin(kCases) + 5);
  chosen.push_back(*std::ranges::find(kCases, std::string("all_device"), &Case::name));
  return chosen;
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<Case, Format>>& test) {
  constexpr const char* kNames[] = {"bf16", "fp32", "fp16", "bf16_8bit"};
  return std::get<Case>(test.param).name + "_" +
         kNames[static_cast<int>(std::get<Format>(test.param))];
}

INSTANTIATE_TEST_SUITE_P(Placements, ReplaceValues,
                         testing::Combine(testing::ValuesIn(chosen_cases()),
                                          testing::Values(Format::kBf16, Format::kFp32,
                                                          Format::kFp16, Format::kBf16With8Bits)),
                         name_of_case);

TEST(ReplaceValuesRefusals, LeaveTheStateAsItWas) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kHost, TierChoice::kHost};  // blocks change in their homes
  Running running(config, toy_model());
  Engine& engine = running.engine;
  const auto refused = [&](ErrorCode code, std::vector<TensorId> tensors,
                           const InitialValues& values) {
    return expect_error(code, [&] { engine.replace_values(tensors, values); });
  };
  EXPECT_NE(refused(ErrorCode::kInvalidArgument, {TensorId{0}}, give_new).find("initialize()"),
            std::string::npos);
  engine.initialize(toy_values());
  running.train(1);
  const StateBytes before = read_state(engine);
  EXPECT_NE(refused(ErrorCode::kInvalidArgument, {TensorId{0}}, {}).find("is empty"),
            std::string::npos);
  EXPECT_NE(
      refused(ErrorCode::kInvalidArgument, {TensorId{999}}, give_new).find("999 does not exist"),
      std::string::npos);
  {
    const Step step = engine.begin_step({.learning_rate = 1e-2});
    (void)refused(ErrorCode::kInvalidArgument, {TensorId{0}}, give_new);
  }
  const auto infinite = [](const TensorPlace&, std::uint64_t, std::span<float> values) {
    std::ranges::fill(values, std::numeric_limits<float>::infinity());
  };
  EXPECT_NE(refused(ErrorCode::kNonFinite, {TensorId{0}}, infinite)
                .find("\"" + engine.tensors()[0].name + "\""),
            std::string::npos);
  EXPECT_EQ(read_state(engine), before);
  engine.replace_values({}, give_new);
  EXPECT_EQ(read_state(engine), before);
}

TEST(ReplaceValuesRefusals, ADurableStoreKeepsItsCommit) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.storage.state.name = "kept";
  Running running(config, toy_model());
  running.engine.initialize(toy_values());
  const std::string message = expect_error(ErrorCode::kUnsupported, [&] {
    running.engine.replace_values(std::vector{TensorId{0}}, give_new);
  });
  EXPECT_NE(message.find("\"kept\""), std::string::npos) << message;
  running.engine.close();
}

}  // namespace
}  // namespace sluice::test
