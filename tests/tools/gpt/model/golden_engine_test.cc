// The same ten steps of the PyTorch twin, trained through the engine with all of the state on NVMe.
#include <gtest/gtest.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tests/golden/golden_run.h"
#include "tests/support/temp_directory.h"
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {
namespace {

Config out_of_core_config(const GoldenRun& run, const std::string& path) {
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.optimizer.adam = run.adam;
  config.optimizer.clip_norm = run.clip_norm;
  config.memory.host_bytes = 16 << 20;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {path};
  config.storage.block_elements = 4096;
  config.threads = 2;
  return config;
}

GoldenRun::Tensors masters(Engine& engine) {
  GoldenRun::Tensors tensors;
  for (const TensorPlace& tensor : engine.tensors()) {
    std::vector<float>& values = tensors[tensor.name];
    values.resize(tensor.element_count);
    engine.read_state(tensor.id, StateKind::kMaster, 0, std::as_writable_bytes(std::span(values)));
  }
  return tensors;
}

class GoldenEngine : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Twin, GoldenEngine, testing::Values("gpt2_tied", "gpt2_untied"));

TEST_P(GoldenEngine, TenStepsOnNvmeEqualThePyTorchTwin) {
  const GoldenRun run = read_golden_run(std::string(SLUICE_GOLDEN_DIR) + "/" + GetParam());
  const ModelSpec model = validated(gpt_model_spec(run.model));
  const test::TempDirectory directory;
  const auto device = make_host_device({.memory_bytes = 16 << 20});
  Engine engine(out_of_core_config(run, directory.path()), model, *device);
  engine.initialize([&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    const UnitPlace& unit = layout_of(engine).unit(tensor.unit);
    const UnitSpec& spec = model.units[index_of(tensor.unit)];
    fill_initial_values(run.model, run.seed, spec.tensors[index_of(tensor.id) - unit.first_tensor],
                        first, values);
  });
  const GoldenRun::Tensors initial = masters(engine);
  GptCompute compute(run.model, {.batch = run.batch, .sequence = run.model.context},
                     {.threads = 2});
  const Stream stream(*device, "compute");
  std::vector<const std::byte*> parameters;
  std::vector<std::byte*> gradients;
  const auto gather = [&](const Lease& lease, Pass pass) {
    parameters.clear();
    gradients.clear();
    for (std::size_t i = 0; i < model.units[index_of(lease.unit())].tensors.size(); ++i) {
      parameters.push_back(lease.parameter(i));
      if (pass == Pass::kBackward) gradients.push_back(lease.gradient(i));
    }
  };
  for (std::uint32_t number = 0; number < run.steps; ++number) {
    const GoldenRun::MicroBatch data = run.micro_batch(number);
    compute.start_training(data.tokens, data.targets);
    Step step = engine.begin_step({.learning_rate = run.learning_rate});
    for (std::uint32_t use = 0; use < model.forward_order.size(); ++use) {
      const Lease lease = step.acquire(model.forward_order[use], Pass::kForward, stream);
      gather(lease, Pass::kForward);
      device->launch(stream.id(),
                     [&compute, use, parameters] { compute.forward(use, parameters); });
    }
    for (std::uint32_t use = 0; use < model.backward_order.size(); ++use) {
      const Lease lease = step.acquire(model.backward_order[use], Pass::kBackward, stream);
      gather(lease, Pass::kBackward);
      device->launch(stream.id(), [&compute, use, parameters, gradients] {
        compute.backward(use, parameters, gradients);
      });
    }
    const StepReport report = step.finish();
    EXPECT_NEAR(compute.loss(), run.losses[number], 1e-5 * run.losses[number]) << "step " << number;
    EXPECT_NEAR(report.gradient_norm, run.gradient_norms[number], 1e-5 * run.gradient_norms[number])
        << "step " << number;
  }
  EXPECT_LE(relative_update_error(run, masters(engine), initial), 1e-3);
}

}  // namespace
}  // namespace sluice::gpt
