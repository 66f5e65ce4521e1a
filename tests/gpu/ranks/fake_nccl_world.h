// The ranks of the stand-in for NCCL (fake_nccl.cc) share this state. The ranks use the state to
// meet and to exchange messages. NCCL wants the same operation on all ranks: kind, number and type
// of elements, root, and the order of reduction. The offsets of buffers in symmetric windows have
// to be equal, too, and a message as long as its receiver expects. All of this is compared.
// Thread rule: any thread may call every function.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/gpu/ranks/fake_nccl.h"

namespace sluice::test {

struct FakeNcclSent {
  const void* data;
  std::size_t size_bytes;
  bool is_taken = false;
};

struct FakeNcclMessage {
  void* data;
  std::size_t size_bytes;
  int peer;
  bool is_send;
};

// The offset of a rank's buffer in its window. The offsets of buffers outside of all windows are
// not compared.
using FakeNcclOffset = std::int64_t;
inline constexpr FakeNcclOffset kOutsideOfWindows = -1;

// Returns whether the environment variable FAKE_NCCL_MULTICAST is `state` (fake_nccl.cc).
bool fake_nccl_multicast_is(std::string_view state);
// Returns true if broken multicast prevents every rank from joining a communicator.
bool fake_nccl_cannot_bind();
// `data` points to a std::function<void()>. The function calls the object at `data`, and then
// deletes the object.
void run_fake_nccl_work(void* data);

// One rank's contribution to an operation. The fields `call` and `offsets` have to be equal on all
// ranks. The text `call` names the operation, such as "broadcast of 64 int8 from rank 1".
struct FakeNcclPart {
  const void* data = nullptr;
  std::string call = {};
  std::vector<FakeNcclOffset> offsets = {};
};

// The ranks of one communicator.
struct FakeNcclWorld {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex:
  int size = 0;
  std::vector<int> members;  // the ranks' numbers in the communicator that was split first
  int joined = 0;
  bool is_alone = false;  // only one rank takes part
  int reading = 0;        // the number of ranks that are reading data
  std::set<int> aborted;  // ranks that stop waiting; other ranks learn of this by polls
  std::string violation;  // the first violation of NCCL's rules for callers
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<FakeNcclSent>>> sent;  // by (from, to)
  std::map<std::uint64_t, std::vector<FakeNcclPart>> parts;                       // by operation
  std::map<std::uint64_t, int> done;
  std::map<std::uint64_t, std::size_t> window_bytes;  // by number of the window
  struct Split {
    std::vector<std::pair<int, int>> choices;  // color and key, by rank
    int chosen = 0;
    std::map<int, std::shared_ptr<FakeNcclWorld>> worlds;  // by color
  };
  std::map<std::uint64_t, Split> splits;

  // Requires for set_members(): the mutex is held.
  void set_members(std::vector<int> ranks);
  // The function waits until all ranks have called meet() for this operation. `work` reads the data
  // of all parts. No rank returns before all ranks are done. Returns false if `rank` is aborted:
  // other ranks may still read its data.
  bool meet(std::uint64_t operation, int rank, FakeNcclPart part,
            const std::function<void(const std::vector<const void*>&)>& work);
  void transfer(int rank, const std::vector<FakeNcclMessage>& messages);
  // Counts bytes that `rank` gets from `peer`, or as many from each other rank. The function counts
  // no single bytes, which connect ranks or let them wait for each other.
  void count_bytes(int rank, int peer, std::size_t size_bytes);
  void count_from_all(int rank, std::size_t size_bytes);
  // Keeps the first violation of NCCL's rules for callers. The polls of all ranks report it.
  void violate(const std::string& what);
  // All ranks register windows of the same size.
  void compare_window(std::uint64_t number, std::size_t size_bytes);
  // The function ends the work of `rank`. After this call, nothing reads the rank's data.
  void abort(int rank);
  // Blocks until abort() of this rank.
  void wait_for_abort(int rank) {
    std::unique_lock lock(mutex);
    wait_for_abort(rank, lock);
  }

 private:
  void wait_for_abort(int rank, std::unique_lock<std::mutex>& lock);
  void keep_violation(const std::string& what);  // the mutex is held
  bool is_one_call(const std::vector<FakeNcclPart>& all);
  void compare(int rank, const FakeNcclPart& first, const FakeNcclPart& own);
};

// Whether fake_nccl_hang() is in force.
bool does_fake_nccl_hang();
// Returns when fake_nccl_hang_aborts() is not in force.
void wait_for_fake_nccl_aborts();
// The function counts a call. Returns whether this call has to fail (fake_nccl_fail_at()).
bool fake_nccl_call_fails(const char* call);
void count_fake_nccl(int fake_nccl_counts::*member, int by = 1);
// Returns whether operations are held back (fake_nccl_hold()). If operations are held back, the
// function also adds 1 to `held_questions`.
bool is_fake_nccl_held();

}  // namespace sluice::test
