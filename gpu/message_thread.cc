#include "gpu/message_thread.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "base/error.h"

namespace sluice {
namespace {

using std::chrono::steady_clock;

// Polls without news before the thread begins to sleep between them: long enough for a peer that
// computes nothing but sums, short enough not to take a core from one that computes.
constexpr std::uint32_t kPollsBeforeSleep = 4000;
constexpr std::chrono::microseconds kSleep{50};
constexpr double kSayInterval_s = 0.25;

}  // namespace

MessageThread::MessageThread(const std::string& path) : thread_([this, path] { run(path); }) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_open_ || failure_; });
  if (is_open_) return;
  lock.unlock();
  thread_.join();
  throw Error(ErrorCode::kUnsupported, *failure_);
}

MessageThread::~MessageThread() {
  {
    const std::scoped_lock lock(mutex_);
    must_stop_ = true;
  }
  work_came_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<MpiPort> MessageThread::open(const std::string& path, std::string& why) {
  // Global: Open MPI's own plugins look for its symbols there. Never closed: its threads and exit
  // handlers stay.
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* const text = ::dlerror();
    why = text == nullptr ? "unknown reason" : text;
    return nullptr;
  }
  void* const symbol = ::dlsym(library, kOpenMpiPortSymbol);
  if (symbol == nullptr) {
    why = "it is no library of this release";
    return nullptr;
  }
  return std::unique_ptr<MpiPort>(reinterpret_cast<OpenMpiPort>(symbol)(why));
}

void MessageThread::run(const std::string& path) {
  ::pthread_setname_np(::pthread_self(), "sluice-mpi");
  std::string why;
  std::unique_ptr<MpiPort> port = open(path, why);
  {
    const std::scoped_lock lock(mutex_);
    if (port == nullptr) {
      failure_ = fmt::format("MPI cannot be used through \"{}\": {}", path, why);
    } else {
      rank_ = port->rank();
      rank_count_ = port->rank_count();
      tag_max_ = port->tag_max();
      version_ = port->version();
      is_open_ = true;
    }
  }
  changed_.notify_all();
  if (port == nullptr) return;
  std::uint32_t idle_polls = 0;
  while (take_work(*port)) {
    start_messages(*port);
    idle_polls = finish_messages(*port) ? 0 : idle_polls + 1;
    if (idle_polls < kPollsBeforeSleep) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
  const std::scoped_lock lock(mutex_);
  // MPI_Finalize would wait for ranks that are gone.
  if (failure_) (void)port.release();
}

// Waits while there is nothing to do; false when that will not change.
bool MessageThread::take_work(MpiPort& port) {
  std::unique_lock lock(mutex_);
  is_working_ = false;
  if (failure_) changed_.notify_all();
  work_came_.wait(lock, [this] {
    return must_stop_ || must_abort_ || (!failure_ && (!queue_.empty() || in_flight_count_ != 0));
  });
  if (must_abort_) {
    lock.unlock();
    port.abort();
  }
  if (must_stop_ && (failure_ || (queue_.empty() && in_flight_count_ == 0))) return false;
  starting_.swap(queue_);
  is_working_ = true;
  return true;
}

void MessageThread::start_messages(MpiPort& port) {
  for (const auto& batch : starting_) {
    for (std::size_t i = 0; i < batch->messages.size(); ++i) {
      const Message& message = batch->messages[i];
      const std::uint32_t number =
          message.is_send
              ? port.start_send(message.data, message.size_bytes, message.peer, message.tag)
              : port.start_receive(message.data, message.size_bytes, message.peer, message.tag);
      if (number >= in_flight_.size()) in_flight_.resize(number + 1);
      in_flight_[number] = {.batch = batch, .message = i};
      ++in_flight_count_;
    }
  }
  starting_.clear();
}

// Whether there was news.
bool MessageThread::finish_messages(MpiPort& port) {
  if (in_flight_count_ == 0) return false;
  std::vector<std::uint32_t> ended;
  std::string failure;
  port.test(ended, failure);
  if (ended.empty() && failure.empty()) return false;
  {
    const std::scoped_lock lock(mutex_);
    for (const std::uint32_t number : ended) {
      MessageBatch& batch = *in_flight_[number].batch;
      batch.is_ended[in_flight_[number].message] = true;
      --batch.left;
      in_flight_[number].batch.reset();
    }
    if (!failure.empty() && !failure_) failure_ = "MPI reports: " + failure;
  }
  in_flight_count_ -= ended.size();
  changed_.notify_all();
  return true;
}

void MessageThread::start(const std::shared_ptr<MessageBatch>& batch) {
  batch->left = batch->messages.size();
  batch->is_ended.assign(batch->left, false);
  if (batch->left == 0) return;
  {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(batch);
  }
  work_came_.notify_all();
}

void MessageThread::wait(const MessageBatch& batch, const MessageWait& how) {
  std::unique_lock lock(mutex_);
  await(lock, batch, how);
  if (!failure_) return;
  // The caller takes the memory of its messages along.
  changed_.wait(lock, [this] { return !is_working_; });
  throw Error(ErrorCode::kRanks, *failure_);
}

// Until every message has ended, or something has failed.
void MessageThread::await(std::unique_lock<std::mutex>& lock, const MessageBatch& batch,
                          const MessageWait& how) {
  std::size_t left = batch.left;
  auto moved_at = steady_clock::now();
  while (batch.left != 0 && !failure_) {
    const bool has_moved = changed_.wait_for(
        lock, std::chrono::duration<double>(std::min(how.timeout_s, kSayInterval_s)),
        [&] { return batch.left != left || failure_; });
    left = batch.left;
    const auto now = steady_clock::now();
    if (has_moved) {
      moved_at = now;
      continue;
    }
    const std::string waiting =
        fmt::format("{} not answered rank {} in {}", missing_ranks(batch), rank_, how.what);
    if (now - moved_at >= std::chrono::duration<double>(how.timeout_s)) {
      failure_ = fmt::format(
          "{} within {} s; killed or stopped, or late: then raise "
          "sharding.timeout",
          waiting, how.timeout_s);
      changed_.notify_all();
    } else if (how.on_wait != nullptr && *how.on_wait) {
      lock.unlock();
      (*how.on_wait)(waiting);
      lock.lock();
    }
  }
}

std::string MessageThread::missing_ranks(const MessageBatch& batch) const {
  std::vector<std::uint32_t> ranks;
  for (std::size_t i = 0; i < batch.messages.size(); ++i)
    if (!batch.is_ended[i]) ranks.push_back(batch.messages[i].peer);
  std::ranges::sort(ranks);
  ranks.erase(std::ranges::unique(ranks).begin(), ranks.end());
  return fmt::format("{} {} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "),
                     ranks.size() == 1 ? "has" : "have");
}

void MessageThread::abort() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    must_abort_ = true;
  }
  work_came_.notify_all();
  if (thread_.joinable()) thread_.join();  // the process ends meanwhile
}

}  // namespace sluice
