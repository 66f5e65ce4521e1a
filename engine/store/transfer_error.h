// The error of a transfer that its queue could not complete. Callable from any thread.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

struct Transfer;

// `subject` describes the transfer in words, by the data and the place that the data moves to or
// from.
// Requires: the request has an error.
Error transfer_error(const Transfer& transfer, const std::string& subject);

}  // namespace sluice
