#include "engine/run/worker.h"

#include <utility>

namespace sluice {

Worker::Worker(unsigned threads, Scheduler& scheduler)
    : scheduler_(scheduler),
      optimizer_(threads),
      thread_("sluice-work", {.after_tasks = {}, .on_exception = [this](std::exception_ptr thrown) {
                                scheduler_.fail(std::move(thrown));
                              }}) {}

void Worker::post(std::function<void()> work, std::function<void()> done) {
  thread_.post(task(std::move(work), std::move(done)));
}

void Worker::post_here(std::function<void()> work, std::function<void()> done) {
  thread_.post_here_if_idle(task(std::move(work), std::move(done)));
}

std::function<void()> Worker::task(std::function<void()> work, std::function<void()> done) {
  scheduler_.work().begin(Work::kCpu);
  return [this, work = std::move(work), done = std::move(done)]() mutable {
    try {
      work();
    } catch (...) {
      scheduler_.fail(std::current_exception());
    }
    scheduler_.post([this, done = std::move(done)] {
      scheduler_.work().end(Work::kCpu);
      done();
    });
  };
}

}  // namespace sluice
