// The functions count the requests to the stand-in for NCCL (fake_nccl.cc), and can make calls of
// the stand-in fail. A program finds the functions by their symbols in the stand-in's library.
// Thread rule: any thread.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include <sluice/error.h>

struct fake_nccl_counts {
  int reductions = 0;     // reductions that NCCL itself makes
  int word_launches = 0;  // reductions of words; a group of such reductions is one launch
  int windows = 0;        // windows that were registered and not given back
  int allocations = 0;    // counted like windows
  int aborts = 0;
  int held_questions = 0;  // answers "in progress" because of fake_nccl_hold()
  int messages = 0;        // between two ranks
  // The length of the shortest message between two ranks. The length is 0 if there was no message.
  // Messages of single bytes, which connect the ranks, do not count.
  std::uint64_t message_bytes_least = 0;
  // The bytes that ranks got from other ranks, by messages, gathers and broadcasts: from ranks of
  // the same node, and from ranks of another node (fake_nccl_count_nodes()). Reductions by NCCL
  // itself do not count, and neither do single bytes.
  std::uint64_t inside_bytes = 0;
  std::uint64_t across_bytes = 0;
  // The number of requests in which a rank's offset in a symmetric window differed from the offset
  // of rank 0.
  int unequal_offsets = 0;
};

extern "C" fake_nccl_counts fake_nccl_take_counts();

// A fault makes one call of the stand-in fail with ncclSystemError. If the call releases an object,
// the object is released in spite of the failure.
struct fake_nccl_fault {
  std::uint64_t at_call = 0;  // counted over all ranks; the next call is number 1; 0: no call fails
  // If `is_poll` is true, only the calls of ncclCommGetAsyncError are counted. If `is_poll` is
  // false, all other calls are counted. The number of calls of ncclCommGetAsyncError differs from
  // run to run.
  bool is_poll = false;
};
// Returns the number of calls since the last fault was set.
extern "C" std::uint64_t fake_nccl_fail_at(fake_nccl_fault fault);

// The function adds `change` to the number of holders. While there is a holder, operations are not
// enqueued on their streams. The stand-in then tells callers that their operations are in progress.
extern "C" void fake_nccl_hold(int change);
// If `do_hang` is true, calls of ncclAllGather return only when their communicator is aborted, as
// when a GPU takes no more launches.
extern "C" void fake_nccl_hang(bool do_hang);
// If `do_hang` is true, aborts of communicators do not return, as when copy engines wait for a rank
// that is gone.
extern "C" void fake_nccl_hang_aborts(bool do_hang);
// Each `node_ranks` consecutive ranks are a node. With 0, as at first, no bytes are counted.
extern "C" void fake_nccl_count_nodes(int node_ranks);
// If `is_alone` is true, only one rank takes part in communicators that are made after this call.
// The other ranks count as present, but send nothing. So a process can count the messages of one
// rank in a large world.
extern "C" void fake_nccl_leave_alone(bool is_alone);

// `path` is the library's path.
template <class Function>
Function* fake_nccl_function(const char* path, const char* name) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  SLUICE_CHECK(library != nullptr, "the fake is there");
  return reinterpret_cast<Function*>(::dlsym(library, name));
}
inline void hang_fake_nccl(const char* path, bool do_hang) {
  fake_nccl_function<decltype(fake_nccl_hang)>(path, "fake_nccl_hang")(do_hang);
}
inline void count_fake_nccl_nodes(const char* path, int node_ranks) {
  fake_nccl_function<decltype(fake_nccl_count_nodes)>(path, "fake_nccl_count_nodes")(node_ranks);
}
inline void hang_fake_nccl_aborts(const char* path, bool do_hang) {
  fake_nccl_function<decltype(fake_nccl_hang_aborts)>(path, "fake_nccl_hang_aborts")(do_hang);
}
inline fake_nccl_counts take_fake_nccl_counts(const char* path) {
  return fake_nccl_function<decltype(fake_nccl_take_counts)>(path, "fake_nccl_take_counts")();
}
inline void hold_fake_nccl(const char* path, int change) {
  fake_nccl_function<decltype(fake_nccl_hold)>(path, "fake_nccl_hold")(change);
}
inline void leave_fake_nccl_alone(const char* path, bool is_alone) {
  fake_nccl_function<decltype(fake_nccl_leave_alone)>(path, "fake_nccl_leave_alone")(is_alone);
}
inline std::uint64_t fail_fake_nccl(const char* path, const fake_nccl_fault& fault) {
  return fake_nccl_function<decltype(fake_nccl_fail_at)>(path, "fake_nccl_fail_at")(fault);
}
