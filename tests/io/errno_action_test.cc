#include "io/errno_action.h"

#include <cerrno>
#include <string>

#include <gtest/gtest.h>

namespace sluice::test {
namespace {

TEST(ErrnoRule, IsTheTableOfItsHeader) {
  for (int error = 1; error < 134; ++error) {
    ErrnoAction read = ErrnoAction::kFail;
    ErrnoAction write = ErrnoAction::kFail;
    switch (error) {
      case EINTR:
      case EAGAIN:
      case ECANCELED: read = write = ErrnoAction::kRetry; break;
      case EIO:
      case ENODATA:
      case ENOLINK:
      case ETIMEDOUT:
      case EILSEQ:
      case EREMOTEIO:
      case EBADMSG: read = ErrnoAction::kReread; break;
      default: break;
    }
    EXPECT_EQ(errno_rule(IoKind::kRead, error).action, read) << error;
    EXPECT_EQ(errno_rule(IoKind::kWrite, error).action, write) << error;
    EXPECT_EQ(errno_rule(IoKind::kFlush, error).action, write) << error;
    EXPECT_NE(std::string(errno_rule(IoKind::kRead, error).advice), "") << error;
  }
}

TEST(ErrnoRule, AdviceNamesTheRemedy) {
  const auto advice = [](int error) {
    return std::string(errno_rule(IoKind::kWrite, error).advice);
  };
  EXPECT_NE(advice(EIO).find("smartctl"), std::string::npos);
  EXPECT_NE(advice(ENOSPC).find("storage.paths"), std::string::npos);
  EXPECT_NE(advice(EFBIG).find("ulimit -f"), std::string::npos);
}

}  // namespace
}  // namespace sluice::test
