#include "gpu/ranks/rank_failure.h"

#include <utility>

namespace sluice {

void RankFailure::set(const Error& error) {
  const std::scoped_lock lock(mutex_);
  if (first_) return;
  first_ = error;
  if (handler_) handler_(error);
}

bool RankFailure::is_set() const {
  const std::scoped_lock lock(mutex_);
  return first_.has_value();
}

void RankFailure::throw_if_set() const {
  const std::scoped_lock lock(mutex_);
  if (first_) throw Error(*first_);
}

void RankFailure::on_failure(std::function<void(const Error&)> handler) {
  const std::scoped_lock lock(mutex_);
  handler_ = std::move(handler);
  if (handler_ && first_) handler_(*first_);
}

}  // namespace sluice
