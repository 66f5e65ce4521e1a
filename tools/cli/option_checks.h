// The checks that every number on the command line has to pass. The parser alone would wrap -1
// around to 2^64 - 1, read 010 as 8, and let NaN through every range. Options also take numbers
// such as 8B, 24G and 7000MB/s. Only this file reads such numbers.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// A number from `least` to `most`.
CLI::Validator between(double least, double most);

// A size in bytes, such as 10MiB or 24G, above 0.
CLI::Validator is_size();

// Also accepts rates as data sheets print them: "7000MB/s" for 7000MB, and "7G" for 7GB. The suffix
// is for options with is_size().
CLI::Validator rate_suffix();

// The call comes once, when all options are defined. Makes each numeric option of `app` and its
// subcommands require a finite decimal number. For an integer type, the number must be whole. For
// an unsigned type, the number must not be negative. The number may end in K, M, B, G or T, in
// upper or lower case, for thousands, millions, billions (both B and G) and trillions.
void check_numbers(CLI::App& app);

}  // namespace sluice
