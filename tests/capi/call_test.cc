// Bad input to the C interface: each call returns a code and says why, and none harms the engine.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <limits>

#include "tests/capi/capi_support.h"
#include "tests/support/fork_quietly.h"
#include "tests/support/memory_group.h"

namespace sluice::test {
namespace {

class CApiCall : public CApi {
 protected:
  static void expect(sluice_status expected, sluice_status actual, const std::string& words) {
    EXPECT_EQ(actual, expected) << sluice_last_error();
    EXPECT_NE(std::string(sluice_last_error()).find(words), std::string::npos)
        << '"' << words << "\" is not in: " << sluice_last_error();
  }
  static void refused(sluice_status actual, const std::string& words) {
    expect(SLUICE_INVALID_ARGUMENT, actual, words);
  }

  void train_a_step() {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
    walk();
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  }
};

TEST_F(CApiCall, VersionsAreThere) {
  EXPECT_EQ(sluice_abi_version(), static_cast<std::uint32_t>(SLUICE_ABI_VERSION));
  EXPECT_NE(std::string(sluice_version()), "");
  EXPECT_EQ(std::async(std::launch::async, [] { return std::string(sluice_last_error()); }).get(),
            "");
}

// In a control group of 256 MiB.
TEST_F(CApiCall, PoolsBeyondTheLimitOfMemoryAreRefused) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow memory counts as the process's";
#endif
  const MemoryGroup group(256 << 20);
  if (!group.exists()) GTEST_SKIP() << "no control group with a limit can be made here";
  const auto said = [&](std::uint64_t elements) {
    return group.run([&] {
      const sluice_tensor tensor{"weight", &elements, 1, 0};
      const sluice_unit unit{"large", &tensor, 1, 0};
      sluice_model large{};
      large.units = &unit;
      large.unit_count = 1;
      large.concurrent_leases = 1;
      const std::string text = R"({"placement": {"parameters": "host", "optimizer": "host"},
          "memory": {"device": "300MiB", "host": "4GiB"}, "run": {"threads": 1}})";
      const sluice_status status = sluice_engine_create(text.c_str(), &large, &engine_);
      return std::to_string(status) + " " + sluice_last_error();
    });
  };
  EXPECT_EQ(said(4 << 20), "0 ");
  const std::string refusal = said(32 << 20);
  EXPECT_TRUE(refusal.starts_with(std::to_string(SLUICE_OUT_OF_MEMORY) + " ")) << refusal;
  EXPECT_NE(refusal.find("the cgroup's limit of 256 MiB leaves"), std::string::npos) << refusal;
}

TEST_F(CApiCall, NoEngine) {
  sluice_step_report report{};
  sluice_lease lease{};
  double number = 0;
  std::uint64_t count = 0;
  sluice_unit_info unit{};
  sluice_tensor_info tensor{};
  sluice_traffic traffic{};
  const char* note = nullptr;
  refused(sluice_initialize(nullptr, sine_values, nullptr),
          "sluice_initialize: the engine is null");
  refused(sluice_close(nullptr), "sluice_close: the engine is null");
  refused(sluice_drain(nullptr), "the engine is null");
  refused(sluice_begin_step(nullptr, &step_), "the engine is null");
  refused(sluice_finish_step(nullptr, nullptr, &report), "the engine is null");
  refused(sluice_abandon_step(nullptr), "the engine is null");
  refused(sluice_loss_scale(nullptr, &number), "the engine is null");
  refused(sluice_begin_inference(nullptr), "the engine is null");
  refused(sluice_end_inference(nullptr), "the engine is null");
  refused(sluice_acquire(nullptr, 0, SLUICE_FORWARD, &lease), "the engine is null");
  refused(sluice_release(nullptr, 1), "the engine is null");
  refused(sluice_read_state(nullptr, 0, SLUICE_MASTER, 0, 0, nullptr), "the engine is null");
  refused(sluice_applied_step(nullptr, &count), "the engine is null");
  refused(sluice_unit_describe(nullptr, 0, &unit), "the engine is null");
  refused(sluice_tensor_describe(nullptr, 0, &tensor), "the engine is null");
  refused(sluice_predicted_traffic(nullptr, 1, &traffic), "the engine is null");
  refused(sluice_next_note(nullptr, &note), "the engine is null");
  int flag = 0;
  refused(sluice_save(nullptr, "/tmp", 0, nullptr), "the engine is null");
  refused(sluice_begin_save(nullptr, "/tmp", 0, nullptr), "the engine is null");
  refused(sluice_poll_save(nullptr, &flag), "the engine is null");
  refused(sluice_finish_save(nullptr, &flag), "the engine is null");
  refused(sluice_restore(nullptr, "/tmp", 0), "the engine is null");
  refused(sluice_open_or_create(nullptr, sine_values, nullptr, 0, &flag), "the engine is null");
  refused(sluice_set_application(nullptr, "a"), "the engine is null");
  refused(sluice_commit_now(nullptr), "the engine is null");
  refused(sluice_committed_step(nullptr, &count, &flag), "the engine is null");
  refused(sluice_application_text(nullptr, &note), "the engine is null");
  refused(sluice_saved_path(nullptr, &note), "the engine is null");
  sluice_engine_destroy(nullptr);
}

