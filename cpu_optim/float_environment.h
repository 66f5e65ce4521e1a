// The floating-point environment in which the optimizer's definitions are valid. This environment
// rounds to nearest, does not flush denormals or read them as zero, and masks exceptions.
// Applications and libraries often change the environment unnoticed. For example, loading a shared
// object linked with -ffast-math sets flush-to-zero in the loading thread, and later threads
// inherit this setting. Results would then depend on which thread ran a chunk. An object of this
// class sets the environment of the current thread, and the destructor restores the former
// environment. Threads must not share an object. On processors other than x86 and aarch64, the
// class does nothing.
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
