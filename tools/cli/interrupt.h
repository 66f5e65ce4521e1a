// How the command handles Ctrl-C, SIGTERM and SIGHUP. The handler answers each signal immediately
// with a line. If there is nothing to save yet, the first signal ends the process. Later, the first
// signal sets a flag that a loop checks between steps, and the second signal ends the process.
// Storage files have no names, and temporary files are removed, so nothing is left behind in either
// case. A signal that was ignored when the process started (nohup) stays ignored.
//
// Thread rule: one thread. Any thread may call interrupted().
#pragma once

namespace sluice {

// From this call on, a signal ends the process with exit code 130. A line then says that nothing
// was written.
void catch_interrupts();

// From this call on, the first signal prints `answer` and sets the flag that interrupted() returns.
// The second signal ends the process by that signal. `answer` must end with a line feed and live as
// long as the process.
void defer_interrupts(const char* answer);

// From this call on, signals work as before but print nothing. The call is for ranks that would
// only repeat another rank's answer.
void silence_interrupts();

bool interrupted();

}  // namespace sluice
