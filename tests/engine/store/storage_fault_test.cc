// A kernel that answers errnos and short transfers, and a drive that lies, at seeded points of a
// small training run: it ends with the right bits or with a typed error, never hangs, and is never
// silently wrong.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_over_queue.h"
#include "io/transfer_progress.h"
#include "tests/support/campaign.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

const ToyOptions kTwoSteps{.steps = 2};

// Everything on storage under a small budget, in blocks of 8 and 40 KiB.
Config storage_config(const std::string& path) {
  Config config = toy_config(path);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 1_MiB;
  return config;
}

struct Outcome {
  std::optional<Error> error;
  bool is_exact = false;
  std::uint64_t requests = 0;
  std::uint64_t struck = 0;
  std::uint64_t struck_offset_bytes = 0;
  std::size_t notes = 0;
};

class StorageFault : public testing::Test {
 protected:
  Outcome run(const FaultOptions& options) { return run(options, config_); }

  Outcome run(const FaultOptions& options, const Config& config) {
    Outcome outcome;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    FaultQueue* queue = nullptr;
    Engine engine =
        EngineOverQueue::make(config, model_, *device, [&](std::unique_ptr<IoQueue> inner) {
          auto wrapped = make_fault_queue(std::move(inner), options);
          queue = wrapped.get();
          return wrapped;
        });
    try {
      const ToyResult result = run_toy(engine, model_, *device, config, kTwoSteps);
      outcome.is_exact = same_training(result, expected_);
      for (const StepReport& report : result.reports) outcome.notes += report.notes.size();
    } catch (const Error& error) {
      outcome.error = error;
    }
    const IoCounters counters = queue->counters();
    outcome.requests = counters.read_requests + counters.write_requests + counters.failed;
    outcome.struck = queue->struck();
    outcome.struck_offset_bytes = queue->struck_offset_bytes();
    return outcome;
  }

  TempDirectory directory_;
  Config config_ = storage_config(directory_.path());
  ModelSpec model_ = toy_model();
  ToyResult expected_ = toy_oracle(config_, kTwoSteps);
};

struct MadeFault {
  Fault fault;
  int error;
  bool heals_once;    // one such answer is made up for
  bool heals_always;  // and so is every one of them
};

constexpr MadeFault kMadeFaults[] = {
    {Fault::kErrno, EIO, false, false},      {Fault::kErrno, ENOSPC, false, false},
    {Fault::kErrno, EAGAIN, true, false},    {Fault::kErrno, EINTR, true, false},
    {Fault::kErrno, ECANCELED, true, false}, {Fault::kHalf, 0, true, false},
    {Fault::kOneBlockShort, 0, true, false}, {Fault::kZeroBytes, 0, true, false},
    {Fault::kDelayed, 0, true, true},        {Fault::kReordered, 0, true, true},
};

TEST_F(StorageFault, KernelFaultsEndExactOrTyped) {
  const Outcome clean = run({.fault = Fault::kNone, .at = 0});
  const std::uint64_t stride = even_stride(clean.requests);
  ASSERT_TRUE(clean.is_exact);
  const Campaign campaign = test::campaign(60);
  std::uint64_t failures = 0;
  for (const std::uint64_t seed : seeds_of(campaign)) {
    const MadeFault& fault = kMadeFaults[seed % std::size(kMadeFaults)];
    const bool is_slow = fault.fault == Fault::kDelayed || fault.fault == Fault::kReordered;
    const std::uint64_t at = seed * stride % clean.requests;
    const bool sticky = seed / std::size(kMadeFaults) % 2 == 1 && !(is_slow && seed % 3 != 0);
    SCOPED_TRACE(fmt::format("seed {}: fault {} errno {} at request {}{}", seed,
                             static_cast<int>(fault.fault), fault.error, at,
                             sticky ? ", sticky" : ""));
    const Outcome outcome =
        run({.seed = seed, .fault = fault.fault, .at = at, .error = fault.error, .sticky = sticky});
    if (!outcome.error) {  // healed, or came too late: overlap spares reads
      EXPECT_TRUE(outcome.is_exact);
      continue;
    }
    ++failures;
    EXPECT_EQ(outcome.error->code(), ErrorCode::kIo) << outcome.error->what();
    const std::string message = outcome.error->what();
    EXPECT_NE(message.find(directory_.path()), std::string::npos) << message;
    EXPECT_NE(message.find("of unit \""), std::string::npos) << message;
    if (fault.error != 0) {
      EXPECT_NE(message.find(errno_text(fault.error)), std::string::npos) << message;
    }
    EXPECT_FALSE(sticky ? fault.heals_always : fault.heals_once) << message;
  }
  if (campaign.cases >= 100) {
    EXPECT_GE(failures, campaign.cases / 10);
  }
}

