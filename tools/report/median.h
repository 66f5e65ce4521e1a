// The median of measured values, as all commands print it. The function is pure.
#pragma once

#include <algorithm>
#include <vector>

#include <sluice/error.h>

namespace sluice {

// Returns the mean of the two values in the middle if there is an even number of values.
// Requires: at least one value.
inline double median(std::vector<double> values) {
  SLUICE_CHECK(!values.empty(), "a median of something");
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace sluice
