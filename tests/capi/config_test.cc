// DeepSpeed's configs and the schedule of learning rates behind the C interface.
#include <array>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

constexpr const char* kDeepspeed = R"({
  // as DeepSpeed allows it
  "train_micro_batch_size_per_gpu": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 4}}
})";

TEST(CApiConfig, KnowsWhoseConfigItIs) {
  int answer = 7;
  EXPECT_EQ(sluice_is_deepspeed(kDeepspeed, &answer), SLUICE_OK);
  EXPECT_EQ(answer, 1);
  EXPECT_EQ(sluice_is_deepspeed(R"({"placement": {"optimizer": "nvme"}})", &answer), SLUICE_OK);
  EXPECT_EQ(answer, 0);
  EXPECT_EQ(sluice_is_deepspeed(nullptr, &answer), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_is_deepspeed(kDeepspeed, nullptr), SLUICE_INVALID_ARGUMENT);
}

TEST(CApiConfig, ReadsFilesWithComments) {
  const char* read = nullptr;
  ASSERT_EQ(sluice_read_config("{ // a comment\n \"optimizer\": {\"clip_norm\": 0.5 /* half */}}",
                               "mine.json", &read),
            SLUICE_OK)
      << sluice_last_error();
  EXPECT_STREQ(read, R"({"optimizer":{"clip_norm":0.5}})");
}

TEST(CApiConfig, RefusesFilesWithTheirPlace) {
  const char* read = "";
  EXPECT_EQ(sluice_read_config("{\n  \"optimizer\": {\"clip\": 1}}", "mine.json", &read),
            SLUICE_CONFIG);
  EXPECT_EQ(read, nullptr);
  const std::string message = sluice_last_error();
  EXPECT_NE(message.find("mine.json:2:"), std::string::npos) << message;
  for (const char* text :
       {"", "[]", "{", R"({"run": {"threads": "many"}})", R"({"optimizer": {"clip_norm": -1}})"})
    EXPECT_EQ(sluice_read_config(text, "mine.json", &read), SLUICE_CONFIG) << text;
  EXPECT_EQ(sluice_read_config(nullptr, "mine.json", &read), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_read_config("{}", nullptr, &read), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_read_config("{}", "mine.json", nullptr), SLUICE_INVALID_ARGUMENT);
}

TEST(CApiConfig, ImportsDeepspeedsWithWhatAutoStandsFor) {
  const char* report = nullptr;
  ASSERT_EQ(sluice_import_deepspeed(kDeepspeed, "ds.json", R"({"batch": 3})", &report), SLUICE_OK)
      << sluice_last_error();
  const std::string text = report;
  EXPECT_NE(text.find("\"sequences\": 3"), std::string::npos) << text;
  EXPECT_NE(text.find("\"schedule_count\": \"deepspeed\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"new_key\": \"optimizer.learning_rate\""), std::string::npos) << text;
}

TEST(CApiConfig, ImportsWithTheNamesAndTheSizeOfAProgram) {
  constexpr const char* kFile = R"({
    "train_batch_size": "auto", "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"}
  })";
  const char* report = nullptr;
  ASSERT_EQ(
      sluice_import_deepspeed(kFile, "ds.json",
                              R"({"batch": 3, "precision": "fp32", "hidden_size": 70})", &report),
      SLUICE_OK)
      << sluice_last_error();
  const std::string text = report;
  EXPECT_NE(text.find("\"keep_gathered\": \"2800\""), std::string::npos) << text;
  EXPECT_EQ(
      sluice_import_deepspeed(
          kFile, "ds.json",
          R"({"batch": 3, "micro_batches": 2, "names": {"micro_batches": "args.steps"}})", &report),
      SLUICE_CONFIG);
  const std::string message = sluice_last_error();
  EXPECT_NE(message.find("the file says 4, but args.steps is 2"), std::string::npos) << message;
  EXPECT_EQ(sluice_import_deepspeed(kFile, "ds.json", R"({"names": {"lr": 3}})", &report),
            SLUICE_INVALID_ARGUMENT);
}

