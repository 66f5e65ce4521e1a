// The bytes of a checkpoint's files: ranges that begin and end anywhere, written and read past the
// page cache by several threads, are those that a plain read or write would give.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_folder.h"
#include "engine/checkpoint/checkpoint_plan.h"
#include "engine/checkpoint/piece_cache.h"
#include "engine/checkpoint/safetensors_file.h"
#include "engine/checkpoint/safetensors_header.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Bytes bytes_of_file(const std::string& path) {
  const std::string text = file_text(path);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Cuts [0, count) into pieces of up to `most` bytes.
std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces_of(std::uint64_t count,
                                                               std::uint64_t most) {
  std::mt19937_64 random(most);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces;
  for (std::uint64_t at = 0; at < count;) {
    const std::uint64_t length = std::min(count - at, random() % most + 1);
    pieces.emplace_back(at, length);
    at += length;
  }
  return pieces;
}

// How many pages of the file the page cache holds.
std::size_t cached_pages(const std::string& path, std::uint64_t size_bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  void* const memory = ::mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  std::vector<unsigned char> pages(div_ceil(size_bytes, kPageBytes));
  EXPECT_EQ(::mincore(memory, size_bytes, pages.data()), 0);
  ::munmap(memory, size_bytes);
  return static_cast<std::size_t>(
      std::ranges::count_if(pages, [](unsigned char page) { return page & 1; }));
}

TEST(CheckpointBytes, PiecesThatAreWrittenAtOnceAreAllThere) {
  const TempDirectory directory;
  const Bytes expected = random_bytes(3'000'001, 5);
  for (const std::uint64_t most : {5'000u, 40'000u, 2'000'000u}) {
    SCOPED_TRACE(most);
    NewCheckpoint fresh(directory.file("root"));
    fresh.create("data", "", expected.size());
    CheckpointFile file(fresh.folder(), "data");
    const auto pieces = pieces_of(expected.size(), most);
    std::atomic<std::size_t> next = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        AlignedBuffer room(64_KiB, "the test");
        for (std::size_t i = next++; i < pieces.size(); i = next++)
          file.write(pieces[i].first,
                     std::span(expected).subspan(pieces[i].first, pieces[i].second), room.span());
      });
    }
    for (std::thread& thread : threads) thread.join();
    file.sync();
    const std::string path = fresh.folder() + "/data";
    const UniqueFd direct(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (most == 2'000'000u && direct) {
      EXPECT_LE(cached_pages(path, expected.size()), 2 * pieces.size());
    }
    EXPECT_TRUE(bytes_of_file(path) == expected);
  }
}

