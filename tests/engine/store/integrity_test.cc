// The table of checksums by itself, and block by block under a BlockStore whose files are altered
// behind its back.
#include "engine/store/integrity.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "engine/plan/placement.h"
#include "engine/store/block_store.h"
#include "io/checksum.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

TEST(Integrity, TellsStaleMisdirectedAndFlippedApart) {
  Integrity table(Verify::kFull, 4);
  const std::vector<std::byte> data(16, std::byte{1});
  const std::vector<std::byte> zeros(16);
  for (std::uint32_t plane = 0; plane < 4; ++plane) {
    table.stored(plane, 0, 100 + plane);
    table.stored(plane, 1, 200 + plane);
  }
  EXPECT_FALSE(table.find_damage(2, data, 202).has_value());
  const auto stale = table.find_damage(2, data, 102);
  ASSERT_TRUE(stale.has_value());
  EXPECT_EQ(stale->kind, DamageKind::kStale);
  EXPECT_EQ(stale->version, 0u);
  EXPECT_EQ(stale->expected, 202u);
  EXPECT_EQ(stale->found, 102u);
  for (const std::uint64_t version : {0u, 1u}) {
    const auto misdirected = table.find_damage(2, data, version == 1 ? 203 : 103);
    ASSERT_TRUE(misdirected.has_value());
    EXPECT_EQ(misdirected->kind, DamageKind::kMisdirected);
    EXPECT_EQ(misdirected->owner, 3u);
    EXPECT_EQ(misdirected->version, version);
  }
  EXPECT_EQ(table.find_damage(2, data, 7)->kind, DamageKind::kFlipped);
  EXPECT_EQ(table.find_damage(2, zeros, 7)->kind, DamageKind::kNeverWritten);
}

TEST(Integrity, EqualBlocksAreNoAlarm) {
  Integrity table(Verify::kFull, 4);
  for (std::uint32_t plane = 0; plane < 4; ++plane) table.stored(plane, 0, 42);
  table.stored(1, 1, 42);
  for (std::uint32_t plane = 0; plane < 4; ++plane)
    EXPECT_FALSE(table.find_damage(plane, {}, 42).has_value());
}

// The same version stored again (initialization) leaves nothing before it.
TEST(Integrity, WritingAVersionAgainReplacesIt) {
  Integrity table(Verify::kFull, 2);
  table.stored(0, 0, 1);
  table.stored(0, 0, 2);
  const std::vector<std::byte> data(16, std::byte{1});
  EXPECT_EQ(table.find_damage(0, data, 1)->kind, DamageKind::kFlipped);
}

TEST(Integrity, SampleReachesEveryPlaneInEightVersions) {
  const Integrity sample(Verify::kSample, 64);
  const Integrity off(Verify::kOff, 64);
  for (std::uint32_t plane = 0; plane < 64; ++plane) {
    int wanted = 0;
    for (std::uint64_t version = 100; version < 108; ++version) {
      wanted += sample.wants(plane, version) ? 1 : 0;
      EXPECT_FALSE(off.wants(plane, version));
    }
    EXPECT_EQ(wanted, 1) << plane;
  }
}

// All of a small model on storage, driven block by block.
class BlockStoreDamage : public testing::Test {
 protected:
  struct Place {
    BlockId block;
    Plane plane;
    Extent extent;
    int descriptor;
  };

  BlockStoreDamage() {
    for (const BlockPlace& block : layout_.blocks()) {
      for (const Plane plane : {Plane::kParameter, Plane::kRecord}) {
        const Extent& extent = plane == Plane::kParameter ? tiers_.parameter_extent(block.id, 0)
                                                          : tiers_.record_extent(block.id, 0);
        places_.push_back({block.id, plane, extent, tiers_.file(extent.file).descriptor()});
        fill(places_.back());
      }
    }
  }

  // New random bytes through the store.
  void fill(const Place& place) {
    for (std::uint64_t i = 0; i < place.extent.length_bytes; i += 8) {
      const std::uint64_t word = random_();
      std::memcpy(buffer_.data() + i, &word, 8);
    }
    store_.write_now(place.block, place.plane, buffer_.data());
  }
  void load(const Place& place) { store_.read_now(place.block, place.plane, buffer_.data()); }

  void read_raw(const Place& place, std::byte* target) {
    ASSERT_EQ(::pread(place.descriptor, target, place.extent.length_bytes,
                      static_cast<off_t>(place.extent.offset_bytes)),
              static_cast<ssize_t>(place.extent.length_bytes));
  }
  void write_raw(const Place& place, const std::byte* source) {
    ASSERT_EQ(::pwrite(place.descriptor, source, place.extent.length_bytes,
                       static_cast<off_t>(place.extent.offset_bytes)),
              static_cast<ssize_t>(place.extent.length_bytes));
  }
  const Place& any_place() { return places_[random_() % places_.size()]; }

