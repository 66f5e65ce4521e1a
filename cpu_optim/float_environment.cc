#include "cpu_optim/float_environment.h"

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

#else

FloatEnvironment::FloatEnvironment() noexcept : saved_control_(0) {}
FloatEnvironment::~FloatEnvironment() = default;

#endif

}  // namespace sluice
