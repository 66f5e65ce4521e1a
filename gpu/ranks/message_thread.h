// The messages between ranks. One thread at a time starts and tests messages, and wakes the threads
// that wait for a batch. A waiting thread moves the messages itself, so that a small operation
// needs no other thread. The class also has its own thread. This thread moves large batches. The
// threads that started the batches can compute in the meantime. Each wait has a deadline, because
// only a deadline can detect a stopped rank or a dead link.
//
// Thread rule: any thread may call every function.
// Invariants: at most one thread is inside the port. Batches start in the order of the start()
// calls, and the messages of a batch start in the order of the batch. After a failure, no messages
// are moved. Messages that the port has begun stay unfinished. The process is expected to end soon.
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

#include <sluice/error.h>
#include "gpu/ranks/host_neighbors.h"
#include "gpu/ranks/message_port.h"
#include "gpu/ranks/rank_wait.h"

namespace sluice {

struct Message {
  std::byte* data = nullptr;  // a send only reads the data
  std::uint64_t size_bytes = 0;
  std::uint32_t peer = 0;
  int tag = 0;
  bool is_send = false;
};

// A batch of messages. One call of wait() waits for all messages of the batch. The batch and the
// memory of its messages must live until wait() has returned or thrown.
struct MessageBatch {
  std::vector<Message> messages;
  // The value is true if the batch's owner computes between start() and wait(). In this time, the
  // class's thread moves the messages.
  bool is_large = false;

  // Only the MessageThread uses the next members.
  std::vector<bool> is_ended;  // indexed by message
  std::size_t left = 0;
  std::chrono::steady_clock::time_point moved_at;  // when the latest message ended
};

// A way to connect the ranks.
struct Connection {
  std::string_view kind;     // Collectives::name()
  std::string_view opening;  // names the wait while the connection opens
  std::string_view closing;  // names the wait while the connection closes
  // Returns the connected port, or throws. The MessageThread's own thread calls this function once.
  std::function<std::unique_ptr<MessagePort>()> open;
};

class MessageThread {
 public:
  struct Options {
    Connection connection;
    double timeout_s = 0;  // for each wait while the connection opens or closes
    std::function<void(const std::string& waiting)> on_wait;  // as in RankWait
  };

  // Begins to open the connection.
  explicit MessageThread(const Options& options);
  // Requires: has_ended().
  ~MessageThread();

  // The call blocks until the connection is open. This function is called before any other
  // function.
  // Fails with the exceptions of Connection::open, and with kRanks if other ranks do not connect
  // within the timeout. An exception that is not an Error becomes one with the code kInternal.
  // After the error kRanks, the thread may still be trying to open the connection. This object must
  // stay alive until has_ended() returns true.
  void await_open();
  // Ends the connection in the regular way, unless something has failed. The call returns an empty
  // text when the thread has ended. If the timeout passes earlier, the call returns a sentence that
  // names the unfinished step. After await_end(), only has_ended() may be called.
  std::string await_end();
  bool has_ended() const;

  std::uint32_t rank() const { return rank_; }
  std::uint32_t rank_count() const { return rank_count_; }
  int tag_max() const { return tag_max_; }
  const std::string& version() const { return version_; }
  std::string_view kind() const { return options_.connection.kind; }
  // Returns the ranks to which this rank sends no messages.
  const HostNeighbors& neighbors() const { return neighbors_; }

  void start(const std::shared_ptr<MessageBatch>& batch);
  // The call blocks until every message has ended.
  // Fails with kRanks if ranks do not answer within the timeout. The error names these ranks. The
  // timeout begins again whenever a message of the batch ends.
  void wait(const MessageBatch& batch, const RankWait& how);

  // Ends every wait for messages, now and later, because an operation of this rank has failed. Only
  // the first failure is kept.
  void fail(const std::string& failure);

  // The call asks the thread to end every process of the run. The call then waits until the
  // processes end or the timeout passes.
  void abort() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using TimePoint = std::chrono::steady_clock::time_point;
  struct InFlight {
    std::shared_ptr<MessageBatch> batch;
    std::size_t message = 0;
  };

  void run();
  void open();
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

  // These members are constant after await_open() has returned.
  std::uint32_t rank_ = 0;
  std::uint32_t rank_count_ = 1;
  int tag_max_ = 0;
  std::string version_;
  HostNeighbors neighbors_;

  // Only the thread that has set is_moving_ uses these members.
  std::unique_ptr<MessagePort> port_;
  std::vector<InFlight> in_flight_;  // indexed by the port's numbers
  std::vector<std::shared_ptr<MessageBatch>> starting_;
  std::vector<std::uint32_t> ended_;

  mutable std::mutex mutex_;
  std::condition_variable work_came_;  // wakes the class's thread
  std::condition_variable changed_;    // a batch ended, a call failed, or the port is free or open
  // Guarded by mutex_.
  std::vector<std::shared_ptr<MessageBatch>> queue_;
  std::size_t in_flight_count_ = 0;     // messages
  std::size_t large_count_ = 0;         // large batches that are queued or in flight
  std::optional<std::string> failure_;  // set only by latch()
  std::optional<Error> open_failure_;
  bool is_open_ = false;
  bool has_ended_ = false;  // the thread has finished
  // `wait_` names the step that the thread is waiting for. `wait_begin_` is the time at which this
  // step began.
  std::string_view wait_ = "the start of a thread";
  TimePoint wait_begin_ = std::chrono::steady_clock::now();
  bool is_moving_ = false;  // a thread may be inside the port, and may use messages' memory
  bool must_stop_ = false;
  bool must_abort_ = false;

  std::thread thread_;  // the last member, because the thread uses all others
};

}  // namespace sluice
