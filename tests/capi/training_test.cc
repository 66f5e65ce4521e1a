// Training through the C interface: what it reports is what has happened.
#include <algorithm>
#include <stdexcept>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

class CApiTraining : public CApi {
 protected:
  sluice_step_report step(const sluice_step_options& begin, const sluice_finish_options* finish,
                          float factor = 1) {
    EXPECT_EQ(sluice_begin_step(engine_, &begin), SLUICE_OK) << sluice_last_error();
    walk(factor);
    sluice_step_report report{};
    EXPECT_EQ(sluice_finish_step(engine_, finish, &report), SLUICE_OK) << sluice_last_error();
    return report;
  }
};

// Plain gradient descent: p -= rate * p / divisor.
constexpr const char* kSgd = R"("type": "sgd", "momentum": 0, "weight_decay": 0, "clip_norm": 0,
                                "overlap": "serial")";

TEST_F(CApiTraining, OptionsOfBeginAndFinishReachTheUpdate) {
  make(kSgd);
  std::vector<float> expected = master(0, 5000);
  const auto scale_by = [&](float factor) {
    for (float& value : expected) value *= factor;
  };
  (void)step({.learning_rate = 0.25,
              .gradient_divisor = 0,
              .group_learning_rates = nullptr,
              .group_count = 0,
              .micro_batches = 1},
             nullptr);
  scale_by(0.75f);
  EXPECT_EQ(master(0, 5000), expected);
  sluice_finish_options finish{.learning_rate = 0.5,
                               .gradient_divisor = 0,
                               .group_learning_rates = nullptr,
                               .group_count = 0,
                               .reserved = 0};
  (void)step(step_, &finish);
  scale_by(0.5f);
  EXPECT_EQ(master(0, 5000), expected);
  finish.gradient_divisor = 4;
  const sluice_step_report report = step(step_, &finish);
  scale_by(0.875f);
  EXPECT_EQ(master(0, 5000), expected);
  EXPECT_EQ(report.step, 3u);
  EXPECT_EQ(report.schedule_changes, 0u);
  EXPECT_GT(report.gradient_norm, 0);
  std::uint64_t applied = 0;
  ASSERT_EQ(sluice_applied_step(engine_, &applied), SLUICE_OK);
  EXPECT_EQ(applied, 3u);
}

TEST_F(CApiTraining, RatesOfGroupsReachTheUpdate) {
  make(std::string(kSgd) + R"(, "groups": [{"tensors": ["*.bias"]}])");
  const std::vector<float> weight = master(0, 50), bias = master(1, 50);
  const double rate = 0.5;
  (void)step({.learning_rate = 0,
              .gradient_divisor = 0,
              .group_learning_rates = &rate,
              .group_count = 1,
              .micro_batches = 1},
             nullptr);
  EXPECT_EQ(master(0, 50), weight);
  for (std::size_t i = 0; i < 50; ++i) EXPECT_EQ(master(1, 50)[i], 0.5f * bias[i]);
}

