// A durable store whose drive flips bits, loses data or does not flush, and the order of the
// requests that keeps its last commit whole.
#include "tests/engine/durable/durable_engine.h"

#include <cerrno>
#include <fstream>

#include <fmt/format.h>

#include "engine/engine_over_queue.h"
#include "tests/support/commit_audit.h"
#include "tests/support/expect_error.h"
#include "tests/support/flush_fault.h"

namespace sluice::test {
namespace {

TEST_F(DurableEngine, FlippedBitsAreFound) {
  for (const std::size_t index : {std::size_t{1}, std::size_t{4}}) {
    Config with = config(kCases[index], OverlapPolicy::kDeferred, 1);
    with.storage.state.name = "flipped-" + kCases[index].name;
    (void)run(with, {.steps = 2});
    for (const std::string& path : paths_) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        if (entry.path().string().find(with.storage.state.name) == std::string::npos ||
            entry.path().string().find(".data") == std::string::npos)
          continue;
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        for (std::uint64_t at = 17; at < entry.file_size(); at += 4096) {
          file.seekg(static_cast<std::streamoff>(at));
          const auto byte = static_cast<char>(file.get() ^ 4);
          file.seekp(static_cast<std::streamoff>(at));
          file.put(byte);
        }
      }
    }
    const std::string words =
        expect_error(ErrorCode::kDamaged, [&] { (void)run(with, {.steps = 1}); });
    EXPECT_NE(words.find("checksum"), std::string::npos) << words;
  }
}

TEST_F(DurableEngine, AFileThatHasBeenCutIsNamed) {
  (void)run(config(), {.steps = 2});
  std::string cut;
  for (const auto& entry : std::filesystem::directory_iterator(paths_[1])) {
    if (entry.path().string().find(".data1") == std::string::npos) continue;
    cut = entry.path();
    std::filesystem::resize_file(cut, 8192);
  }
  const std::string words = expect_error(ErrorCode::kDamaged, [&] { const Run run(config()); });
  EXPECT_NE(words.find(cut), std::string::npos) << words;
  EXPECT_NE(words.find("8192 B"), std::string::npos) << words;
}

// The requests to the queue, in order, for every placement and policy.
TEST_F(DurableEngine, RecordsNameWhatIsFlushedAndNothingNamedIsWrittenAgain) {
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
    for (auto i = static_cast<std::size_t>(policy) % 3; i < kCaseCount; i += 3) {
      const auto commit_every = static_cast<std::uint32_t>(1 + i % 2);
      Config with = config(kCases[i], policy, commit_every);
      with.storage.state.name = fmt::format("audit-{}-{}", name_of(policy), kCases[i].name);
      SCOPED_TRACE(with.storage.state.name);
      if (policy == OverlapPolicy::kSpeculative)
        with.optimizer.clip_norm = bound_that_bites_sometimes(1);
      CommitAudit audit;
      {
        const ModelSpec model = toy_model();
        const auto device =
            make_host_device({.memory_bytes = with.memory.device_bytes.value_or(64_MiB),
                              .has_own_memory = kCases[i].is_gpu});
        Engine engine = EngineOverQueue::make(with, model, *device, [&](auto queue) {
          return make_audit_queue(std::move(queue), audit);
        });
        (void)run_toy(engine, model, *device, with, {.steps = 6});
        engine.close();
      }
      EXPECT_EQ(audit.violations, std::vector<std::string>());
      EXPECT_EQ(audit.records, 1 + 6 / commit_every);
      EXPECT_GT(audit.stores, 6u);
    }
  }
}

TEST_F(DurableEngine, AFlushThatFailsOrHangsStopsTheRunAndTheStoreStaysAtTheCommitBefore) {
  for (const int error : {EIO, ENOSPC, 0}) {
    // Four flushes a commit: of two data files, and of each twin.
    for (const int passed : {8, 9, 10, 11}) {
      SCOPED_TRACE(testing::Message() << error << " behind " << passed);
      Config with = config();
      with.storage.state.name = fmt::format("flush-{}-{}", error, passed);
      with.storage.timeout_s = error == 0 ? 2 : 60;  // a loaded machine is no drive that hangs
      const ModelSpec model = toy_model();
      {
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        Engine engine =
            EngineOverQueue::make(with, model, *device, [&](std::unique_ptr<IoQueue> queue) {
              return std::make_unique<FlushFault>(std::move(queue), error, passed);
            });
        const std::string words =
            expect_error(error == 0 ? ErrorCode::kTimeout : ErrorCode::kIo, [&] {
              (void)run_toy(engine, model, *device, with, {.steps = 6});
              engine.close();
            });
        EXPECT_NE(words.find("flush of " + directory_.path()), std::string::npos) << words;
        EXPECT_NE(words.find("for the commit of step 2"), std::string::npos) << words;
        const char* const way =
            passed < 10 ? "the store stays at step 1: open it again"
                        : "the store stays at step 1, or 2, whose commit record was being written";
        EXPECT_TRUE(error == 0 || words.find(way) != std::string::npos) << words;
      }
      Run again(with);
      const std::uint64_t step = again.engine->committed_step().value();
      // Once it may be there or not: a record that could not be flushed may be whole.
      EXPECT_TRUE(step == 1 || (step == 2 && passed >= 10) || error == 0) << step;
      again.engine.reset();
      const auto rest = static_cast<std::uint32_t>(6 - step);
      EXPECT_TRUE(run(with, {.steps = rest}).state == toy_oracle(with, {.steps = 6}).state);
    }
  }
}

}  // namespace
}  // namespace sluice::test
