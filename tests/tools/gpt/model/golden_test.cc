// GptCompute and the scalar Adam in a plain loop against ten steps of the PyTorch twin
// (tests/golden).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/optimizer_math.h"
#include "tests/golden/golden_run.h"
#include "tests/tools/gpt/model/model_state.h"

namespace sluice::gpt {
namespace {

// In-memory training: master weights where the model reads them, moments beside them.
class PlainTrainer {
 public:
  explicit PlainTrainer(const GoldenRun& run)
      : run_(run),
        spec_(gpt_model_spec(run.model)),
        parameters_(spec_, DType::kFp32),
        compute_(run.model, {run.batch, run.model.context}, {.threads = 2}) {
    for_each_tensor(spec_, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      float* data = parameters_.floats(unit, tensor);
      fill_initial_values(run.model, run.seed, t, 0, {data, t.element_count()});
      initial_[t.name] = {data, data + t.element_count()};
      exp_avg_[t.name].resize(t.element_count());
      exp_avg_sq_[t.name].resize(t.element_count());
    });
  }

  PassResult compute_gradients(std::uint32_t step) {
    const GoldenRun::MicroBatch data = run_.micro_batch(step);
    return run_training_pass(compute_, spec_, parameters_, DType::kFp32, data.tokens, data.targets);
  }

  static double norm_of(const PassResult& pass) {
    double squares = 0;
    for (const auto& [name, values] : pass.gradients)
      for (const float value : values) squares += static_cast<double>(value) * value;
    return std::sqrt(squares);
  }

  void update(std::uint32_t step, const PassResult& pass) {
    const auto clip = static_cast<float>(std::min(1.0, run_.clip_norm / norm_of(pass)));
    for_each_tensor(spec_, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      AdamOptions options = run_.adam;
      if (t.weight_decay == WeightDecay::kNone) options.weight_decay = 0;
      const AdamCoefficients coefficients =
          adam_coefficients(options, run_.learning_rate, step + 1, clip);
      float* master = parameters_.floats(unit, tensor);
      std::vector<float>& m = exp_avg_[t.name];
      std::vector<float>& v = exp_avg_sq_[t.name];
      for (std::size_t i = 0; i < m.size(); ++i) {
        const AdamElement next =
            adam_element(coefficients, {master[i], m[i], v[i]}, pass.gradients.at(t.name)[i]);
        master[i] = next.master;
        m[i] = next.exp_avg;
        v[i] = next.exp_avg_sq;
      }
    });
  }

  const ModelSpec& spec() const { return spec_; }
  const float* parameter(std::size_t unit, std::size_t tensor) const {
    return parameters_.floats(unit, tensor);
  }
  const std::vector<float>& initial(const std::string& name) const { return initial_.at(name); }

 private:
  const GoldenRun& run_;
  ModelSpec spec_;
  TensorMemory parameters_;
  GptCompute compute_;
  std::map<std::string, std::vector<float>> initial_, exp_avg_, exp_avg_sq_;
};

class Golden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Twin, Golden, testing::Values("gpt2_tied", "gpt2_untied"));

TEST_P(Golden, TenStepsEqualThePyTorchTwin) {
  const GoldenRun run = read_golden_run(std::string(SLUICE_GOLDEN_DIR) + "/" + GetParam());
  PlainTrainer trainer(run);
  for (std::uint32_t step = 0; step < run.steps; ++step) {
    const PassResult pass = trainer.compute_gradients(step);
    EXPECT_NEAR(pass.loss, run.losses[step], 1e-5 * run.losses[step]) << "step " << step;
    EXPECT_NEAR(PlainTrainer::norm_of(pass), run.gradient_norms[step],
                1e-5 * run.gradient_norms[step]);
    ASSERT_EQ(pass.gradients.size(), run.gradients[step].size());
    for (const auto& [name, expected] : run.gradients[step])
      EXPECT_LT(relative_difference(pass.gradients.at(name), expected), 1e-5)
          << name << " at step " << step;
    trainer.update(step, pass);
  }

  GoldenRun::Tensors parameters;
  GoldenRun::Tensors initial;
  for_each_tensor(trainer.spec(), [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
    const float* values = trainer.parameter(unit, tensor);
    parameters[t.name] = {values, values + t.element_count()};
    initial[t.name] = trainer.initial(t.name);
  });
  EXPECT_LE(relative_update_error(run, parameters, initial), 1e-3);
}

}  // namespace
}  // namespace sluice::gpt