TEST(CApiConfig, ValuesStandForMissingKeysUnlessAProgramHasNamesForThem) {
  constexpr const char* kFile = R"({"train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {}}})";
  const std::string values =
      R"("betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3, "warmup_steps": 77)";
  const auto imported = [&](const std::string& json) -> std::string {
    const char* report = nullptr;
    EXPECT_EQ(sluice_import_deepspeed(kFile, "ds.json", json.c_str(), &report), SLUICE_OK)
        << sluice_last_error();
    return report == nullptr ? "" : report;
  };
  const std::string of_options = imported("{" + values + "}");
  for (const char* part :
       {"\"beta2\": 0.9,", "\"epsilon\": 1e-06", "\"tensors\"", "\"warmup_steps\": 77"})
    EXPECT_NE(of_options.find(part), std::string::npos) << part << "\n" << of_options;
  // transformers leaves them at DeepSpeed's defaults.
  const std::string of_program = imported("{" + values + R"(, "names": {"betas": "args.betas"}})");
  for (const char* part : {"\"beta2\": 0.999,", "\"epsilon\": 1e-08", "\"warmup_steps\": 1000"})
    EXPECT_NE(of_program.find(part), std::string::npos) << part << "\n" << of_program;
  EXPECT_EQ(of_program.find("\"tensors\""), std::string::npos) << of_program;
}

TEST(CApiConfig, RefusesWithAllReasons) {
  const char* report = "";
  EXPECT_EQ(sluice_import_deepspeed(kDeepspeed, "ds.json", nullptr, &report), SLUICE_CONFIG);
  EXPECT_EQ(report, nullptr);
  const std::string message = sluice_last_error();
  EXPECT_NE(message.find("ds.json:3"), std::string::npos) << message;
  EXPECT_NE(message.find("--batch"), std::string::npos) << message;
  for (const char* values :
       {"[", "3", R"({"batch": "many"})", R"({"bach": 3})", R"({"betas": [0.9]})"})
    EXPECT_EQ(sluice_import_deepspeed(kDeepspeed, "ds.json", values, &report),
              SLUICE_INVALID_ARGUMENT)
        << values;
  EXPECT_EQ(sluice_import_deepspeed("{", "ds.json", nullptr, &report), SLUICE_CONFIG);
  EXPECT_EQ(sluice_import_deepspeed(kDeepspeed, nullptr, nullptr, &report),
            SLUICE_INVALID_ARGUMENT);
}

TEST(CApiConfig, RefusesValuesThatAreNoWholeNumbers) {
  const auto result = [](const std::string& name, const std::string& value) {
    const std::string values =
        fmt::format(R"({{"batch": 4, "micro_batches": 2, "{}": {}}})", name, value);
    const char* report = nullptr;
    return sluice_import_deepspeed(kDeepspeed, "ds.json", values.c_str(), &report);
  };
  for (const char* name : {"batch", "micro_batches", "steps", "ranks", "hidden_size"}) {
    for (const char* value : {"-4", "0", "2.5", "0.5", "1e30", "true", "\"2\"", "null",
                              "18446744073709551617", "[2]", "9007199254740994"}) {
      EXPECT_EQ(result(name, value), SLUICE_INVALID_ARGUMENT) << name << " " << value;
      const std::string message = sluice_last_error();
      EXPECT_NE(message.find(fmt::format("\"{}\" is ", name)), std::string::npos) << message;
      EXPECT_NE(message.find("it must be a whole number between 1 and "), std::string::npos)
          << message;
    }
    EXPECT_EQ(result(name, "2.0"), SLUICE_OK) << name << ": " << sluice_last_error();
  }
  EXPECT_EQ(result("ranks", "4294967297"), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(result("warmup_steps", "-1"), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(),
               "sluice_import_deepspeed: \"warmup_steps\" is -1; it must be a whole number "
               "between 0 and 9007199254740992");
}

TEST(CApiConfig, ImportsAFileWhoseNameIsNoUtf8) {
  const char* report = nullptr;
  ASSERT_EQ(sluice_import_deepspeed(kDeepspeed, "ds\xff.json", R"({"batch": 3})", &report),
            SLUICE_OK)
      << sluice_last_error();
  EXPECT_NE(std::string(report).find("\"file\": \"ds\xef\xbf\xbd.json\""), std::string::npos)
      << report;
  EXPECT_EQ(sluice_import_deepspeed(kDeepspeed, "ds\xff.json", nullptr, &report), SLUICE_CONFIG);
}

TEST(CApiConfig, SaysTheRatesOfASchedule) {
  const char* config = R"({"optimizer": {"learning_rate": 0.1, "warmup_steps": 2,
      "schedule": "linear", "schedule_steps": 7, "minimum_learning_rate": 0.02}})";
  std::array<double, 6> rates{};
  ASSERT_EQ(sluice_learning_rates(config, 1, rates.size(), rates.data()), SLUICE_OK)
      << sluice_last_error();
  // The second step of the warm-up, then a line of four steps from update 2 to update 6.
  const std::array<double, 6> expected = {0.1, 0.1, 0.08, 0.06, 0.04, 0.02};
  for (std::size_t i = 0; i < rates.size(); ++i) EXPECT_NEAR(rates[i], expected[i], 1e-15) << i;
  EXPECT_EQ(sluice_learning_rates(config, 0, 1, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_learning_rates(config, 0, 0, nullptr), SLUICE_OK);
  const char* bad = R"({"optimizer": {"learning_rate": 0.1, "minimum_learning_rate": 0.2}})";
  EXPECT_EQ(sluice_learning_rates(bad, 0, 1, rates.data()), SLUICE_CONFIG);
  EXPECT_NE(std::string(sluice_last_error()).find("minimum_learning_rate"), std::string::npos);
}

