// The page for `sluice top` behind the C interface. python/tests/test_status.py reads what is in
// it.
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>

#include "tests/capi/capi_support.h"
#include "tests/support/file_text.h"
#include "tests/support/paused_child.h"

namespace sluice::test {
namespace {

class CApiStatus : public CApi {
 protected:
  CApiStatus() {
    if (const char* const before = std::getenv("XDG_RUNTIME_DIR")) before_ = before;
    ::setenv("XDG_RUNTIME_DIR", directory_.path().c_str(), 1);
  }
  ~CApiStatus() override {
    if (before_)
      ::setenv("XDG_RUNTIME_DIR", before_->c_str(), 1);
    else
      ::unsetenv("XDG_RUNTIME_DIR");
  }

  std::string page() const { return directory_.file("sluice/" + std::to_string(::getpid())); }
  bool has_page() const { return std::filesystem::exists(page()); }
  std::string bytes_of_page() const { return file_text(page()); }
  void train_step() {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK) << sluice_last_error();
    walk();
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  }

  sluice_figures figures_{.loss = std::numeric_limits<double>::quiet_NaN(),
                          .tokens = 0,
                          .steps = 0,
                          .flops_per_token = 0,
                          .peak_flops = 0};
  std::optional<std::string> before_;
};

TEST_F(CApiStatus, IsThereWhenAskedForUntilTheEngineEnds) {
  make();
  train_step();
  EXPECT_FALSE(has_page()) << "nothing has asked for it";
  ASSERT_EQ(sluice_show_status(engine_, &figures_), SLUICE_OK) << sluice_last_error();
  struct stat info {};
  ASSERT_EQ(::stat(page().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const std::string before = bytes_of_page();
  train_step();
  EXPECT_NE(bytes_of_page(), before) << "a step has not changed it";
  sluice_engine_destroy(engine_);
  engine_ = nullptr;
  EXPECT_FALSE(has_page());
}

TEST_F(CApiStatus, EveryPhaseIsWritten) {
  make();
  ASSERT_EQ(sluice_show_status(engine_, &figures_), SLUICE_OK) << sluice_last_error();
  std::string last = bytes_of_page();
  const auto changes = [&] {
    const std::string now = bytes_of_page();
    const bool has_changed = now != last;
    last = now;
    return has_changed;
  };
  ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK) << sluice_last_error();
  EXPECT_TRUE(changes());
  ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK) << sluice_last_error();
  EXPECT_TRUE(changes());
  ASSERT_EQ(sluice_save(engine_, directory_.path().c_str(), 0, nullptr), SLUICE_OK)
      << sluice_last_error();
  EXPECT_TRUE(changes());
}

TEST_F(CApiStatus, RefusesWhatIsNoFigure) {
  make();
  EXPECT_EQ(sluice_show_status(engine_, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_show_status(nullptr, &figures_), SLUICE_INVALID_ARGUMENT);
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    figures_.peak_flops = wrong;
    EXPECT_EQ(sluice_show_status(engine_, &figures_), SLUICE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sluice_last_error()).find("peak_flops"), std::string::npos);
  }
  EXPECT_FALSE(has_page());
}

TEST_F(CApiStatus, ASecondEngineGetsANote) {
  make();
  ASSERT_EQ(sluice_show_status(engine_, &figures_), SLUICE_OK);
  sluice_engine* second = nullptr;
  const sluice_model made = model();
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &second), SLUICE_OK)
      << sluice_last_error();
  ASSERT_EQ(sluice_show_status(second, &figures_), SLUICE_OK);
  std::string notes;
  const char* note = nullptr;
  while (sluice_next_note(second, &note) == SLUICE_OK && note != nullptr) notes += note;
  EXPECT_NE(notes.find("another engine of this process"), std::string::npos) << notes;
  sluice_engine_destroy(second);
  EXPECT_TRUE(has_page());
}

TEST_F(CApiStatus, WithoutAFolderNothingHappens) {
  ::unsetenv("XDG_RUNTIME_DIR");
  make();
  ASSERT_EQ(sluice_show_status(engine_, &figures_), SLUICE_OK) << sluice_last_error();
  train_step();
  EXPECT_FALSE(std::filesystem::exists(directory_.file("sluice")));
}

// An engine with everything that there is: a page, a trace and guarded memory.
using CApiFork = CApiStatus;

// The worker of a data loader lives on after its parent was killed. It must keep no space on the
// drive, no memory that is pinned, and no lock.
TEST_F(CApiFork, AForkedChildKeepsNothing) {
  for (const char* const state : {"", R"("state": {"name": "run"}, )"}) {
    backend_ = state;
    const auto before = descriptors_of(::getpid());
    ASSERT_EQ(sluice_trace_start(directory_.file("trace").c_str(), 0, 1), SLUICE_OK);
    const sluice_model made = model();
    std::string guarded = config();
    guarded.insert(guarded.find(R"("device")"), R"("guard": "on", )");
    ASSERT_EQ(sluice_engine_create(guarded.c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    int is_new = 0;
    ASSERT_EQ(*state == '\0' ? sluice_initialize(engine_, sine_values, nullptr)
                             : sluice_open_or_create(engine_, sine_values, nullptr, 0, &is_new),
              SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_show_status(engine_, &figures_), SLUICE_OK) << sluice_last_error();
    ASSERT_TRUE(has_page());
    train_step();
    EXPECT_GT(descriptors_of(::getpid()).size(), before.size() + 2);
    {
      const PausedChild child;
      EXPECT_EQ(descriptors_of(child.pid()), before);
      const std::string maps = maps_of(child.pid());
      for (const std::string& kept :
           {std::string("io_uring"), std::string("memfd:sluice"), directory_.path()})
        EXPECT_EQ(maps.find(kept), std::string::npos) << maps;
    }
    train_step();
    sluice_engine_destroy(engine_);
    engine_ = nullptr;
    ASSERT_EQ(sluice_trace_stop(nullptr), SLUICE_OK);
  }
}

}  // namespace
}  // namespace sluice::test
