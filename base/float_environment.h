// This header sets the floating-point environment in which Sluice's results are defined. In this
// environment, the processor rounds to nearest, keeps denormals, and masks exceptions. Applications
// and libraries often change the environment without notice. For example, a thread gets
// flush-to-zero when it loads a shared object that was linked with -ffast-math. If this thread
// later starts other threads, the other threads inherit the setting. With such a setting, a result
// would depend on the thread that computes the result. An object of this class sets this
// environment for the current thread. The destructor restores the former environment. So every call
// of Sluice leaves the application's own setting unchanged. The destructor also undoes a change
// that a callback of the application makes during the call.
//
// Sluice sets the environment in every thread that Sluice starts, and in every public call that
// computes. A calling thread may run a task in place of a worker. Sluice sets the environment in
// every such task, too.
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
