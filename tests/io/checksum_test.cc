#include "io/checksum.h"

#include <random>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <gtest/gtest.h>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

// XXH3 with 64 bits and seed 0: the published test vector of the empty input, and sums that xxHash
// gives without any vector instructions, so that no processor may choose other ones.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);
  std::vector<std::byte> data(1000003);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>((i * 2654435761u & 0xffffffffu) >> 24);
  EXPECT_EQ(checksum(std::span(data).first(4096)), 0x9bf67f8deff876aeu);
  EXPECT_EQ(checksum(data), 0xeabdff429d7374f7u);
}

TEST(Checksum, EverySingleBitCounts) {
  const Campaign campaign = test::campaign(2000);
  std::mt19937_64 random(campaign.first_seed);
  std::vector<std::byte> data(16384);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  const std::uint64_t clean = checksum(data);
  for (std::uint64_t i = 0; i < campaign.cases; ++i) {
    const std::uint64_t bit = random() % (data.size() * 8);
    const auto mask = static_cast<std::byte>(1u << bit % 8);
    data[bit / 8] ^= mask;
    EXPECT_NE(checksum(data), clean) << "bit " << bit;
    data[bit / 8] ^= mask;
  }
  EXPECT_EQ(checksum(data), clean);
}

#if defined(__x86_64__)
// Whether the processor tells which parts of its registers are in use.
bool tells_registers_in_use() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_OSXSAVE) != 0 &&
         __get_cpuid_count(13, 1, &a, &b, &c, &d) != 0 && (a & 4) != 0;
}

// The upper halves of the vector registers: bits 2 (AVX) and 6 (AVX-512).
[[gnu::target("xsave")]] unsigned upper_halves_in_use() {
  return static_cast<unsigned>(_xgetbv(1)) & 0x44;
}

[[gnu::target("avx")]] void release_upper_halves() {
  _mm256_zeroupper();
}

// Code that is compiled for SSE takes eight times as long while they are in use.
TEST(Checksum, LeavesNoUpperHalvesInUse) {
  if (!tells_registers_in_use() || !__builtin_cpu_supports("avx"))
    GTEST_SKIP() << "this processor does not tell";
  const std::vector<std::byte> data(1 << 20);
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, std::size_t{500}, data.size()}) {
    release_upper_halves();
    ASSERT_EQ(upper_halves_in_use(), 0u);
    (void)checksum(std::span(data).first(size));
    EXPECT_EQ(upper_halves_in_use(), 0u) << "after " << size << " bytes";
  }
}
#endif

}  // namespace
}  // namespace sluice::test
