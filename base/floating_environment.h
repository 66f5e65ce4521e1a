// How a thread rounds, and what it does with denormal numbers. A thread inherits both from the
// thread that starts it. Work that belongs to one thread and runs on another takes the environment
// of the first, because an application may flush denormal numbers to zero on its own threads.
//
// Thread rule: the object affects the thread that makes it, which also has to destroy it.
#pragma once

#include <cfenv>

namespace sluice {

// While it exists, the calling thread rounds and flushes as `environment` does.
class FloatingEnvironment {
 public:
  explicit FloatingEnvironment(const std::fenv_t& environment) {
    std::fegetenv(&own_);
    std::fesetenv(&environment);
  }
  ~FloatingEnvironment() { std::fesetenv(&own_); }
  FloatingEnvironment(const FloatingEnvironment&) = delete;
  FloatingEnvironment& operator=(const FloatingEnvironment&) = delete;

 private:
  std::fenv_t own_{};
};

}  // namespace sluice
