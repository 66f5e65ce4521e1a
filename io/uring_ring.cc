#include "io/uring_ring.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

#include <fmt/format.h>
#include <liburing.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/process_fd.h"

namespace sluice {
namespace {

// From the newest kernel to the oldest; a kernel that does not know a flag answers EINVAL. The
// first set (Linux 6.1) tells the kernel that one thread does everything, so that it handles
// completions in that thread's own system call, without interrupts; such a ring is made disabled,
// and its owner enables it. SUBMIT_ALL keeps a refused request from delaying the rest of its batch.
constexpr std::array<unsigned, 3> kSetupFlags{
    IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
        IORING_SETUP_SUBMIT_ALL,
    IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL,  // Linux 5.19
    0,
};

const char* remedy_of(int error) {
  switch (error) {
    case EPERM:
      return "allow it (sysctl kernel.io_uring_disabled=0, the container's seccomp profile)";
    case ENOSYS: return "use Linux 5.6 or later and a container that lets io_uring through";
    case ENOMEM: return "raise the limit of locked memory (ulimit -l) or lower storage.queue_depth";
    case EMFILE:
    case ENFILE: return "raise the number of open files (ulimit -n)";
    default: return "use Linux 5.6 or later";
  }
}

// The kernel takes registered buffers of up to 1 GiB each.
constexpr std::uint64_t kSlabBytes = std::uint64_t{1} << 30;

// Memory that is pinned for a ring, in slabs of at most kSlabBytes.
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
  // Only when nothing is in flight, for which the kernel would wait.
  void unregister_from(io_uring& ring) {
    if (!memory_.empty()) (void)io_uring_unregister_buffers(&ring);
    memory_ = {};
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

// Files that a ring keeps open, so that the kernel does not look them up for every request.
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

  // A destroyed ring releases its files only some time later. This does so at once, so that the
  // space of an unnamed file is free when its last descriptor is closed.
  void unregister_from(io_uring& ring) {
    if (!files_.empty()) (void)io_uring_unregister_files(&ring);
    files_.clear();
  }

  // Makes `entry` use the registered file, if `descriptor` is one.
  void apply(io_uring_sqe& entry, int descriptor) const {
    const auto found = std::ranges::find(files_, descriptor);
    if (found == files_.end()) return;
    entry.fd = static_cast<int>(found - files_.begin());
    io_uring_sqe_set_flags(&entry, IOSQE_FIXED_FILE);
  }

 private:
  std::vector<int> files_;
};

}  // namespace

struct UringRing::Parts {
  explicit Parts(const IoQueueOptions& options) : memory(options.memory), files(options.files) {}
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
  ~Parts() {
    if (!descriptor) return;  // there is no ring, or this is a child, which has nothing of it
    const ForkPause pause;
    (void)descriptor.release(pause);  // the library closes it
    io_uring_queue_exit(&ring);
  }
  // Returns 0 or -errno.
  int make(unsigned entries, io_uring_params& params) {
    const ForkPause pause;
    const int result = io_uring_queue_init_params(entries, &ring, &params);
    if (result < 0) return result;
    // The descriptor and the mappings keep the ring alive, and with it the registered files and
    // the registered memory, which stays pinned. So a child must have neither.
    (void)io_uring_ring_dontfork(&ring);
    descriptor.take(ring.ring_fd, pause);
    return 0;
  }

  io_uring ring{};
  ProcessFd descriptor;
  RegisteredMemory memory;
  RegisteredFiles files;
  bool is_enabled = false;
};

void UringRing::throw_refused(const Refusal& refusal) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("the kernel refuses an io_uring: {}: {} (errno {}); {}, or set "
                          "storage.backend to \"threads\"",
                          refusal.call, errno_text(refusal.error), refusal.error,
                          remedy_of(refusal.error)));
}

