#include "engine/store/block_places.h"

#include <utility>

#include <sluice/error.h>
#include "base/named_thread.h"

namespace sluice {

BlockPlaces::BlockPlaces(std::uint32_t count) : places_(count) {
  SLUICE_CHECK(count != 0, "there is a place for a block");
  try {
    for (Place& place : places_)
      threads_.push_back(start_thread("sluice-state", [this, &place] { run(place); }));
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
  for (Place& place : places_) place.changed.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockPlaces::await(std::uint32_t place) {
  std::unique_lock lock(mutex_);
  places_[place].changed.wait(lock, [&] { return places_[place].is_free; });
  if (failure_) std::rethrow_exception(failure_);
}

void BlockPlaces::start(std::uint32_t place, std::function<void()> task) {
  {
    const std::scoped_lock lock(mutex_);
    SLUICE_CHECK(places_[place].is_free, "a place has one task at a time");
    places_[place].task = std::move(task);
    places_[place].is_free = false;
  }
  places_[place].changed.notify_all();
}

void BlockPlaces::finish() {
  std::unique_lock lock(mutex_);
  for (Place& place : places_) place.changed.wait(lock, [&] { return place.is_free; });
  if (failure_) std::rethrow_exception(failure_);
}

void BlockPlaces::run(Place& place) {
  std::unique_lock lock(mutex_);
  while (true) {
    place.changed.wait(lock, [&] { return !place.is_free || is_stopping_; });
    if (place.is_free) return;
    const std::function<void()> task = std::move(place.task);
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
    place.is_free = true;
    place.changed.notify_all();
  }
}

}  // namespace sluice
