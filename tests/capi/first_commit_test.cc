// The text of the first commit of a store that begins with a checkpoint's state.
#include <filesystem>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

class CApiFirstCommit : public CApi {
 protected:
  void end() {
    sluice_engine_destroy(engine_);
    engine_ = nullptr;
  }
  // A checkpoint of the untrained model.
  std::string saved(const std::string& application) {
    make();
    const std::string root = directory_.file("saved");
    std::filesystem::create_directory(root);
    EXPECT_EQ(sluice_save(engine_, root.c_str(), 0, application.c_str()), SLUICE_OK)
        << sluice_last_error();
    end();
    return root + "/latest";
  }
  void create(const std::string& store) {
    std::string durable = config();
    durable.replace(durable.rfind("}}"), 2, R"(, "state": {"name": ")" + store + R"("}}})");
    const sluice_model made = model();
    ASSERT_EQ(sluice_engine_create(durable.c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
  }
  // Returns what the next run finds if this one ends before its first step.
  std::string text_of_next_run(const std::string& store) {
    end();
    create(store);
    int is_new = 1;
    EXPECT_EQ(sluice_open_or_create(engine_, sine_values, nullptr, 0, &is_new), SLUICE_OK)
        << sluice_last_error();
    EXPECT_EQ(is_new, 0);
    const char* text = nullptr;
    EXPECT_EQ(sluice_application_text(engine_, &text), SLUICE_OK);
    const std::string found = text;
    end();
    return found;
  }
  bool is_noted(const std::string& words) {
    const char* note = nullptr;
    while (sluice_next_note(engine_, &note) == SLUICE_OK && note != nullptr)
      if (std::string(note).find(words) != std::string::npos) return true;
    return false;
  }
};

TEST_F(CApiFirstCommit, KeepsTheTextOfTheCheckpoint) {
  const std::string folder = saved("position 17");
  create("run");
  ASSERT_EQ(sluice_set_application(engine_, "of another state"), SLUICE_OK);
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_OK) << sluice_last_error();
  EXPECT_FALSE(is_noted("has no text"));
  EXPECT_EQ(text_of_next_run("run"), "position 17");
}

TEST_F(CApiFirstCommit, SaysWhereATextIsLongerThanACommitKeeps) {
  const std::string long_text((1 << 20) + 1, 'x');
  const std::string folder = saved(long_text);
  create("run");
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_OK) << sluice_last_error();
  EXPECT_TRUE(is_noted("has no text: the checkpoint's has 1048577 B, and a commit has room for "));
  const char* text = nullptr;
  ASSERT_EQ(sluice_application_text(engine_, &text), SLUICE_OK);
  EXPECT_EQ(text, long_text);
  EXPECT_EQ(text_of_next_run("run"), "");
  create("other");
  ASSERT_EQ(sluice_set_application(engine_, "a shorter one"), SLUICE_OK);
  ASSERT_EQ(sluice_restore(engine_, folder.c_str(), 0), SLUICE_OK) << sluice_last_error();
  EXPECT_FALSE(is_noted("has no text"));
  EXPECT_EQ(text_of_next_run("other"), "a shorter one");
}

}  // namespace
}  // namespace sluice::test
