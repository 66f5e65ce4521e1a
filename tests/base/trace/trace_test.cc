#include "base/trace/trace_recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sluice/error.h>
#include "tests/support/file_text.h"
#include "tests/support/fork_quietly.h"
#include "tests/support/holds_in_child.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

std::int64_t distance_ns(std::uint64_t a, std::uint64_t b) {
  return std::abs(static_cast<std::int64_t>(a - b));
}

TEST(TraceClock, IsTheSteadyClock) {
  calibrate_trace_clock();
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t before = steady_now_ns();
    const std::uint64_t now = trace_now_ns();
    const std::uint64_t after = steady_now_ns();
    EXPECT_GT(now + 1'000'000, before);
    EXPECT_LT(now, after + 1'000'000);
  }
}

TEST(TraceClock, StaysSoOverCalibrations) {
  for (int i = 0; i < 20; ++i) {
    calibrate_trace_clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::uint64_t before = steady_now_ns();
    const std::uint64_t now = trace_now_ns();
    EXPECT_LT(distance_ns(now, before), distance_ns(steady_now_ns(), before) + 1'000'000);
  }
}

TEST(TraceClock, ReadsClockGettimeWhereItMust) {
  force_steady_trace_clock(true);
  EXPECT_EQ(trace_clock_name(), "clock_gettime");
  const std::uint64_t before = steady_now_ns();
  EXPECT_GE(trace_now_ns(), before);
  force_steady_trace_clock(false);
}

TEST(TraceClock, RestsWithoutATrace) {
  trace_enable(16);
  trace_enable(0);
  EXPECT_EQ(trace_clock_name(), "clock_gettime");
}

// Without its thread, the child would wait for the end of the trace, or write to the parent's file.
TEST(Trace, AForkedChildHasNone) {
  const test::TempDirectory directory;
  const std::string path = directory.file("trace");
  trace_start({.file = path});
  const pid_t child = test::fork_quietly();
  if (child == 0) {
    trace_section("engine", "the child's");
    trace_record({.begin_ns = 1, .end_ns = 9});
    const bool is_over = !trace_enabled() && trace_stop().records == 0;
    try {
      trace_start({.file = path + "2"});
    } catch (const Error&) {
      ::_exit(is_over ? 0 : 1);
    }
    ::_exit(2);
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0);
  (void)trace_stop();
  EXPECT_EQ(test::file_text(path).find("the child's"), std::string::npos);
}

TEST(Trace, RefusesNumbersThatCannotBe) {
  const test::TempDirectory directory;
  const TraceOptions options{.file = directory.file("trace")};
  TraceOptions large = options;
  large.ring_records = (1u << 30) + 1;
  TraceOptions foreign = options;
  foreign.rank = 2;
  foreign.ranks = 2;
  for (const TraceOptions& refused : {large, foreign}) EXPECT_THROW(trace_start(refused), Error);
  EXPECT_FALSE(trace_enabled());
}

// Runs `holds` in a process that can reserve `room_bytes` more than now. Returns its result.
template <class Check>
bool holds_within(std::uint64_t room_bytes, const Check& holds) {
  return test::holds_in_child([&] {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit{.rlim_cur = pages * 4096 + room_bytes, .rlim_max = RLIM_INFINITY};
    return ::setrlimit(RLIMIT_AS, &limit) == 0 && holds();
  });
}

// A thread that records cannot fail, so the size is tried before.
TEST(Trace, RefusesRingsThatTheSystemDoesNotGrant) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow memory is beyond every limit";
#endif
  const test::TempDirectory directory;
  EXPECT_TRUE(holds_within(1ull << 30, [&] {
    try {
      trace_start({.file = directory.file("trace"), .ring_records = 1u << 30});
    } catch (const Error& error) {
      return error.code() == ErrorCode::kOutOfMemory &&
             std::string(error.what()).find("64.0 GiB") != std::string::npos && !trace_enabled();
    }
    return false;
  }));
  EXPECT_FALSE(std::filesystem::exists(directory.file("trace")));
}