// Pages of memory that are pages of the file go to the drive from where they lie.
TEST(CheckpointBytes, WholePagesNeedNoRoom) {
  const TempDirectory directory;
  const Bytes random = random_bytes(64 * kPageBytes, 6);
  AlignedBuffer pages(random.size(), "the test");
  std::ranges::copy(random, pages.data());
  NewCheckpoint fresh(directory.file("root"));
  fresh.create("data", "", random.size());
  CheckpointFile file(fresh.folder(), "data");
  const std::string path = fresh.folder() + "/data";
  const UniqueFd direct(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (!direct) GTEST_SKIP() << "the file system has no O_DIRECT";
  file.write(0, pages.span(), {});  // without room, anything else would go through the page cache
  file.sync();
  EXPECT_EQ(cached_pages(path, random.size()), 0u);
  EXPECT_TRUE(bytes_of_file(path) == random);
}

TEST(CheckpointBytes, TensorsOfWholePagesBeginAtPages) {
  StateDescription state;
  for (const std::uint64_t extent : {3u, 8192u, 100u, 4096u})
    state.tensors.push_back({.name = "t" + std::to_string(extent), .shape = {extent}});
  const StateFormat format;  // bf16
  const CheckpointPlan plan = plan_checkpoint(state, format, 5'000'000'000);
  std::size_t whole = 0;
  for (const CheckpointPlan::Tensor& tensor : plan.tensors) {
    const std::uint64_t element_bytes = safetensors_element_bytes(tensor.dtype);
    const std::uint64_t size = state.tensors[tensor.tensor].shape[0] * element_bytes;
    EXPECT_EQ(tensor.begin_bytes % element_bytes, 0u);
    if (size % kPageBytes != 0) continue;
    ++whole;
    EXPECT_EQ(tensor.begin_bytes % kPageBytes, 0u) << tensor.tensor;
  }
  EXPECT_EQ(whole, 8u);
  for (const CheckpointPlan::File& file : plan.files)
    EXPECT_EQ(file.beginning.size() % kPageBytes, 0u);
}

// With their headers, whose offsets have more digits in a larger file.
TEST(CheckpointBytes, FilesKeepTheirLimit) {
  StateDescription state;
  const std::string dots(500, '.');
  for (std::uint64_t i = 0; i < 300; ++i)
    state.tensors.push_back({.name = "\n" + dots + std::to_string(i), .shape = {1 + i % 7, 1024}});
  constexpr std::uint64_t kLargest = 7 * 1024 * sizeof(float);
  for (const std::uint64_t limit : {kLargest, 40'000ul, 200'000ul, 3'000'000ul}) {
    const CheckpointPlan plan = plan_checkpoint(state, StateFormat(), limit);
    std::vector<int> tensors(plan.files.size());
    for (const CheckpointPlan::Tensor& tensor : plan.tensors) ++tensors[tensor.file];
    for (std::size_t file = 0; file < plan.files.size(); ++file)
      EXPECT_TRUE(plan.files[file].size_bytes <= limit || tensors[file] == 1)
          << plan.files[file].size_bytes << " of " << limit;
    EXPECT_LT(plan.size_bytes / plan.files.size(), limit + 2 * kPageBytes);
    if (limit >= 200'000) {
      EXPECT_GT(plan.size_bytes / plan.files.size(), limit * 3 / 4);  // they are not cut too early
    }
  }
}

class DirectReads : public testing::Test {
 protected:
  DirectReads() {
    const std::string header =
        R"({"t":{"dtype":"U8","shape":[1000003],"data_offsets":[0,1000003]}})";
    const std::uint64_t length = header.size();
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header;
    const Bytes data = random_bytes(1'000'003, 9);
    file.write(reinterpret_cast<const char*>(data.data()), static_cast<long>(data.size()));
    file.close();
    all_ = bytes_of_file(path_);
  }

  TempDirectory directory_;
  std::string path_ = directory_.file("file.safetensors");
  Bytes all_;
};

TEST_F(DirectReads, AnyRangeIsThatOfTheFile) {
  const SafetensorsFile file(path_);
  std::mt19937_64 random(3);
  AlignedBuffer buffer;
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t begin = random() % all_.size();
    const std::uint64_t count =
        i % 3 == 0 ? all_.size() - begin : random() % (all_.size() - begin) + 1;
    const auto bytes = file.read_direct(begin, count, buffer);
    ASSERT_TRUE(std::ranges::equal(bytes, std::span(all_).subspan(begin, count)))
        << begin << " " << count;
  }
}

TEST_F(DirectReads, AFileThatHasBecomeShorterIsNamed) {
  const SafetensorsFile file(path_);
  std::filesystem::resize_file(path_, 500'000);
  AlignedBuffer buffer;
  EXPECT_EQ(file.read_direct(100'000, 300'000, buffer).size(), 300'000u);
  const std::string message =
      expect_error(ErrorCode::kInput, [&] { (void)file.read_direct(300'000, 400'000, buffer); });
  EXPECT_NE(message.find(path_), std::string::npos) << message;
  EXPECT_NE(message.find("ends at byte 500000"), std::string::npos) << message;
}

TEST(PieceCacheTest, APieceIsReadOnceWhoeverWantsIt) {
  PieceCache cache;
  const int part = 0;
  std::atomic<int> reads = 0;
  const auto read = [&](std::size_t number) {
    return [&reads, number](AlignedBuffer& buffer) {
      ++reads;
      if (buffer.size_bytes() == 0) buffer = AlignedBuffer(kPageBytes, "the test");
      buffer.span()[0] = static_cast<std::byte>(number);
      return std::span<const std::byte>(buffer.span()).first(1);
    };
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (std::size_t number = 0; number < 200; ++number) {
        for (int again = 0; again < 3; ++again)
          EXPECT_EQ(cache.get({&part, number}, read(number))->front(),
                    static_cast<std::byte>(number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(reads, 200);
  reads = 0;
  // One thread alone finds the five that it used last.
  for (int round = 0; round < 10; ++round) {
    for (std::size_t number = 0; number < 5; ++number)
      (void)cache.get({&part, number}, read(number));
  }
  EXPECT_EQ(reads, 5);
  // A piece in use stays as it is, whatever comes.
  const auto held = cache.get({&part, 0}, read(0));
  for (std::size_t number = 10; number < 30; ++number)
    (void)cache.get({&part, number}, read(number));
  EXPECT_EQ(held->front(), std::byte{0});
}

TEST(PieceCacheTest, AFailedReadIsTriedAgain) {
  PieceCache cache;
  const int part = 0;
  expect_error(ErrorCode::kIo, [&] {
    (void)cache.get({&part, 1}, [](AlignedBuffer&) -> std::span<const std::byte> {
      throw Error(ErrorCode::kIo, "once");
    });
  });
  const std::byte byte{7};
  EXPECT_EQ(cache.get({&part, 1}, [&](AlignedBuffer&) { return std::span(&byte, 1); })->front(),
            byte);
}

}  // namespace
}  // namespace sluice::test
