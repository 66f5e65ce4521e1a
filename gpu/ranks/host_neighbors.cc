#include "gpu/ranks/host_neighbors.h"

#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>

#include <sluice/error.h>
#include "gpu/ranks/message_port.h"

namespace sluice {

// A rank's information about its process.
struct HostNeighbors::Header {
  Process process;
};

namespace {

constexpr std::uint64_t kSignalsBegin = 4_KiB;  // after the header
// The kernel moves up to 2 GiB - 4 KiB in one call. More would leave no room for the proof.
constexpr std::uint64_t kReadBytesMax = 1_GiB;
constexpr std::uint64_t kSlotsBegin = 8_KiB;
constexpr std::uint64_t kSlots = 2;
constexpr std::uint64_t kPartBytes =
    kSlotsBegin + HostNeighbors::kPlaces * kSlots * HostNeighbors::kSlotBytes;
static_assert(kSignalsBegin + HostNeighbors::kPlaces * sizeof(RankSignals) <= kSlotsBegin);

// The process has one permission, whatever the number of its worlds.
struct Permits {
  std::mutex mutex;
  std::uint64_t count = 0;  // guarded by mutex
};
Permits permits;

// A number that no other process has at the same address.
std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number))
    number = static_cast<std::uint64_t>(::getpid()) << 32 | 1;
  return number;
}

}  // namespace

// Asks the system again each time, because a forked process has the count without the permission.
ReadPermit ReadPermit::for_siblings() {
  const std::scoped_lock lock(permits.mutex);
  ReadPermit permit;
  const pid_t parent = ::getppid();
  permit.is_given_ = parent > 1 && ::prctl(PR_SET_PTRACER, parent) == 0;
  if (permit.is_given_) ++permits.count;
  return permit;
}

ReadPermit ReadPermit::share() {
  const std::scoped_lock lock(permits.mutex);
  ReadPermit permit;
  permit.is_given_ = permits.count != 0;
  if (permit.is_given_) ++permits.count;
  return permit;
}

ReadPermit::~ReadPermit() {
  if (!is_given_) return;
  const std::scoped_lock lock(permits.mutex);
  if (--permits.count == 0) (void)::prctl(PR_SET_PTRACER, 0);
}

HostNeighbors::HostNeighbors(MessagePort& port, const Progress& progress) {
  parts_.assign(port.rank_count(), nullptr);
  progress("the search for the ranks of each host");
  const std::vector<std::uint32_t> ranks = port.host_ranks();
  if (ranks.size() < 2) return;
  progress("the sharing of memory among this host's ranks");
  SegmentPlace place;
  if (ranks.front() == port.rank()) {
    segment_ = SharedSegment::make(ranks.size() * kPartBytes);
    place = segment_.place();
  }
  const bool has_come =
      port.broadcast_on_host(std::as_writable_bytes(std::span(&place, 1)));  // the first one's
  if (ranks.front() != port.rank() && has_come)
    segment_ = SharedSegment::open(place, ranks.size() * kPartBytes);
  const bool all_have_it = port.agree_on_host(segment_.data() != nullptr);
  segment_.close_place();
  if (!all_have_it) return;
  progress("the reading of memory among this host's ranks");
  take_parts(port, ranks);
  permit_ = ReadPermit::share();  // the reading may work because of it
  if (can_read_all(port)) return;
  permit_ = ReadPermit::for_siblings();
  (void)port.agree_on_host(true);  // every rank has given it
  if (can_read_all(port)) return;
  permit_ = ReadPermit();
  parts_.assign(parts_.size(), nullptr);
}

// Ends when every rank's part is ready.
void HostNeighbors::take_parts(MessagePort& port, std::span<const std::uint32_t> ranks) {
  const std::uint64_t proof = random_number();
  proof_ = std::make_unique<Proof>(proof);
  for (std::size_t i = 0; i < ranks.size(); ++i)
    parts_[ranks[i]] = segment_.data() + i * kPartBytes;
  std::byte* const own = parts_[port.rank()];
  std::construct_at(reinterpret_cast<Header*>(own),
                    Header{{.id = ::getpid(),
                            .proof_address = reinterpret_cast<std::uint64_t>(proof_.get()),
                            .proof = proof}});
  for (std::uint32_t place = 0; place < kPlaces; ++place)
    std::construct_at(reinterpret_cast<RankSignals*>(own + kSignalsBegin) + place);
  (void)port.agree_on_host(true);
  processes_.assign(parts_.size(), {});
  for (const std::uint32_t rank : ranks)
    processes_[rank] = reinterpret_cast<const Header*>(parts_[rank])->process;
}

// Whether every rank of the host can. Address and process may belong to another namespace.
bool HostNeighbors::can_read_all(MessagePort& port) const {
  bool can_read = true;
  for (std::uint32_t rank = 0; rank < parts_.size(); ++rank)
    can_read = can_read && (parts_[rank] == nullptr || read(rank, 0, nullptr, 0) == 0);
  return port.agree_on_host(can_read);
}

bool HostNeighbors::include(std::span<const std::uint32_t> ranks) const {
  return std::ranges::all_of(
      ranks, [this](auto rank) { return rank < parts_.size() && parts_[rank] != nullptr; });
}

RankSignals& HostNeighbors::signals(std::uint32_t rank, std::uint32_t place) const {
  return reinterpret_cast<RankSignals*>(parts_[rank] + kSignalsBegin)[place];
}

std::byte* HostNeighbors::slot(std::uint32_t rank, std::uint32_t place, std::uint64_t step) const {
  return parts_[rank] + kSlotsBegin + (place * kSlots + step % kSlots) * kSlotBytes;
}

// Data and proof come by one system call, so they come from one process. A call that stops before
// the proof is continued, and the call that ends the transfer proves all of it, because a process
// that has ended does not come back.
int HostNeighbors::read(std::uint32_t rank, std::uint64_t address, std::byte* target,
                        std::uint64_t size_bytes) const {
  const Process& process = processes_[rank];
  while (true) {
    const std::uint64_t asked_bytes = std::min(size_bytes, kReadBytesMax);
    std::uint64_t proof = 0;
    const iovec local[] = {{.iov_base = target, .iov_len = asked_bytes},
                           {.iov_base = &proof, .iov_len = sizeof proof}};
    const iovec remote[] = {
        {.iov_base = reinterpret_cast<void*>(address), .iov_len = asked_bytes},
        {.iov_base = reinterpret_cast<void*>(process.proof_address), .iov_len = sizeof proof}};
    const ssize_t count = ::process_vm_readv(process.id, local, 2, remote, 2, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    auto moved = static_cast<std::uint64_t>(count);
    if (moved == asked_bytes + sizeof proof) {
      if (proof != process.proof) return ESRCH;
      if (asked_bytes == size_bytes) return 0;
      moved = asked_bytes;
    } else if (moved >= asked_bytes) {
      return ESRCH;  // the proof is not at its place
    } else if (moved == 0) {
      return EFAULT;
    }
    target += moved;
    address += moved;
    size_bytes -= moved;
  }
}

}  // namespace sluice
