#include "gpu/ranks/message_thread.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/named_thread.h"

namespace sluice {
namespace {

using std::chrono::steady_clock;

// Polls without news before a thread begins to yield to other threads between them, unless one of
// those sums or copies beside large messages: about as long as a thread takes to wake.
constexpr std::uint32_t kTestsBeforeYield = 20;

std::vector<std::uint32_t> missing_ranks(const MessageBatch& batch) {
  std::vector<std::uint32_t> ranks;
  for (std::size_t i = 0; i < batch.messages.size(); ++i)
    if (!batch.is_ended[i]) ranks.push_back(batch.messages[i].peer);
  return ranks;
}

}  // namespace

MessageThread::MessageThread(const Options& options)
    : options_(options), thread_(start_thread("sluice-msg", [this] { run(); })) {}

MessageThread::~MessageThread() {
  if (thread_.joinable()) thread_.join();
}

void MessageThread::await_open() {
  Lock lock(mutex_);
  const std::string late = await_other_ranks(lock, [this] { return is_open_ || has_ended_; });
  if (!late.empty()) throw Error(ErrorCode::kRanks, late);
  if (open_failure_) throw *open_failure_;
}

std::string MessageThread::await_end() {
  Lock lock(mutex_);
  wait_ = "the exchange of the last messages";
  wait_begin_ = steady_clock::now();
  must_stop_ = true;
  work_came_.notify_all();
  return await_other_ranks(lock, [this] { return has_ended_; });
}

bool MessageThread::has_ended() const {
  const std::scoped_lock lock(mutex_);
  return has_ended_;
}

// Sets the name of the coming wait for other ranks.
void MessageThread::begin_wait(std::string_view what) {
  const std::scoped_lock lock(mutex_);
  wait_ = what;
  wait_begin_ = steady_clock::now();
}

// Waits until the wait is over, or returns a sentence when one wait takes longer than the timeout.
// Calls inside of MPI have no deadline.
template <class IsOver>
std::string MessageThread::await_other_ranks(Lock& lock, const IsOver& is_over) {
  RankWait how;
  how.timeout_s = options_.timeout_s;
  while (!changed_.wait_for(lock, how.interval(), is_over)) {
    const std::string waiting = fmt::format("{} has not ended", wait_);
    if (steady_clock::now() - wait_begin_ >= how.timeout())
      return fmt::format(
          "{} within {} s; a rank may have been killed or stopped; if it is only late, raise "
          "sharding.timeout",
          waiting, how.timeout_s);
    if (!options_.on_wait) continue;
    lock.unlock();
    options_.on_wait(waiting);
    lock.lock();
  }
  return "";
}

// The memory that the ranks of a host share is a part of the connection.
void MessageThread::open() {
  begin_wait(options_.connection.opening);
  port_ = options_.connection.open();
  neighbors_ = HostNeighbors(*port_, [this](std::string_view wait) { begin_wait(wait); });
}

void MessageThread::run() {
  std::optional<Error> failure;
  try {
    open();
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure.emplace(ErrorCode::kInternal,
                    fmt::format("{} failed: {}", options_.connection.opening, error.what()));
  }
  Lock lock(mutex_);
  if (failure) {
    open_failure_ = failure;
    has_ended_ = true;
    latch(failure->what());
    return;
  }
  rank_ = port_->rank();
  rank_count_ = port_->rank_count();
  tag_max_ = port_->tag_max();
  version_ = port_->version();
  is_open_ = true;
  changed_.notify_all();
  while (true) {
    work_came_.wait(lock, [this] { return !is_moving_ && is_wanted(); });
    if (must_abort_) {
      lock.unlock();
      port_->abort();
    }
    if (!has_work()) break;
    move_until(lock, TimePoint::max(), [this] { return !has_work(); });
  }
  // The end would wait for ranks that are gone.
  if (failure_ && port_->ends_with_others()) (void)port_.release();
  lock.unlock();
  begin_wait(options_.connection.closing);
  port_.reset();
  lock.lock();
  has_ended_ = true;
  changed_.notify_all();
}

// Whether there are messages that no thread waits for, or whose owner leaves them to this thread.
bool MessageThread::has_work() const {
  const bool is_left = !queue_.empty() || in_flight_count_ != 0;
  return !failure_ && (large_count_ != 0 || (must_stop_ && is_left));
}

bool MessageThread::is_wanted() const {
  return must_abort_ || must_stop_ || has_work();
}

// Moves messages on the calling thread, at least once, until `is_enough`, which is asked under the
// lock, or until `end`.
// Requires: no other thread moves messages.
void MessageThread::move_until(Lock& lock, TimePoint end, const std::function<bool()>& is_enough) {
  struct Moving {
    MessageThread& thread;
    Lock& lock;
    // Other threads wait for this, also where the memory for a text is missing.
    ~Moving() {
      if (!lock.owns_lock()) lock.lock();
      thread.is_moving_ = false;
      thread.changed_.notify_all();
      if (thread.is_wanted()) thread.work_came_.notify_one();
    }
  } const moving{*this, lock};
  is_moving_ = true;
  std::uint32_t idle_looks = 0;
  while (!failure_ && !must_abort_ && !is_enough()) {
    starting_.swap(queue_);
    for (const auto& batch : starting_) in_flight_count_ += batch->messages.size();
    const std::uint32_t looks_before_yield = large_count_ == 0 ? kTestsBeforeYield : 0;
    lock.unlock();
    try {
      start_messages();
      idle_looks = finish_messages() ? 0 : idle_looks + 1;
    } catch (const std::exception& error) {
      fail(fmt::format("rank {} cannot move its messages: {}", rank_, error.what()));
    }
    const bool is_over = idle_looks != 0 && steady_clock::now() >= end;
    if (idle_looks >= kLooksBeforeSleep) {
      std::this_thread::sleep_for(kSleepBetweenLooks);
    } else if (idle_looks > looks_before_yield && !is_over) {
      std::this_thread::yield();
    }
    lock.lock();
    if (is_over) break;
  }
}

void MessageThread::start_messages() {
  for (const auto& batch : starting_) {
    for (std::size_t i = 0; i < batch->messages.size(); ++i) {
      const Message& message = batch->messages[i];
      const std::uint32_t number =
          message.is_send
              ? port_->start_send(message.data, message.size_bytes, message.peer, message.tag)
              : port_->start_receive(message.data, message.size_bytes, message.peer, message.tag);
      if (number >= in_flight_.size()) in_flight_.resize(number + 1);
      in_flight_[number] = {.batch = batch, .message = i};
    }
  }
  starting_.clear();
}

// Returns whether there was news.
bool MessageThread::finish_messages() {
  ended_.clear();
  std::string failure;
  port_->test(ended_, failure);
  if (ended_.empty() && failure.empty()) return false;
  const std::scoped_lock lock(mutex_);
  const auto now = steady_clock::now();
  bool has_ended = false;
  for (const std::uint32_t number : ended_) {
    MessageBatch& batch = *in_flight_[number].batch;
    batch.is_ended[in_flight_[number].message] = true;
    batch.moved_at = now;
    if (--batch.left == 0) {
      has_ended = true;
      large_count_ -= batch.is_large ? 1 : 0;
    }
    in_flight_[number].batch.reset();
  }
  in_flight_count_ -= ended_.size();
  if (!failure.empty()) latch(failure);
  if (has_ended) changed_.notify_all();
  return true;
}

void MessageThread::start(const std::shared_ptr<MessageBatch>& batch) {
  batch->left = batch->messages.size();
  batch->is_ended.assign(batch->left, false);
  if (batch->left == 0) return;
  Lock lock(mutex_);
  queue_.push_back(batch);
  if (batch->is_large) {
    ++large_count_;
    work_came_.notify_one();
  } else if (!is_moving_) {
    bool has_started = false;
    move_until(lock, {}, [&] { return std::exchange(has_started, true); });
  }
}

void MessageThread::wait(const MessageBatch& batch, const RankWait& how) {
  Lock lock(mutex_);
  await(lock, batch, how);
  if (!failure_) return;
  // The caller takes the memory of its messages away when it leaves.
  changed_.wait(lock, [this] { return !is_moving_; });
  throw Error(ErrorCode::kRanks, *failure_);
}

// Waits until every message has ended, or something has failed.
void MessageThread::await(Lock& lock, const MessageBatch& batch, const RankWait& how) {
  const auto begin = steady_clock::now();
  const auto is_over = [&] { return batch.left == 0 || failure_; };
  const auto may_move = [&] { return !batch.is_large && !is_moving_ && !must_abort_; };
  auto pause = begin + how.interval();
  while (!is_over()) {
    if (may_move()) {
      move_until(lock, pause, is_over);
    } else {
      changed_.wait_until(lock, pause, [&] { return is_over() || may_move(); });
    }
    const auto now = steady_clock::now();
    if (is_over() || now < pause) continue;
    pause = now + how.interval();
    const std::string waiting = how.text(missing_ranks(batch), rank_);
    if (now - std::max(begin, batch.moved_at) >= how.timeout()) {
      latch(how.late_text(waiting));
    } else if (how.on_wait != nullptr && *how.on_wait) {
      lock.unlock();
      (*how.on_wait)(waiting);
      lock.lock();
    }
  }
}

// Keeps the first failure, and wakes every waiting thread.
void MessageThread::latch(const std::string& failure) {
  if (!failure_) failure_ = failure;
  changed_.notify_all();
}

void MessageThread::fail(const std::string& failure) {
  const Lock lock(mutex_);
  latch(failure);
}

void MessageThread::abort() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    must_abort_ = true;
  }
  work_came_.notify_all();
  Lock lock(mutex_);
  (void)changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s),
                          [this] { return has_ended_; });  // the process ends meanwhile
}

}  // namespace sluice
