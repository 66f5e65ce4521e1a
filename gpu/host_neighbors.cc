#include "gpu/host_neighbors.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/error.h"
#include "gpu/mpi_port.h"

namespace sluice {

// How a rank's process is found, and a proof that it was: a number at an address.
struct HostNeighbors::Header {
  std::int32_t process = 0;
  std::uint64_t address = 0;
  std::uint64_t proof = 0;
};

namespace {

constexpr std::uint64_t kSignalsBegin = 4_KiB;  // behind the header
constexpr std::uint64_t kSlotsBegin = 8_KiB;
constexpr std::uint64_t kSlots = 2;
constexpr std::uint64_t kPartBytes =
    kSlotsBegin + HostNeighbors::kPlaces * kSlots * HostNeighbors::kSlotBytes;
static_assert(kSignalsBegin + HostNeighbors::kPlaces * sizeof(RankSignals) <= kSlotsBegin);

}  // namespace

HostNeighbors::HostNeighbors(MpiPort& port) {
  parts_ = port.share_memory(kPartBytes);
  std::byte* const own = parts_[port.rank()];
  if (own == nullptr) return;
  // Where processes may only be read by their parents (Yama), their siblings may from here on.
  (void)::prctl(PR_SET_PTRACER, ::getppid());
  const std::uint64_t proof = (static_cast<std::uint64_t>(::getpid()) << 32) + port.rank() + 1;
  std::construct_at(reinterpret_cast<Header*>(own),
                    Header{.process = ::getpid(),
                           .address = reinterpret_cast<std::uint64_t>(&proof),
                           .proof = proof});
  for (std::uint32_t place = 0; place < kPlaces; ++place)
    std::construct_at(reinterpret_cast<RankSignals*>(own + kSignalsBegin) + place);
  (void)port.agree_on_host(true);  // everybody's part stands
  processes_.assign(parts_.size(), 0);
  bool can_read_all = true;
  for (std::uint32_t rank = 0; rank < parts_.size(); ++rank) {
    if (parts_[rank] == nullptr) continue;
    processes_[rank] = header(rank).process;
    can_read_all = can_read_all && can_read(rank);
  }
  if (!port.agree_on_host(can_read_all)) parts_.assign(parts_.size(), nullptr);
}

// Number and process may be those of another namespace.
bool HostNeighbors::can_read(std::uint32_t rank) const {
  std::uint64_t proof = 0;
  return read(rank, header(rank).address, reinterpret_cast<std::byte*>(&proof), sizeof proof) ==
             0 &&
         proof == header(rank).proof;
}

HostNeighbors::Header& HostNeighbors::header(std::uint32_t rank) const {
  return *reinterpret_cast<Header*>(parts_[rank]);
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

int HostNeighbors::read(std::uint32_t rank, std::uint64_t address, std::byte* target,
                        std::uint64_t size_bytes) const {
  while (size_bytes != 0) {
    const iovec local{.iov_base = target, .iov_len = size_bytes};
    const iovec remote{.iov_base = reinterpret_cast<void*>(address), .iov_len = size_bytes};
    const ssize_t count = ::process_vm_readv(processes_[rank], &local, 1, &remote, 1, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return EFAULT;
    target += count;
    address += static_cast<std::uint64_t>(count);
    size_bytes -= static_cast<std::uint64_t>(count);
  }
  return 0;
}

}  // namespace sluice
