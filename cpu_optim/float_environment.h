// The floating-point environment in which the optimizer's definitions hold: round to nearest,
// denormals neither flushed nor read as zero, exceptions masked. Applications and libraries change
// it unnoticed: a shared object linked with -ffast-math sets flush-to-zero in the thread that loads
// it, and later threads inherit that. Results would then depend on which thread ran a chunk. An
// object of this class sets the environment of its own thread and restores the former one; it must
// not be shared between threads. On processors other than x86 it does nothing.
#pragma once

namespace sluice {

class FloatEnvironment {
 public:
  FloatEnvironment() noexcept;
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned saved_control_;
};

}  // namespace sluice
