// The command's signal handler for Ctrl-C, SIGTERM and SIGHUP. The handler prints a line
// immediately after each signal. If there is nothing to save yet, the first signal ends the
// process. Later in a run, the first signal sets a flag that a loop checks between steps, and the
// second signal ends the process. After the process has ended, no file is left, because storage
// files have no names and the handler removes temporary files. If a signal was ignored when the
// process started, as under nohup, the signal stays ignored.
//
// Thread rule: one thread. Any thread may call interrupted().
#pragma once

namespace sluice {

// From this call on, a signal ends the process with exit code 130. The handler then prints that
// nothing was written.
void catch_interrupts();

// From this call on, the handler prints `text` instead. `text` must end with a line feed and live
// as long as the process.
void say_at_interrupt(const char* text);

// From this call on, the first signal prints `answer` and sets the flag that interrupted() returns.
// The second signal kills the process with the signal's default action. `answer` must end with a
// line feed and live as long as the process.
void defer_interrupts(const char* answer);

// From this call on, the handler prints nothing. The effect of signals does not change. A rank
// makes this call if another rank prints the same lines.
void silence_interrupts();

bool interrupted();

}  // namespace sluice
