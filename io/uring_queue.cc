// The fast queue: io_uring through liburing. One thread owns the ring: it takes requests from the
// handover, submits them in batches, sleeps in the kernel until something completes, and calls
// back. An eventfd read is always in the ring, so that a handover completes too and ends that
// sleep.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <liburing.h>

#include "base/error.h"
#include "base/trace_clock.h"
#include "base/units.h"
#include "io/handover.h"
#include "io/io_queue.h"
#include "io/request_ledger.h"
#include "io/transfer_progress.h"

namespace sluice {
namespace {

// From the newest kernel to the oldest; one that does not know a flag answers EINVAL. The first set
// (Linux 6.1) tells the kernel that one thread does everything, so that completions are worked off
// in that thread's own system call, without interrupts; such a ring is made disabled and enabled by
// its owner. SUBMIT_ALL keeps a refused request from holding up the rest of its batch.
constexpr std::array<unsigned, 3> kSetupFlags{
    IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
        IORING_SETUP_SUBMIT_ALL,
    IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL,  // Linux 5.19
    0,
};

[[noreturn]] void throw_refused(int error) {
  const char* remedy = "";
  switch (error) {
    case EPERM:
      remedy = "allow it (sysctl kernel.io_uring_disabled=0, the container's seccomp profile)";
      break;
    case ENOSYS:
      remedy = "use Linux 5.6 or later and a container that lets io_uring_setup through";
      break;
    case ENOMEM:
      remedy = "raise the limit of locked memory (ulimit -l) or lower storage.queue_depth";
      break;
    case EMFILE:
    case ENFILE: remedy = "raise the number of open files (ulimit -n)"; break;
    default: remedy = "use Linux 5.6 or later"; break;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("the kernel refuses an io_uring: {} (errno {}); {}, or set "
                          "storage.backend to \"threads\"",
                          errno_text(error), error, remedy));
}

// The kernel takes registered buffers of up to 1 GiB each.
constexpr std::uint64_t kSlabBytes = std::uint64_t{1} << 30;

// Memory that is pinned for a ring, in slabs.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(std::span<std::byte> memory) : memory_(memory) {}

  // Returns 0, or the errno with which the kernel refused; nothing is registered then.
  int register_with(io_uring& ring) {
    std::vector<iovec> slabs;
    for (std::uint64_t at = 0; at < memory_.size(); at += kSlabBytes)
      slabs.push_back({memory_.data() + at, std::min(kSlabBytes, memory_.size() - at)});
    const int result =
        slabs.empty()
            ? 0
            : io_uring_register_buffers(&ring, slabs.data(), static_cast<unsigned>(slabs.size()));
    if (result < 0) memory_ = {};
    return -result;
  }

  // The slab that holds all of `attempt`, or -1.
  int slab_of(const TransferAttempt& attempt) const {
    if (attempt.data < memory_.data() || attempt.length_bytes == 0) return -1;
    const auto begin = static_cast<std::uint64_t>(attempt.data - memory_.data());
    const std::uint64_t end = begin + attempt.length_bytes;
    if (end > memory_.size() || begin / kSlabBytes != (end - 1) / kSlabBytes) return -1;
    return static_cast<int>(begin / kSlabBytes);
  }

 private:
  std::span<std::byte> memory_;
};

// Files that a ring holds on to, so that the kernel does not look them up for every request.
class RegisteredFiles {
 public:
  explicit RegisteredFiles(std::span<const int> files) : files_(files.begin(), files.end()) {}

  // As RegisteredMemory::register_with().
  int register_with(io_uring& ring) {
    if (files_.empty()) return 0;
    const int result =
        io_uring_register_files(&ring, files_.data(), static_cast<unsigned>(files_.size()));
    if (result < 0) files_.clear();
    return -result;
  }

  // A ring that goes lets go of its files some time later; this does so at once, so that the space
  // of an unnamed file is free when its last descriptor is closed.
  void unregister_from(io_uring& ring) {
    if (!files_.empty()) (void)io_uring_unregister_files(&ring);
    files_.clear();
  }

  // Makes `entry` name the registered file, if `descriptor` is one.
  void apply(io_uring_sqe& entry, int descriptor) const {
    const auto found = std::ranges::find(files_, descriptor);
    if (found == files_.end()) return;
    entry.fd = static_cast<int>(found - files_.begin());
    io_uring_sqe_set_flags(&entry, IOSQE_FIXED_FILE);
  }

