// Ctrl-C and SIGTERM as a flag that a loop looks at between steps. A second signal ends the process
// at once; storage files have no names, so nothing is left behind then either.
#pragma once

namespace sluice {

// From here on the first SIGINT or SIGTERM sets the flag.
void catch_interrupts();
bool interrupted();

}  // namespace sluice
