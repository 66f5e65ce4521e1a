// A thread that runs posted tasks one after another. The engine's scheduler and its worker are such
// threads. If a caller would otherwise wait for its task, the caller can run the task itself. Then
// the task is done sooner, because waking two threads takes longer than most tasks. Tasks that
// capture at most two pointers need no allocation.
// Thread rule: any thread may call post() and post_here(). The destructor runs the tasks that were
// posted earlier, and then joins the thread.
// Invariants: tasks run one at a time, in order, on this thread or in post_here(). All tasks run in
// the floating-point environment of base/float_environment.h.
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
    std::function<void()> after_tasks;  // after a batch, on the thread that ran it; may be empty
    std::function<void(std::exception_ptr)>
        on_exception;  // on the same thread, when a task or after_tasks throws
  };

  // `name` has at most 15 characters, because debuggers do not show longer names.
  // Fails with kUnsupported if the machine cannot start a thread. The message names the thread.
  TaskThread(const std::string& name, Hooks hooks);
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  ~TaskThread();

  // The call returns immediately. The thread runs `task` later.
  void post(std::function<void()> task);
  // Does the same as post(). If the thread is idle, the calling thread runs the waiting tasks, and
  // then `task`, before the call returns. The calling thread also runs the tasks that `task` posts,
  // up to a limit.
  void post_here(std::function<void()> task);
  // If no other tasks wait, the call does the same as post_here(). If other tasks wait, the call
  // does the same as post(), because the waiting tasks may take long.
  void post_here_if_idle(std::function<void()> task);

  // Every TaskThread runs `hook` before each task. Tests use the hook to change the order of
  // events. A null pointer removes the hook.
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
  bool is_running_ = false;  // whether a batch of tasks is running
  bool stopping_ = false;

  std::thread thread_;  // last: starts when everything else is ready
};

}  // namespace sluice
