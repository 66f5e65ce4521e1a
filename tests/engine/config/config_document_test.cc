#include <sluice/config_document.h>

#include <gtest/gtest.h>

#include <cmath>

#include <sluice/config.h>
#include <sluice/error.h>
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

// The message that a document or an assignment fails with; empty when it does not.
std::string complaint(std::string_view text, std::string_view assignment = "") {
  try {
    ConfigDocument document(text, "run.json");
    if (!assignment.empty()) document.set(assignment);
    (void)engine_config(document);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    return error.what();
  }
  return "";
}

TEST(ConfigDocument, DefaultsComeFromTheSchema) {
  const ConfigDocument document("{}", "run.json");
  EXPECT_EQ(document.number("optimizer.beta1"), 0.9);
  EXPECT_EQ(document.integer("storage.queue_depth"), 32u);
  EXPECT_EQ(document.string("placement.parameters"), "auto");
  EXPECT_FALSE(document.find_integer("storage.block_elements").has_value());
  EXPECT_FALSE(document.size_bytes("memory.host").has_value());
  EXPECT_TRUE(document.boolean("model.tied_head"));
}

TEST(ConfigDocument, ReadsValuesAndComments) {
  const ConfigDocument document(R"({
    // a comment
    "memory": {"device": "8MiB", "host": "10 MiB"}, /* and another */
    "storage": {"paths": ["/a", "/b"], "block_elements": 8192,
                "weights": [3, 0.5]}
  })",
                                "run.json");
  const Config config = engine_config(document);
  EXPECT_EQ(config.memory.device_bytes, 8u << 20);
  EXPECT_EQ(config.memory.host_bytes, 10u << 20);
  EXPECT_EQ(config.storage.paths, (std::vector<std::string>{"/a", "/b"}));
  EXPECT_EQ(config.storage.block_elements, 8192u);
  EXPECT_EQ(config.storage.weights, (std::vector<double>{3, 0.5}));
}

TEST(ConfigDocument, KeptUnitsHaveASize) {
  const auto keep = [](std::string_view text) {
    return engine_config(ConfigDocument(text, "run.json")).sharding.keep_gathered_bytes;
  };
  EXPECT_EQ(keep("{}"), Config{}.sharding.keep_gathered_bytes);
  EXPECT_EQ(keep(R"({"sharding": {"keep_gathered": "0"}})"), 0u);
  EXPECT_EQ(keep(R"({"sharding": {"keep_gathered": "1MiB"}})"), 1u << 20);
}

TEST(ConfigDocument, GradientsFollowParametersUnlessNamed) {
  const auto precision = [](std::string_view text) {
    return engine_config(ConfigDocument(text, "run.json")).precision;
  };
  EXPECT_EQ(precision(R"({"precision": {"parameters": "fp32"}})").gradients, DType::kFp32);
  EXPECT_EQ(precision(R"({"precision": {"parameters": "bf16"}})").gradients, DType::kBf16);
  EXPECT_EQ(precision(R"({"precision": {"parameters": "bf16", "gradients": "fp32"}})").gradients,
            DType::kFp32);
  EXPECT_EQ(precision(R"({"precision": {"parameters": "fp16"}})").parameters, DType::kFp16);
  EXPECT_EQ(precision(R"({"precision": {"parameters": "fp16"}})").gradients, DType::kFp16);
}

TEST(ConfigDocument, ParameterGroupsAreAListOfObjects) {
  const auto groups = [](std::string_view text) {
    return engine_config(ConfigDocument(text, "run.json")).optimizer.groups;
  };
  EXPECT_TRUE(groups("{}").empty());
  const auto read = groups(R"({"optimizer": {"groups": [
      {"tensors": ["a", "b*"], "weight_decay": 0},
      {"tensors": ["c"], "learning_rate_factor": 0.5}, {"tensors": ["d"]}]}})");
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[0].tensors, (std::vector<std::string>{"a", "b*"}));
  EXPECT_EQ(read[0].weight_decay, 0.0);
  EXPECT_EQ(read[0].learning_rate_factor, 1.0);
  EXPECT_EQ(read[1].learning_rate_factor, 0.5);
  EXPECT_EQ(read[1].weight_decay, std::nullopt);
  ConfigDocument document("{}", "run.json");
  document.set(R"(optimizer.groups=[{"tensors": ["e"]}])");
  EXPECT_EQ(engine_config(document).optimizer.groups.at(0).tensors, std::vector<std::string>{"e"});
}

