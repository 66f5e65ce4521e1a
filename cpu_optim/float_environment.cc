#include "cpu_optim/float_environment.h"

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace sluice {

// Both functions stay out of line. Arithmetic has no dependence on the control register, so only an
// opaque call keeps the compiler from moving it across the switch.
#if defined(__x86_64__) || defined(__i386__)

FloatEnvironment::FloatEnvironment() noexcept : saved_control_(_mm_getcsr()) {
  constexpr unsigned kIeeeDefault = 0x1f80;  // nearest, no FTZ (bit 15), no DAZ (bit 6), all masked
  constexpr unsigned kExceptionFlags = 0x3f;  // sticky results of earlier operations, not control
  if ((saved_control_ & ~kExceptionFlags) != kIeeeDefault) _mm_setcsr(kIeeeDefault);
}

FloatEnvironment::~FloatEnvironment() {
  _mm_setcsr(saved_control_);
}

#elif defined(__aarch64__)

namespace {

unsigned control_register() {
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return static_cast<unsigned>(control);  // its upper half has no bits
}

void set_control_register(unsigned value) {
  const std::uint64_t control = value;
  asm volatile("msr fpcr, %0" : : "r"(control));
}

}  // namespace

// All bits 0: nearest, no flush to zero, NaNs keep their payload, no traps.
FloatEnvironment::FloatEnvironment() noexcept : saved_control_(control_register()) {
  if (saved_control_ != 0) set_control_register(0);
}

FloatEnvironment::~FloatEnvironment() {
  set_control_register(saved_control_);
}

#else

FloatEnvironment::FloatEnvironment() noexcept : saved_control_(0) {}
FloatEnvironment::~FloatEnvironment() = default;

#endif

}  // namespace sluice