  static Config config_for(const std::string& path) {
    Config config = toy_config(path);
    config.precision = {DType::kFp32, DType::kFp32};  // blocks of 16 KiB, records of 32
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.memory.host_bytes = 2_MiB;
    return config;
  }

  Campaign campaign_ = test::campaign(200);
  std::mt19937_64 random_{campaign_.first_seed};
  TempDirectory directory_;
  Config config_ = config_for(directory_.path());
  ModelSpec model_ = validated(toy_model());
  Layout layout_{model_, state_format(config_), config_.storage.block_elements};
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Placement placement_ = plan_placement(layout_, model_, config_.placement,
                                        {.device_bytes = 64_MiB, .host_bytes = 2_MiB});
  Tiers tiers_{layout_, placement_, config_.storage, *device_};
  Scheduler scheduler_;
  std::unique_ptr<IoQueue> queue_ = make_sync_queue({});
  BlockStore store_{config_.storage, layout_, tiers_, *queue_, scheduler_};
  AlignedBuffer buffer_{64_KiB, "test"};
  AlignedBuffer raw_{64_KiB, "test"};
  std::vector<Place> places_;
};

TEST_F(BlockStoreDamage, EveryFlippedBitIsFound) {
  for (std::uint64_t i = 0; i < campaign_.cases; ++i) {
    SCOPED_TRACE(i);
    const Place& place = any_place();
    read_raw(place, raw_.data());
    const std::uint64_t bit = random_() % (place.extent.length_bytes * 8);
    const auto mask = static_cast<std::byte>(1u << bit % 8);
    raw_.data()[bit / 8] ^= mask;
    write_raw(place, raw_.data());
    const std::string message = expect_error(ErrorCode::kDamaged, [&] { load(place); });
    EXPECT_NE(message.find("flipped"), std::string::npos) << message;
    raw_.data()[bit / 8] ^= mask;
    write_raw(place, raw_.data());
    load(place);
  }
}

TEST_F(BlockStoreDamage, EveryMisdirectedBlockIsFoundWithItsOwner) {
  for (std::uint64_t i = 0; i < campaign_.cases / 4;) {
    SCOPED_TRACE(i);
    const Place& victim = any_place();
    const Place& owner = any_place();
    if (&victim == &owner || victim.extent.length_bytes != owner.extent.length_bytes) continue;
    ++i;
    read_raw(owner, raw_.data());
    AlignedBuffer kept(victim.extent.length_bytes, "test");
    read_raw(victim, kept.data());
    write_raw(victim, raw_.data());
    const std::string message = expect_error(ErrorCode::kDamaged, [&] { load(victim); });
    const std::string owner_name = layout_.unit(layout_.block(owner.block).unit).name + "\" block ";
    EXPECT_NE(message.find("its bytes are those of unit \"" + owner_name), std::string::npos)
        << message;
    write_raw(victim, kept.data());
    load(victim);
  }
}

TEST_F(BlockStoreDamage, EveryStaleBlockIsFound) {
  for (std::uint64_t i = 0; i < campaign_.cases / 4; ++i) {
    SCOPED_TRACE(i);
    const Place& place = any_place();
    read_raw(place, raw_.data());
    const std::uint64_t next = store_.version(place.block, place.plane) + 1;
    store_.advance(place.block, place.plane, next);
    fill(place);
    load(place);
    write_raw(place, raw_.data());
    const std::string message = expect_error(ErrorCode::kDamaged, [&] { load(place); });
    EXPECT_NE(message.find("those of update " + std::to_string(next - 1)), std::string::npos)
        << message;
    fill(place);  // a rewrite of the same version heals it
    load(place);
  }
}

// Blocks of 16 KiB, a million of them with tools/test.sh --slow. A third of them are zeros and a
// third have the same bytes, as moments have at the beginning.
TEST_F(BlockStoreDamage, CleanReadsRaiseNoAlarm) {
  std::vector<const Place*> clean;
  for (const Place& place : places_) {
    if (place.extent.length_bytes == 16_KiB) clean.push_back(&place);
  }
  ASSERT_GT(clean.size(), 9u);
  for (std::size_t i = 0; i < clean.size(); ++i) {
    if (i % 3 == 0) continue;
    std::ranges::fill(buffer_.span(), i % 3 == 1 ? std::byte{0} : std::byte{0x3f});
    store_.write_now(clean[i]->block, clean[i]->plane, buffer_.data());
  }
  const std::uint64_t reads = campaign_.cases * 100;
  for (std::uint64_t i = 0; i < reads; ++i) load(*clean[random_() % clean.size()]);
  EXPECT_TRUE(store_.take_notes().empty());
}

}  // namespace
}  // namespace sluice::test
