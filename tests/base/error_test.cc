#include <sluice/error.h>

#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <string>

namespace sluice {
namespace {

TEST(Error, CarriesCodeAndMessage) {
  const Error error(ErrorCode::kIo, "read unit \"h.3\"");
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_STREQ(error.what(), "read unit \"h.3\"");
}

TEST(Error, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  const int last = static_cast<int>(ErrorCode::kPoisoned);
  for (int code = 0; code <= last; ++code) names.insert(name_of(static_cast<ErrorCode>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(last + 1));
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(Error, ErrnoAsText) {
  EXPECT_EQ(errno_text(EIO), "Input/output error");
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device");
}

TEST(Check, PassesWithoutASideEffectOnFlow) {
  int evaluated = 0;
  if (true)
    SLUICE_CHECK(++evaluated == 1, "one statement");
  else
    ADD_FAILURE();
  EXPECT_EQ(evaluated, 1);
}

TEST(CheckDeathTest, NamesPlaceConditionAndContract) {
  EXPECT_DEATH(SLUICE_CHECK(1 + 1 == 3, "arithmetic holds"),
               "error_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3 \\(arithmetic holds\\)");
}

}  // namespace
}  // namespace sluice