// The one errno that a second read can heal: every read of the run once.
TEST_F(StorageFault, AReadThatFailsOnceIsReadAgainAndReported) {
  const Outcome clean = run({.fault = Fault::kNone, .at = 0});
  std::uint64_t healed = 0;
  std::size_t notes = 0;
  for (std::uint64_t at = 0; at < clean.requests; at += clean.requests / 24) {
    const Outcome outcome = run({.fault = Fault::kErrno, .at = at, .error = EIO});
    if (outcome.error) {
      EXPECT_NE(std::string(outcome.error->what()).find("write of"), std::string::npos)
          << outcome.error->what();
      continue;
    }
    EXPECT_TRUE(outcome.is_exact);
    ++healed;
    notes += outcome.notes;
  }
  EXPECT_GE(healed, 6u);
  EXPECT_GE(notes, 3u);
}

// Refuses one read, and remembers when.
class RefusesOneRead final : public IoQueue {
 public:
  RefusesOneRead(std::unique_ptr<IoQueue> inner, int passed)
      : inner_(std::move(inner)), left_(passed) {}

  void submit(std::span<IoRequest* const> requests) override {
    for (IoRequest* const request : requests) {
      if (request->kind != IoKind::kRead || left_.fetch_sub(1) != 0) {
        inner_->submit({&request, 1});
        continue;
      }
      begin_transfer(*request);
      note_start(*request, steady_now_ns());
      request->error = EIO;
      request->moved_ns = refused_ns_ = steady_now_ns();
      request->on_complete(*request);
    }
  }
  void wait_idle() override { inner_->wait_idle(); }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const override { return inner_->name(); }
  std::uint64_t refused_ns() const { return refused_ns_; }

 private:
  std::unique_ptr<IoQueue> inner_;
  std::atomic<int> left_;
  std::atomic<std::uint64_t> refused_ns_{0};
};

// In the trace, a read that was repeated begins when it was first asked for, and its time at the
// drive is that of the attempt which brought the bytes.
TEST_F(StorageFault, ARereadHasTheTimesOfItsOwnAttempt) {
  config_.storage.backend = IoBackend::kSync;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  RefusesOneRead* queue = nullptr;
  trace_enable(1 << 14);
  {
    Engine engine =
        EngineOverQueue::make(config_, model_, *device, [&](std::unique_ptr<IoQueue> inner) {
          auto wrapped = std::make_unique<RefusesOneRead>(std::move(inner), 20);
          queue = wrapped.get();
          return wrapped;
        });
    EXPECT_TRUE(same_training(run_toy(engine, model_, *device, config_, kTwoSteps), expected_));
    ASSERT_NE(queue->refused_ns(), 0u);
    // Among the reads under way at that time, the repeated one has reached the drive after it.
    std::uint64_t repeated = 0;
    for (const TraceRecord& record : trace_take()) {
      if (record.kind != TraceKind::kRead || record.begin_ns > queue->refused_ns() ||
          record.end_ns < queue->refused_ns())
        continue;
      EXPECT_GE(record.moved_ns, record.started_ns);
      repeated += record.started_ns >= queue->refused_ns() ? 1 : 0;
    }
    EXPECT_EQ(repeated, 1u);
  }
  trace_enable(0);
}

class DriveLie : public StorageFault, public testing::WithParamInterface<Fault> {};

