#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <chrono>
#include <thread>

#include "tests/contract/io_queue_contract.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/uring_pipe.h"

namespace sluice::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Uring, IoQueueContract,
                         ::testing::Values(IoQueueFactory{"uring", make_uring_queue}));

class UringQueueWithPipe : public UringPipe {
 protected:
  void write_pipe(std::span<const std::byte> data) {
    ASSERT_EQ(::write(target_.get(), data.data(), data.size()), static_cast<ssize_t>(data.size()));
  }

  // Returns when the queue has taken all that was written.
  void await_empty_pipe() {
    int unread_bytes = 1;
    while (unread_bytes != 0) {
      ASSERT_EQ(::ioctl(source_.get(), FIONREAD, &unread_bytes), 0);
      std::this_thread::yield();
    }
  }
};

TEST_F(UringQueueWithPipe, ShortReadIsResumedWhereItEnded) {
  std::mt19937_64 random(3);
  std::vector<std::byte> written(4 * 4096);
  for (std::byte& byte : written) byte = static_cast<std::byte>(random());
  std::vector<std::byte> read(written.size());
  RequestBatch batch(1);
  batch.set(0, IoKind::kRead, source_.get(), 0, read);
  queue_->submit(batch.pointers());
  for (std::size_t page = 0; page < 4; ++page) {
    write_pipe(std::span(written).subspan(page * 4096, 4096));
    await_empty_pipe();
  }
  batch.wait();
  EXPECT_EQ(batch[0].error, 0);
  EXPECT_EQ(batch[0].transferred_bytes, written.size());
  EXPECT_TRUE(equal(read, written));
  EXPECT_EQ(queue_->counters().resumed, 3u);
}

TEST_F(UringQueueWithPipe, EndAfterAShortReadIsEIO) {
  std::vector<std::byte> data(2 * 4096);
  RequestBatch batch(1);
  batch.set(0, IoKind::kRead, source_.get(), 0, data);
  queue_->submit(batch.pointers());
  write_pipe(std::vector<std::byte>(4096));
  target_ = UniqueFd();
  batch.wait();
  EXPECT_EQ(batch[0].error, EIO);
  EXPECT_EQ(batch[0].transferred_bytes, 4096u);
}

TEST_F(UringQueueWithPipe, SlowRequestDoesNotHoldUpOthers) {
  TempDirectory directory;
  const DirectFile file = DirectFile::create_scratch(directory.path(), 4096);
  std::vector<std::byte> slow_data(1);
  RequestBatch slow(1);
  slow.set(0, IoKind::kRead, source_.get(), 0, slow_data);
  queue_->submit(slow.pointers());
  AlignedBuffer data(4096, "test");
  RequestBatch quick(1);
  quick.set(0, IoKind::kRead, file.descriptor(), 0, data.span());
  for (int i = 0; i < 100; ++i) quick.submit_and_wait(*queue_);
  EXPECT_EQ(slow.completion_count(), 0u);
  write_pipe(std::vector<std::byte>(1));
  slow.wait();
  EXPECT_EQ(slow[0].error, 0);
}

