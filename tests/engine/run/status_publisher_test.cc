// A training that a program shows in `sluice top`: what its page says after each step.
#include <sluice/status_publisher.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/units.h>

#include "base/trace/trace_recorder.h"
#include "engine/run/status_page.h"
#include "tests/support/fork_quietly.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class StatusPublisherTest : public testing::Test {
 protected:
  StatusPublisherTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
    config_.optimizer.overlap = OverlapPolicy::kSerial;  // a step's writes end in the step
    for (const char* name : {"/first", "/second"})
      std::filesystem::create_directory(directory_.path() + name);
    config_.storage.paths = {directory_.path() + "/first", directory_.path() + "/second"};
    const char* const before = std::getenv("XDG_RUNTIME_DIR");
    if (before != nullptr) before_ = before;
    ::setenv("XDG_RUNTIME_DIR", directory_.path().c_str(), 1);
  }
  ~StatusPublisherTest() override {
    if (before_)
      ::setenv("XDG_RUNTIME_DIR", before_->c_str(), 1);
    else
      ::unsetenv("XDG_RUNTIME_DIR");
  }

  StepReport train_step() {
    Step step = engine().begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, engine(), *device_, stream_, config_, 1);
    return step.finish();
  }

  Engine& engine() {
    if (!engine_) {
      engine_.emplace(config_, model_, *device_);
      engine_->initialize(toy_values());
    }
    return *engine_;
  }

  RunStatus status() const {
    const std::vector<FoundPage> pages = read_status_pages(status_folder());
    EXPECT_EQ(pages.size(), 1u);
    if (pages.size() != 1 || !pages[0].status) return {};
    EXPECT_EQ(pages[0].status->pid, static_cast<std::uint32_t>(::getpid()));
    return *pages[0].status;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 400_KiB});
  Stream stream_{*device_, "compute"};
  std::optional<Engine> engine_;
  std::optional<std::string> before_;
};

TEST_F(StatusPublisherTest, EvaluationsCountForNoStep) {
  StatusPublisher publisher(engine(), {});
  publisher.step_ended(train_step());
  constexpr std::uint64_t kEvaluated = 1_GiB;
  for (const RunPhase phase : {RunPhase::kEvaluating, RunPhase::kSaving}) {
    publisher.enter(phase);
    trace_span({.end_ns = 1, .size_bytes = kEvaluated, .kind = TraceKind::kCopyToDevice});
  }
  publisher.enter(RunPhase::kTraining);
  publisher.step_ended(train_step());
  const auto up = static_cast<std::size_t>(StatusLink::kCopyToDevice);
  EXPECT_GT(status().links[up].size_bytes, 0u);
  EXPECT_LT(status().links[up].size_bytes, kEvaluated);
  // A program that tells of no phases.
  trace_span({.end_ns = 1, .size_bytes = kEvaluated, .kind = TraceKind::kCopyToDevice});
  publisher.step_ended(train_step());
  EXPECT_GT(status().links[up].size_bytes, kEvaluated);
}

TEST_F(StatusPublisherTest, SaysWhatTheReportsSay) {
  std::optional<StatusPublisher> publisher;
  publisher.emplace(engine(), StatusOptions{.steps = 9, .flops_per_token = 100});
  EXPECT_EQ(publisher->problem(), "");
  EXPECT_EQ(status().phase, RunPhase::kStarting);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const StepReport report = train_step();
    publisher->step_ended(report, {.loss = 0.5, .tokens = 1000, .peak_flops = 1e12});
    const RunStatus told = status();
    EXPECT_EQ(told.phase, RunPhase::kTraining);
    EXPECT_EQ(told.step, i);
    EXPECT_EQ(told.steps, 9u);
    EXPECT_EQ(told.loss, 0.5);
    EXPECT_EQ(told.gradient_norm, report.gradient_norm);
    EXPECT_GT(told.step_s, 0);
    EXPECT_EQ(told.flops_per_s(), 100 * told.tokens_per_s());
    EXPECT_EQ(told.mfu(), told.flops_per_s() / 1e12);
    EXPECT_EQ(told.total_ns, report.times.total_ns);
    EXPECT_EQ(told.links[0].size_bytes, report.nvme_read_bytes);
    // Each drive has its part.
    ASSERT_EQ(told.drive_count, 2u);
    std::uint64_t read_bytes = 0, write_bytes = 0;
    for (std::size_t drive = 0; drive < 2; ++drive) {
      EXPECT_EQ(told.drives[drive].read_bytes, report.drives[drive].read_bytes);
      EXPECT_GT(told.drives[drive].read_bytes, 0u);
      EXPECT_GT(told.drives[drive].write_bytes, 0u);
      read_bytes += told.drives[drive].read_bytes;
      write_bytes += told.drives[drive].write_bytes;
    }
    EXPECT_EQ(read_bytes, report.nvme_read_bytes);
    EXPECT_EQ(write_bytes, report.nvme_write_bytes);
    EXPECT_GT(told.tiers[1].in_use_bytes, 0u);
  }
  EXPECT_TRUE(status().drives[1].name().ends_with("/second"));
  publisher->enter(RunPhase::kEvaluating);
  EXPECT_EQ(status().phase, RunPhase::kEvaluating);
  EXPECT_EQ(status().step, 3u);
  publisher->enter(RunPhase::kSaving, 4);
  EXPECT_EQ(status().step, 4u);
  publisher.reset();
  EXPECT_TRUE(read_status_pages(status_folder()).empty());
}

