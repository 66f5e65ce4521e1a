#include "base/float_environment.h"

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace sluice {

// All functions stay out of line. Arithmetic has no dependence on the control register, so only an
// opaque call keeps the compiler from moving it across the switch.
#if defined(__x86_64__) || defined(__i386__)

namespace {

constexpr unsigned kIeeeDefault = 0x1f80;   // nearest, no FTZ (bit 15), no DAZ (bit 6), all masked
constexpr unsigned kExceptionFlags = 0x3f;  // sticky results of earlier operations, not control
// The x87 unit has a rounding mode of its own. libc reads that one where it turns text into numbers
// and back.
constexpr unsigned short kX87Default = 0x037f;  // nearest, 64-bit significands, all masked

unsigned short x87_control() {
  unsigned short control = 0;
  asm volatile("fnstcw %0" : "=m"(control));
  return control;
}

void set_x87_control(unsigned short control) {
  asm volatile("fldcw %0" : : "m"(control));
}

}  // namespace

[[gnu::noinline]] FloatEnvironment::FloatEnvironment() noexcept
    : saved_control_(_mm_getcsr()), saved_x87_(x87_control()) {
  set_float_environment();
}

[[gnu::noinline]] FloatEnvironment::~FloatEnvironment() {
  _mm_setcsr(saved_control_);
  if (x87_control() != saved_x87_) set_x87_control(saved_x87_);
}

[[gnu::noinline]] void set_float_environment() noexcept {
  if ((_mm_getcsr() & ~kExceptionFlags) != kIeeeDefault) _mm_setcsr(kIeeeDefault);
  if (x87_control() != kX87Default) set_x87_control(kX87Default);
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

[[gnu::noinline]] FloatEnvironment::FloatEnvironment() noexcept
    : saved_control_(control_register()) {
  set_float_environment();
}

[[gnu::noinline]] FloatEnvironment::~FloatEnvironment() {
  if (control_register() != saved_control_) set_control_register(saved_control_);
}

// All bits 0: nearest, no flush to zero, NaNs keep their payload, no traps.
[[gnu::noinline]] void set_float_environment() noexcept {
  if (control_register() != 0) set_control_register(0);
}

#else

FloatEnvironment::FloatEnvironment() noexcept : saved_control_(0) {}
FloatEnvironment::~FloatEnvironment() = default;
void set_float_environment() noexcept {}

#endif

}  // namespace sluice
