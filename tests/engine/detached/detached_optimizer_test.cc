// The detached optimizer equals the scalar definition bit for bit wherever its state is, however
// tensors are left out, reordered and changed by the application.
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <map>
#include <thread>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/detached/detached_plan.h"
#include "tests/engine/detached/detached_support.h"
#include "tests/support/expect_error.h"
#include "tests/support/refused_syscall.h"

namespace sluice::test {
namespace {

TEST_F(DetachedTest, EqualsTheScalarDefinitionForEveryOptimizerTypeAndPlacement) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad,
        OptimizerKind::kSgd}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme, TierChoice::kAuto}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(kind), static_cast<int>(dtype),
                                 static_cast<int>(tier)));
        make_tensors(dtype, counts_);
        Config made = config(kind, tier);
        if (tier == TierChoice::kHost) made.memory.host_bytes = 4_MiB;
        if (tier != TierChoice::kHost) made.memory.host_bytes = 200_KiB;
        DetachedOptimizer optimizer(made, description());
        train(optimizer, kind);
        expect_equal(optimizer, kind);
        const DetachedReport report = optimizer.report();
        EXPECT_LE(report.host_bytes, *made.memory.host_bytes);
        EXPECT_EQ(report.write_bytes == 0, tier == TierChoice::kHost);
        EXPECT_EQ(report.adopted_elements, dtype == DType::kFp32 ? 0u : 1u);
        EXPECT_EQ(report.non_finite_blocks, 0u);
      }
    }
  }
}

TEST_F(DetachedTest, MomentsInFewerBitsAreThoseOfTheDefinition) {
  for (const OptimizerState moments : {OptimizerState::kBf16, OptimizerState::k8bit}) {
    moments_ = moments;
    for (const OptimizerKind kind :
         {OptimizerKind::kAdamW, OptimizerKind::kLion, OptimizerKind::kAdagrad}) {
      for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
        for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme}) {
          SCOPED_TRACE(fmt::format("{} {} {} {}", name_of(moments), name_of(kind),
                                   static_cast<int>(dtype), static_cast<int>(tier)));
          make_tensors(dtype, counts_);
          Config made = config(kind, tier);
          made.memory.host_bytes = tier == TierChoice::kHost ? 4_MiB : 200_KiB;
          DetachedOptimizer optimizer(made, description());
          train(optimizer, kind);
          expect_equal(optimizer, kind);
        }
      }
    }
  }
}