UringRing::UringRing(unsigned entries, const IoQueueOptions& options)
    : parts_(std::make_unique<Parts>(options)) {
  io_uring& ring = parts_->ring;
  int result = -EINVAL;
  io_uring_params params{};
  for (std::size_t i = 0; i < kSetupFlags.size() && result == -EINVAL; ++i) {
    params = {};
    params.flags = kSetupFlags[i];
    result = parts_->make(entries, params);
  }
  if (result < 0) throw_refused({"io_uring_setup", -result});
  parts_->is_enabled = (params.flags & IORING_SETUP_R_DISABLED) == 0;
  // This feature flag came with plain reads and writes, in Linux 5.6.
  if ((params.features & IORING_FEAT_RW_CUR_POS) == 0)
    throw_refused({"plain reads and writes", ENOSYS});
  if (const int error = parts_->memory.register_with(ring); error != 0) {
    note_ = fmt::format(
        "storage: buffers are pinned anew for every transfer, because the kernel refuses to "
        "register {} of them: {}; raise the limit of locked memory (ulimit -l) to save processor "
        "time",
        format_bytes(options.memory.size()), errno_text(error));
  }
  if (const int error = parts_->files.register_with(ring); error != 0) {
    note_ += fmt::format(
        "{}storage: files are looked up anew for every transfer, because the kernel refuses to "
        "register them: {}; raise the number of open files (ulimit -n) to save processor time",
        note_.empty() ? "" : "; ", errno_text(error));
  }
}

UringRing::~UringRing() = default;

// The library's io_uring_enable_rings() does the same io_uring_register, but version 2.3 lacks it
// in the shared object.
UringRing::Refusal UringRing::begin() {
  io_uring& ring = parts_->ring;
  if (!parts_->is_enabled) {
    const int result = io_uring_register(static_cast<unsigned>(ring.ring_fd),
                                         IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
    if (result < 0) return {"io_uring_register", -result};
  }
  parts_->is_enabled = true;
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  for (std::vector<Completion> completions; completions.empty(); reap(completions))
    if (const int error = submit_and_wait(); error != 0) return {"io_uring_enter", error};
  return {};
}

void UringRing::release_files() {
  parts_->files.unregister_from(parts_->ring);
}

void UringRing::release_memory() {
  parts_->memory.unregister_from(parts_->ring);
}

void UringRing::prepare(IoKind kind, int descriptor, const TransferAttempt& attempt,
                        std::uint64_t tag) {
  io_uring_sqe* entry = io_uring_get_sqe(&parts_->ring);
  SLUICE_CHECK(entry != nullptr, "each slot has at most one entry in the ring");
  const auto length_bytes = static_cast<unsigned>(attempt.length_bytes);
  const int slab = parts_->memory.slab_of(attempt);
  const bool is_read = kind == IoKind::kRead;
  if (kind == IoKind::kFlush) {
    io_uring_prep_fsync(entry, descriptor, IORING_FSYNC_DATASYNC);
  } else if (slab >= 0 && is_read) {
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
  parts_->files.apply(*entry, descriptor);
  io_uring_sqe_set_data64(entry, tag);
}

int UringRing::submit_and_wait() {
  const int result = io_uring_submit_and_wait(&parts_->ring, 1);
  if (result >= 0 || result == -EINTR) return 0;
  if (result != -EAGAIN && result != -EBUSY) return -result;
  // The kernel is short of memory for requests. Those that it did not take stay in the ring and go
  // with the next call; meanwhile completions, which free memory, must be collected. There is no
  // bound: a request that the kernel has not taken yet can wait, but cannot be given up.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  (void)io_uring_get_events(&parts_->ring);
  return 0;
}

void UringRing::reap(std::vector<Completion>& target) {
  unsigned count = 0;
  unsigned head = 0;
  io_uring_cqe* completion = nullptr;
  io_uring_for_each_cqe(&parts_->ring, head, completion) {
    target.push_back({completion->user_data, completion->res});
    ++count;
  }
  io_uring_cq_advance(&parts_->ring, count);
}

void UringRing::take_back(std::vector<Completion>& target, int result) {
  const io_uring_sq& entries = parts_->ring.sq;
  for (unsigned left = io_uring_sq_ready(&parts_->ring); left != 0; --left)
    target.push_back(
        {entries.sqes[(entries.sqe_tail - left) & *entries.kring_mask].user_data, result});
}

bool UringRing::look() {
  const int result = io_uring_get_events(&parts_->ring);
  return result >= 0 || result == -EINTR;
}

}  // namespace sluice