// The writes of an overlapped update may be thrown away before anything reads them: then a lie
// about them is never found, and never matters.
TEST_P(DriveLie, IsFoundOrDoesNotMatterWhenUpdatesOverlap) {
  for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
    Config config = config_;
    config.optimizer.overlap = policy;
    const Outcome clean = run({.fault = Fault::kNone, .at = 0}, config);
    const std::uint64_t stride = even_stride(clean.requests);
    side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
      SCOPED_TRACE(fmt::format("{} seed {}", name_of(policy), seed));
      const Outcome outcome =
          run({.seed = seed, .fault = GetParam(), .at = seed * stride % clean.requests}, config);
      if (outcome.error) {
        EXPECT_EQ(outcome.error->code(), ErrorCode::kDamaged) << outcome.error->what();
      } else {
        EXPECT_TRUE(outcome.is_exact) << "silently wrong";
      }
    });
  }
}

TEST_P(DriveLie, IsFoundAndNamed) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  const Outcome clean = run({.fault = Fault::kNone, .at = 0});
  const std::uint64_t stride = even_stride(clean.requests);
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Outcome outcome =
        run({.seed = seed, .fault = GetParam(), .at = seed * stride % clean.requests});
    if (outcome.struck == 0) {  // no write came after that request
      EXPECT_TRUE(outcome.is_exact);
      return;
    }
    ASSERT_TRUE(outcome.error.has_value()) << "silently " << (outcome.is_exact ? "exact" : "wrong");
    const std::string message = outcome.error->what();
    EXPECT_EQ(outcome.error->code(), ErrorCode::kDamaged) << message;
    EXPECT_NE(message.find("read of unit \""), std::string::npos) << message;
    EXPECT_NE(message.find(directory_.path()), std::string::npos) << message;
    EXPECT_NE(message.find("with checksum"), std::string::npos) << message;
    EXPECT_NE(message.find(", twice"), std::string::npos) << message;
    const bool is_own_place =
        message.find(fmt::format("[{}, +", outcome.struck_offset_bytes)) != std::string::npos;
    switch (GetParam()) {
      case Fault::kBitFlip:
        EXPECT_TRUE(is_own_place) << message;
        EXPECT_NE(message.find("damaged"), std::string::npos) << message;
        break;
      case Fault::kLostWrite:
        EXPECT_TRUE(is_own_place) << message;
        EXPECT_NE(message.find("stale"), std::string::npos) << message;
        break;
      default:  // the victim holds another's bytes, the block itself its old ones
        EXPECT_NE(message.find(is_own_place ? "stale" : "misdirected"), std::string::npos)
            << message;
    }
  });
}

// This shows the need for checksums: without them the same lies go through.
TEST_P(DriveLie, WouldPassWithoutVerification) {
  Config config = config_;
  config.storage.verify = Verify::kOff;
  const Outcome clean = run({.fault = Fault::kNone, .at = 0}, config);
  const std::uint64_t stride = even_stride(clean.requests);
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 1; seed <= 200 && wrong == 0; ++seed) {
    const Outcome outcome =
        run({.seed = seed, .fault = GetParam(), .at = seed * stride % clean.requests}, config);
    if (!outcome.error && !outcome.is_exact) ++wrong;
  }
  // Which of them matter depends on timing: a lie may strike padding, or bytes that are
  // written again before they are read. One that passes shows that the tests above are not vacuous.
  EXPECT_GE(wrong, 1u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DriveLie,
                         testing::Values(Fault::kBitFlip, Fault::kLostWrite, Fault::kMisdirected),
                         [](const auto& tested) {
                           return tested.param == Fault::kBitFlip     ? "BitFlip"
                                  : tested.param == Fault::kLostWrite ? "LostWrite"
                                                                      : "Misdirected";
                         });

// Several steps and micro-batches with everything verified: nothing is suspected without a reason.
TEST_F(StorageFault, CleanRunsRaiseNoAlarm) {
  for (const Verify verify : {Verify::kFull, Verify::kSample, Verify::kOff}) {
    for (const DType dtype : {DType::kBf16, DType::kFp32}) {  // fp32: records begin as zeros, alike
      Config config = config_;
      config.storage.verify = verify;
      config.precision = {dtype, dtype};
      config.memory.host_bytes = 2_MiB;
      const ToyOptions options{.steps = 3, .micro_batches = 2};
      const ToyResult result = run_toy(config, options);
      EXPECT_TRUE(same_training(result, toy_oracle(config, options)));
      for (const StepReport& report : result.reports) EXPECT_TRUE(report.notes.empty());
    }
  }
}

}  // namespace
}  // namespace sluice::test
