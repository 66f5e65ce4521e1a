#include "engine/store/commit_record.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include <gtest/gtest.h>

#include "tests/engine/store/commit_samples.h"

namespace sluice::test {
namespace {

// Gives altered bytes the checksum that a writer would have.
void seal(std::vector<std::byte>& bytes) {
  CommitHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const std::span whole = std::span(bytes).first(header.length_bytes);
  header.checksum = commit_checksum(header, whole.subspan(sizeof(header)));
  std::memcpy(bytes.data(), &header, sizeof(header));
}

// A record of one plane after `alter`, with a checksum that fits.
CommitReading sealed(const std::function<void(CommitHeader&, CommitPlane&)>& alter) {
  CommitRecord record = sample_commit(1);
  record.file_count = 2;
  record.planes = {{.length_bytes = 8192, .copy_count = 2, .copies = {{.file = 0}, {.file = 1}}}};
  std::vector<std::byte> bytes = encoded(record);
  CommitHeader header;
  CommitPlane plane;
  std::memcpy(&header, bytes.data(), sizeof(header));
  std::memcpy(&plane, bytes.data() + sizeof(header), sizeof(plane));
  alter(header, plane);
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), &plane, sizeof(plane));
  seal(bytes);
  return decode_commit(bytes);
}

TEST(CommitRecord, ComesBackAsItWas) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const CommitRecord record = sample_commit(seed, seed + 1, 2 * seed);
    std::vector<std::byte> bytes = encoded(record);
    ASSERT_LE(bytes.size(), commit_slot_bytes(record.planes.size()));
    bytes.resize(bytes.size() + 8192, std::byte{0x5a});  // what an older record has left
    const CommitReading reading = decode_commit(bytes);
    ASSERT_EQ(reading.state, CommitState::kWhole) << reading.problem;
    const CommitRecord& found = reading.record;
    EXPECT_EQ(found.store_id, record.store_id);
    EXPECT_EQ(found.generation, record.generation);
    EXPECT_EQ(found.step, record.step);
    EXPECT_EQ(found.scale, record.scale);
    EXPECT_EQ(found.settings, record.settings);
    EXPECT_EQ(found.application, record.application);
    ASSERT_EQ(found.planes.size(), record.planes.size());
    EXPECT_EQ(encoded(found), encoded(record));
  }
}

