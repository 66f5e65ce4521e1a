#include "engine/plan/layout.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

ModelSpec units_a_and_b() {
  ModelSpec spec;
  spec.units.push_back(
      {"a", {{.name = "a.w", .shape = {100, 100}}, {.name = "a.b", .shape = {100}}}});
  spec.units.push_back({"b", {{.name = "b.w", .shape = {1}}}});
  return validated(spec);
}

constexpr StateFormat kSplit{
    .parameter = DType::kBf16, .gradient = DType::kBf16, .master = MasterLayout::kSplitBf16};
constexpr StateFormat kFp32{
    .parameter = DType::kFp32, .gradient = DType::kFp32, .master = MasterLayout::kFp32};
constexpr StateFormat kFp16{
    .parameter = DType::kFp16, .gradient = DType::kFp16, .master = MasterLayout::kFp16};

TEST(Layout, TensorsStartAtMultiplesOf256Elements) {
  const Layout layout(units_a_and_b(), kSplit, 4096);
  ASSERT_EQ(layout.tensors().size(), 3u);
  EXPECT_EQ(layout.tensors()[0].offset_elements, 0u);
  EXPECT_EQ(layout.tensors()[1].offset_elements, 10240u);  // 10,000 rounded up
  EXPECT_EQ(layout.tensors()[2].offset_elements, 0u);
  EXPECT_EQ(layout.units()[0].element_count, 10240u + 256u);
  EXPECT_EQ(layout.units()[1].element_count, 256u);
  EXPECT_EQ(layout.parameter_count(), 10101u);
}

TEST(Layout, BlocksTileEachUnitExactly) {
  const Layout layout(units_a_and_b(), kSplit, 4096);
  ASSERT_EQ(layout.blocks().size(), 4u);
  EXPECT_EQ(layout.blocks()[2].offset_elements, 8192u);
  EXPECT_EQ(layout.blocks()[2].element_count, 10496u - 8192u);
  EXPECT_EQ(layout.blocks()[3].unit, UnitId{1});
  for (const UnitPlace& unit : layout.units()) {
    std::uint64_t next = 0;
    for (const BlockPlace& block : layout.blocks_of(unit.id)) {
      EXPECT_EQ(block.offset_elements, next);
      next += block.element_count;
    }
    EXPECT_EQ(next, unit.element_count);
  }
}

// The other unit has shards, and padding for two levels.
TEST(Layout, ALocalUnitIsWholeOnItsRank) {
  ModelSpec spec = units_a_and_b();
  spec.units[0].is_announced = spec.units[0].is_local = true;
  const Layout layout(spec, kSplit, 4096, {}, {.index = 2, .count = 3, .pieces = 2});
  const UnitPlace& local = layout.units()[0];
  EXPECT_EQ(local.element_count, 10240u + 256u);
  EXPECT_EQ(local.shard_elements, local.element_count);
  EXPECT_EQ(local.shard_begin, 0u);
  EXPECT_EQ(local.block_count, 3u);
  EXPECT_FALSE(local.is_sharded);
  EXPECT_EQ(layout.set_begin(local.id), 0u);
  EXPECT_EQ(layout.set_elements(local.id), local.element_count);
  EXPECT_EQ(layout.home_parameter_bytes(local.id), local.element_count * 2);
  EXPECT_EQ(layout.units()[1].shard_elements, 512u);
  EXPECT_TRUE(layout.units()[1].is_sharded);
}

// Even a small one: what stays gathered is a unit of all ranks.
TEST(Layout, ALocalUnitIsNotGathered) {
  ModelSpec spec = units_a_and_b();
  spec.units[1].is_announced = spec.units[1].is_local = true;
  const Layout layout(spec, kSplit, 4096, {}, {.count = 2, .keep_gathered_bytes = 1 << 20});
  EXPECT_TRUE(layout.keeps_gathered(UnitId{0}));
  EXPECT_FALSE(layout.keeps_gathered(UnitId{1}));
}

TEST(Layout, EightBitMomentsTakeTheirCodesAndTheirScales) {
  StateFormat format = kSplit;
  format.moments = OptimizerState::k8bit;
  const Layout layout(units_a_and_b(), format, 4096);
  EXPECT_EQ(layout.record_bytes(BlockId{0}), 4096u * (2 + 1 + 1) + 2 * 16 * 4);
  EXPECT_EQ(layout.record_bytes(BlockId{3}), 256u * 4 + 2 * 4);
  EXPECT_EQ(layout.state_bytes(), (10496u + 256u) * 6 + (41u + 1u) * 8);
  EXPECT_DOUBLE_EQ(format.state_bytes_per_element(), 6.03125);
  std::vector<std::byte> record(layout.record_bytes(BlockId{0}));
  const RecordMoments moments = moments_of(format, 4096, record.data());
  const auto offset = [&](const void* at) {
    return static_cast<const std::byte*>(at) - record.data();
  };
  EXPECT_EQ(offset(moments.exp_avg_codes.codes), 8192);
  EXPECT_EQ(offset(moments.exp_avg_sq_codes.codes), 12288);
  EXPECT_EQ(offset(moments.exp_avg_codes.scales), 16384);
  EXPECT_EQ(offset(moments.exp_avg_sq_codes.scales), 16448);
  EXPECT_EQ(moments.exp_avg, nullptr);
  format.keeps_exp_avg = false;  // Adagrad
  EXPECT_EQ(format.record_bytes(4096), 4096u * 3 + 64);
  EXPECT_EQ(moments_of(format, 4096, record.data()).exp_avg_codes.codes, nullptr);
}

