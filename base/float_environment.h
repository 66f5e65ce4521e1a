// The floating-point environment that all definitions of results assume. In this environment, the
// processor rounds to nearest, keeps denormals, and masks exceptions. Applications and libraries
// often change the environment without notice. For example, a thread gets flush-to-zero when it
// loads a shared object that was linked with -ffast-math. Threads that this thread starts later
// inherit the setting. With such a setting, a result would depend on the thread that computes the
// result. An object of this class sets this environment for the current thread. The destructor
// restores the former environment. So every call of Sluice leaves the application's own setting
// unchanged. The destructor also undoes a change that a callback of the application makes during
// the call.
//
// Sluice sets the environment wherever a thread begins to work for Sluice: in every thread that
// Sluice starts, in every public call that computes, and in every task that a calling thread runs
// in place of a worker.
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

// Sets the environment of the current thread until the thread ends, or until other code changes it.
// The function is meant for threads that Sluice has started.
void set_float_environment() noexcept;

}  // namespace sluice