TEST_F(CApiCall, AConfigOrAModelThatCannotBe) {
  sluice_model made = model();
  const std::string config = this->config();
  refused(sluice_engine_create(config.c_str(), &made, nullptr), "the place for the engine is null");
  refused(sluice_engine_create(nullptr, &made, &engine_), "config_json is null");
  refused(sluice_engine_create(config.c_str(), nullptr, &engine_), "the model is null");
  expect(SLUICE_CONFIG, sluice_engine_create("{\"memroy\": 1}", &made, &engine_), "config:1:2: ");
  expect(SLUICE_CONFIG, sluice_engine_create("{", &made, &engine_), "config:1:");
  expect(SLUICE_OUT_OF_MEMORY,
         sluice_engine_create(R"({"memory": {"device": "4KiB", "host": "4KiB"}})", &made, &engine_),
         "memory");

  const auto with = [&](const sluice_unit& unit, const std::string& words) {
    sluice_model bad = model();
    bad.units = &unit;
    bad.unit_count = 1;
    refused(sluice_engine_create(config.c_str(), &bad, &engine_), words);
    EXPECT_EQ(engine_, nullptr);
  };
  const sluice_tensor nameless{nullptr, vector_, 1, 0}, shapeless{"a", nullptr, 2, 0};
  with({nullptr, second_, 1, 0}, "units[0].name is null");
  with({"u", nullptr, 1, 0}, "units[0].tensors is null");
  with({"u", second_, 0, 0}, "unit \"u\" has no tensors");
  with({"u", &nameless, 1, 0}, "units[0].tensors[0].name is null");
  with({"u", &shapeless, 1, 0}, "units[0].tensors[0].shape is null");
  with({"u", second_, 1, 1}, "every unit is frozen");
  made.units = nullptr;
  refused(sluice_engine_create(config.c_str(), &made, &engine_), "units is null");
  made.unit_count = 0;
  refused(sluice_engine_create(config.c_str(), &made, &engine_), "it has no units");
  made = model();
  made.concurrent_leases = 0;
  refused(sluice_engine_create(config.c_str(), &made, &engine_), "concurrent_leases is 0");
  made = model();
  made.forward_count = 1;
  refused(sluice_engine_create(config.c_str(), &made, &engine_), "forward_order is null");
  const std::uint32_t order[1] = {7};
  made.forward_order = order;
  refused(sluice_engine_create(config.c_str(), &made, &engine_), "forward_order names unit 7");
}

TEST_F(CApiCall, ValuesThatCannotBe) {
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK);
  refused(sluice_begin_step(engine_, &step_), "initialize");
  refused(sluice_initialize(engine_, nullptr, nullptr), "null");
  const auto stop = [](void*, std::uint32_t, std::uint64_t, float*, std::uint64_t) { return 1; };
  expect(SLUICE_CALLBACK, sluice_initialize(engine_, stop, nullptr), "has failed");
  const auto infinite = [](void*, std::uint32_t, std::uint64_t, float* values,
                           std::uint64_t count) {
    std::fill(values, values + count, std::numeric_limits<float>::infinity());
    return 0;
  };
  expect(SLUICE_NON_FINITE, sluice_initialize(engine_, infinite, nullptr), "first.weight");
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK);
  refused(sluice_initialize(engine_, sine_values, nullptr), "has its values already");
  train_a_step();
  refused(sluice_initialize(engine_, sine_values, nullptr), "has its values already");
}

