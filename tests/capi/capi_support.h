// An engine that tests use through the C interface, and the test fixture that has one. The model
// has two small units.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "capi/sluice.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {

inline int sine_values(void* context, std::uint32_t tensor, std::uint64_t first, float* values,
                       std::uint64_t count) {
  (void)context;
  for (std::uint64_t i = 0; i < count; ++i)
    values[i] = std::sin(static_cast<float>(first + i) + 3.0f * static_cast<float>(tensor));
  return 0;
}

// Returns the arguments for one Adam step of tensor 0. The gradients are in fp32.
inline sluice_update adam_update(void* parameter, const void* gradient, std::uint64_t step) {
  sluice_update made{};
  made.parameter = parameter;
  made.gradient = gradient;
  made.step = step;
  made.learning_rate = 0.01;
  made.beta1 = 0.9;
  made.beta2 = 0.999;
  made.epsilon = 1e-8;
  made.gradient_scale = 1;
  return made;
}

// Threads of ranks make an engine each. They may make no fixture: GoogleTest keeps its flags in
// one.
class CApiEngine {
 protected:
  ~CApiEngine() { sluice_engine_destroy(engine_); }

  std::string config(const std::string& optimizer = "") const {
    return R"({"precision": {"parameters": "fp32", "gradients": "fp32"},
               "placement": {"parameters": "nvme", "optimizer": "nvme"},
               "memory": {"device": "1MiB", "host": "4MiB"},
               "optimizer": {)" +
           optimizer + R"(}, "storage": {)" + backend_ + R"("paths": [")" + directory_.path() +
           R"("]}})";
  }

  sluice_model model() const {
    sluice_model model{};
    model.units = units_;
    model.unit_count = 2;
    model.concurrent_leases = 1;
    return model;
  }

  void make(const std::string& optimizer = "") {
    const sluice_model made = model();
    ASSERT_EQ(sluice_engine_create(config(optimizer).c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  }

  // The function uses all units as one step does, but does not begin or finish the step. Each
  // gradient is `factor` times the parameter.
  void walk(float factor = 1) {
    for (const std::uint32_t unit : {0u, 1u}) use(unit, SLUICE_FORWARD, factor);
    for (const std::uint32_t unit : {1u, 0u}) use(unit, SLUICE_BACKWARD, factor);
  }
  void use(std::uint32_t unit, sluice_pass pass, float factor) {
    sluice_lease lease{};
    ASSERT_EQ(sluice_acquire(engine_, unit, pass, &lease), SLUICE_OK) << sluice_last_error();
    sluice_unit_info info{};
    ASSERT_EQ(sluice_unit_describe(engine_, unit, &info), SLUICE_OK);
    for (std::uint64_t i = 0; pass == SLUICE_BACKWARD && i < info.gradient_bytes / 4; ++i)
      static_cast<float*>(lease.gradients)[i] +=
          factor * static_cast<const float*>(lease.parameters)[i];
    ASSERT_EQ(sluice_release(engine_, lease.id), SLUICE_OK) << sluice_last_error();
  }

  std::vector<float> master(std::uint32_t tensor, std::uint64_t count) {
    std::vector<float> values(count);
    EXPECT_EQ(sluice_read_state(engine_, tensor, SLUICE_MASTER, 0, count, values.data()), SLUICE_OK)
        << sluice_last_error();
    return values;
  }

  TempDirectory directory_;
  std::string backend_;  // a line for the config's section "storage", or empty
  const std::uint64_t matrix_[2] = {100, 50};
  const std::uint64_t vector_[1] = {50};
  const sluice_tensor first_[2] = {{"first.weight", matrix_, 2, 1}, {"first.bias", vector_, 1, 0}};
  const sluice_tensor second_[1] = {{"second.scale", nullptr, 0, 0}};
  const sluice_unit units_[2] = {{"first", first_, 2, 0}, {"second", second_, 1, 0}};
  const sluice_step_options step_{.learning_rate = 1e-2,
                                  .gradient_divisor = 0,
                                  .group_learning_rates = nullptr,
                                  .group_count = 0,
                                  .micro_batches = 1};
  sluice_engine* engine_ = nullptr;
};

class CApi : public testing::Test, protected CApiEngine {};

}  // namespace sluice::test