// There is room for one ring, and not for one of every thread.
TEST(Trace, CountsWhatThreadsLoseThatFindNoMemoryForTheirRings) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow memory is beyond every limit";
#endif
  const test::TempDirectory directory;
  const std::string path = directory.file("trace");
  EXPECT_TRUE(holds_within(400ull << 20, [&] {
    trace_start({.file = path, .ring_records = 1u << 22});  // 256 MiB
    trace_record({.begin_ns = 1, .end_ns = 9});
    std::thread([] {
      for (int i = 0; i < 3; ++i) trace_record({.begin_ns = 1, .end_ns = 9});
    }).join();
    trace_record({.begin_ns = 2, .end_ns = 9});
    const TraceResult result = trace_stop();
    return result.records == 2 && result.lost == 3 && result.failure.empty();
  }));
  EXPECT_NE(test::file_text(path).find("no memory"), std::string::npos);
}

TEST(Trace, EndsEarlyWhenTheReaderOfAPipeHasGone) {
  const test::TempDirectory directory;
  const std::string path = directory.file("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(test::holds_in_child([&] {
    ::signal(SIGPIPE, SIG_DFL);
    const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
    trace_start({.file = path});
    ::close(reader);
    trace_section("engine", "told to a pipe");  // by this thread, not by the trace's
    trace_record({.begin_ns = 1, .end_ns = 9});
    const TraceResult result = trace_stop();
    sigset_t pending;
    ::sigpending(&pending);
    return result.error == EPIPE && result.failure.find("gone") != std::string::npos &&
           sigismember(&pending, SIGPIPE) == 0;
  }));
}

TEST(Trace, AsksForMoreOpenFilesWhereNoneIsLeft) {
  const test::TempDirectory directory;
  EXPECT_TRUE(test::holds_in_child([&] {
    const rlimit limit{.rlim_cur = 0, .rlim_max = 0};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    try {
      trace_start({.file = directory.file("trace")});
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUnsupported &&
             std::string(error.what()).find("ulimit -n") != std::string::npos;
    }
    return false;
  }));
}

TEST(Trace, KeepsRecordsOnlyWhileItRuns) {
  trace_record({.begin_ns = 1, .end_ns = 9});
  trace_enable(16);
  EXPECT_TRUE(trace_enabled());
  trace_record({.begin_ns = 3, .end_ns = 9});
  std::thread([] { trace_record({.begin_ns = 2, .end_ns = 9}); }).join();
  const auto records = trace_take();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].begin_ns, 2u);
  EXPECT_EQ(records[1].begin_ns, 3u);
  EXPECT_TRUE(trace_take().empty());
  trace_begin({.begin_ns = 4, .end_ns = 9});  // announced, for those who are killed
  EXPECT_TRUE(trace_take().empty());
  trace_record({.begin_ns = 4, .end_ns = 9});
  trace_enable(16);  // forgets
  EXPECT_TRUE(trace_take().empty());
  trace_enable(0);
  trace_record({.begin_ns = 5, .end_ns = 9});
  EXPECT_TRUE(trace_take().empty());
}

// Only the drainer of a file polls, and not once more when the poll is gone.
TEST(Trace, PollsWhileItWritesAFile) {
  const test::TempDirectory directory;
  std::atomic<int> calls{0};
  {
    const TracePoll poll([&] { ++calls; });
    trace_enable(16);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(calls, 0);
    trace_enable(0);
    trace_start({.file = directory.path() + "/polled"});
    while (calls < 3) std::this_thread::yield();
  }
  const int last = calls;
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(calls, last);
  (void)trace_stop();
}

TEST(Trace, CountsAlways) {
  const auto of = [](const TraceCounts& counts) {
    return counts[static_cast<std::size_t>(TraceKind::kCollective)];
  };
  const TraceCount before = of(trace_counts());
  for (const std::uint64_t duration : {0, 1, 2, 3, 4, 1023, 1024})
    trace_span({.begin_ns = 10,
                .end_ns = 10 + duration,
                .size_bytes = 100,
                .kind = TraceKind::kCollective});
  trace_span({.begin_ns = 0, .end_ns = UINT64_MAX, .kind = TraceKind::kCollective});
  const TraceCount after = of(trace_counts());
  EXPECT_EQ(after.spans - before.spans, 8u);
  EXPECT_EQ(after.size_bytes - before.size_bytes, 700u);
  const auto bucket = [&](std::size_t i) { return after.by_duration[i] - before.by_duration[i]; };
  EXPECT_EQ(bucket(0), 2u);
  EXPECT_EQ(bucket(1), 2u);
  EXPECT_EQ(bucket(2), 1u);
  EXPECT_EQ(bucket(9), 1u);
  EXPECT_EQ(bucket(10), 1u);
  EXPECT_EQ(bucket(kTraceBuckets - 1), 1u);
}

}  // namespace
}  // namespace sluice
