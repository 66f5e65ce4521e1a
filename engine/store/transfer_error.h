// The error of a transfer that its queue could not complete. Callable from any thread.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

struct Transfer;

// `subject` describes the transfer in words: the data, and the place that the data moves to or
// from.
// Requires: the transfer's request has an error.
Error transfer_error(const Transfer& transfer, const std::string& subject);

}  // namespace sluice