// A state that is read and set again is the same state, also in parts.
TEST_F(DetachedTest, MomentsInFewerBitsComeBack) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  for (const OptimizerState moments : {OptimizerState::kBf16, OptimizerState::k8bit}) {
    moments_ = moments;
    make_tensors(DType::kBf16, {20'001});
    DetachedOptimizer optimizer(config(kind, TierChoice::kNvme), description());
    for (int step = 0; step < 3; ++step) {
      const DetachedUpdate update = next(kind, 0);
      optimizer.begin({&update, 1});
      optimizer.wait_all();
    }
    for (const auto& [first, count] : {std::pair<std::uint64_t, std::uint64_t>{0, 20'001},
                                       {100, 300},
                                       {20'000, 1},
                                       {4090, 20}}) {
      for (const StateKind what : {StateKind::kExpAvg, StateKind::kExpAvgSq}) {
        std::vector<float> part(count);
        optimizer.read(0, what, first, part);
        optimizer.write(0, what, first, part);
      }
    }
    expect_equal(optimizer, kind);
    const DetachedUpdate update = next(kind, 0);
    optimizer.begin({&update, 1});
    optimizer.wait_all();
    expect_equal(optimizer, kind);
  }
}

TEST_F(DetachedTest, MovesEveryRecordOnceInEachDirectionAndReadsAhead) {
  make_tensors(DType::kFp32, {40'000, 65'536});
  const OptimizerKind kind = OptimizerKind::kAdamW;
  DetachedOptimizer optimizer(config(kind, TierChoice::kNvme), description());
  for (int step = 0; step < 5; ++step) {
    const std::vector<DetachedUpdate> updates{next(kind, 0), next(kind, 1)};
    optimizer.begin(updates);
    optimizer.wait_all();
    // The order is known from the second step on: 16 lanes are filled with what comes next, of
    // which the end of the first tensor is shorter.
    const std::uint64_t ahead = step == 0 ? 0 : 15 * 32_KiB + 28_KiB;
    DetachedReport report = optimizer.report();
    const std::uint64_t expected =
        static_cast<std::uint64_t>(step) * report.pass_read_bytes + ahead;
    for (int wait = 0; wait < 10'000 && report.read_bytes < expected; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      report = optimizer.report();
    }
    EXPECT_EQ(report.read_bytes, expected);
    EXPECT_EQ(report.write_bytes, static_cast<std::uint64_t>(step + 1) * report.pass_read_bytes);
    EXPECT_EQ(report.updated_elements, static_cast<std::uint64_t>(step + 1) * 105'536u);
  }
  expect_equal(optimizer, kind);
}

// As docs/tracing.md has it: a transfer or an update is a span with its block and step.
TEST_F(DetachedTest, EveryTransferAndUpdateIsInTheTrace) {
  make_tensors(DType::kBf16, {40'000, 65'536, 300});
  const OptimizerKind kind = OptimizerKind::kAdamW;
  Config made = config(kind, TierChoice::kNvme);
  made.memory.host_bytes = 600_KiB;
  DetachedOptimizer optimizer(made, description());
  trace_enable(1 << 14);
  constexpr std::uint64_t kSteps = 3;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    const std::vector<DetachedUpdate> updates{next(kind, 2), next(kind, 1), next(kind, 0)};
    optimizer.begin(updates);
    optimizer.wait_all();
  }
  std::vector<float> values(300);
  optimizer.read(2, StateKind::kMaster, 0, values);  // is no update
  const std::vector<TraceRecord> records = trace_take();
  trace_enable(0);
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint32_t> updates;  // by block and step
  std::map<std::uint32_t, std::uint32_t> of_tensor;
  std::uint64_t read_bytes = 0, write_bytes = 0;
  for (const TraceRecord& record : records) {
    EXPECT_LE(record.begin_ns, record.end_ns);
    if (record.kind == TraceKind::kRead) read_bytes += record.size_bytes;
    if (record.kind == TraceKind::kWrite) write_bytes += record.size_bytes;
    if (record.kind != TraceKind::kAdam) continue;
    ++updates[{record.block, record.step}];
    ++of_tensor[record.unit];
  }
  for (const auto& [place, count] : updates)
    EXPECT_EQ(count, 1u) << "block " << place.first << " in step " << place.second;
  const std::uint32_t blocks = 10 + 16 + 1;  // of 4,096 elements
  EXPECT_EQ(updates.size(), blocks * kSteps);
  EXPECT_EQ(of_tensor[0], 10 * kSteps);
  EXPECT_EQ(of_tensor[1], 16 * kSteps);
  EXPECT_EQ(of_tensor[2], kSteps);
  EXPECT_EQ(write_bytes, optimizer.report().write_bytes);
  EXPECT_GT(write_bytes, 0u);
  EXPECT_GE(read_bytes, (kSteps - 1) * optimizer.report().pass_read_bytes);
}

TEST_F(DetachedTest, TakesAStateThatItGave) {
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    const OptimizerKind kind = OptimizerKind::kAdamW;
    make_tensors(dtype, counts_);
    std::vector<std::map<StateKind, std::vector<float>>> saved(tensors_.size());
    std::vector<StateKind> kinds{StateKind::kExpAvg, StateKind::kExpAvgSq};
    if (dtype != DType::kFp32) kinds.push_back(StateKind::kMaster);
    {
      DetachedOptimizer optimizer(config(kind, TierChoice::kNvme), description());
      train(optimizer, kind);
      for (std::uint32_t id = 0; id < tensors_.size(); ++id)
        for (const StateKind what : kinds) {
          saved[id][what].resize(tensors_[id].count());
          optimizer.read(id, what, 0, saved[id][what]);
        }
    }
    Config other = config(kind, TierChoice::kHost);
    other.memory.host_bytes = 8_MiB;
    DetachedOptimizer optimizer(other, description());
    for (std::uint32_t id = 0; id < tensors_.size(); ++id)
      for (const auto& [what, values] : saved[id]) {
        // In two pieces that cross the ends of blocks.
        const std::uint64_t cut = values.size() / 3;
        optimizer.write(id, what, 0, std::span(values).first(cut));
        optimizer.write(id, what, cut, std::span(values).subspan(cut));
      }
    train(optimizer, kind);
    expect_equal(optimizer, kind);
  }
}

TEST_F(DetachedTest, SaysWhichTensorIsNoLongerFinite) {
  make_tensors(DType::kFp32, {100, 200});
  DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kHost), description());
  std::vector<DetachedUpdate> updates{next(OptimizerKind::kAdamW, 0),
                                      next(OptimizerKind::kAdamW, 1)};
  tensors_[1].gradient[3] = NAN;
  optimizer.begin(updates);
  optimizer.wait_all();
  EXPECT_EQ(optimizer.report().non_finite_blocks, 1u);
  EXPECT_EQ(optimizer.report().non_finite_tensor, "t1");
  const auto line = [](const std::string& name) {
    return "an update has left \"" + name + "\" with an infinity or a NaN";
  };
  EXPECT_EQ(optimizer.take_notes().back(), line("t1"));
  updates = {next(OptimizerKind::kAdamW, 0), next(OptimizerKind::kAdamW, 1)};
  tensors_[0].gradient[7] = INFINITY;
  optimizer.begin(updates);
  optimizer.wait_all();
  EXPECT_EQ(optimizer.report().non_finite_blocks, 3u);
  EXPECT_EQ(optimizer.report().non_finite_tensor, "t1");  // the first one
  EXPECT_EQ(optimizer.take_notes(), std::vector{line("t0")}) << "each once";
}

