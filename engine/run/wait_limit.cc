#include "engine/run/wait_limit.h"

namespace sluice {
namespace {

thread_local std::optional<std::chrono::milliseconds> thread_wait_limit;
thread_local bool thread_wait_is_limited = false;

}  // namespace

WaitLimit::WaitLimit(std::chrono::milliseconds limit) {
  thread_wait_limit = limit;
}

WaitLimit::~WaitLimit() {
  thread_wait_limit.reset();
}

LimitedWait::LimitedWait() {
  thread_wait_is_limited = true;
}

LimitedWait::~LimitedWait() {
  thread_wait_is_limited = false;
}

std::optional<std::chrono::milliseconds> wait_limit() {
  return thread_wait_is_limited ? thread_wait_limit : std::nullopt;
}

}  // namespace sluice
