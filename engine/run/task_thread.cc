#include "engine/run/task_thread.h"

#include <utility>

#include "base/float_environment.h"
#include "base/named_thread.h"

namespace sluice {
namespace {

// A caller runs so many. A task's own tasks are as short as itself; a stream of others is left to
// the thread.
constexpr int kBatchesMax = 8;
// More tasks than this seldom wait at the same time, so that the lists do not grow in a step.
constexpr std::size_t kTasksUsual = 512;

std::vector<std::function<void()>> task_list() {
  std::vector<std::function<void()>> tasks;
  tasks.reserve(kTasksUsual);
  return tasks;
}

}  // namespace

TaskThread::TaskThread(const std::string& name, Hooks hooks)
    : hooks_(std::move(hooks)),
      batch_(task_list()),
      tasks_(task_list()),
      thread_(start_thread(name, [this] { run(); })) {}

TaskThread::~TaskThread() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

// The thread that runs a batch looks for further tasks behind it. Notifications are made under the
// mutex: the task may be the last that the owner waits for before it destroys this object.
void TaskThread::post(std::function<void()> task) {
  const std::scoped_lock lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!is_running_) posted_.notify_one();
}

void TaskThread::post_here(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  tasks_.push_back(std::move(task));
  if (is_running_) return;
  for (int batch = 0; batch < kBatchesMax && !tasks_.empty(); ++batch) run_batch(lock);
  if (!tasks_.empty() || stopping_) posted_.notify_one();
}

void TaskThread::post_here_if_idle(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  const bool is_idle = tasks_.empty() && !is_running_;
  tasks_.push_back(std::move(task));
  if (is_idle) run_batch(lock);
  if (!is_running_ && (!tasks_.empty() || stopping_)) posted_.notify_one();
}

void TaskThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    posted_.wait(lock, [this] { return !is_running_ && (stopping_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    run_batch(lock);
  }
}

// Requires: nothing runs. The two vectors are swapped, so that both keep their capacity.
void TaskThread::run_batch(std::unique_lock<std::mutex>& lock) {
  is_running_ = true;
  batch_.swap(tasks_);
  lock.unlock();
  const FloatEnvironment environment;  // the calling thread may be the application's
  for (auto& task : batch_) {
    if (void (*const hook)() = before_task_) hook();
    guard(task);
  }
  batch_.clear();
  if (hooks_.after_tasks) guard(hooks_.after_tasks);
  lock.lock();
  is_running_ = false;
}

// An exception of on_exception ends the process, also in post_here(): otherwise no task would run
// again.
void TaskThread::guard(const std::function<void()>& call) const {
  try {
    call();
  } catch (...) {
    [&]() noexcept { hooks_.on_exception(std::current_exception()); }();
  }
}

}  // namespace sluice
