// Calls a function for each number of a range, on as many threads as there are granted cores.
#pragma once

#include <cstddef>
#include <functional>

namespace sluice {

// Calls `run` once with each number from 0 to count - 1. The calls run at the same time, on at most
// as many threads as the process may use. Returns when every call has returned. If calls throw, one
// of their exceptions leaves this function.
void for_each_at_once(std::size_t count, const std::function<void(std::size_t)>& run);

}  // namespace sluice