 private:
  std::vector<int> files_;
};

// A ring as a value: made by any thread, used by the one that calls enable().
class Ring {
 public:
  // Room for `entries` submissions, and for at least as many completions.
  // Fails with: kUnsupported. Where only memory or files cannot be registered, note() says why.
  Ring(unsigned entries, const IoQueueOptions& options)
      : memory_(options.memory), files_(options.files) {
    int result = -EINVAL;
    io_uring_params params{};
    for (std::size_t i = 0; i < kSetupFlags.size() && result == -EINVAL; ++i) {
      params = {};
      params.flags = kSetupFlags[i];
      result = io_uring_queue_init_params(entries, &ring_, &params);
    }
    if (result < 0) throw_refused(-result);
    enabled_ = (params.flags & IORING_SETUP_R_DISABLED) == 0;
    // This feature came with plain reads and writes, Linux 5.6.
    if ((params.features & IORING_FEAT_RW_CUR_POS) == 0) {
      io_uring_queue_exit(&ring_);
      throw_refused(ENOSYS);
    }
    if (const int error = memory_.register_with(ring_); error != 0) {
      note_ = fmt::format(
          "storage: buffers are pinned anew for every transfer, since the kernel refuses to "
          "register {} of them: {}; raise the limit of locked memory (ulimit -l) to save processor "
          "time",
          format_bytes(options.memory.size()), errno_text(error));
    }
    if (const int error = files_.register_with(ring_); error != 0) {
      note_ += fmt::format(
          "{}storage: files are looked up anew for every transfer, since the kernel refuses to "
          "register them: {}; raise the number of open files (ulimit -n) to save processor time",
          note_.empty() ? "" : "; ", errno_text(error));
    }
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { io_uring_queue_exit(&ring_); }

  // The calling thread becomes the owner. The library's io_uring_enable_rings() is this call, and
  // is missing from its shared object in 2.3.
  void enable() {
    if (!enabled_) {
      SLUICE_CHECK(io_uring_register(static_cast<unsigned>(ring_.ring_fd),
                                     IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == 0,
                   "a ring is enabled once");
    }
    enabled_ = true;
  }

  // On the owner's thread, at its end.
  void release_files() { files_.unregister_from(ring_); }

  void prepare(IoKind kind, int descriptor, const TransferAttempt& attempt, std::uint64_t tag) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    SLUICE_CHECK(entry != nullptr, "each slot has at most one entry in the ring");
    const auto length_bytes = static_cast<unsigned>(attempt.length_bytes);
    const int slab = memory_.slab_of(attempt);
    const bool is_read = kind == IoKind::kRead;
    if (slab >= 0 && is_read) {
      io_uring_prep_read_fixed(entry, descriptor, attempt.data, length_bytes, attempt.offset_bytes,
                               slab);
    } else if (slab >= 0) {
      io_uring_prep_write_fixed(entry, descriptor, attempt.data, length_bytes, attempt.offset_bytes,
                                slab);
    } else if (is_read) {
      io_uring_prep_read(entry, descriptor, attempt.data, length_bytes, attempt.offset_bytes);
    } else {
      io_uring_prep_write(entry, descriptor, attempt.data, length_bytes, attempt.offset_bytes);
    }
    files_.apply(*entry, descriptor);
    io_uring_sqe_set_data64(entry, tag);
  }

  const std::string& note() const { return note_; }

  // Submits what is prepared and sleeps until there is a completion. May return early.
  void submit_and_wait() {
    const int result = io_uring_submit_and_wait(&ring_, 1);
    if (result >= 0 || result == -EINTR) return;
    SLUICE_CHECK(result == -EAGAIN || result == -EBUSY, "io_uring_enter refused its arguments");
    // The kernel is short of memory for requests. What it did not take stays in the ring and goes
    // with the next call; completions, which free memory, must be collected meanwhile. There is no
    // bound: a request that the kernel has not taken yet can wait, but not be given up.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)io_uring_get_events(&ring_);
  }

  // Calls body(tag, result) for each completion that is there.
  template <class Body>
  void reap(const Body& body) {
    unsigned count = 0;
    unsigned head = 0;
    io_uring_cqe* completion = nullptr;
    io_uring_for_each_cqe(&ring_, head, completion) {
      body(completion->user_data, completion->res);
      ++count;
    }
    io_uring_cq_advance(&ring_, count);
  }

 private:
  io_uring ring_{};
  RegisteredMemory memory_;
  RegisteredFiles files_;
  std::string note_;
  bool enabled_ = false;
};

class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(const IoQueueOptions& options)
      : ring_(options.depth + 1, options),  // one for the eventfd read
        handover_(options.backlog != 0 ? options.backlog : options.depth),
        slots_(options.depth),
        owner_([this] { run(); }) {}