TEST(ConfigDocument, MistakesInParameterGroupsHaveTheirPlace) {
  EXPECT_EQ(complaint("{\"optimizer\": {\"groups\": [{\"tensors\": [\"a\"]},\n"
                      "  {\"tensors\": [\"b\"], \"weight_deca\": 1}]}}"),
            "run.json:2:22: unknown key \"optimizer.groups.1.weight_deca\"; did you mean "
            "\"optimizer.groups.1.weight_decay\"?");
  EXPECT_EQ(complaint("{\"optimizer\": {\"groups\": [{\"tensors\": []}]}}"),
            "run.json:1:28: \"optimizer.groups.0.tensors\" is empty, but must have at least 1 "
            "entry");
  EXPECT_EQ(
      complaint("{\"optimizer\": {\"groups\": [{\"weight_decay\": -1, \"tensors\": [\"a\"]}]}}"),
      "run.json:1:28: \"optimizer.groups.0.weight_decay\" is -1, but must be at least 0");
  EXPECT_EQ(complaint("{\"optimizer\": {\"groups\": [{\"weight_decay\": 1}]}}"),
            "run.json:1:16: group 0 lacks \"tensors\", the list of its names");
}

TEST(ConfigDocument, UnknownKeyNamesPlaceAndNearest) {
  EXPECT_EQ(complaint("{\n  \"optimizer\": {\n    \"learning_rat\": 1}}"),
            "run.json:3:5: unknown key \"optimizer.learning_rat\"; did you mean "
            "\"optimizer.learning_rate\"?");
  EXPECT_EQ(complaint("{\"memroy\": {}}"),
            "run.json:1:2: unknown key \"memroy\"; did you mean \"memory\"?");
  EXPECT_EQ(complaint("{\"host\": \"1MiB\"}"),
            "run.json:1:2: unknown key \"host\"; did you mean \"memory.host\"?");
}

TEST(ConfigDocument, AllUnknownKeysAreNamedAtOnce) {
  EXPECT_EQ(complaint("{\"run\": {\"steps\": 2, \"stepz\": 1},\n"
                      "  \"memroy\": {\"host\": 1},\n"
                      "  \"optimizer\": {\"groups\": [{\"tensors\": [\"a\"], \"dekay\": 1}]}}"),
            "run.json:1:22: unknown key \"run.stepz\"; did you mean \"run.steps\"?\n"
            "run.json:2:3: unknown key \"memroy\"; did you mean \"memory\"?\n"
            "run.json:3:47: unknown key \"optimizer.groups.0.dekay\"");
}

