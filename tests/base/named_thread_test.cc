#include "base/named_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <string>

namespace sluice {
namespace {

sigset_t blocked_here() {
  sigset_t blocked;
  (void)::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return blocked;
}

bool blocks(const sigset_t& blocked, int number) {
  return ::sigismember(&blocked, number) == 1;
}

TEST(NamedThread, LeavesTheSignalsOfTheProcessToOtherThreads) {
  const sigset_t before = blocked_here();
  sigset_t blocked{};
  start_thread("tested", [&] { blocked = blocked_here(); }).join();
  for (const int number :
       {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGALRM, SIGCHLD, SIGPIPE, SIGXFSZ, SIGRTMIN})
    EXPECT_TRUE(blocks(blocked, number)) << ::strsignal(number);
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF})
    EXPECT_FALSE(blocks(blocked, number)) << ::strsignal(number);
  const sigset_t after = blocked_here();
  for (int number = 1; number < NSIG; ++number)
    EXPECT_EQ(blocks(after, number), blocks(before, number)) << number;
}

// Signals that were blocked before stay blocked behind the object.
TEST(NamedThread, SignalsAreBlockedAsLongAsAnObjectLives) {
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, SIGUSR2);
  sigset_t before;
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &one, &before), 0);
  {
    const SignalsBlocked signals;
    EXPECT_TRUE(blocks(blocked_here(), SIGTERM));
    EXPECT_FALSE(blocks(blocked_here(), SIGSEGV));
    const SignalsBlocked inner;
  }
  EXPECT_FALSE(blocks(blocked_here(), SIGTERM));
  EXPECT_TRUE(blocks(blocked_here(), SIGUSR2));
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, &before, nullptr), 0);
}

}  // namespace
}  // namespace sluice