TEST_F(StatusPublisherTest, WhatIsNotKnownStaysSo) {
  StatusPublisher publisher(engine(), {});
  EXPECT_TRUE(std::isnan(status().loss));
  const StepReport report = train_step();
  publisher.step_ended(report);
  EXPECT_TRUE(std::isnan(status().loss));
  EXPECT_EQ(status().steps, 0u);
  EXPECT_EQ(status().tokens, 0u);
  EXPECT_EQ(status().step_s, static_cast<double>(report.times.total_ns) * 1e-9);
  publisher.step_ended({});  // a report that no engine has made
  EXPECT_EQ(status().step, 0u);
}

TEST_F(StatusPublisherTest, AProcessHasOnePage) {
  std::optional<StatusPublisher> first;
  first.emplace(engine(), StatusOptions{.steps = 1});
  {
    StatusPublisher second(engine(), {.steps = 2});
    EXPECT_NE(second.problem().find("another engine of this process"), std::string::npos);
    second.set_options({.steps = 3});
    second.enter(RunPhase::kSaving);
    second.step_ended(train_step());
    EXPECT_EQ(status().steps, 1u);
    EXPECT_EQ(status().phase, RunPhase::kStarting);
  }
  EXPECT_EQ(status().steps, 1u) << "the end of the second is not the first's";
  first.reset();
  const StatusPublisher third(engine(), {.steps = 4});
  EXPECT_EQ(third.problem(), "");
  EXPECT_EQ(status().steps, 4u);
}

TEST_F(StatusPublisherTest, AChildHasAPageOfItsOwn) {
  const StatusPublisher publisher(engine(), {});
  const pid_t child = fork_quietly();
  if (child == 0) {
    const StatusPublisher own(engine(), {});  // reads the engine, and calls nothing of it
    ::_exit(own.problem().empty() && read_status_pages(status_folder()).size() == 2 ? 0 : 1);
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_EQ(state, 0);
}

TEST_F(StatusPublisherTest, WithoutAFolderIsNoPageAndNoFailure) {
  std::ofstream(directory_.file("file")) << "text";
  ::setenv("XDG_RUNTIME_DIR", directory_.file("file").c_str(), 1);
  {
    StatusPublisher publisher(engine(), {});
    EXPECT_NE(publisher.problem().find("cannot make the folder of the status page"),
              std::string::npos)
        << publisher.problem();
    publisher.step_ended(train_step());
  }
  ::unsetenv("XDG_RUNTIME_DIR");
  {
    StatusPublisher publisher(engine(), {});
    EXPECT_EQ(publisher.problem(), "");
    publisher.step_ended(train_step());
  }
  ::setenv("XDG_RUNTIME_DIR", directory_.path().c_str(), 1);
  const StatusPublisher publisher(engine(), {});
  EXPECT_EQ(publisher.problem(), "") << "one that failed does not keep the page";
}

// A long path keeps its end, which tells drives apart, and whole characters. No path changes a
// terminal.
TEST_F(StatusPublisherTest, PathsAreCutToThePlaceForThem) {
  const std::string long_name = "/" + std::string(40, 'x') + "\u00e9" + std::string(59, 'y');
  config_.storage.paths = {directory_.path() + long_name, directory_.path() + "/a\x1b[31mb"};
  for (const std::string& path : config_.storage.paths) std::filesystem::create_directory(path);
  const StatusPublisher publisher(engine(), {});
  const RunStatus told = status();
  EXPECT_EQ(told.drives[0].name(), "..." + std::string(59, 'y'));
  EXPECT_TRUE(told.drives[1].name().ends_with("/a?[31mb")) << told.drives[1].name();
}

TEST_F(StatusPublisherTest, PathsOfOneEndAreToldApart) {
  const std::string end = "/" + std::string(70, 'y');
  config_.storage.paths = {directory_.path() + "/first" + end, directory_.path() + "/second" + end};
  for (const std::string& path : config_.storage.paths) std::filesystem::create_directory(path);
  const StatusPublisher publisher(engine(), {});
  EXPECT_EQ(status().drives[0].name(), "0..." + std::string(59, 'y'));
  EXPECT_EQ(status().drives[1].name(), "1..." + std::string(59, 'y'));
}

TEST_F(StatusPublisherTest, WithoutStateOnDrivesThereAreNone) {
  config_.placement = {TierChoice::kHost, TierChoice::kHost};
  const StatusPublisher publisher(engine(), {});
  EXPECT_EQ(status().drive_count, 0u);
}

TEST(RunPhase, HasNames) {
  EXPECT_EQ(name_of(RunPhase::kStarting), "starting");
  EXPECT_EQ(name_of(RunPhase::kSaving), "saving");
}

}  // namespace
}  // namespace sluice::test