TEST(ConfigDocument, WrongTypeRangeAndChoice) {
  EXPECT_EQ(complaint(R"({"run": {"steps": "many"}})"),
            R"(run.json:1:10: "run.steps" is "many", but must be of type integer)");
  EXPECT_EQ(complaint(R"({"run": {"steps": 0}})"),
            R"(run.json:1:10: "run.steps" is 0, but must be at least 1)");
  EXPECT_EQ(complaint(R"({"optimizer": {"beta1": 1}})"),
            R"(run.json:1:16: "optimizer.beta1" is 1, but must be less than 1)");
  EXPECT_EQ(
      complaint(R"({"placement": {"parameters": "disk"}})"),
      R"(run.json:1:16: "placement.parameters" is "disk", but must be one of "auto", "device", "host", "nvme")");
  EXPECT_NE(complaint(R"({"memory": {"host": "ten"}})")
                .find("run.json:1:13: \"memory.host\": \"ten\" is not a size"),
            std::string::npos);
  EXPECT_EQ(complaint(R"({"storage": {"paths": []}})"),
            R"(run.json:1:14: "storage.paths" is empty, but must have at least 1 entry)");
  EXPECT_EQ(
      complaint(R"({"storage": {"paths": ["/a", "/b", "/a"]}})"),
      R"(run.json:1:14: "storage.paths": "/a" and "/a" are the same folder; name each folder once)");
  EXPECT_EQ(complaint(R"({"storage": {"block_elements": 5000}})"),
            R"(run.json:1:14: "storage.block_elements" is 5000, but must be a multiple of 4096)");
  EXPECT_EQ(
      complaint(R"({"storage": {"paths": ["/a", "/b"], "weights": [1]}})"),
      R"(run.json:1:37: "storage.weights" has 1 entries and "storage.paths" has 2, but each path needs one weight)");
  EXPECT_NE(complaint(R"({"storage": {"weights": [0]}})").find("is 0, but must be more than 0"),
            std::string::npos);
  EXPECT_NE(complaint(R"({"storage": {"weights": ["fast"]}})").find("must be of type number"),
            std::string::npos);
  EXPECT_EQ(
      complaint(R"({"storage": {"weights": [1], "calibration": "io.json"}})"),
      R"(run.json:1:30: "storage.calibration" and "storage.weights" are both given, but one of them decides; remove the other)");
  EXPECT_EQ(complaint("[]"), "run.json: the document is array, but must be of type object");
}

TEST(ConfigDocument, BrokenJsonNamesLineAndColumn) {
  EXPECT_EQ(complaint("{\n  \"run\": {,}\n}").substr(0, 14), "run.json:2:11:");
  EXPECT_EQ(complaint("{\"run\": {}, \"run\": {}}"), "run.json:1:13: key \"run\" is given twice");
}

TEST(ConfigDocument, AssignmentsOverrideAndAreChecked) {
  ConfigDocument document(R"({"memory": {"host": "10MiB"}})", "run.json");
  document.set("memory.host=12MiB");
  document.set("run.steps=5");
  document.set("data.file=123");  // a string key takes its value as text
  document.set("storage.paths=[\"/x\"]");
  EXPECT_EQ(document.size_bytes("memory.host"), 12u << 20);
  EXPECT_EQ(document.integer("run.steps"), 5u);
  EXPECT_EQ(document.string("data.file"), "123");
  EXPECT_EQ(document.strings("storage.paths"), std::vector<std::string>{"/x"});
  EXPECT_EQ(complaint("{}", "run.step=1"),
            "--set run.step=1: unknown key \"run.step\"; did you mean \"run.steps\"?");
  EXPECT_EQ(complaint("{}", "run.steps=-1"),
            "--set run.steps=-1: \"run.steps\" is -1, but must be at least 1");
  EXPECT_EQ(complaint("{}", "run.steps"),
            "--set run.steps: it must be KEY=VALUE, such as memory.host=10MiB");
}

// validate() finds these, too, but knows no file.
TEST(ConfigDocument, ContradictionsHaveTheirPlace) {
  for (const char* text : {R"({"optimizer": {"overlap": "eager"}})",
                           R"({"placement": {"optimizer": "device", "parameters": "nvme"}})",
                           R"({"optimizer": {"overlap": "eager", "clip_norm": 0},
 "precision": {"parameters": "fp16", "loss_scale": {"static": 0}}})"}) {
    EXPECT_TRUE(complaint(text).starts_with("run.json:1:16: \"")) << complaint(text);
  }
  EXPECT_TRUE(complaint("{}", "optimizer.overlap=eager")
                  .starts_with("--set optimizer.overlap=eager: \"optimizer.overlap\": eager"));
}

