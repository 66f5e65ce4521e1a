// The remedies that are named for waits: they can be applied, and they are for those who waited.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/tools/trace/trace_builder.h"
#include "tools/trace/trace_summary.h"

namespace sluice::test {
namespace {

class AdviceTest : public testing::Test {
 protected:
  AdviceTest() {
    engine_.is_known = true;
    engine_.lanes = 3;
    engine_.lane_bytes = 1 << 20;
    engine_.units = {{.name = "u", .parameter_bytes = 2 << 20, .tensors = {}}};
  }

  std::string advice(StallCause cause, TraceReason reason) const {
    TraceRecord update = span(TraceKind::kAdam, 300, 400, 0, 0);
    update.size_bytes = adam_bytes_;
    const TraceFile file = trace_of({span(TraceKind::kStep, 0, 1'000'000),
                                     transfer(TraceKind::kRead, 0, 0, 100, 200, 300), update});
    const StallGroup group{.cause = cause, .reason = reason, .spans = 1, .total_ns = 1'000'000};
    return advice_for(group, TraceAnalysis(file), engine_);
  }

  TracedEngine engine_;
  std::uint64_t adam_bytes_ = 0;  // of the one update; 0 = as if none ran
};

// A run has no more threads than cores, whatever run.threads says.
TEST_F(AdviceTest, ForAdamNamesThreadsThatTheRunCanHave) {
  const auto said = [&](unsigned threads, std::uint64_t cores) {
    engine_.threads = threads;
    engine_.granted_cores = cores;
    return advice(StallCause::kAdam, TraceReason::kUpdate);
  };
  EXPECT_EQ(said(4, 4),
            "on 4 threads, which is all cores that the run has: twice the cores "
            "would take up to 0.5 ms off each step");
  EXPECT_EQ(said(2, 16),
            "on 2 threads: run.threads 4, of 16 cores, would take up to 0.5 ms off "
            "each step");
  EXPECT_EQ(said(3, 4),
            "on 3 threads: run.threads 4, of 4 cores, would take up to 0.2 ms off "
            "each step");
  engine_.state_bytes_per_parameter = 8;
  adam_bytes_ = 4000;  // in 100 ns
  EXPECT_TRUE(said(3, 4).starts_with("5.00 Gparam/s on 3 threads: ")) << said(3, 4);
  engine_ = {};
  EXPECT_EQ(advice(StallCause::kAdam, TraceReason::kUpdate),
            "more cores, and run.threads for them");
}

// A lane of the update reads when it gets a lane: the device window is no help to it.
TEST_F(AdviceTest, ForReadsNamesTheRoomThatTheyGoTo) {
  const std::string window = "one more unit in the window needs memory.device +2.00 MiB";
  const std::string lanes = "optimizer.lanes 3 -> 6 needs memory.host +3.00 MiB";
  const std::string place = "memory.device + one activation is one more place for them";
  for (const StallCause cause :
       {StallCause::kLatePrefetch, StallCause::kLatencyTail, StallCause::kNoBuffer}) {
    for (const auto& [reason, wanted] : {std::pair(TraceReason::kRead, window),
                                         {TraceReason::kUpdateRead, lanes},
                                         {TraceReason::kNone, lanes},  // of the pass
                                         {TraceReason::kActivation, place}}) {
      const std::string said = advice(cause, reason);
      EXPECT_TRUE(said.ends_with(wanted)) << said;
    }
  }
}

// A larger budget is no help while part of it is unused. Homes that the config names are.
TEST_F(AdviceTest, AsksForNoBudgetThatIsLeftOver) {
  engine_.units.push_back({.name = "v", .parameter_bytes = 2 << 20, .tensors = {}});
  engine_.settings = {{"placement.parameters", "nvme"}, {"placement.optimizer", "nvme"}};
  engine_.record_blocks_on_storage = 3;
  const auto says = [&](StallCause cause, TraceReason reason, const std::string& wanted) {
    EXPECT_EQ(advice(cause, reason), wanted);
  };
  const std::string homes = "placement.parameters and placement.optimizer auto";
  says(StallCause::kNoBuffer, TraceReason::kUpdateRead,
       "each of the 3 blocks on storage has a lane; memory.host +1.00 MiB with " + homes +
           " gives one more block a home there");
  says(StallCause::kBandwidth, TraceReason::kRead,
       "the drives moved 40.96 GB/s; memory.host +19.5 MiB with " + homes +
           " keeps as much state off them as is waited for, a second drive halves it");
  engine_.record_blocks_on_storage = 4;
  says(StallCause::kNoBuffer, TraceReason::kUpdateRead,
       "optimizer.lanes 3 -> 4 needs memory.host +1.00 MiB");

  engine_.host_budget_bytes = engine_.device_budget_bytes = 1 << 30;
  engine_.host_bytes = engine_.device_bytes = 24 << 20;
  const std::string host = "1000 MiB of memory.host are unused";
  const std::string device =
      "1000 MiB of memory.device are unused: with placement.parameters auto, state has its home "
      "there";
  for (const TraceReason reason : {TraceReason::kUpdateRead, TraceReason::kSlot})
    says(StallCause::kNoBuffer, reason, host + ": with " + homes + ", state has its home there");
  says(StallCause::kBandwidth, TraceReason::kRead,
       "the drives moved 40.96 GB/s, and " + host + ": with " + homes +
           ", state has its home there; a second drive halves the wait");
  says(StallCause::kNoBuffer, TraceReason::kWindow, device);
  engine_.activation_bytes = 1 << 20;
  for (const TraceReason reason : {TraceReason::kGradientSlot, TraceReason::kActivation})
    says(StallCause::kNoBuffer, reason,
         "1000 MiB of memory.device are unused, so no budget is short");

  engine_.settings = {{"placement.parameters", "auto"}, {"placement.optimizer", "auto"}};
  says(StallCause::kNoBuffer, TraceReason::kUpdateRead,
       host + ", which optimizer.lanes 3 -> 4 fits into");
}

}  // namespace
}  // namespace sluice::test
