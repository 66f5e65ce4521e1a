// A thread that runs posted tasks one after another. The engine's scheduler and its worker are such
// threads. A caller that would otherwise wait for its task can run the task in the thread's place.
// Running the task there is quicker, because waking two threads takes longer than most tasks. Tasks
// that capture at most two pointers need no allocation.
// Thread rule: any thread may call post() and post_here(). The destructor runs the tasks that were
// posted before it, and then joins the thread.
// Invariants: tasks run one at a time, in order, on this thread or in post_here(). Wherever tasks
// run, they find the environment of base/float_environment.h.
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

  // `name` has at most 15 characters, because debuggers show no more.
  // Fails with kUnsupported, naming the thread.
  TaskThread(const std::string& name, Hooks hooks);
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  ~TaskThread();

  // The call returns immediately. The thread runs `task` later.
  void post(std::function<void()> task);
  // Does the same as post(). If the thread has nothing to do, the task has already run on return:
  // on the calling thread, after the tasks posted before it. The tasks that `task` has posted have
  // then run, too, up to a limit.
  void post_here(std::function<void()> task);
  // Does the same as post_here() if no other tasks wait. If other tasks wait, which may be long,
  // does the same as post().
  void post_here_if_idle(std::function<void()> task);

  // Every such thread runs `hook` before each task, for tests that change the order. Null removes
  // the hook.
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
