// A thread that runs posted tasks one after another. The engine's scheduler and its worker are such
// threads. Tasks that capture at most two pointers need no allocation.
// Thread rule: post() from any thread. The destructor runs the tasks posted before it, then joins.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace sluice {

class TaskThread {
 public:
  struct Hooks {
    std::function<void()> after_tasks;  // on this thread, after each batch of tasks; may be empty
    std::function<void(std::exception_ptr)>
        on_exception;  // on this thread, when a task or after_tasks throws
  };

  // `name`: at most 15 characters, as shown by debuggers.
  // Fails with: kUnsupported naming the thread.
  TaskThread(const std::string& name, Hooks hooks);
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  ~TaskThread();

  // Returns immediately; `task` runs later on the thread.
  void post(std::function<void()> task);

  // Runs `hook` before each task of every such thread, for tests that change the order; null
  // removes it.
  static void set_before_task(void (*hook)()) { before_task_ = hook; }

 private:
  static inline std::atomic<void (*)()> before_task_ = nullptr;

  void run();
  void guard(const std::function<void()>& call) const;

  // Constant after construction.
  Hooks hooks_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;

  std::thread thread_;  // last: starts when everything else is ready
};

}  // namespace sluice