TEST(ConfigDocument, MissingFileIsNamed) {
  try {
    (void)ConfigDocument::from_file("/no/such/config.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInput);
    EXPECT_STREQ(error.what(),
                 "cannot read the config file \"/no/such/config.json\": No such file or directory; "
                 "name a file that exists");
  }
  EXPECT_NE(test::expect_error(ErrorCode::kInput,
                               [] { (void)ConfigDocument::text_of_file("/no/such/config.json"); })
                .find("\"/no/such/config.json\""),
            std::string::npos);
}

// For complaints that come later, such as one about keys that do not go together.
TEST(ConfigDocument, AComplaintHasThePlaceOfItsKey) {
  ConfigDocument document("{\n  \"run\": {\"steps\": 5}\n}", "run.json");
  const auto words = [&](std::string_view key) {
    return test::expect_error(ErrorCode::kConfig, [&] { document.fail(key, "that is too few"); });
  };
  EXPECT_EQ(words("run.steps"), "run.json:2:11: that is too few");
  document.set("run.steps=6");
  EXPECT_EQ(words("run.steps"), "--set run.steps=6: that is too few");
}

TEST(ConfigDocumentDeathTest, CodeThatReadsWhatTheSchemaDoesNotSay) {
  const ConfigDocument document("{}", "run.json");
  EXPECT_DEATH((void)document.number("optimizer.beta3"), "a key that the schema does not know");
  EXPECT_DEATH((void)document.integer("storage.block_elements"), "no default for a key");
}

// Values that a user of the library sets without a document.
TEST(ConfigValidation, AnEpsilonIsANumberOfFp32) {
  Config config;
  config.storage.paths = {"/tmp"};
  config.optimizer.adam.epsilon = 1e39;
  const std::string message = test::expect_error(ErrorCode::kConfig, [&] { validate(config); });
  EXPECT_NE(message.find("optimizer.adam.epsilon"), std::string::npos) << message;
}

TEST(ConfigValidation, AFolderIsNamedOnce) {
  Config config;
  config.storage.paths = {"/", "/tmp", "/tmp/."};
  const std::string message = test::expect_error(ErrorCode::kConfig, [&] { validate(config); });
  EXPECT_NE(message.find("\"/tmp\" and \"/tmp/.\" are the same folder"), std::string::npos)
      << message;
}

TEST(ConfigValidation, ValuesOutOfRangeAreRefusedByName) {
  const auto refused = [](const auto& change) {
    Config config;
    config.storage.paths = {"/tmp"};
    validate(config);
    change(config);
    try {
      validate(config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const auto names = [&](std::string_view member, const auto& change) {
    EXPECT_NE(refused(change).find(member), std::string::npos) << member;
  };
  const double nan = std::nan("");
  for (const double bad : {-0.1, 1.0, nan}) {
    names("optimizer.adam.beta1", [&](Config& c) { c.optimizer.adam.beta1 = bad; });
    names("optimizer.adam.beta2", [&](Config& c) { c.optimizer.adam.beta2 = bad; });
    names("optimizer.momentum", [&](Config& c) { c.optimizer.momentum = bad; });
  }
  for (const double bad : {-0.1, nan}) {
    names("optimizer.adam.epsilon", [&](Config& c) { c.optimizer.adam.epsilon = bad; });
    names("optimizer.adam.weight_decay", [&](Config& c) { c.optimizer.adam.weight_decay = bad; });
    names("optimizer.clip_norm", [&](Config& c) { c.optimizer.clip_norm = bad; });
    names("optimizer.clip_epsilon", [&](Config& c) { c.optimizer.clip_epsilon = bad; });
    names("precision.loss_scale",
          [&](Config& c) { c.precision.loss_scale = {.static_scale = 0, .minimum = bad}; });
    names("learning_rate_factor", [&](Config& c) {
      c.optimizer.groups = {{.tensors = {"*"}, .learning_rate_factor = bad}};
    });
    names("weight_decay",
          [&](Config& c) { c.optimizer.groups = {{.tensors = {"*"}, .weight_decay = bad}}; });
    names("storage.timeout_s", [&](Config& c) { c.storage.timeout_s = bad; });
    names("storage.weights", [&](Config& c) { c.storage.weights = {bad}; });
  }
  for (const double bad : {-1.0, 1e39, nan})
    names("static_scale", [&](Config& c) { c.precision.loss_scale.static_scale = bad; });
  names("names no tensors", [](Config& c) { c.optimizer.groups = {{}}; });
  names("loss_scale", [](Config& c) { c.precision.loss_scale.window = 0; });
  names("loss_scale", [](Config& c) { c.precision.loss_scale.hysteresis = 0; });
  names("loss_scale", [](Config& c) { c.precision.loss_scale.initial_scale_power = 33; });
  names("optimizer.lanes", [](Config& c) { c.optimizer.lanes = 0; });
  names("optimizer.overlap", [](Config& c) { c.optimizer.overlap = OverlapPolicy::kEager; });
  names("optimizer.overlap", [](Config& c) {
    c.optimizer.overlap = OverlapPolicy::kEager;
    c.optimizer.clip_norm = 0;
    c.precision.loss_scale.static_scale = 0;
  });
  names("placement.optimizer", [](Config& c) {
    c.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kDevice};
  });
  names("sharding.stage", [](Config& c) { c.sharding.stage = 4; });
  names("activations.micro_batches", [](Config& c) { c.activations.micro_batches = 0; });
  names("storage.paths", [](Config& c) { c.storage.paths.clear(); });
  names("storage.weights", [](Config& c) { c.storage.weights = {1, 1}; });
  names("storage.calibration", [](Config& c) {
    c.storage.weights = {1};
    c.storage.calibration = "io.json";
  });
  for (const std::uint32_t bad : {0u, 4097u})
    names("storage.queue_depth", [&](Config& c) { c.storage.queue_depth = bad; });
  for (const std::uint64_t bad : {0u, 4095u, 4097u})
    names("storage.block_elements", [&](Config& c) { c.storage.block_elements = bad; });
  names("storage.state.name", [](Config& c) { c.storage.state.name = "a/b"; });
  names("storage.state.commit_every", [](Config& c) { c.storage.state.commit_every = 0; });
  names("memory.save_buffers", [](Config& c) { c.memory.save_buffers = 17; });
}

// The limits of the schema, which a file cannot pass.
TEST(ConfigValidation, LimitsOfTheSchemaHoldInCodeToo) {
  const auto names = [](std::string_view member, const auto& change) {
    Config config;
    change(config);
    const std::string words = test::expect_error(ErrorCode::kConfig, [&] { validate(config); });
    EXPECT_NE(words.find(member), std::string::npos) << words;
  };
  for (const double bad : {-1.0, 0.0, 0.09, 86401.0, std::nan("")})
    names("sharding.timeout_s", [&](Config& c) { c.sharding.timeout_s = bad; });
  for (const std::uint32_t bad : {65537u, UINT32_MAX}) {
    names("optimizer.lanes", [&](Config& c) { c.optimizer.lanes = bad; });
    names("activations.micro_batches", [&](Config& c) { c.activations.micro_batches = bad; });
  }
  names("storage.block_elements",
        [](Config& c) { c.storage.block_elements = std::uint64_t{1} << 63; });
  names("storage.weights", [](Config& c) { c.storage.weights = {1e16}; });
  names("precision.loss_scale", [](Config& c) { c.precision.loss_scale.minimum = 1e39; });
  names("threads", [](Config& c) { c.threads = 4097; });
  Config most;
  most.sharding.timeout_s = 0.1;
  most.optimizer.lanes = most.activations.micro_batches = 65536;
  EXPECT_NO_THROW(validate(most));
}

TEST(ConfigValidation, AUnitMayMissAtLeastOneUpdate) {
  Config config;
  config.storage.paths = {"/tmp"};
  config.optimizer.lazy_max = 1;
  validate(config);
  config.optimizer.lazy_max = 0;
  const std::string words = test::expect_error(ErrorCode::kConfig, [&] { validate(config); });
  EXPECT_NE(words.find("optimizer.lazy_max"), std::string::npos) << words;
}

}  // namespace
}  // namespace sluice
