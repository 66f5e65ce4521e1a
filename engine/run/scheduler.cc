#include "engine/run/scheduler.h"

#include <algorithm>

#include "engine/run/wait_limit.h"

namespace sluice {

Scheduler::Scheduler()
    : thread_("sluice-sched",
              {.after_tasks = [this] { after_tasks(); },
               .on_exception = [this](std::exception_ptr thrown) { fail(std::move(thrown)); }}) {}

void Scheduler::run(const std::function<void()>& task) {
  std::exception_ptr thrown;
  const std::function<bool()> once = [&] {
    try {
      task();
    } catch (...) {
      thrown = std::current_exception();
    }
    return true;  // a waiter is checked until it says yes, so this runs once
  };
  await_settled(once);
  if (thrown != nullptr) std::rethrow_exception(thrown);
}

void Scheduler::await(const std::function<bool()>& ready) {
  Waiter waiter{.ready = ready, .heeds_failure = true};
  wait_for(waiter);
  throw_if_failed();
}

void Scheduler::await_settled(const std::function<bool()>& ready) {
  Waiter waiter{.ready = ready, .heeds_failure = false};
  wait_for(waiter);
}

void Scheduler::wait_for(Waiter& waiter) {
  post_here([this, &waiter] { waiters_.push_back(&waiter); });
  std::unique_lock lock(mutex_);
  const auto is_done = [&] { return waiter.done; };
  const auto limit = waiter.heeds_failure ? wait_limit() : std::nullopt;
  if (!limit) return changed_.wait(lock, is_done);
  if (changed_.wait_for(lock, *limit, is_done)) return;
  lock.unlock();
  // The waiter lives on this stack, so it has to leave the list first. It may be done by then. It
  // is asked once more, because it may have come in the same batch of tasks: a caller that repeats
  // a short wait would never be asked.
  bool has_left = false, has_ended = false;
  post([&] {
    const bool ended = std::erase(waiters_, &waiter) != 0 && !may_go_on(waiter);
    const std::scoped_lock inner(mutex_);
    has_ended = ended;
    has_left = true;
    changed_.notify_all();
  });
  lock.lock();
  changed_.wait(lock, [&] { return has_left; });
  if (has_ended) throw WaitEnded();
}

void Scheduler::settle_with(std::function<bool()> settle) {
  run([&] { settle_ = std::move(settle); });
}

// Waiters may move things in run(), too.
void Scheduler::after_tasks() {
  (void)settle();
  do {
    wake_waiters();
  } while (settle());
}

bool Scheduler::settle() {
  try {
    return settle_ && settle_();
  } catch (...) {
    fail(std::current_exception());
    return false;
  }
}

void Scheduler::wake_waiters() {
  bool woke = false;
  std::erase_if(waiters_, [&](Waiter* waiter) {
    if (!may_go_on(*waiter)) return false;
    const std::scoped_lock lock(mutex_);
    waiter->done = true;  // from here on the waiter may be gone
    woke = true;
    return true;
  });
  if (woke) changed_.notify_all();
}

// A predicate that throws has failed; a waiter that ignores failures is checked again.
bool Scheduler::may_go_on(const Waiter& waiter) {
  try {
    return (waiter.heeds_failure && failed()) || waiter.ready();
  } catch (...) {
    fail(std::current_exception());
    return waiter.heeds_failure;
  }
}

void Scheduler::fail(const Error& error) {
  {
    const std::scoped_lock lock(mutex_);
    if (failure_ != nullptr) return;
    failure_ = std::make_exception_ptr(error);
    has_failed_ = true;
  }
  post([] {});  // makes the scheduler look at its waiters
}

void Scheduler::fail(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(Error(ErrorCode::kInternal, error.what()));
  }
}

void Scheduler::throw_if_failed() const {
  std::exception_ptr failure;
  {
    const std::scoped_lock lock(mutex_);
    failure = failure_;
  }
  if (failure == nullptr) return;
  is_heard_ = true;
  std::rethrow_exception(failure);
}

}  // namespace sluice
