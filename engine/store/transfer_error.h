// The error of a transfer that the queue could not complete, and whether it is repeated. Any thread
// may call the functions.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

struct Transfer;

// `subject` describes the transfer in words. The text names the data, and the place that the data
// comes from or goes to.
// Requires: the transfer's request has an error.
Error transfer_error(const Transfer& transfer, const std::string& subject);

// Returns whether to read again after a fault. Data that was damaged only on its way comes whole
// the second time. A transfer is read again once.
bool repeats_read(Transfer& transfer);

}  // namespace sluice
