// The drives' benchmark looks at what it reads: every page has the stamp that was written last.
#include "tools/bench/io_bench.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class IoBenchTest : public testing::Test {
 protected:
  // Two files of 256 KiB, written once by 8 requests.
  IoBench make(const FaultOptions& faults) {
    for (const char* name : {"a", "b"}) {
      paths_.push_back(directory_.file(name));
      std::filesystem::create_directories(paths_.back());
    }
    return {{.paths = paths_, .file_bytes = 256_KiB, .request_bytes_max = 64_KiB, .depth_max = 2},
            [faults](std::span<std::byte> memory, std::span<const int> files) {
              return make_fault_queue(
                  make_sync_queue({.depth = 2, .memory = memory, .files = files}), faults);
            }};
  }

  TempDirectory directory_;
  std::vector<std::string> paths_;
};

TEST_F(IoBenchTest, ReadsWhatItHasWritten) {
  IoBench bench = make({});
  for (const IoPattern pattern :
       {IoPattern::kRead, IoPattern::kMixed, IoPattern::kRead, IoPattern::kWrite, IoPattern::kRead})
    EXPECT_EQ(bench.measure({.pattern = pattern, .request_bytes = 32_KiB, .depth = 2}).bytes,
              pattern == IoPattern::kMixed ? 1_MiB : 512_KiB);
}

// Whatever a drive does with a write: the page is named, with what was found in its place.
TEST_F(IoBenchTest, APageThatIsNotWhatWasWrittenIsNamed) {
  for (const Fault fault : {Fault::kLostWrite, Fault::kMisdirected}) {
    SCOPED_TRACE(static_cast<int>(fault));
    IoBench bench = make({.fault = fault, .at = 5});
    const std::string message = expect_error(ErrorCode::kDamaged, [&] {
      (void)bench.measure({.pattern = IoPattern::kRead, .request_bytes = 64_KiB, .depth = 1});
    });
    EXPECT_NE(message.find(directory_.path()), std::string::npos) << message;
    EXPECT_NE(message.find("expected page"), std::string::npos) << message;
    paths_.clear();
  }
}

TEST_F(IoBenchTest, ATransferThatFailsIsNamed) {
  IoBench bench = make({.at = 9, .error = EIO});
  const std::string message = expect_error(ErrorCode::kIo, [&] {
    (void)bench.measure({.pattern = IoPattern::kRead, .request_bytes = 64_KiB, .depth = 1});
  });
  EXPECT_NE(message.find("read of " + directory_.path()), std::string::npos) << message;
}

}  // namespace
}  // namespace sluice::test