TEST_F(CApiCall, StepsThatCannotBe) {
  make();
  sluice_step_report report{};
  double scale = 0;
  refused(sluice_begin_step(engine_, nullptr), "options is null");
  sluice_step_options bad = step_;
  bad.learning_rate = -1;
  refused(sluice_begin_step(engine_, &bad), "learning_rate is -1");
  bad = step_;
  bad.micro_batches = 0;
  refused(sluice_begin_step(engine_, &bad), "micro_batches is 0");
  bad = step_;
  bad.group_count = 1;
  refused(sluice_begin_step(engine_, &bad), "group_learning_rates is null");
  bad.group_learning_rates = &bad.learning_rate;
  refused(sluice_begin_step(engine_, &bad), "optimizer.groups has 0");
  refused(sluice_finish_step(engine_, nullptr, &report), "no step is active");
  refused(sluice_abandon_step(engine_), "no step is active");
  refused(sluice_loss_scale(engine_, &scale), "no step is active");
  refused(sluice_end_inference(engine_), "no inference is active");

  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  refused(sluice_begin_step(engine_, &step_), "still active");
  refused(sluice_begin_inference(engine_), "still active");
  refused(sluice_close(engine_), "active");
  float value = 0;
  refused(sluice_read_state(engine_, 0, SLUICE_MASTER, 0, 1, &value), "active");
  refused(sluice_save(engine_, directory_.path().c_str(), 0, nullptr), "active");
  refused(sluice_commit_now(engine_), "storage.state.name");
  refused(sluice_finish_step(engine_, nullptr, nullptr), "the report is null");
  refused(sluice_finish_step(engine_, nullptr, &report), "no unit has been through backward");
  refused(sluice_loss_scale(engine_, nullptr), "null");
  ASSERT_EQ(sluice_loss_scale(engine_, &scale), SLUICE_OK);
  EXPECT_EQ(scale, 1);
  walk();
  const sluice_finish_options finish{.learning_rate = 1,
                                     .gradient_divisor = -1,
                                     .group_learning_rates = nullptr,
                                     .group_count = 0,
                                     .reserved = 0};
  refused(sluice_finish_step(engine_, &finish, &report), "gradient_divisor is -1");
  sluice_finish_options later = finish;
  later.gradient_divisor = 1;
  later.reserved = 3;
  refused(sluice_finish_step(engine_, &later, &report), "options->reserved is 3; it must be 0");
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(report.step, 1u);
  ASSERT_EQ(sluice_close(engine_), SLUICE_OK);
  EXPECT_NE(sluice_begin_step(engine_, &step_), SLUICE_OK);
}

TEST_F(CApiCall, LeasesThatCannotBe) {
  make();
  sluice_lease lease{};
  refused(sluice_acquire(engine_, 0, SLUICE_FORWARD, &lease), "neither a step nor an inference");
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  refused(sluice_acquire(engine_, 0, SLUICE_FORWARD, nullptr), "null");
  refused(sluice_acquire(engine_, 0, 3, &lease), "pass is 3");
  refused(sluice_acquire(engine_, 0, -1, &lease), "pass is -1");
  refused(sluice_acquire(engine_, 0, SLUICE_INFERENCE, &lease), "does not belong");
  refused(sluice_acquire(engine_, 9, SLUICE_FORWARD, &lease), "unit 9 does not exist");
  ASSERT_EQ(sluice_acquire(engine_, 0, SLUICE_FORWARD, &lease), SLUICE_OK);
  EXPECT_EQ(lease.gradients, nullptr);
  sluice_lease other{};
  refused(sluice_acquire(engine_, 1, SLUICE_FORWARD, &other), "still held");
  refused(sluice_release(engine_, lease.id + 1), "does not exist");
  // With a lease held, the step can be abandoned all the same, and the lease ends with it.
  ASSERT_EQ(sluice_abandon_step(engine_), SLUICE_OK);
  refused(sluice_release(engine_, lease.id), "has ended");
  ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK);
  refused(sluice_acquire(engine_, 0, SLUICE_FORWARD, &lease), "SLUICE_INFERENCE");
  ASSERT_EQ(sluice_acquire(engine_, 0, SLUICE_INFERENCE, &lease), SLUICE_OK);
  ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK);
  train_a_step();
}

