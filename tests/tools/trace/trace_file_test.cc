// Trace files: what is written is what is read, whatever happens to the writer or to the file.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/trace/trace_format.h"
#include "base/trace/trace_ring.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"
#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_reader.h"

namespace sluice::test {
namespace {

using Bytes = std::vector<std::byte>;

void expect_message(ErrorCode code, const std::string& part, const auto& body) {
  const std::string message = expect_error(code, body);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

Bytes bytes_of(const std::string& path) {
  const std::string text = test::file_text(path);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TraceRecord numbered(std::uint64_t number) {
  return {.begin_ns = 1000 + number,
          .end_ns = 2000 + number,
          .started_ns = 1100 + number,
          .moved_ns = 1900 + number,
          .size_bytes = number,
          .step = 3,
          .unit = 4,
          .block = static_cast<std::uint32_t>(number),
          .use = 5,
          .kind = TraceKind::kWrite,
          .reason = TraceReason::kSlot,
          .lane = 1,
          .detail = 1};
}

// Four threads' records, one after another so that none is lost.
std::string written_trace(const TempDirectory& directory, std::uint64_t records) {
  const std::string path = directory.path() + "/run.trace";
  trace_start({.file = path, .ring_records = 1 << 14, .rank = 2, .ranks = 4});
  trace_section("engine", R"({"units": []})");
  for (std::uint64_t thread = 0; thread < 4; ++thread) {
    std::thread([&] {
      for (std::uint64_t i = thread; i < records; i += 4) trace_record(numbered(i));
    }).join();
  }
  const TraceResult result = trace_stop();
  EXPECT_EQ(result.records, records);
  EXPECT_EQ(result.lost, 0u);
  EXPECT_EQ(result.failure, "");
  return path;
}

std::set<std::uint64_t> numbers_of(const TraceFile& file) {
  std::set<std::uint64_t> numbers;
  for (const TraceRecord& record : file.records) {
    TraceRecord expected = numbered(record.size_bytes);
    EXPECT_EQ(std::memcmp(&record, &expected, sizeof(record)), 0) << record.size_bytes;
    EXPECT_TRUE(numbers.insert(record.size_bytes).second) << "twice: " << record.size_bytes;
  }
  return numbers;
}

TEST(TraceFile, HoldsWhatWasRecorded) {
  const TempDirectory directory;
  const std::string path = written_trace(directory, 8'000);
  const TraceFile file = read_trace(path);
  EXPECT_EQ(numbers_of(file).size(), 8'000u);
  EXPECT_TRUE(file.is_complete);
  EXPECT_EQ(file.lost, 0u);
  EXPECT_EQ(file.damaged_blocks, 0u);
  EXPECT_EQ(file.rank, 2u);
  EXPECT_EQ(file.ranks, 4u);
  EXPECT_EQ(file.sections.at("engine"), R"({"units": []})");
  EXPECT_NE(file.wall_ns, 0u);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST(TraceFile, KeepsNobodyElsesModeWhenItReplacesAFile) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/run.trace";
  std::ofstream(path) << "old";
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  (void)written_trace(directory, 4);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST(TraceFile, OneTraceAtATime) {
  const TempDirectory directory;
  trace_start({.file = directory.path() + "/a"});
  expect_message(ErrorCode::kInvalidArgument, "running already",
                 [&] { trace_start({.file = directory.path() + "/b"}); });
  (void)trace_stop();
  expect_message(ErrorCode::kInput, "cannot write the trace",
                 [&] { trace_start({.file = directory.path() + "/none/b"}); });
  EXPECT_EQ(trace_stop().records, 0u);
  trace_record(numbered(1));  // nowhere
}

// Cut anywhere, it holds the whole blocks before the cut and says that it was cut.
TEST(TraceFile, LoadsWhereverItIsCut) {
  const TempDirectory directory;
  const Bytes whole = bytes_of(written_trace(directory, 8'000));
  const std::size_t described = parse_trace("whole", whole).sections.at("sluice-trace").size() + 64;
  const Campaign cuts = campaign(1000);
  std::mt19937_64 random(cuts.first_seed);
  std::size_t most = 0;
  for (std::uint64_t i = 0; i < cuts.cases; ++i) {
    const std::size_t length = random() % whole.size();
    SCOPED_TRACE(length);
    const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    if (length < described) {
      expect_message(ErrorCode::kInput, "is no trace", [&] { (void)parse_trace("cut", cut); });
      continue;
    }
    try {
      const TraceFile file = parse_trace("cut", cut);
      EXPECT_FALSE(file.is_complete);
      EXPECT_LE(file.damaged_blocks, 1u);
      const std::size_t count = numbers_of(file).size();
      // No more is lost than one block, and what the ring's drainer cuts it into.
      EXPECT_GE((count + kTraceBlockRecordsMax) * sizeof(TraceRecord) + described + 4096, length);
      most = std::max(most, count);
      if (i % 16 == 0) const TraceAnalysis analysis(file);
    } catch (const Error& error) {
      EXPECT_LT(length, described + 64) << error.what();  // inside the padding of the description
    }
  }
  EXPECT_GT(most, 4'000u);
}

// Altered bytes cost the blocks that they are in, and never the reader.
TEST(TraceFile, SurvivesDamage) {
  const TempDirectory directory;
  const Bytes whole = bytes_of(written_trace(directory, 8'000));
  const Campaign cases = campaign(300);
  for (std::uint64_t seed = cases.first_seed; seed < cases.first_seed + cases.cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Bytes damaged = whole;
    for (std::uint64_t i = random() % 8 + 1; i-- > 0;)
      damaged[random() % damaged.size()] ^= static_cast<std::byte>(random() % 255 + 1);
    try {
      const TraceFile file = parse_trace("damaged", damaged);
      EXPECT_GT(file.damaged_blocks, 0u);
      (void)numbers_of(file);
      const TraceAnalysis analysis(file);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInput);
    }
  }
}

void append_records(Bytes& bytes, std::uint64_t first, std::uint32_t count) {
  std::vector<TraceRecord> records;
  for (std::uint32_t i = 0; i < count; ++i) records.push_back(numbered(first + i));
  const auto payload = std::as_bytes(std::span(records));
  TraceBlockHeader header;
  header.type = static_cast<std::uint32_t>(TraceBlockType::kRecords);
  header.count = count;
  header.payload_bytes = payload.size();
  header.checksum = trace_checksum(header, payload);
  const auto raw = std::as_bytes(std::span(&header, 1));
  bytes.insert(bytes.end(), raw.begin(), raw.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
}

// Each damage costs its block and is counted; blocks behind it are found wherever they lie.
TEST(TraceFile, GoesOnBehindEachDamage) {
  const TempDirectory directory;
  Bytes bytes = bytes_of(written_trace(directory, 0));
  for (std::uint32_t count = 1; count <= 6; ++count) {
    append_records(bytes, 100 * count, count);
    const std::size_t damaged = bytes.size();
    append_records(bytes, 1000 * count, count);
    bytes[damaged + 200 % (64 * count + 64)] ^= std::byte{1};
  }
  append_records(bytes, 10'000, 1);
  const TraceFile file = parse_trace("damaged", bytes);
  EXPECT_EQ(numbers_of(file).size(), 1u + 2 + 3 + 4 + 5 + 6 + 1);
  EXPECT_EQ(file.damaged_blocks, 6u);
}

// Blocks that are whole and say what is not so.
TEST(TraceFile, RefusesToBelieveCounts) {
  const TempDirectory directory;
  Bytes bytes = bytes_of(written_trace(directory, 4));
  TraceBlockHeader header;
  header.type = static_cast<std::uint32_t>(TraceBlockType::kRecords);
  header.count = 0xffffffff;
  header.payload_bytes = 64;
  const Bytes payload(64, std::byte{0xff});  // a record of a kind that does not exist
  header.checksum = trace_checksum(header, payload);
  const auto raw = std::as_bytes(std::span(&header, 1));
  bytes.insert(bytes.end(), raw.begin(), raw.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  header.payload_bytes = UINT64_MAX - 63;
  bytes.insert(bytes.end(), raw.begin(), raw.end());
  const TraceFile file = parse_trace("lies", bytes);
  EXPECT_EQ(file.records.size(), 4u);
  EXPECT_EQ(file.damaged_blocks, 1u);
}

TEST(TraceFile, OfAnotherVersionIsRefused) {
  const TempDirectory directory;
  const Bytes whole = bytes_of(written_trace(directory, 4));
  TraceBlockHeader header;
  const std::string text = R"({"version": 2})";
  Bytes payload(64);
  std::memcpy(payload.data(), text.data(), text.size());
  header.type = static_cast<std::uint32_t>(TraceBlockType::kSection);
  header.count = static_cast<std::uint32_t>(text.size());
  std::memcpy(header.name, "sluice-trace", 12);
  header.payload_bytes = 64;
  header.checksum = trace_checksum(header, payload);
  Bytes bytes(128);
  std::memcpy(bytes.data(), &header, 64);
  std::memcpy(bytes.data() + 64, payload.data(), 64);
  expect_message(ErrorCode::kInput, "its version is 2", [&] { (void)parse_trace("later", bytes); });
  expect_message(ErrorCode::kInput, "is no trace", [&] { (void)parse_trace("empty", {}); });
  expect_message(ErrorCode::kInput, "cannot read the trace",
                 [&] { (void)read_trace(directory.path()); });
}

// A process that is killed has written what it recorded more than a moment ago.
TEST(TraceFile, OutlivesAKilledProcess) {
  const TempDirectory directory;
  const std::string path = directory.path() + "/killed.trace";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    trace_start({.file = path});
    for (std::uint64_t i = 0; i < 1000; ++i) trace_record(numbered(i));
    std::this_thread::sleep_for(std::chrono::seconds(1));
    for (std::uint64_t i = 1000;; ++i) trace_record(numbered(i));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const TraceFile file = read_trace(path);
  EXPECT_FALSE(file.is_complete);
  std::size_t early = 0;
  for (const TraceRecord& record : file.records) early += record.size_bytes < 1000 ? 1 : 0;
  EXPECT_EQ(early, 1000u);
}

TEST(TraceFile, RanksComeOntoOneClock) {
  const TempDirectory directory;
  std::vector<std::string> paths;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    if (rank == 1) continue;  // missing
    paths.push_back(directory.path() + "/" + std::to_string(rank));
    trace_start({.file = paths.back(), .rank = rank, .ranks = 3});
    trace_record(numbered(rank));
    (void)trace_stop();
  }
  const std::vector<TraceFile> files = read_traces({paths[1], paths[0]});
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].rank, 0u);
  EXPECT_EQ(files[1].rank, 2u);
  EXPECT_EQ(files[1].records.at(0).begin_ns, numbered(2).begin_ns);  // one machine, one clock
  expect_message(ErrorCode::kInput, "both of rank 0", [&] {
    (void)read_traces({paths[0], paths[0]});
  });
}

// Such as a file of a rank that an earlier run has left.
TEST(TraceFile, RanksOfDifferentRunsAreRefused) {
  const TempDirectory directory;
  const auto made = [&](const char* name, std::uint32_t rank, std::uint32_t ranks,
                        std::uint64_t number) {
    std::string path = directory.path() + "/" + name;
    trace_start({.file = path, .rank = rank, .ranks = ranks});
    trace_record(numbered(number));
    (void)trace_stop();
    return path;
  };
  const std::string first = made("first", 0, 2, 0);
  EXPECT_EQ(read_traces({first, made("second", 1, 2, 900)}).size(), 2u);
  const auto refuses = [&](const std::string& words, const std::string& other) {
    expect_message(ErrorCode::kInput, words, [&] { (void)read_traces({first, other}); });
  };
  refuses("one is of 2 ranks, the other of 3", made("larger", 1, 3, 0));
  refuses("one ended before the other began", made("later", 1, 2, 5000));
}

// Ranks on several hosts have told rank 0's clock apart from theirs: times go onto that of the
// first file.
TEST(TraceFile, ClocksThatWereComparedDecide) {
  const TempDirectory directory;
  std::vector<std::string> paths;
  for (const auto& [rank, offset_ns] : {std::pair{0u, 400}, {2u, 100}}) {
    paths.push_back(directory.path() + "/" + std::to_string(rank));
    trace_start({.file = paths.back(), .rank = rank, .ranks = 3});
    trace_section("clock", fmt::format(R"({{"offset_ns": {}, "error_ns": 7}})", offset_ns));
    trace_record(numbered(rank));
    (void)trace_stop();
  }
  const std::vector<TraceFile> files = read_traces(paths);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].records.at(0).begin_ns, numbered(0).begin_ns);
  EXPECT_EQ(files[1].records.at(0).begin_ns, numbered(2).begin_ns + 300);
  EXPECT_EQ(files[1].records.at(0).moved_ns, numbered(2).moved_ns + 300);
  EXPECT_EQ(files[1].clock_error_ns, 7u);
}

TEST(TraceRing, DropsAndCountsWhenItIsFull) {
  TraceRing ring(5, 0, "test");  // eight
  for (std::uint64_t i = 0; i < 20; ++i) ring.append(numbered(i));
  EXPECT_EQ(ring.lost(), 12u);
  std::vector<TraceRecord> taken(3);
  ASSERT_EQ(ring.drain(taken), 3u);
  EXPECT_EQ(taken[2].size_bytes, 2u);
  for (std::uint64_t i = 20; i < 24; ++i) ring.append(numbered(i));
  EXPECT_EQ(ring.lost(), 13u);
  taken.resize(100);
  ASSERT_EQ(ring.drain(taken), 8u);
  EXPECT_EQ(taken[4].size_bytes, 7u);
  EXPECT_EQ(taken[5].size_bytes, 20u);
  EXPECT_EQ(taken[7].size_bytes, 22u);
  EXPECT_EQ(ring.drain(taken), 0u);
}

// As long as it is emptied in time, a large ring takes little memory.
TEST(TraceRing, UsesTheSamePlacesAgain) {
  const auto resident_pages = [] {
    std::uint64_t size = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> size >> resident;
    return resident;
  };
  constexpr std::uint32_t kRecords = 1 << 20;  // 64 MiB
  TraceRing ring(kRecords, 0, "test");
  std::vector<TraceRecord> taken(8);
  const std::uint64_t before = resident_pages();
  for (std::uint64_t i = 0; i < 2ull * kRecords; i += 7) {
    for (std::uint64_t j = i; j < i + 7; ++j) ring.append(numbered(j));
    ASSERT_EQ(ring.drain(taken), 7u);
    for (std::uint64_t j = 0; j < 7; ++j) ASSERT_EQ(taken[j].size_bytes, i + j);
  }
  EXPECT_EQ(ring.lost(), 0u);
  EXPECT_LT(resident_pages() - before, 2000u);  // 8 MB
}

// One writes, one drains: nothing twice, nothing out of order, and the count adds up.
TEST(TraceRing, LosesNothingThatItDoesNotCount) {
  TraceRing ring(64, 0, "test");
  constexpr std::uint64_t kRecords = 200'000;
  std::thread writer([&] {
    for (std::uint64_t i = 0; i < kRecords; ++i) ring.append(numbered(i));
    ring.close();
  });
  std::vector<TraceRecord> part(16);
  std::uint64_t taken = 0, next = 0;
  while (!ring.is_closed() || ring.waiting() != 0) {
    const std::size_t count = ring.drain(part);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_GE(part[i].size_bytes, next);
      ASSERT_EQ(part[i].block, part[i].size_bytes);
      next = part[i].size_bytes + 1;
    }
    taken += count;
  }
  writer.join();
  EXPECT_EQ(taken + ring.lost(), kRecords);
}

}  // namespace
}  // namespace sluice::test