TEST_F(CApiTraining, OtherValuesBetweenTwoSteps) {
  make();
  const std::vector<float> weights = master(0, 5000);
  const auto ones = [](void*, std::uint32_t tensor, std::uint64_t, float* values,
                       std::uint64_t count) {
    EXPECT_EQ(tensor, 1u);
    std::fill_n(values, count, 1.0f);
    return 0;
  };
  const std::uint32_t bias = 1;
  ASSERT_EQ(sluice_replace_values(engine_, &bias, 1, ones, nullptr), SLUICE_OK)
      << sluice_last_error();
  EXPECT_EQ(master(1, 50), std::vector<float>(50, 1.0f));
  EXPECT_EQ(master(0, 5000), weights);
  const auto stops = [](void*, std::uint32_t, std::uint64_t, float*, std::uint64_t) { return 1; };
  EXPECT_EQ(sluice_replace_values(engine_, &bias, 1, stops, nullptr), SLUICE_CALLBACK);
  EXPECT_STREQ(sluice_last_error(), "sluice_replace_values: the function for values has failed");
  EXPECT_EQ(master(1, 50), std::vector<float>(50, 1.0f));
  EXPECT_EQ(sluice_replace_values(engine_, &bias, 1, nullptr, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_replace_values(engine_, nullptr, 1, ones, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_replace_values(nullptr, &bias, 1, ones, nullptr), SLUICE_INVALID_ARGUMENT);
  std::string durable = config();
  durable.replace(durable.find("\"paths\""), 0, R"("state": {"name": "kept"}, )");
  sluice_engine_destroy(engine_);
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(durable.c_str(), &made, &engine_), SLUICE_OK);
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(sluice_replace_values(engine_, &bias, 1, ones, nullptr), SLUICE_UNSUPPORTED);
}

TEST_F(CApiTraining, TheNormBeforeTheEnd) {
  make(kSgd);
  double norm = 0;
  EXPECT_EQ(sluice_gradient_norm(engine_, 0, &norm), SLUICE_INVALID_ARGUMENT);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  EXPECT_EQ(sluice_gradient_norm(engine_, 0, &norm), SLUICE_INVALID_ARGUMENT) << "no gradient";
  EXPECT_EQ(sluice_gradient_norm(engine_, 0, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_gradient_norm(nullptr, 0, &norm), SLUICE_INVALID_ARGUMENT);
  walk();
  ASSERT_EQ(sluice_gradient_norm(engine_, 0, &norm), SLUICE_OK) << sluice_last_error();
  double half = 0;
  ASSERT_EQ(sluice_gradient_norm(engine_, 2, &half), SLUICE_OK) << sluice_last_error();
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(norm, report.gradient_norm);
  EXPECT_EQ(2 * half, norm);
  EXPECT_GT(norm, 0);
}

// The other member has the same gradients.
int add_an_equal_member(void* context, uint64_t* sums, uint64_t count) {
  ++*static_cast<int*>(context);
  for (uint64_t i = 0; i < count; ++i) sums[i] *= 2;
  return 0;
}

TEST_F(CApiTraining, TheNormIsThatOfTheGroup) {
  make(kSgd);
  const double own = step(step_, nullptr).gradient_norm;
  int calls = 0;
  ASSERT_EQ(sluice_set_norm_group(engine_, add_an_equal_member, &calls, nullptr, 0), SLUICE_OK);
  EXPECT_NEAR(step(step_, nullptr).gradient_norm / own, std::sqrt(2.0) * 0.99, 1e-6)
      << "after a step that has taken a hundredth off parameters and gradients";
  EXPECT_EQ(calls, 1);
  const std::uint32_t missing = 1000;
  EXPECT_EQ(sluice_set_norm_group(engine_, add_an_equal_member, &calls, &missing, 1),
            SLUICE_INVALID_ARGUMENT);
  ASSERT_EQ(sluice_set_norm_group(engine_, nullptr, nullptr, nullptr, 0), SLUICE_OK);
  (void)step(step_, nullptr);
  EXPECT_EQ(calls, 1);
  const auto fails = [](void*, uint64_t*, uint64_t) { return 7; };
  ASSERT_EQ(sluice_set_norm_group(engine_, fails, nullptr, nullptr, 0), SLUICE_OK);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  EXPECT_EQ(sluice_set_norm_group(engine_, nullptr, nullptr, nullptr, 0), SLUICE_INVALID_ARGUMENT)
      << "a step is active";
  walk(1);
  sluice_step_report report{};
  EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_RANKS);
  EXPECT_NE(std::string(sluice_last_error()).find("failed with 7"), std::string::npos);
}

TEST_F(CApiTraining, BytesAreThePlans) {
  make(R"("overlap": "serial")");
  (void)step(step_, nullptr);
  sluice_traffic traffic{};
  ASSERT_EQ(sluice_predicted_traffic(engine_, 1, &traffic), SLUICE_OK);
  const sluice_step_report report = step(step_, nullptr);
  EXPECT_EQ(report.nvme_read_bytes, traffic.nvme_read_bytes);
  EXPECT_EQ(report.nvme_write_bytes, traffic.nvme_write_bytes);
  EXPECT_NE(report.nvme_write_bytes, 0u);
}

// The engine counts bytes as before behind values that have failed.
TEST_F(CApiTraining, BytesAreThePlansAfterValuesThatFail) {
  make(R"("overlap": "serial")");
  (void)step(step_, nullptr);
  const auto failing = [](void*, std::uint32_t, std::uint64_t, float*, std::uint64_t) { return 1; };
  const std::uint32_t tensor = 0;
  ASSERT_EQ(sluice_replace_values(engine_, &tensor, 1, failing, nullptr), SLUICE_CALLBACK);
  ASSERT_EQ(sluice_replace_values(engine_, &tensor, 1, sine_values, nullptr), SLUICE_OK);
  sluice_traffic traffic{};
  ASSERT_EQ(sluice_predicted_traffic(engine_, 1, &traffic), SLUICE_OK);
  for (int i = 0; i < 2; ++i) {
    const sluice_step_report report = step(step_, nullptr);
    EXPECT_EQ(report.nvme_read_bytes, traffic.nvme_read_bytes) << i;
    EXPECT_EQ(report.nvme_write_bytes, traffic.nvme_write_bytes) << i;
  }
}

TEST_F(CApiTraining, WhereTensorsLie) {
  make();
  sluice_tensor_info bias{}, scale{};
  ASSERT_EQ(sluice_tensor_describe(engine_, 1, &bias), SLUICE_OK);
  ASSERT_EQ(sluice_tensor_describe(engine_, 2, &scale), SLUICE_OK);
  EXPECT_EQ(bias.unit, 0u);
  EXPECT_EQ(bias.element_count, 50u);
  EXPECT_EQ(scale.unit, 1u);
  EXPECT_EQ(scale.element_count, 1u);
  ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK);
  sluice_lease lease{};
  ASSERT_EQ(sluice_acquire(engine_, 0, SLUICE_INFERENCE, &lease), SLUICE_OK);
  const std::vector<float> expected = [&] {
    std::vector<float> values(50);
    (void)sine_values(nullptr, 1, 0, values.data(), 50);
    return values;
  }();
  const float* found = static_cast<const float*>(lease.parameters) + bias.offset_elements;
  EXPECT_EQ(std::vector<float>(found, found + 50), expected);
  ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK);
}