// Depth 2: two requests in the kernel, two in the handover, and the fifth has to wait.
TEST_F(UringQueueWithPipe, SubmitBlocksWhileFull) {
  std::vector<std::byte> data(5);
  RequestBatch batch(5);
  for (std::size_t i = 0; i < 5; ++i)
    batch.set(i, IoKind::kRead, source_.get(), 0, std::span(data).subspan(i, 1));
  queue_->submit(batch.pointers().first(4));
  std::atomic<bool> returned = false;
  std::thread submitter([&] {
    queue_->submit(batch.pointers().last(1));
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(returned);
  write_pipe(std::vector<std::byte>(5));
  submitter.join();
  batch.wait();
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(batch[i].error, 0);
}

TEST_F(UringQueueWithPipe, DestructionWaitsForTheKernel) {
  std::vector<std::byte> data(4);
  RequestBatch batch(4);
  for (std::size_t i = 0; i < 4; ++i)
    batch.set(i, IoKind::kRead, source_.get(), 0, std::span(data).subspan(i, 1));
  queue_->submit(batch.pointers());
  std::atomic<bool> destroyed = false;
  std::thread destroyer([&] {
    queue_.reset();
    destroyed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(destroyed);
  write_pipe(std::vector<std::byte>(4, std::byte{9}));
  destroyer.join();
  EXPECT_EQ(batch.completion_count(), 4u);
  EXPECT_TRUE(std::ranges::all_of(data, [](std::byte b) { return b == std::byte{9}; }));
}

TEST_F(UringQueueWithPipe, CallbacksRunOnOneThreadThatIsNotTheCaller) {
  static std::vector<std::thread::id> threads;
  threads.clear();
  std::vector<IoRequest> requests(10);
  for (IoRequest& request : requests) {
    request.on_complete = [](IoRequest&) { threads.push_back(std::this_thread::get_id()); };
    IoRequest* const pointer = &request;
    queue_->submit({&pointer, 1});
  }
  queue_->wait_idle();
  ASSERT_EQ(threads.size(), requests.size());
  for (const std::thread::id thread : threads) {
    EXPECT_EQ(thread, threads.front());
    EXPECT_NE(thread, std::this_thread::get_id());
  }
  EXPECT_EQ(queue_->name(), "uring");
}

// Registered memory moves the same bytes, inside of it, outside of it and across its end; where the
// kernel refuses it, too, with a note.
class UringQueueWithMemory : public ::testing::TestWithParam<bool> {};

TEST_P(UringQueueWithMemory, MovesTheSameBytes) {
  const bool refused = GetParam();
  constexpr std::size_t kPieces = 8;
  const TempDirectory directory;
  const DirectFile file = DirectFile::create_scratch(directory.path(), kPieces * 4096);
  AlignedBuffer arena((kPieces + 1) * 4096, "test");
  std::string note;
  const auto body = [&] {
    // The second half of the pieces is not registered, and one straddles the end.
    const auto queue =
        make_uring_queue({.depth = 4, .memory = arena.span().first(kPieces * 4096 / 2 + 2048)});
    note = queue->note();
    std::mt19937_64 random(7);
    for (int round = 0; round < 20; ++round) {
      for (std::byte& byte : arena.span()) byte = static_cast<std::byte>(random());
      const std::vector<std::byte> expected(arena.span().begin(), arena.span().end());
      RequestBatch batch(kPieces);
      for (const IoKind kind : {IoKind::kWrite, IoKind::kRead}) {
        for (std::size_t i = 0; i < kPieces; ++i)
          batch.set(i, kind, file.descriptor(), i * 4096, arena.span().subspan(i * 4096, 4096));
        batch.submit_and_wait(*queue);
        for (std::size_t i = 0; i < kPieces; ++i) ASSERT_EQ(batch[i].error, 0);
        if (kind == IoKind::kRead) break;
        std::ranges::fill(arena.span().first(kPieces * 4096), std::byte{0});
      }
      ASSERT_TRUE(equal(arena.span(), expected));
    }
  };
  try {
    if (!refused) {
      body();
    } else if (!run_with_refused(  // only calls with an odd count: of one buffer
                   {.number = SYS_io_uring_register, .error = ENOMEM, .argument = 3, .bits = 1},
                   body)) {
      GTEST_SKIP() << "seccomp filters are not allowed here";
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    GTEST_SKIP() << error.what();
  }
  if (refused) {
    EXPECT_NE(note.find("ulimit -l"), std::string::npos) << note;
    EXPECT_EQ(note.find('\n'), std::string::npos) << note;
  }
}

INSTANTIATE_TEST_SUITE_P(Registration, UringQueueWithMemory, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "refused" : "granted"; });

// The kernel registers memory in slabs of 1 GiB. Here 2 MiB of memory stand in a place of 1 GiB and
// more again and again.
TEST(UringQueue, MovesBytesOnBothSidesOfASlabsEnd) {
  constexpr std::size_t kPieceBytes = 2 << 20;
  constexpr std::size_t kSlabBytes = 1 << 30;
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(memory.get(), kPieceBytes), 0);
  const std::size_t whole_bytes = kSlabBytes + kPieceBytes;
  void* const place = ::mmap(nullptr, whole_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(place, MAP_FAILED);
  const std::span whole(static_cast<std::byte*>(place), whole_bytes);
  for (std::size_t at = 0; at < whole_bytes; at += kPieceBytes)
    ASSERT_NE(::mmap(whole.data() + at, kPieceBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     memory.get(), 0),
              MAP_FAILED);
  const TempDirectory directory;
  const DirectFile file = DirectFile::create_scratch(directory.path(), 8192);
  std::string note;
  try {
    const auto queue = make_uring_queue({.depth = 4, .memory = whole});
    note = queue->note();
    for (const std::size_t at : {kSlabBytes - 8192, kSlabBytes - 4096, kSlabBytes}) {
      const std::span<std::byte> piece = whole.subspan(at, 8192);
      for (const IoKind kind : {IoKind::kWrite, IoKind::kRead}) {
        std::ranges::fill(piece, kind == IoKind::kWrite ? std::byte(at >> 12) : std::byte{9});
        RequestBatch batch(1);
        batch.set(0, kind, file.descriptor(), 0, piece);
        batch.submit_and_wait(*queue);
        EXPECT_EQ(batch[0].error, 0) << at;
      }
      EXPECT_EQ(std::ranges::count(piece, std::byte(at >> 12)), 8192) << at;
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    note = error.what();
  }
  EXPECT_EQ(::munmap(place, whole_bytes), 0);
  if (!note.empty()) GTEST_SKIP() << note;
}

// A registered file is the file that had the descriptor when the queue was made, whatever has it
// now; and the queue lets go of it when it ends, not some time later.
TEST(UringQueue, HoldsOnToItsFilesAndLetsGoAtItsEnd) {
  int ends[4];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  ASSERT_EQ(::pipe2(ends + 2, O_CLOEXEC | O_NONBLOCK), 0);
  const UniqueFd sources[] = {UniqueFd(ends[0]), UniqueFd(ends[2])};
  const UniqueFd targets[] = {UniqueFd(ends[1]), UniqueFd(ends[3])};
  const int files[] = {ends[1], ends[3]};
  std::unique_ptr<IoQueue> queue;
  try {
    queue = make_uring_queue({.depth = 2, .files = files});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  if (!queue->note().empty()) GTEST_SKIP() << queue->note();
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const int file : files) ASSERT_EQ(::dup3(null.get(), file, O_CLOEXEC), file);
  std::vector<std::byte> data(10, std::byte{5});
  RequestBatch batch(3);
  batch.set(0, IoKind::kWrite, files[0], 0, std::span(data).first(3));
  batch.set(1, IoKind::kWrite, files[1], 0, std::span(data).first(4));
  batch.set(2, IoKind::kRead, null.get(), 0, std::span(data).first(2));  // at its end: EIO
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, 0);
  EXPECT_EQ(batch[1].error, 0);
  EXPECT_EQ(batch[2].error, EIO);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(::read(sources[i].get(), data.data(), data.size()), i == 0 ? 3 : 4);
    EXPECT_EQ(::read(sources[i].get(), data.data(), data.size()), -1);  // a writer is left
    EXPECT_EQ(errno, EAGAIN);
  }
  queue.reset();
  for (const UniqueFd& source : sources)
    EXPECT_EQ(::read(source.get(), data.data(), data.size()), 0);  // no writer is left
}

TEST(UringQueue, WorksWithoutRegisteredFilesAndSaysSo) {
  const TempDirectory directory;
  const DirectFile file = DirectFile::create_scratch(directory.path(), 4096);
  const int files[] = {file.descriptor()};
  AlignedBuffer data(4096, "test");
  std::string note;
  try {
    // IORING_REGISTER_FILES is operation 2; those of buffers and of enabling the ring lack that
    // bit.
    const bool filtered = run_with_refused(
        {.number = SYS_io_uring_register, .error = EPERM, .argument = 1, .bits = 2}, [&] {
          const auto queue = make_uring_queue({.memory = data.span(), .files = files});
          note = queue->note();
          RequestBatch batch(1);
          batch.set(0, IoKind::kWrite, file.descriptor(), 0, data.span());
          batch.submit_and_wait(*queue);
          EXPECT_EQ(batch[0].error, 0);
        });
    if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_NE(note.find("files are looked up anew"), std::string::npos) << note;
  EXPECT_NE(note.find(errno_text(EPERM)), std::string::npos) << note;
  EXPECT_EQ(note.find("buffers"), std::string::npos) << note;
}

TEST(UringQueue, ComesAndGoesWithoutLeavingDescriptors) {
  const auto lowest_free = [] {
    const UniqueFd probe(::eventfd(0, EFD_CLOEXEC));
    return probe.get();
  };
  const int before = lowest_free();
  for (int i = 0; i < 50; ++i) {
    try {
      (void)make_uring_queue({.depth = 64});
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  EXPECT_EQ(lowest_free(), before);
}

struct Refusal {
  long syscall_number;
  int error;
  const char* remedy;
};

TEST(UringQueue, RefusedByTheKernelIsUnsupportedWithARemedy) {
  for (const Refusal& refusal : {Refusal{SYS_io_uring_setup, EPERM, "seccomp profile"},
                                 Refusal{SYS_io_uring_setup, ENOSYS, "Linux 5.6"},
                                 Refusal{SYS_io_uring_setup, EINVAL, "Linux 5.6"},
                                 Refusal{SYS_io_uring_setup, ENOMEM, "ulimit -l"},
                                 Refusal{SYS_io_uring_setup, EMFILE, "ulimit -n"},
                                 Refusal{SYS_eventfd2, EMFILE, "ulimit -n"},
                                 Refusal{SYS_io_uring_enter, ENOSYS, "lets io_uring through"},
                                 Refusal{SYS_io_uring_enter, EPERM, "seccomp profile"},
                                 Refusal{SYS_io_uring_enter, ENOMEM, "ulimit -l"},
                                 Refusal{SYS_io_uring_register, EPERM, "seccomp profile"}}) {
    std::string message;
    const bool filtered =
        run_with_refused({.number = refusal.syscall_number, .error = refusal.error}, [&] {
          message = expect_error(ErrorCode::kUnsupported, [] { (void)make_uring_queue({}); });
        });
    if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
    EXPECT_NE(message.find(refusal.remedy), std::string::npos) << message;
    EXPECT_NE(message.find("storage.backend"), std::string::npos) << message;
    EXPECT_NE(message.find(errno_text(refusal.error)), std::string::npos) << message;
  }
}

TEST(UringQueueDeathTest, CallbackMustNotSubmitToItsOwnQueue) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::unique_ptr<IoQueue> queue;
  try {
    queue = make_uring_queue({});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  queue.reset();
  EXPECT_DEATH(
      {
        static IoQueue* own;
        const auto inner = make_uring_queue({});
        own = inner.get();
        IoRequest request;
        request.on_complete = [](IoRequest& done) {
          IoRequest* const again = &done;
          own->submit({&again, 1});
        };
        IoRequest* const pointer = &request;
        inner->submit({&pointer, 1});
        inner->wait_idle();
      },
      "neither submit to its own queue");
}

}  // namespace
}  // namespace sluice::test
