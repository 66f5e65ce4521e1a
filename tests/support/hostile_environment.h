// Floating-point environments in which an application may call Sluice. run_under() runs work in
// such an environment.
#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace sluice::test {

#if defined(__x86_64__) || defined(__aarch64__)
inline constexpr bool kKnowsEnvironment = true;
#else
inline constexpr bool kKnowsEnvironment = false;
#endif

#if defined(__x86_64__)
inline constexpr unsigned kDefault = 0x1f80;
inline constexpr unsigned kHostile[] = {
    0x1f80 | 0x8040,           // flush to zero, denormals are zero
    0x1f80 | 0x6000,           // round toward zero
    0x1f80 | 0x8040 | 0x2000,  // flush to zero, denormals are zero, round down
};
// Returns the control register without the sticky exception flags.
inline unsigned control() {
  return _mm_getcsr() & ~0x3fu;
}
inline void set_control(unsigned value) {
  _mm_setcsr(value);
}
#elif defined(__aarch64__)
inline constexpr unsigned kDefault = 0;
inline constexpr unsigned kHostile[] = {
    1u << 24,             // flush to zero
    3u << 22,             // round toward zero
    1u << 24 | 2u << 22,  // flush, and round down
    1u << 25 | 1u << 24,  // flush, and NaNs lose their payload
};
inline unsigned control() {
  std::uint64_t value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return static_cast<unsigned>(value);
}
inline void set_control(unsigned value) {
  asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{value}));
}
#else
inline constexpr unsigned kDefault = 0;
inline constexpr unsigned kHostile[] = {0};
inline unsigned control() {
  return 0;
}
inline void set_control(unsigned) {}
#endif

// The function runs `body` in the environment `hostile`. Returns the value of the control register
// after the run. On x86, libc asks the x87 unit for the rounding mode. So during the run, the x87
// unit also rounds downward.
template <class Body>
unsigned run_under(unsigned hostile, const Body& body) {
  (void)std::fesetround(FE_DOWNWARD);
  set_control(hostile);
  body();
  const unsigned after = control();
  (void)std::fesetround(FE_TONEAREST);
  set_control(kDefault);
  return after;
}

}  // namespace sluice::test
