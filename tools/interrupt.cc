#include "tools/interrupt.h"

#include <csignal>

namespace sluice {
namespace {

volatile std::sig_atomic_t was_interrupted = 0;

extern "C" void note_interrupt(int signal_number) {
  was_interrupted = 1;
  std::signal(signal_number, SIG_DFL);
}

}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, note_interrupt);
  std::signal(SIGTERM, note_interrupt);
}

bool interrupted() {
  return was_interrupted != 0;
}

}  // namespace sluice