TEST_F(CApiCall, ReadsThatCannotBe) {
  make();
  std::vector<float> values(5000);
  const auto read = [&](std::uint32_t tensor, std::int32_t kind, std::uint64_t first,
                        std::uint64_t count) {
    return sluice_read_state(engine_, tensor, kind, first, count, values.data());
  };
  EXPECT_EQ(read(0, SLUICE_MASTER, 0, 5000), SLUICE_OK);
  EXPECT_EQ(values[1], std::sin(1.0f));
  refused(read(3, SLUICE_MASTER, 0, 1), "tensor 3 does not exist");
  refused(read(0, 4, 0, 1), "kind is 4");
  refused(read(0, SLUICE_MASTER, 1, 5000), "first.weight");
  refused(read(1, SLUICE_MASTER, 0, 51), "51 elements of tensor \"first.bias\", which has 50");
  refused(read(0, SLUICE_MASTER, 0, std::numeric_limits<std::uint64_t>::max()), "which has 5000");
  refused(read(0, SLUICE_MASTER, std::numeric_limits<std::uint64_t>::max(), 8), "first.weight");
  refused(sluice_read_state(engine_, 0, SLUICE_MASTER, 0, 1, nullptr), "the target is null");
  refused(sluice_applied_step(engine_, nullptr), "null");
  refused(sluice_next_note(engine_, nullptr), "null");
  sluice_unit_info unit{};
  refused(sluice_unit_describe(engine_, 2, &unit), "unit 2 does not exist");
  refused(sluice_unit_describe(engine_, 0, nullptr), "null");
  sluice_tensor_info tensor{};
  refused(sluice_tensor_describe(engine_, 3, &tensor), "tensor 3 does not exist");
  refused(sluice_tensor_describe(engine_, 0, nullptr), "null");
  sluice_traffic traffic{};
  refused(sluice_predicted_traffic(engine_, 0, &traffic), "micro_batches is 0");
  refused(sluice_predicted_traffic(engine_, 1, nullptr), "null");
}

// The callback runs inside a call of the engine: calls from it, or from elsewhere meanwhile, are
// refused instead of being undefined.
TEST_F(CApiCall, OneCallAtATime) {
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK);
  const auto meanwhile = [](void* context, std::uint32_t tensor, std::uint64_t first, float* values,
                            std::uint64_t count) {
    auto* engine = static_cast<sluice_engine*>(context);
    refused(sluice_drain(engine), "one thread at a time");
    std::async(std::launch::async, [&] {
      refused(sluice_drain(engine), "one thread at a time");
    }).get();
    sluice_engine_destroy(engine);  // does nothing
    return sine_values(nullptr, tensor, first, values, count);
  };
  ASSERT_EQ(sluice_initialize(engine_, meanwhile, engine_), SLUICE_OK) << sluice_last_error();
  train_a_step();
}

// The child neither hangs nor touches what is the parent's, which trains on.
TEST_F(CApiCall, AForkedChild) {
  make();
  train_a_step();
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  const pid_t child = fork_quietly();
  ASSERT_NE(child, -1);
  if (child == 0) {
    alarm(20);
    sluice_lease lease{};
    const bool is_refused = sluice_acquire(engine_, 0, SLUICE_FORWARD, &lease) == SLUICE_FORKED &&
                            std::string(sluice_last_error()).find("process") != std::string::npos &&
                            sluice_close(engine_) == SLUICE_FORKED;
    sluice_engine_destroy(engine_);
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  walk();
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(report.step, 2u);
}

}  // namespace
}  // namespace sluice::test
