// The processors to which an OpenMP runtime in this process binds threads. OMP_PROC_BIND,
// OMP_PLACES and variables of the runtimes select them. The runtime binds the thread that loads it
// to one processor. It starts and binds its other threads in the first parallel region, so the
// affinity masks of the threads do not tell before which processors the process computes on. Thread
// rule: any thread.
#pragma once

#include <vector>

namespace sluice {

// Returns the numbers of the processors as the kernel counts them. The result is empty if the
// process has loaded no OpenMP runtime, or if the runtime binds no threads.
std::vector<int> openmp_processors();

}  // namespace sluice