TEST_F(DetachedTest, RefusesWhatItsContractForbidsAndChangesNothing) {
  make_tensors(DType::kFp32, {100, 200});
  DetachedOptimizer optimizer(config(OptimizerKind::kLion, TierChoice::kHost), description());
  const auto refused = [&](const DetachedUpdate& update) {
    return expect_error(ErrorCode::kInvalidArgument, [&] { optimizer.begin({&update, 1}); });
  };
  const DetachedUpdate good = next(OptimizerKind::kLion, 0);
  DetachedUpdate bad = good;
  bad.tensor = 2;
  EXPECT_EQ(refused(bad), "begin: tensor 2 does not exist; there are 2");
  bad = good;
  bad.gradient = nullptr;
  EXPECT_EQ(refused(bad), "begin: tensor \"t0\" has no gradient");
  bad = good;
  bad.step = 0;
  EXPECT_NE(refused(bad).find("tensor \"t0\""), std::string::npos);
  bad = good;
  bad.learning_rate = -1;
  EXPECT_NE(refused(bad).find("-1"), std::string::npos);
  bad.learning_rate = 1e39;
  EXPECT_NE(refused(bad).find("1e+39, but must be at most 3.4e38"), std::string::npos);
  bad = good;
  bad.gradient_dtype = DType{3};
  EXPECT_NE(refused(bad).find("tensor \"t0\" has a gradient of DType 3"), std::string::npos);
  std::vector<float> values(100);
  expect_error(ErrorCode::kInvalidArgument, [&] { optimizer.wait(2); });
  expect_error(ErrorCode::kInvalidArgument,
               [&] { optimizer.read(2, StateKind::kExpAvg, 0, values); });
  for (const StateKind none : {StateKind{4}, StateKind{9}})
    expect_error(ErrorCode::kInvalidArgument, [&] { optimizer.read(0, none, 0, values); });
  expect_error(ErrorCode::kInvalidArgument,
               [&] { optimizer.read(0, StateKind::kMaster, 0, values); });
  expect_error(ErrorCode::kInvalidArgument,
               [&] { optimizer.read(0, StateKind::kExpAvg, 1, values); });
  values[0] = -1;  // Lion keeps no such moment, whatever the values are
  const std::string unkept = expect_error(
      ErrorCode::kInvalidArgument, [&] { optimizer.write(0, StateKind::kExpAvgSq, 0, values); });
  EXPECT_NE(unkept.find("is not kept by"), std::string::npos) << unkept;
  expect_error(ErrorCode::kInvalidArgument,
               [&] { optimizer.write(0, StateKind::kExpAvg, 1, values); });
  optimizer.begin({&good, 1});
  optimizer.wait_all();
  expect_equal(optimizer, OptimizerKind::kLion);
}

