#include "base/guarded_view.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/aligned_buffer.h"
#include "tests/support/accessible.h"

namespace sluice {
namespace {

using Access = GuardedView::Access;
using test::is_readable;
using test::is_writable;

TEST(GuardedView, ShowsTheMemoryWhereItIsOpen) {
  const AlignedBuffer buffer(5 * kPageBytes, "test");
  GuardedView view(buffer.span(), "test");
  std::memset(buffer.data(), 7, buffer.size_bytes());
  std::byte* const page = view.open(buffer.data() + kPageBytes, kPageBytes, Access::kWrite);
  EXPECT_NE(page, buffer.data() + kPageBytes);
  EXPECT_EQ(page[kPageBytes - 1], std::byte{7});
  page[5] = std::byte{9};
  EXPECT_EQ(buffer.data()[kPageBytes + 5], std::byte{9});
  EXPECT_FALSE(is_readable(page - 1));
  EXPECT_FALSE(is_readable(page + kPageBytes));
  view.close(buffer.data() + kPageBytes, kPageBytes, Access::kWrite);
  EXPECT_FALSE(is_readable(page));
  EXPECT_EQ(buffer.data()[kPageBytes + 5], std::byte{9}) << "the owner's address stays open";
}

TEST(GuardedView, AReaderMayNotWrite) {
  const AlignedBuffer buffer(kPageBytes, "test");
  GuardedView view(buffer.span(), "test");
  std::byte* const page = view.open(buffer.data(), 100, Access::kRead);
  EXPECT_TRUE(is_readable(page));
  EXPECT_FALSE(is_writable(page));
}

TEST(GuardedView, APageIsOpenUntilItsLastUserHasClosedIt) {
  const AlignedBuffer buffer(3 * kPageBytes, "test");
  GuardedView view(buffer.span(), "test");
  const std::byte* const both = buffer.data() + kPageBytes - 8;  // on two pages
  std::byte* const reader = view.open(buffer.data(), kPageBytes, Access::kRead);
  std::byte* const writer = view.open(both, 16, Access::kWrite);
  std::byte* const again = view.open(both, 16, Access::kWrite);
  EXPECT_EQ(writer, again);
  EXPECT_TRUE(is_writable(reader)) << "the page of both";
  view.close(both, 16, Access::kWrite);
  EXPECT_TRUE(is_writable(writer + 15));
  view.close(both, 16, Access::kWrite);
  EXPECT_TRUE(is_readable(reader));
  EXPECT_FALSE(is_writable(reader));
  EXPECT_FALSE(is_readable(writer + 15)) << "the page of the second user alone";
  view.close(buffer.data(), kPageBytes, Access::kRead);
  EXPECT_FALSE(is_readable(reader));
}

TEST(GuardedView, NewPagesAreZero) {
  const AlignedBuffer buffer(kHugePageBytes + 100, "test");
  std::memset(buffer.data(), 1, buffer.size_bytes());
  const GuardedView view(buffer.span(), "test");
  for (const std::byte byte : buffer.span()) ASSERT_EQ(byte, std::byte{0});
  EXPECT_TRUE(view.contains(buffer.data() + buffer.size_bytes() - 1));
  EXPECT_FALSE(view.contains(buffer.data() + buffer.size_bytes()));
}

TEST(GuardedView, NoMemoryIsAViewOfNothing) {
  const GuardedView view({}, "test");
  EXPECT_FALSE(view.contains(nullptr));
}

}  // namespace
}  // namespace sluice
