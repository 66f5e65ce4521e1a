// Ctrl-C, SIGTERM and SIGHUP. Each is answered at once, by a line from the handler. Before there is
// anything to save, the first one ends the process; later it sets a flag that a loop looks at
// between steps, and the second one ends the process. Storage files have no names, and temporary
// files are removed, so nothing is left behind in either case. A signal that was ignored when the
// process started (nohup) stays ignored.
//
// Thread rule: one thread; interrupted() from any.
#pragma once

namespace sluice {

// From here on a signal ends the process with exit code 130, and says that nothing was written.
void catch_interrupts();

// From here on the first signal prints `answer`, which ends with a line feed, and sets the flag;
// the next one ends the process by that signal. `answer` must live as long as the process.
void defer_interrupts(const char* answer);

// For ranks whose answers would only repeat another's: signals work as before, and print nothing.
void silence_interrupts();

bool interrupted();

}  // namespace sluice
