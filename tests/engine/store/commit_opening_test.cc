// Opening after one cut, cut short at every request: what it goes on from does not depend on that.
#include "engine/store/commit_opening.h"

#include <cerrno>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/engine/store/commit_samples.h"
#include "tests/support/expect_error.h"
#include "tests/support/power_cut_disk.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kSlotBytes = 16384;

// Record files with what is put there.
class OpenedRecords : public ::testing::Test {
 protected:
  OpenedRecords() { make(1); }

  void make(std::uint64_t seed) {
    disk_ = std::make_unique<PowerCutDisk>(seed);
    files_ = CommitFiles();
    files_.slot_bytes = kSlotBytes;
    for (const char* name : {"/a/run.commit", "/b/run.commit"})
      files_.twins.push_back({.descriptor = disk_->add_file(2 * kSlotBytes), .name = name});
  }

  void put(std::uint32_t slot, std::uint32_t twin, std::uint64_t generation, std::uint64_t step) {
    const std::vector<std::byte> bytes = encoded(sample_commit(generation, generation, step));
    disk_->put(files_.twins[twin].descriptor, slot * kSlotBytes, bytes);
  }
  void tear(std::uint32_t slot, std::uint32_t twin) {
    disk_->flip(files_.twins[twin].descriptor, slot * kSlotBytes + 40, 1);
  }
  // Both records are whole, except the newest one's twins, as `twins` says.
  void put_two(const std::string& twins) {
    for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) {
      put(0, twin, 7, 3);
      put(1, twin, twins[twin] == 'o' ? 6 : 8, twins[twin] == 'o' ? 2 : 4);
      if (twins[twin] == 'x') tear(1, twin);
    }
  }

  CommitOpening open() {
    disk_->complete_at_once(UINT64_MAX);
    return CommitOpening(*disk_, files_);
  }

  std::unique_ptr<PowerCutDisk> disk_;
  CommitFiles files_;
};

// "ww": both twins of the newest record are whole; o: still the older one; x: torn.
TEST_F(OpenedRecords, GoingBackMayBeCutShortAnywhere) {
  for (const std::string twins : {"ww", "wo", "ow", "wx", "xw"}) {
    std::set<std::uint64_t> found;
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
      for (std::uint64_t requests = 0; requests <= 6; ++requests) {
        make(seed);
        put_two(twins);
        CommitOpening opening = open();
        ASSERT_EQ(opening.offer().newest, 4u) << twins;
        disk_->complete_at_once(requests);
        try {
          opening.go_back(3);
          (void)opening.mend();
        } catch (const PowerCut&) {
          disk_->cut();
        }
        CommitOpening again = open();
        const CommitOffer offer = again.offer();
        ASSERT_TRUE(offer.newest == 3u || (offer.newest == 4u && offer.older == 3u)) << twins;
        found.insert(*offer.newest);
        again.go_back(3);
        (void)again.mend();
        ASSERT_EQ(open().offer().newest, 3u);
        ASSERT_TRUE(open().choice().mends.empty());
        ASSERT_EQ(open().choice().next_slot, 1u);
      }
    }
    EXPECT_EQ(found, (std::set<std::uint64_t>{3, 4})) << twins;
  }
}

// Bytes that a killed process has written and not flushed are there for reads, and go with the
// power.
TEST_F(OpenedRecords, ATwinIsMendedFromWhatIsDurable) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    for (std::uint64_t requests = 0; requests <= 4; ++requests) {
      make(seed);
      put_two("oo");
      std::vector<std::byte> bytes = encoded(sample_commit(8, 8, 4));
      IoRequest write{.kind = IoKind::kWrite,
                      .descriptor = files_.twins[0].descriptor,
                      .offset_bytes = kSlotBytes,
                      .data = bytes.data(),
                      .length_bytes = bytes.size(),
                      .on_complete = [](IoRequest&) {}};
      IoRequest* const pointer = &write;
      disk_->complete_at_once(1);
      disk_->submit({&pointer, 1});
      CommitOpening opening = open();
      ASSERT_EQ(opening.offer().newest, 4u);
      disk_->complete_at_once(requests);
      try {
        (void)opening.mend();
      } catch (const PowerCut&) {
      }
      disk_->cut();
      const auto newest = open().offer().newest;
      ASSERT_TRUE(newest == 4u || newest == 3u);
    }
  }
}

TEST_F(OpenedRecords, ADamagedTwinIsWrittenAgainAndNamed) {
  put_two("ww");
  tear(1, 1);
  CommitOpening opening = open();
  ASSERT_EQ(opening.offer().newest, 4u);
  const std::vector<std::string> notes = opening.mend();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("/b/run.commit"), std::string::npos) << notes[0];
  tear(1, 0);  // the other one now: the mended twin is whole
  EXPECT_EQ(open().offer().newest, 4u);
}

TEST_F(OpenedRecords, NothingIsChangedWithoutGoingBackOrMending) {
  put_two("wx");
  const std::span bytes = disk_->bytes(files_.twins[1].descriptor);
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  (void)open();
  EXPECT_TRUE(std::ranges::equal(bytes, before));
}

TEST_F(OpenedRecords, ATwinThatCannotBeReadIsReplacedByTheOther) {
  put_two("ww");
  disk_->fail_next(IoKind::kRead, EIO);
  EXPECT_EQ(open().offer().newest, 4u);
}

TEST_F(OpenedRecords, AFlushThatFailsIsAnErrorThatNamesTheFile) {
  put_two("wx");
  CommitOpening opening = open();
  disk_->fail_next(IoKind::kFlush, EIO);
  const std::string message = expect_error(ErrorCode::kIo, [&] { (void)opening.mend(); });
  EXPECT_NE(message.find("flush of /a/run.commit for the commit of step 4"), std::string::npos)
      << message;
  EXPECT_NE(message.find("step 4"), std::string::npos) << message;
}

// The commit does not count, and nothing behind the flush is written.
TEST_F(OpenedRecords, ACommitEndsWithTheFirstFlushThatFails) {
  files_.data.push_back({.descriptor = disk_->add_file(4096), .name = "/a/run.data"});
  put_two("ww");
  disk_->complete_at_once(UINT64_MAX);
  std::vector<std::function<void()>> messages;
  CommitWriter writer(*disk_, files_, [&](std::function<void()> message) {
    messages.push_back(std::move(message));
  });
  const std::uint64_t bytes = encode_commit(sample_commit(9, 9, 5), writer.buffer());
  disk_->fail_next(IoKind::kFlush, ENOSPC);
  std::optional<Error> failure;
  writer.begin(commit_sequence(1), 0, bytes, 5, [&](const auto& error) { failure = error; });
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto message = messages[i];
    message();
  }
  ASSERT_TRUE(failure);
  EXPECT_NE(std::string(failure->what()).find("/a/run.data"), std::string::npos);
  EXPECT_TRUE(writer.is_idle());
  EXPECT_EQ(open().offer().newest, 4u);
  EXPECT_EQ(open().offer().older, 3u);
}

}  // namespace
}  // namespace sluice::test