  ~UringQueue() override {
    handover_.stop();
    owner_.join();
  }

  void submit(std::span<IoRequest* const> requests) override {
    check_caller();
    for (IoRequest* request : requests) begin_transfer(*request);
    handover_.put(requests, ledger_.open(requests.size()));
  }

  void wait_idle() override {
    check_caller();
    ledger_.wait_idle();
  }

  IoCounters counters() const override { return ledger_.counters(); }
  std::string_view name() const override { return "uring"; }
  std::string_view note() const override { return ring_.note(); }

 private:
  // Completions with this tag are those of the eventfd read; the others carry their slot.
  static constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

  void check_caller() const {
    SLUICE_CHECK(std::this_thread::get_id() != owner_.get_id(),
                 "a callback must neither submit to its own queue nor wait for it");
  }

  void run() {
    ::pthread_setname_np(::pthread_self(), "sluice-uring");
    ring_.enable();
    free_slots_.reserve(slots_.size());
    taken_.reserve(slots_.size());
    ended_.reserve(slots_.size());
    for (std::uint64_t slot = slots_.size(); slot-- > 0;) free_slots_.push_back(slot);
    while (true) {
      const bool stopping = admit();
      // The eventfd read must have left the ring too: it writes to a member.
      if (stopping && free_slots_.size() == slots_.size() && !wake_armed_) break;
      if (!stopping && !wake_armed_) arm_wake();
      ring_.submit_and_wait();
      ring_.reap([this](std::uint64_t tag, int result) { settle(tag, result); });
      call_back();
    }
    ring_.release_files();
  }

  // Moves requests from the handover into free slots. Returns true when the queue is to end.
  bool admit() {
    taken_.clear();
    const bool stopping = handover_.take(free_slots_.size(), taken_);
    for (const Submission& submission : taken_) {
      const std::uint64_t slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot] = submission;
      prepare(slot);
    }
    return stopping;
  }

  void prepare(std::uint64_t slot) {
    IoRequest& request = *slots_[slot].request;
    if (request.started_ns == 0) request.started_ns = trace_now_ns();
    ring_.prepare(request.kind, request.descriptor, next_attempt(request), slot);
  }

  void arm_wake() {
    ring_.prepare(
        IoKind::kRead, handover_.wake_descriptor(),
        {.data = reinterpret_cast<std::byte*>(&wake_count_), .length_bytes = sizeof(wake_count_)},
        kWakeTag);
    wake_armed_ = true;
  }

  // Books one completion: the request goes on, or its slot becomes free.
  void settle(std::uint64_t tag, int result) {
    if (tag == kWakeTag) {
      SLUICE_CHECK(result == sizeof(wake_count_) || result == -EINTR || result == -EAGAIN,
                   "reading an eventfd cannot fail");
      wake_armed_ = false;
      return;
    }
    IoRequest& request = *slots_[tag].request;
    const TransferStep step = advance_transfer(request, result);
    ledger_.count(request, step);
    if (step == TransferStep::kEnded) {
      request.moved_ns = trace_now_ns();
      ended_.push_back(slots_[tag]);
      free_slots_.push_back(tag);
    } else {
      prepare(tag);
    }
  }

  void call_back() {
    for (const Submission& ended : ended_) {
      ended.request->on_complete(*ended.request);  // from here on the request may be gone
      ledger_.close(ended.ticket);
    }
    ended_.clear();
  }

  // Any thread.
  Ring ring_;  // owner thread only, once that runs
  Handover handover_;
  RequestLedger ledger_;

  // Owner thread only. No more requests than slots are in the ring, so that its completion side,
  // twice as large as the submission side, cannot overflow.
  std::vector<Submission> slots_;
  std::vector<std::uint64_t> free_slots_;
  std::vector<Submission> taken_;
  std::vector<Submission> ended_;
  std::uint64_t wake_count_ = 0;
  bool wake_armed_ = false;

  std::thread owner_;  // last: it starts when all else stands
};

}  // namespace

std::unique_ptr<IoQueue> make_uring_queue(const IoQueueOptions& options) {
  check_options(options);
  try {
    return std::make_unique<UringQueue>(options);
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("cannot start the thread of an io_uring: {}; raise the number of "
                            "processes (ulimit -u) or set storage.backend to \"threads\"",
                            error.what()));
  }
}

}  // namespace sluice