TEST(Layout, Bf16MomentsTakeTwoBytesEach) {
  StateFormat format = kSplit;
  format.moments = OptimizerState::kBf16;
  const Layout layout(units_a_and_b(), format, 4096);
  EXPECT_EQ(layout.record_bytes(BlockId{0}), 4096u * (2 + 2 + 2));
  EXPECT_EQ(layout.state_bytes(), 8u * (10496u + 256u));
  std::vector<std::byte> record(layout.record_bytes(BlockId{0}));
  const RecordMoments moments = moments_of(format, 4096, record.data());
  EXPECT_EQ(reinterpret_cast<std::byte*>(moments.exp_avg_bf16) - record.data(), 8192);
  EXPECT_EQ(reinterpret_cast<std::byte*>(moments.exp_avg_sq_bf16) - record.data(), 16384);
  EXPECT_EQ(moments.exp_avg, nullptr);
  EXPECT_FALSE(moments.exp_avg_codes.exist());
  format.keeps_exp_avg_sq = false;  // Lion
  EXPECT_EQ(format.record_bytes(4096), 4096u * 4);
  EXPECT_EQ(moments_of(format, 4096, record.data()).exp_avg_sq_bf16, nullptr);
}

// With the gaps between slots, as files and pools have them.
TEST(Layout, EightBitMomentsTakeAtMost6_2BytesAParameterAtRest) {
  ModelSpec large;
  large.units.push_back({"a", {{.name = "w", .shape = {1024, 2048}}}});
  large.units.push_back({"b", {{.name = "v", .shape = {1024, 2048}}}});
  StateFormat format = kSplit;
  format.moments = OptimizerState::k8bit;
  const Layout layout(validated(large), format, std::nullopt);
  std::uint64_t bytes = 0;
  for (const BlockPlace& block : layout.blocks())
    bytes += layout.parameter_slot_bytes(block.id) + layout.record_slot_bytes(block.id);
  EXPECT_LE(static_cast<double>(bytes), 6.2 * static_cast<double>(layout.parameter_count()));
  EXPECT_GT(static_cast<double>(bytes), 6.03 * static_cast<double>(layout.parameter_count()));
}

TEST(Layout, TwelveBytesOfStateAnElementInBothPrecisions) {
  for (const StateFormat& format : {kSplit, kFp32}) {
    const Layout layout(units_a_and_b(), format, 4096);
    EXPECT_EQ(layout.state_bytes(), 12u * (10496u + 256u));
  }
  const Layout split(units_a_and_b(), kSplit, 4096);
  EXPECT_EQ(split.parameter_bytes(BlockId{0}), 2u * 4096u);
  EXPECT_EQ(split.record_bytes(BlockId{0}), 10u * 4096u);
  EXPECT_EQ(split.parameter_bytes(BlockId{3}), 512u);
  EXPECT_EQ(split.parameter_slot_bytes(BlockId{3}), 4096u);
  EXPECT_EQ(split.record_slot_bytes(BlockId{3}), 4096u);
  const Layout fp32(units_a_and_b(), kFp32, 4096);
  EXPECT_EQ(fp32.record_bytes(BlockId{0}), 8u * 4096u);
}

TEST(Layout, Fp16KeepsItsMasterInTheRecord) {
  const Layout layout(units_a_and_b(), kFp16, 4096);
  EXPECT_EQ(layout.state_bytes(), 14u * (10496u + 256u));
  EXPECT_EQ(layout.parameter_bytes(BlockId{0}), 2u * 4096u);
  EXPECT_EQ(layout.record_bytes(BlockId{0}), 12u * 4096u);
  Config config;
  config.precision.parameters = DType::kFp16;
  EXPECT_EQ(state_format(config).master, MasterLayout::kFp16);
}

TEST(Layout, DefaultBlocksSuitTheModelsSize) {
  ModelSpec spec;
  spec.units.push_back({"large", {{.name = "w", .shape = {1u << 20, 64}}}});
  EXPECT_EQ(Layout(validated(spec), kSplit, {}).block_elements(), 1u << 20);
  spec.units[0].tensors[0].shape = {3u << 20};
  EXPECT_EQ(Layout(validated(spec), kSplit, {}).block_elements(), 64u << 10);
  spec.units[0].tensors[0].shape = {7};
  EXPECT_EQ(Layout(validated(spec), kSplit, {}).block_elements(), 16u << 10);
}

// A trillion parameters: layout is arithmetic, not storage.
TEST(Layout, HoldsATrillionParameters) {
  ModelSpec spec;
  for (int unit = 0; unit < 1000; ++unit) {
    const std::string name = "u" + std::to_string(unit);
    spec.units.push_back({name, {{.name = name + ".w", .shape = {1000000, 1000}}}});
  }
  const Layout layout(validated(spec), kSplit, {});
  EXPECT_EQ(layout.parameter_count(), 1000000000000u);
  EXPECT_EQ(layout.blocks().size(), 1000u * 954u);
}

}  // namespace
}  // namespace sluice
