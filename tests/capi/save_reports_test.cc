// Reports of checkpoints beside training to a program that does not ask for each of them.
#include <filesystem>
#include <string>
#include <vector>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

class CApiSaves : public CApi {
 protected:
  CApiSaves() {
    std::string beside = config();
    beside.replace(beside.find("\"memory\": {"), 11, R"("memory": {"save_buffers": 2, )");
    const sluice_model made = model();
    EXPECT_EQ(sluice_engine_create(beside.c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    EXPECT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK);
    std::filesystem::create_directory(root_);
  }

  void begin() {
    ASSERT_EQ(sluice_begin_save(engine_, root_.c_str(), 0, nullptr), SLUICE_OK)
        << sluice_last_error();
  }
  // The path that `call` reports, or nothing.
  std::string reported_by(sluice_status (*call)(sluice_engine*, int*)) {
    int has_one = 0;
    EXPECT_EQ(call(engine_, &has_one), SLUICE_OK) << sluice_last_error();
    const char* path = "";
    if (has_one == 0) return "";
    EXPECT_EQ(sluice_saved_path(engine_, &path), SLUICE_OK);
    return path;
  }
  std::vector<std::string> notes() {
    std::vector<std::string> all;
    const char* note = nullptr;
    while (sluice_next_note(engine_, &note) == SLUICE_OK && note != nullptr) all.push_back(note);
    return all;
  }

  const std::string root_ = directory_.path() + "/saved";
  const std::string first_ = root_ + "/step-000000000";
};

TEST_F(CApiSaves, AReportOutlivesTheNextBegin) {
  begin();
  begin();  // the first one appears here
  EXPECT_EQ(reported_by(sluice_poll_save), first_);
  EXPECT_EQ(reported_by(sluice_poll_save), "");
  EXPECT_EQ(reported_by(sluice_finish_save), first_ + ".1");
  EXPECT_EQ(reported_by(sluice_finish_save), "");
}

TEST_F(CApiSaves, TheNewestIsReportedAndTheOthersAreNoted) {
  (void)notes();
  for (int saves = 0; saves < 3; ++saves) begin();
  EXPECT_EQ(reported_by(sluice_finish_save), first_ + ".2");
  EXPECT_EQ(reported_by(sluice_poll_save), "");
  const std::vector<std::string> told = notes();
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0], "checkpoint: \"" + first_ + "\" of step 0 had appeared before \"" + first_ +
                         ".1\"; no call had asked for it by then");
  EXPECT_EQ(told[1], "checkpoint: \"" + first_ + ".1\" of step 0 had appeared before \"" + first_ +
                         ".2\"; no call had asked for it by then");
}

}  // namespace
}  // namespace sluice::test