// A gradient that is not finite ends the step and nothing else.
TEST_F(CApiTraining, AGradientThatIsNotFinite) {
  make();
  const std::vector<float> before = master(0, 5000);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  walk(INFINITY);
  sluice_step_report report{};
  EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_NON_FINITE);
  EXPECT_EQ(master(0, 5000), before);
  EXPECT_EQ(step(step_, nullptr).step, 1u);
}

TEST_F(CApiTraining, NotesComeOnceEach) {
  make();
  const char* note = nullptr;
  do {
    ASSERT_EQ(sluice_next_note(engine_, &note), SLUICE_OK);
  } while (note != nullptr);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  use(1, SLUICE_FORWARD, 1);
  use(0, SLUICE_FORWARD, 1);
  for (const std::uint32_t unit : {1u, 0u}) use(unit, SLUICE_BACKWARD, 1);
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_NE(report.schedule_changes, 0u);
  ASSERT_EQ(sluice_next_note(engine_, &note), SLUICE_OK);
  ASSERT_NE(note, nullptr);
  EXPECT_NE(std::string(note).find("not used as scheduled"), std::string::npos);
  ASSERT_EQ(sluice_next_note(engine_, &note), SLUICE_OK);
  EXPECT_EQ(note, nullptr);
}

// A step ends with every failure, also with one that is no error of Sluice.
TEST_F(CApiTraining, AnExceptionOfTheApplicationEndsTheStep) {
  make();
  const auto add = [](void*, std::uint64_t*, std::uint64_t) -> int {
    throw std::runtime_error("the network is gone");
  };
  ASSERT_EQ(sluice_set_norm_group(engine_, add, nullptr, nullptr, 0), SLUICE_OK);
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
  walk(1);
  sluice_step_report report{};
  EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_INTERNAL);
  EXPECT_STREQ(sluice_last_error(), "the network is gone");
  EXPECT_EQ(sluice_abandon_step(engine_), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(), "sluice_abandon_step: no step is active");
}

// The oldest notes go where there are too many, and a note says how many went.
TEST_F(CApiTraining, NotesThatAreDroppedAreCounted) {
  make();
  const auto take = [&] {
    std::vector<std::string> notes;
    const char* note = nullptr;
    while (sluice_next_note(engine_, &note) == SLUICE_OK && note != nullptr) notes.push_back(note);
    return notes;
  };
  const auto train = [&](int steps) {  // each without a unit, of which a note tells
    for (int i = 0; i < steps; ++i) {
      ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
      use(0, SLUICE_FORWARD, 1);
      use(0, SLUICE_BACKWARD, 1);
      sluice_step_report report{};
      ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    }
  };
  train(2);  // the schedule changes
  (void)take();
  train(103);
  const std::vector<std::string> notes = take();
  ASSERT_EQ(notes.size(), 101u);
  EXPECT_EQ(notes[0],
            "3 older notes were dropped: only the newest 100 are kept; call "
            "sluice_next_note() after each step");
  EXPECT_NE(notes[1].find("step 6: "), std::string::npos) << notes[1];
  EXPECT_TRUE(take().empty());
}

}  // namespace
}  // namespace sluice::test
