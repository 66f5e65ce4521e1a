// The error of a transfer that the queue could not complete. Any thread may call the function.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

struct Transfer;

// `subject` describes the transfer in words. The text names the data, and the place that the data
// comes from or goes to.
// Requires: the transfer's request has an error.
Error transfer_error(const Transfer& transfer, const std::string& subject);

}  // namespace sluice
