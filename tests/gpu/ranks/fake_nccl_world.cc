#include "tests/gpu/ranks/fake_nccl_world.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

namespace sluice::test {
namespace {

fake_nccl_counts counts;
std::mutex counts_mutex;
// Guarded by counts_mutex.
fake_nccl_fault fault;
std::uint64_t calls = 0;  // since the fault was set
int holders = 0;
bool leaves_alone = false;
bool hangs = false;
bool aborts_hang = false;
int node_ranks = 0;
std::condition_variable aborts_changed;

void count_messages(const std::vector<FakeNcclMessage>& messages) {
  const std::scoped_lock lock(counts_mutex);
  for (const FakeNcclMessage& message : messages) {
    if (message.size_bytes <= 1 || !message.is_send) continue;
    std::uint64_t& least = counts.message_bytes_least;
    least = counts.messages++ == 0 ? message.size_bytes : std::min(least, message.size_bytes);
  }
}

}  // namespace

bool fake_nccl_multicast_is(std::string_view state) {
  const char* const told = std::getenv("FAKE_NCCL_MULTICAST");
  return told != nullptr && told == state;
}
bool fake_nccl_cannot_bind() {
  const char* const nvls = std::getenv("NCCL_NVLS_ENABLE");
  return fake_nccl_multicast_is("broken") && (nvls == nullptr || nvls != std::string_view("0"));
}

void run_fake_nccl_work(void* data) {
  const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
  (*owned)();
}

void count_fake_nccl(int fake_nccl_counts::*member, int by) {
  const std::scoped_lock lock(counts_mutex);
  counts.*member += by;
}

bool fake_nccl_call_fails(const char* call) {
  const std::scoped_lock lock(counts_mutex);
  const bool is_poll = call == std::string_view("ncclCommGetAsyncError");
  if (is_poll != fault.is_poll) return false;
  return ++calls == fault.at_call;
}

bool does_fake_nccl_hang() {
  const std::scoped_lock lock(counts_mutex);
  return hangs;
}

void wait_for_fake_nccl_aborts() {
  std::unique_lock lock(counts_mutex);
  aborts_changed.wait(lock, [] { return !aborts_hang; });
}

bool is_fake_nccl_held() {
  const std::scoped_lock lock(counts_mutex);
  if (holders != 0) ++counts.held_questions;
  return holders != 0;
}

void FakeNcclWorld::set_members(std::vector<int> ranks) {
  const std::scoped_lock lock(counts_mutex);
  size = static_cast<int>(ranks.size());
  members = std::move(ranks);
  is_alone = leaves_alone;
  if (is_alone) joined = size - 1;
}

void FakeNcclWorld::count_bytes(int rank, int peer, std::size_t size_bytes) {
  if (size_bytes <= 1) return;
  const auto member = [&](int of) { return members[static_cast<std::size_t>(of)]; };
  const std::scoped_lock lock(counts_mutex);
  if (node_ranks == 0) return;
  const bool is_inside = member(rank) / node_ranks == member(peer) / node_ranks;
  (is_inside ? counts.inside_bytes : counts.across_bytes) += size_bytes;
}

void FakeNcclWorld::count_from_all(int rank, std::size_t size_bytes) {
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) count_bytes(rank, peer, size_bytes);
}

void FakeNcclWorld::keep_violation(const std::string& what) {
  if (violation.empty()) violation = what;
  changed.notify_all();
}

void FakeNcclWorld::violate(const std::string& what) {
  const std::scoped_lock lock(mutex);
  keep_violation(what);
}

void FakeNcclWorld::compare_window(std::uint64_t number, std::size_t size_bytes) {
  const std::scoped_lock lock(mutex);
  const std::size_t first = window_bytes.emplace(number, size_bytes).first->second;
  if (first != size_bytes)
    keep_violation("a window of " + std::to_string(size_bytes) + " bytes, which has " +
                   std::to_string(first) + " on another rank");
}

bool FakeNcclWorld::meet(std::uint64_t operation, int rank, FakeNcclPart part,
                         const std::function<void(const std::vector<const void*>&)>& work) {
  std::unique_lock lock(mutex);
  if (is_alone) return true;
  auto& all = parts[operation];
  all.resize(static_cast<std::size_t>(size));
  all[static_cast<std::size_t>(rank)] = std::move(part);
  int& through = done[operation];
  const auto wait_for = [&](int until) {
    ++through;
    changed.notify_all();
    changed.wait(lock, [&] { return through >= until || aborted.count(rank) != 0; });
  };
  wait_for(size);
  if (!aborted.empty()) {
    wait_for_abort(rank, lock);
    return false;
  }
  if (!is_one_call(all)) {
    wait_for_abort(rank, lock);
    return false;
  }
  compare(rank, all.front(), all[static_cast<std::size_t>(rank)]);
  std::vector<const void*> data;
  for (const FakeNcclPart& one : all) data.push_back(one.data);
  ++reading;
  lock.unlock();
  work(data);
  lock.lock();
  --reading;
  wait_for(2 * size);
  return aborted.count(rank) == 0;
}

