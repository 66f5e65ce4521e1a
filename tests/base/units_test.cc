#include <sluice/units.h>

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include <sluice/error.h>

namespace sluice {
namespace {

static_assert(64_KiB == 65536 && 3_MiB == 3145728 && 2_GiB == 2147483648);
static_assert(div_ceil(0, 7) == 0 && div_ceil(7, 7) == 1 && div_ceil(8, 7) == 2);
static_assert(div_ceil(~std::uint64_t{0}, 2) == std::uint64_t{1} << 63);  // no overflow inside
static_assert(align_up(0, 512) == 0 && align_up(1, 512) == 512 && align_up(512, 512) == 512);
static_assert(is_aligned(0, 8) && is_aligned(24, 8) && !is_aligned(25, 8));

TEST(ParseSize, ReadsEveryUnit) {
  for (const auto& [text, bytes] : {std::pair<const char*, std::uint64_t>{"0", 0},
                                    {"4096", 4096},
                                    {"512B", 512},
                                    {"64KiB", 65536},
                                    {"10 MiB", 10485760},
                                    {"1.5GiB", 1610612736},
                                    {"2TiB", 2199023255552},
                                    {"3KB", 3000},
                                    {"3MB", 3000000},
                                    {"3GB", 3000000000},
                                    {"2TB", 2000000000000},
                                    {"0.5KiB", 512},
                                    {"0.0009765625KiB", 1},
                                    {"24G", 25769803776},
                                    {"1.5k", 1536},
                                    {"10m", 10485760},
                                    {"2T", 2199023255552},
                                    {"1kb", 1000},
                                    {"1Kib", 1024},
                                    {"3 gb", 3000000000},
                                    {"007", 7}}) {
    EXPECT_EQ(parse_size(text), bytes) << text;
  }
}

// Sizes that a product in double gets wrong.
TEST(ParseSize, IsExact) {
  EXPECT_EQ(parse_size("0.067GB"), 67000000u);
  EXPECT_EQ(parse_size("1.001KB"), 1001u);
  EXPECT_EQ(parse_size("0.017TB"), 17000000000u);
  EXPECT_EQ(parse_size("9007199254740993"), 9007199254740993u);  // 2^53 + 1
  EXPECT_EQ(parse_size("9223372036854775807"), 9223372036854775807u);
  EXPECT_EQ(parse_size("8388608TiB"), std::uint64_t{1} << 63);
  for (std::uint64_t thousandths = 0; thousandths < 20000; ++thousandths) {
    const std::string digits = std::to_string(1000 + thousandths % 1000).substr(1);
    const std::string text = std::to_string(thousandths / 1000) + "." + digits + "GB";
    ASSERT_EQ(parse_size(text), thousandths * 1'000'000) << text;
  }
}

TEST(ParseSize, RefusesWhatIsNoSize) {
  for (const auto& [text, why] : {std::pair<const char*, const char*>{"", "start with a number"},
                                  {"MiB", "start with a number"},
                                  {" 4", "start with a number"},
                                  {"+4", "start with a number"},
                                  {".5MiB", "start with a number"},
                                  {"nan", "start with a number"},
                                  {"inf", "start with a number"},
                                  {"-1", "negative"},
                                  {"-0.5GiB", "negative"},
                                  {"5.", "no digit follows"},
                                  {"5.MiB", "no digit follows"},
                                  {"1.5", "whole number of bytes"},
                                  {"0.0001KiB", "whole number of bytes"},
                                  {"0.1KiB", "whole number of bytes"},
                                  {"0.000000000000000000000KiB", "too long"},
                                  {"9223372036854775809", "beyond"},
                                  {"18446744073709551616", "beyond"},
                                  {"9999999999999999999999999999999999999999999999", "beyond"},
                                  {"8388609TiB", "beyond"},
                                  {"8388608.5TiB", "beyond"},
                                  {"1kbit", "unit \"kbit\" is unknown"},
                                  {"1Ki", "unit"},
                                  {"1G/s", "unit"},
                                  {"1e3", "unit"},
                                  {"0x10", "unit"},
                                  {"1,5GiB", "unit"},
                                  {"1 GiB ", "unit"}}) {
    try {
      const std::uint64_t bytes = parse_size(text);
      ADD_FAILURE() << '"' << text << "\" was read as " << bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      const std::string message = error.what();
      EXPECT_NE(message.find(why), std::string::npos) << message;
      EXPECT_NE(message.find('"' + std::string(text) + '"'), std::string::npos) << message;
      EXPECT_NE(message.find("1.5GiB"), std::string::npos) << message;  // shows how to write one
    }
  }
}

TEST(FormatBytes, ShowsThreeDigits) {
  for (const auto& [bytes, text] : {std::pair<std::uint64_t, const char*>{0, "0 B"},
                                    {1023, "1023 B"},
                                    {1024, "1.00 KiB"},
                                    {1536, "1.50 KiB"},
                                    {10240, "10.0 KiB"},
                                    {102400, "100 KiB"},
                                    {1023 * 1024, "1023 KiB"},
                                    {1048575, "1.00 MiB"},  // and not "1024 KiB"
                                    {1048576, "1.00 MiB"},
                                    {9961472, "9.50 MiB"},
                                    {std::uint64_t{3} << 40, "3.00 TiB"},
                                    {std::uint64_t{5} << 50, "5.00 PiB"},
                                    {~std::uint64_t{0}, "16384 PiB"}}) {
    EXPECT_EQ(format_bytes(bytes), text);
  }
}

}  // namespace
}  // namespace sluice
