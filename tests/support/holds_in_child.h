// Runs a check in a forked child, which may change limits, signals and descriptors.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/fork_quietly.h"

namespace sluice::test {

// Returns the result of `holds`. The result is false if the child ends in another way.
template <class Check>
bool holds_in_child(const Check& holds) {
  const pid_t child = fork_quietly();
  if (child == 0) ::_exit(holds() ? 0 : 1);
  int state = 0;
  ::waitpid(child, &state, 0);
  return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

}  // namespace sluice::test
