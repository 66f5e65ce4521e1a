// The floating-point environment in which the definitions of the results are valid. This
// environment rounds to nearest, does not flush denormals or read them as zero, and masks
// exceptions. Applications and libraries often change the environment unnoticed. For example,
// loading a shared object linked with -ffast-math sets flush-to-zero in the loading thread, and
// later threads inherit this setting. Results would then depend on which thread ran a piece of
// work. An object of this class sets the environment of the current thread. The destructor restores
// the former environment. So the application finds its own setting after every call, even if a
// function that the application gave to the call has changed the setting.
//
// Sluice sets the environment where its work begins: in every thread that it starts, in every
// public call that computes, and in every task that a caller runs in another thread's place.
//
// Thread rule: the object belongs to the thread that makes it. On processors other than x86 and
// aarch64, the class does nothing.
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
  unsigned short saved_x87_ = 0;  // x86 only
};

// Sets the environment of the current thread for the rest of its life, or until something else
// changes it. Meant for a thread that Sluice has started.
void set_float_environment() noexcept;

}  // namespace sluice
