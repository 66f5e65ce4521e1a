// The messages between ranks: one thread at a time starts and tests messages, and wakes the threads
// that wait for a batch. A waiting thread moves the messages itself, so that a small operation
// passes through no other thread. The class's own thread moves large ones while their owner
// computes. Waiting has a deadline, because that is the only way to notice a stopped rank or a dead
// link.
//
// Thread rule: every function from any thread.
// Invariants: at most one thread is inside MPI; messages start in the order of start(), and within
// a batch in its order. After a failure no message moves any more: messages that MPI has begun stay
// as they are, and the process is about to end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gpu/ranks/host_neighbors.h"
#include "gpu/ranks/mpi_port.h"
#include "gpu/ranks/rank_wait.h"

namespace sluice {

struct Message {
  std::byte* data = nullptr;  // not written to when it is a send
  std::uint64_t size_bytes = 0;
  std::uint32_t peer = 0;
  int tag = 0;
  bool is_send = false;
};

// Messages that are waited for together. The batch and its messages' memory live until wait() has
// returned or thrown.
struct MessageBatch {
  std::vector<Message> messages;
  // Its owner computes between start() and wait(); the thread moves its messages meanwhile.
  bool is_large = false;

  // Used by the MessageThread.
  std::vector<bool> is_ended;  // by message
  std::size_t left = 0;
  std::chrono::steady_clock::time_point moved_at;  // when the last of its messages ended
};

class MessageThread {
 public:
  struct Options {
    std::string path;      // of the library
    double timeout_s = 0;  // for each wait while MPI begins and ends
    std::function<void(const std::string& waiting)> on_wait;  // RankWait
  };

  // Begins to open the library and MPI.
  explicit MessageThread(const Options& options);
  // Requires: await_end() has reported the end, or await_open() has failed with kUnsupported.
  ~MessageThread();

  // Blocks until MPI is open. It comes before any other function.
  // Fails with: kUnsupported; kRanks if other ranks do not come within the timeout. In the second
  // case the thread stays inside MPI, and this object has to stay, too.
  void await_open();
  // Ends MPI in order, unless something has failed. Returns an empty text once the thread has ended
  // or a sentence about what has not ended within the timeout. It is the last call.
  std::string await_end();

  std::uint32_t rank() const { return rank_; }
  std::uint32_t rank_count() const { return rank_count_; }
  int tag_max() const { return tag_max_; }
  const std::string& version() const { return version_; }
  // The ranks that need no messages.
  const HostNeighbors& neighbors() const { return neighbors_; }

  void start(const std::shared_ptr<MessageBatch>& batch);
  // Blocks until every message has ended.
  // Fails with: kRanks naming the ranks that did not answer within the timeout of the last message
  // that ended.
  void wait(const MessageBatch& batch, const RankWait& how);

  // Reports a failure outside of messages, between ranks of a host, to all other ranks. Keeps the
  // first.
  void fail(const std::string& failure);

  // Ends every process of the run, or waits for that end, for at most the timeout.
  void abort() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using TimePoint = std::chrono::steady_clock::time_point;
  struct InFlight {
    std::shared_ptr<MessageBatch> batch;
    std::size_t message = 0;
  };

  void run();
  std::unique_ptr<MpiPort> open(std::string& why);
  void begin_wait(std::string_view what);
  template <class IsOver>
  std::string await_other_ranks(Lock& lock, const IsOver& is_over);
  bool has_work() const;
  bool is_wanted() const;
  void move_until(Lock& lock, TimePoint end, const std::function<bool()>& is_enough);
  void start_messages();
  bool finish_messages();
  void await(Lock& lock, const MessageBatch& batch, const RankWait& how);
  void latch(const std::string& failure);

  const Options options_;

  // Constant once await_open() has returned.
  std::uint32_t rank_ = 0;
  std::uint32_t rank_count_ = 1;
  int tag_max_ = 0;
  std::string version_;
  HostNeighbors neighbors_;

  // For the thread that has set is_moving_.
  std::unique_ptr<MpiPort> port_;
  std::vector<InFlight> in_flight_;  // by the port's number
  std::vector<std::shared_ptr<MessageBatch>> starting_;
  std::vector<std::uint32_t> ended_;

  std::mutex mutex_;
  std::condition_variable work_came_;  // for the thread
  std::condition_variable changed_;    // ended batches, failures; MPI is free or open
  // Guarded by mutex_.
  std::vector<std::shared_ptr<MessageBatch>> queue_;
  std::size_t in_flight_count_ = 0;     // messages
  std::size_t large_count_ = 0;         // batches that have not ended, queued ones included
  std::optional<std::string> failure_;  // set only by latch()
  bool is_open_ = false;
  bool has_ended_ = false;  // the thread has finished
  // The step that the thread is at, inside MPI or the system, and since when.
  std::string_view wait_ = "the start of a thread";
  TimePoint wait_begin_ = std::chrono::steady_clock::now();
  bool is_moving_ = false;  // a thread may be inside MPI, which may touch messages' memory
  bool must_stop_ = false;
  bool must_abort_ = false;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace sluice