// Ranks that call unequal operations would read beyond each other's data, or wait without end.
bool FakeNcclWorld::is_one_call(const std::vector<FakeNcclPart>& all) {
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].call == all.front().call) continue;
    keep_violation("rank 0 calls " + all.front().call + ", and rank " + std::to_string(rank) +
                   " calls " + all[rank].call);
    return false;
  }
  return true;
}

// NCCL takes the caller's own offset for every rank's.
void FakeNcclWorld::compare(int rank, const FakeNcclPart& first, const FakeNcclPart& own) {
  if (first.offsets == own.offsets) return;
  count_fake_nccl(&fake_nccl_counts::unequal_offsets);
  std::string what = own.call + ": offsets in symmetric windows:";
  for (const auto& [of, part] : {std::pair{0, &first}, std::pair{rank, &own}}) {
    what += " rank " + std::to_string(of);
    for (const FakeNcclOffset offset : part->offsets) what += " " + std::to_string(offset);
  }
  keep_violation(what);
}

// The memory of a rank that has given up may be gone, so the others' work never ends by itself.
void FakeNcclWorld::wait_for_abort(int rank, std::unique_lock<std::mutex>& lock) {
  changed.wait(lock, [&] { return aborted.count(rank) != 0; });
}

void FakeNcclWorld::abort(int rank) {
  std::unique_lock lock(mutex);
  aborted.insert(rank);
  changed.notify_all();
  changed.wait(lock, [&] { return reading == 0; });
}

void FakeNcclWorld::transfer(int rank, const std::vector<FakeNcclMessage>& messages) {
  std::vector<std::shared_ptr<FakeNcclSent>> own;
  count_messages(messages);
  std::unique_lock lock(mutex);
  if (is_alone) return;
  for (const FakeNcclMessage& message : messages) {
    if (!message.is_send) continue;
    count_bytes(message.peer, rank, message.size_bytes);
    own.push_back(std::make_shared<FakeNcclSent>(FakeNcclSent{message.data, message.size_bytes}));
    sent[{rank, message.peer}].push_back(own.back());
  }
  changed.notify_all();
  for (const FakeNcclMessage& message : messages) {
    if (message.is_send) continue;
    auto& queue = sent[{message.peer, rank}];
    changed.wait(lock, [&] { return !queue.empty() || aborted.count(rank) != 0; });
    if (aborted.count(rank) != 0 || aborted.count(message.peer) != 0)
      return wait_for_abort(rank, lock);
    if (queue.front()->size_bytes != message.size_bytes) {
      keep_violation("rank " + std::to_string(message.peer) + " sends " +
                     std::to_string(queue.front()->size_bytes) + " bytes, and rank " +
                     std::to_string(rank) + " expects " + std::to_string(message.size_bytes));
      return wait_for_abort(rank, lock);
    }
    std::memcpy(message.data, queue.front()->data, message.size_bytes);
    queue.front()->is_taken = true;
    queue.pop_front();
    changed.notify_all();
  }
  changed.wait(lock, [&] {
    for (const auto& each : own)
      if (!each->is_taken && aborted.count(rank) == 0) return false;
    return true;
  });
}

}  // namespace sluice::test

extern "C" fake_nccl_counts fake_nccl_take_counts() {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  return std::exchange(sluice::test::counts, {});
}

extern "C" void fake_nccl_hold(int change) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::holders += change;
}

extern "C" void fake_nccl_hang(bool do_hang) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::hangs = do_hang;
}

extern "C" void fake_nccl_count_nodes(int node_ranks) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::node_ranks = node_ranks;
}

extern "C" void fake_nccl_hang_aborts(bool do_hang) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::aborts_hang = do_hang;
  sluice::test::aborts_changed.notify_all();
}

extern "C" void fake_nccl_leave_alone(bool is_alone) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::leaves_alone = is_alone;
}

extern "C" std::uint64_t fake_nccl_fail_at(fake_nccl_fault coming) {
  const std::scoped_lock lock(sluice::test::counts_mutex);
  sluice::test::fault = coming;
  return std::exchange(sluice::test::calls, 0);
}
