#include "engine/run/task_thread.h"

#include <utility>

#include "base/named_thread.h"

namespace sluice {

TaskThread::TaskThread(const std::string& name, Hooks hooks)
    : hooks_(std::move(hooks)), thread_(start_thread(name, [this] { run(); })) {}

TaskThread::~TaskThread() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void TaskThread::post(std::function<void()> task) {
  {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  posted_.notify_one();
}

void TaskThread::run() {
  std::vector<std::function<void()>>
      batch;  // swapped with tasks_, so that both keep their capacity
  while (true) {
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      batch.swap(tasks_);
    }
    for (auto& task : batch) {
      if (void (*const hook)() = before_task_) hook();
      guard(task);
    }
    batch.clear();
    if (hooks_.after_tasks) guard(hooks_.after_tasks);
  }
}

// An exception that left the thread would end the process.
void TaskThread::guard(const std::function<void()>& call) const {
  try {
    call();
  } catch (...) {
    hooks_.on_exception(std::current_exception());
  }
}

}  // namespace sluice
