#include "engine/store/block_places.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include "base/named_thread.h"

namespace sluice {

BlockPlaces::BlockPlaces(std::uint32_t count) : places_(count) {
  SLUICE_CHECK(count != 0, "there is a place for a block");
  try {
    for (std::uint32_t place = 0; place < count; ++place)
      threads_.push_back(start_thread("sluice-state", [this, place] { run(place); }));
  } catch (...) {
    stop();
    throw;
  }
}

BlockPlaces::~BlockPlaces() {
  stop();
}

void BlockPlaces::stop() {
  {
    const std::scoped_lock lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockPlaces::await(std::uint32_t place) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !places_[place]; });
  if (failure_) std::rethrow_exception(failure_);
}

void BlockPlaces::start(std::uint32_t place, std::function<void()> task) {
  {
    const std::scoped_lock lock(mutex_);
    SLUICE_CHECK(!places_[place], "a place has one task at a time");
    places_[place] = std::move(task);
  }
  changed_.notify_all();
}

void BlockPlaces::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return std::ranges::none_of(places_, [](const auto& task) { return static_cast<bool>(task); });
  });
  if (failure_) std::rethrow_exception(failure_);
}

void BlockPlaces::run(std::uint32_t place) {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return places_[place] || is_stopping_; });
    if (!places_[place]) return;
    const std::function<void()> task = places_[place];
    const bool may_run = !failure_;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      if (may_run) task();
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    if (thrown && !failure_) failure_ = thrown;
    places_[place] = nullptr;
    changed_.notify_all();
  }
}

}  // namespace sluice