TEST_F(DetachedTest, ABudgetThatIsTooSmallNamesOneThatWorks) {
  make_tensors(DType::kFp32, {40'000});
  for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme}) {
    Config made = config(OptimizerKind::kAdamW, tier);
    made.memory.host_bytes = 64_KiB;
    const std::string message = expect_error(
        ErrorCode::kOutOfMemory, [&] { const DetachedOptimizer bad(made, description()); });
    const std::string needed = tier == TierChoice::kHost ? "316 KiB" : "96 KiB";
    EXPECT_NE(message.find("need " + needed), std::string::npos) << message;
    made.memory.host_bytes = parse_size(tier == TierChoice::kHost ? "316KiB" : "96KiB");
    const DetachedOptimizer works(made, description());
  }
  Config made = config(OptimizerKind::kAdamW, TierChoice::kDevice);
  expect_error(ErrorCode::kConfig, [&] { const DetachedOptimizer refused(made, description()); });
  made = Config();
  made.storage.state.name = "run-7";
  expect_error(ErrorCode::kConfig, [&] { const DetachedOptimizer refused(made, description()); });
  made = Config();
  made.storage.block_elements = 1;
  expect_error(ErrorCode::kConfig, [&] { const DetachedOptimizer refused(made, description()); });
}

TEST_F(DetachedTest, TheParameterCannotBeSet) {
  make_tensors(DType::kBf16, {100});
  DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kHost), description());
  const std::vector<float> values(100, 1.0f);
  const std::string message = expect_error(
      ErrorCode::kInvalidArgument, [&] { optimizer.write(0, StateKind::kParameter, 0, values); });
  EXPECT_NE(message.find("\"t0\""), std::string::npos) << message;
}

TEST_F(DetachedTest, WhatItCannotBeMadeOfIsNamed) {
  make_tensors(DType::kFp32, {40'000});
  const Config good = config(OptimizerKind::kAdamW, TierChoice::kNvme);
  const auto refused = [&](ErrorCode code, const Config& made,
                           const std::vector<DetachedTensor>& tensors) {
    return expect_error(code, [&] { const DetachedOptimizer none(made, tensors); });
  };
  EXPECT_NE(refused(ErrorCode::kInvalidArgument, good, {}).find("no tensors"), std::string::npos);
  EXPECT_NE(refused(ErrorCode::kInvalidArgument, good, {{.name = "", .element_count = 4}})
                .find("no name"),
            std::string::npos);
  Config made = good;
  made.storage.paths = {"/no/such/folder"};
  EXPECT_NE(refused(ErrorCode::kInput, made, description()).find("/no/such/folder"),
            std::string::npos);
  // Sixteen terabytes of records, in blocks that the budget holds three of.
  made = good;
  made.storage.block_elements = 1 << 28;
  made.memory.host_bytes = 16_GiB;
  EXPECT_NE(refused(ErrorCode::kNoSpace, made, {{.name = "huge", .element_count = 1ull << 41}})
                .find(directory_.path()),
            std::string::npos);
  made = good;
  made.storage.backend = IoBackend::kUring;
  const bool filtered = run_with_refused({.number = SYS_io_uring_setup, .error = EPERM}, [&] {
    EXPECT_NE(refused(ErrorCode::kUnsupported, made, description()).find("\"threads\""),
              std::string::npos);
  });
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
}

// Elsewhere blocks are the grain of transfers; in memory, each end of a block is a wait.
TEST(DetachedPlan, InHostMemoryATensorIsOneBlock) {
  const std::vector<DetachedTensor> tensors{{.name = "a", .element_count = 1 << 20},
                                            {.name = "b", .element_count = 40 << 20}};
  Config config;
  config.placement.optimizer = TierChoice::kHost;
  const DetachedPlan whole = plan_detached(config, tensors, 1_GiB);
  ASSERT_EQ(whole.blocks.size(), 1u + 3u) << "of 16 Mi elements at most";
  EXPECT_EQ(whole.blocks[0].element_count, 1u << 20);
  EXPECT_EQ(whole.blocks[3].element_count, 8u << 20);
  config.placement.optimizer = TierChoice::kAuto;
  EXPECT_EQ(plan_detached(config, tensors, 1_GiB).blocks.size(), 4u);
  // The same tensors where they do not all fit, in blocks of storage.
  EXPECT_EQ(plan_detached(config, tensors, 100_MiB).blocks.size(), 4u + 160u);
}

}  // namespace
}  // namespace sluice::test
