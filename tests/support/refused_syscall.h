// The function runs a part of a test on a separate thread. On this thread, the kernel refuses one
// system call. Older kernels, containers and simpler file systems refuse calls in the same way. A
// seccomp filter makes the kernel refuse the call. The filter needs no privilege and ends with its
// thread.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <cstddef>
#include <cstdint>
#include <thread>

namespace sluice::test {

struct RefusedSyscall {
  long number = 0;  // SYS_...
  int error = 0;    // the errno that the kernel returns
  // The index of an argument. A call is refused only if the argument with this index has all bits
  // of `bits`. If `bits` is 0, every call is refused.
  unsigned argument = 0;
  std::uint32_t bits = 0;
};

inline bool refuse_for_this_thread(const RefusedSyscall& refused) {
  const auto argument_offset = static_cast<std::uint32_t>(
      offsetof(seccomp_data, args) + refused.argument * sizeof(std::uint64_t));  // the low half
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(refused.number), 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, argument_offset),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, refused.bits),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused.bits, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(refused.error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof(code) / sizeof(code[0]), code};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// If filters are not allowed, the function returns false and does not run `body`. In that case, the
// test should be skipped.
template <class Body>
[[nodiscard]] bool run_with_refused(const RefusedSyscall& refused, const Body& body) {
  bool filtered = false;
  std::thread([&] {
    filtered = refuse_for_this_thread(refused);
    if (filtered) body();
  }).join();
  return filtered;
}

}  // namespace sluice::test
