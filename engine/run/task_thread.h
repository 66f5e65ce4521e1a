// A thread that runs posted tasks one after another. The engine's scheduler and its worker are such
// threads. A caller that would wait for its task can run it in the thread's place, because waking
// two threads takes longer than most tasks. Tasks that capture at most two pointers need no
// allocation.
// Thread rule: post() and post_here() from any thread. The destructor runs the tasks posted before
// it, then joins.
// Invariant: tasks run one at a time, in order, on this thread or in post_here().
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
    std::function<void()> after_tasks;  // where the tasks ran, after each batch; may be empty
    std::function<void(std::exception_ptr)>
        on_exception;  // likewise, when a task or after_tasks throws
  };

  // `name`: at most 15 characters, as shown by debuggers.
  // Fails with: kUnsupported naming the thread.
  TaskThread(const std::string& name, Hooks hooks);
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  ~TaskThread();

  // Returns immediately; `task` runs later on the thread.
  void post(std::function<void()> task);
  // The same, but where the thread has nothing to do, the task has run on return, on the calling
  // thread and behind those posted before it.
  void post_here(std::function<void()> task);

  // Runs `hook` before each task of every such thread, for tests that change the order; null
  // removes it.
  static void set_before_task(void (*hook)()) { before_task_ = hook; }

 private:
  static inline std::atomic<void (*)()> before_task_ = nullptr;

  void run();
  void run_batch(std::unique_lock<std::mutex>& lock);
  void guard(const std::function<void()>& call) const;

  // Constant after construction.
  Hooks hooks_;

  std::vector<std::function<void()>> batch_;  // of the thread that has set is_running_

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable posted_;
  std::vector<std::function<void()>> tasks_;
  bool is_running_ = false;  // a batch of tasks
  bool stopping_ = false;

  std::thread thread_;  // last: starts when everything else is ready
};

}  // namespace sluice