TEST_F(CApi, PlansWithoutAnEngine) {
  const sluice_model described = model();
  const char* plan = nullptr;
  ASSERT_EQ(sluice_plan(config(R"("overlap": "serial")").c_str(), &described, &plan), SLUICE_OK)
      << sluice_last_error();
  const std::string text = plan;
  make(R"("overlap": "serial")");
  sluice_traffic traffic{};
  ASSERT_EQ(sluice_predicted_traffic(engine_, 1, &traffic), SLUICE_OK);
  EXPECT_GT(traffic.nvme_read_bytes, 0u);
  for (const std::string& part :
       {"\"nvme_read_bytes\":" + std::to_string(traffic.nvme_read_bytes),
        "\"nvme_write_bytes\":" + std::to_string(traffic.nvme_write_bytes),
        std::string("\"policy\":\"serial\""), std::string("\"device_budget_bytes\":1048576"),
        std::string("\"host_budget_bytes\":4194304")})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  EXPECT_EQ(sluice_plan(R"({"memory": {"device": "4KiB"}})", &described, &plan),
            SLUICE_OUT_OF_MEMORY);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(sluice_plan("{}", nullptr, &plan), SLUICE_INVALID_ARGUMENT);
}

// The file divides what is on storage among the drives.
TEST_F(CApi, APlanNeedsTheCalibrationThatAnEngineNeeds) {
  const sluice_model described = model();
  backend_ = R"("calibration": "/nowhere.json", )";
  const char* plan = nullptr;
  EXPECT_EQ(sluice_plan(config().c_str(), &described, &plan), SLUICE_INPUT);
  EXPECT_EQ(plan, nullptr);
  const std::string message = sluice_last_error();
  EXPECT_EQ(sluice_engine_create(config().c_str(), &described, &engine_), SLUICE_INPUT);
  EXPECT_EQ(message, sluice_last_error());
  EXPECT_NE(message.find("\"/nowhere.json\" cannot be read"), std::string::npos) << message;

  std::string in_memory = config();
  for (std::size_t at; (at = in_memory.find("\"nvme\"")) != std::string::npos;)
    in_memory.replace(at, 6, "\"host\"");
  EXPECT_EQ(sluice_plan(in_memory.c_str(), &described, &plan), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_engine_create(in_memory.c_str(), &described, &engine_), SLUICE_OK)
      << sluice_last_error();
}

}  // namespace
}  // namespace sluice::test