TEST(CommitRecord, EveryBitOfItIsGuarded) {
  CommitRecord record = sample_commit(3);
  record.planes.resize(2);
  record.settings = "{}";
  record.application.resize(10);
  std::vector<std::byte> bytes = encoded(record);
  const std::uint64_t length = commit_bytes(record);
  for (std::uint64_t bit = 0; bit < 8 * length; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    const CommitReading reading = decode_commit(bytes);
    ASSERT_EQ(reading.state, CommitState::kDamaged) << "bit " << bit;
    ASSERT_FALSE(reading.problem.empty());
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
}

TEST(CommitRecord, TornAnywhereIsDamaged) {
  const CommitRecord record = sample_commit(5);
  const std::vector<std::byte> bytes = encoded(record);
  const std::vector<std::byte> before = encoded(sample_commit(6));
  for (std::uint64_t cut = 512; cut < commit_bytes(record); cut += 512) {
    std::vector<std::byte> torn = before;
    torn.resize(std::max(bytes.size(), before.size()));
    std::memcpy(torn.data(), bytes.data(), cut);
    ASSERT_EQ(decode_commit(torn).state, CommitState::kDamaged) << cut;
    std::vector<std::byte> short_slot(bytes.begin(), bytes.begin() + static_cast<long>(cut));
    ASSERT_EQ(decode_commit(short_slot).state, CommitState::kDamaged) << cut;
  }
}

TEST(CommitRecord, NothingWrittenIsEmpty) {
  EXPECT_EQ(decode_commit(std::vector<std::byte>(8192)).state, CommitState::kEmpty);
  EXPECT_EQ(decode_commit({}).state, CommitState::kDamaged);
}

TEST(CommitRecord, AnotherVersionIsForeignAndNamed) {
  const CommitReading reading = sealed([](CommitHeader& header, CommitPlane&) {
    header.version = kCommitVersion + 1;
    header.plane_count = 77;  // whatever that version means by it
  });
  EXPECT_EQ(reading.state, CommitState::kForeign);
  EXPECT_NE(reading.problem.find("version 2"), std::string::npos) << reading.problem;
}

TEST(CommitRecord, WhatNoWriterWritesIsDamagedThoughItsChecksumFits) {
  using Alter = std::function<void(CommitHeader&, CommitPlane&)>;
  const std::pair<const char*, Alter> cases[] = {
      {"kind", [](CommitHeader& header, CommitPlane&) { header.kind = 7; }},
      {"rank 3 of 3", [](CommitHeader& header, CommitPlane&) { header.rank = 3; }},
      {"length", [](CommitHeader& header, CommitPlane&) { header.plane_count += 1; }},
      {"length", [](CommitHeader& header, CommitPlane&) { header.plane_count = 0xffffffff; }},
      {"settings",
       [](CommitHeader& header, CommitPlane&) {
         const auto grown = static_cast<std::uint32_t>(kSettingsBytesMax + 1);
         header.plane_count = 0;
         header.settings_bytes = grown;
       }},
      {"names copy 2 of 2", [](CommitHeader&, CommitPlane& plane) { plane.named_copy = 2; }},
      {"names copy 0 of 0", [](CommitHeader&, CommitPlane& plane) { plane.copy_count = 0; }},
      {"names copy 0 of 4", [](CommitHeader&, CommitPlane& plane) { plane.copy_count = 4; }},
      {"in file 2 of 2", [](CommitHeader&, CommitPlane& plane) { plane.copies[1].file = 2; }},
      {"lies at 17", [](CommitHeader&, CommitPlane& plane) { plane.copies[1].offset_bytes = 17; }},
      {"lies at",
       [](CommitHeader&, CommitPlane& plane) { plane.copies[1].offset_bytes = ~0ull << 12; }},
      {"lies at", [](CommitHeader&, CommitPlane& plane) { plane.length_bytes = ~0ull; }},
      {"overlap", [](CommitHeader&,
                     CommitPlane& plane) { plane.copies[1] = {.file = 0, .offset_bytes = 4096}; }},
      {"ought to be zero", [](CommitHeader& header, CommitPlane&) { header.reserved = 1; }},
      {"ought to be zero", [](CommitHeader&, CommitPlane& plane) { plane.copies[2].file = 1; }},
  };
  for (const auto& [text, alter] : cases) {
    const CommitReading reading = sealed(alter);
    EXPECT_EQ(reading.state, CommitState::kDamaged) << text;
    if (std::string(text) == "settings") continue;  // its length gives it away first
    EXPECT_NE(reading.problem.find(text), std::string::npos) << reading.problem;
  }
}

// Bytes of every kind, with a checksum that fits where a header is there at all: an answer, and
// nothing that is read beyond the slot (AddressSanitizer).
TEST(CommitRecord, AnyBytesGetAnAnswer) {
  std::mt19937_64 random(9);
  int whole = 0;
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::byte> bytes = encoded(sample_commit(random() % 20));
    const std::uint64_t reach = random() % 2 == 0 ? sizeof(CommitHeader) : bytes.size();
    for (std::uint64_t change = random() % 4; change > 0; --change)
      bytes[16 + random() % (reach - 16)] = static_cast<std::byte>(random());
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    CommitHeader header;
    if (bytes.size() >= sizeof(header)) {
      std::memcpy(&header, bytes.data(), sizeof(header));
      if (header.length_bytes >= sizeof(header) && header.length_bytes <= bytes.size() &&
          random() % 2 == 0)
        seal(bytes);
    }
    const CommitReading reading = decode_commit(bytes);
    if (reading.state != CommitState::kWhole) continue;
    ++whole;
    const std::vector<std::byte> again = encoded(reading.record);
    const std::uint64_t length = commit_bytes(reading.record);
    ASSERT_TRUE(
        std::equal(again.begin(), again.begin() + static_cast<long>(length), bytes.begin()));
  }
  EXPECT_GT(whole, 100);
}

}  // namespace
}  // namespace sluice::test
