// The floating-point environment in which the optimizer's definitions hold: round to nearest,
// denormals neither flushed nor read as zero, exceptions masked. Applications and libraries change
// it behind one's back (a shared object linked with -ffast-math sets flush-to-zero in the thread
// that loads it, and later threads inherit that): results would depend on which thread ran a chunk.
// An object sets the environment of its own thread and puts the former one back; not to be shared
// between threads. x86 only: elsewhere it does nothing.
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
