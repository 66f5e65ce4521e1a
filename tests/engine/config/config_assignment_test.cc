// Assignments (--set) of sections, lists and entries.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/config_document.h>
#include <sluice/error.h>

namespace sluice {
namespace {

// The message that an assignment, or the document with it, fails with; empty when it does not.
std::string failure_of(std::string_view text, std::string_view assignment) {
  try {
    ConfigDocument document(text, "run.json");
    document.set(assignment);
    (void)engine_config(document);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    return error.what();
  }
  return "";
}

TEST(ConfigAssignment, ASectionKeepsItsOtherKeys) {
  ConfigDocument document(R"({"storage": {"paths": ["/d1", "/d2"], "state": {"name": "mine"}},
 "optimizer": {"groups": [{"tensors": ["a"], "weight_decay": 0.5}]}})",
                          "run.json");
  document.set(R"(storage={"queue_depth": 8, "state": {"commit_every": 3}})");
  document.set(R"(optimizer.groups.0={"learning_rate_factor": 2})");
  EXPECT_EQ(document.strings("storage.paths"), (std::vector<std::string>{"/d1", "/d2"}));
  EXPECT_EQ(document.string("storage.state.name"), "mine");
  EXPECT_EQ(document.integer("storage.state.commit_every"), 3u);
  EXPECT_EQ(document.integer("storage.queue_depth"), 8u);
  EXPECT_EQ(document.number("optimizer.groups.0.weight_decay"), 0.5);
  EXPECT_EQ(document.number("optimizer.groups.0.learning_rate_factor"), 2);
  EXPECT_EQ(document.origin_of("storage.paths"), "run.json:1:14");
  EXPECT_EQ(document.origin_of("storage.queue_depth"),
            R"(--set storage={"queue_depth": 8, "state": {"commit_every": 3}})");
  document.set(R"(optimizer.groups=[{"tensors": ["b"]}])");  // a list is replaced
  EXPECT_FALSE(document.find_number("optimizer.groups.0.weight_decay"));
}

TEST(ConfigAssignment, AMistakeInASectionOrAnEntryNamesTheAssignment) {
  const std::string file = R"({"optimizer": {"beta1": 0.8}, "storage": {"paths": ["/a"]}})";
  for (const char* assignment :
       {R"(optimizer={"beta1":5})", R"(optimizer={"betta":0.5})", R"(optimizer.beta1={"a":1})",
        "optimizer.groups.0=3", "storage.weights.0=0",
        R"(optimizer.groups=[{"tensors":["a"],"weight_decay":-1}])", "optimizer.groups.0={}",
        R"(storage={"state":{"name":".x"}})"}) {
    EXPECT_TRUE(failure_of(file, assignment).starts_with(fmt::format("--set {}: ", assignment)))
        << failure_of(file, assignment);
  }
  EXPECT_EQ(failure_of(file, R"(optimizer={"beta1":0.5,"beta1":0.4})"),
            R"(--set optimizer={"beta1":0.5,"beta1":0.4}: key "optimizer.beta1" is given twice)");
}

TEST(ConfigAssignment, AValueComesFromTheNewest) {
  ConfigDocument document("{}", "run.json");
  document.set("optimizer.beta1=0.5");
  document.set(R"(optimizer={"beta1":0.4})");
  EXPECT_EQ(document.origin_of("optimizer.beta1"), R"(--set optimizer={"beta1":0.4})");
  document.set(R"(storage.paths=["/a","/b"])");
  document.set("storage.paths.1=/c");
  EXPECT_EQ(document.strings("storage.paths"), (std::vector<std::string>{"/a", "/c"}));
  EXPECT_EQ(document.origin_of("storage.paths"), "--set storage.paths.1=/c");
}

}  // namespace
}  // namespace sluice
