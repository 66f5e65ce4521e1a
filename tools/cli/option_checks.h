// Every number on the command line has to pass these checks. Without these checks, the parser would
// turn -1 into 2^64 - 1, read 010 as 8, and accept NaN in every range. Options also accept numbers
// such as 8B, 24G and 7000MB/s. Only this file defines how such numbers are read.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// The validator accepts a number from `least` to `most`.
CLI::Validator between(double least, double most);

// The validator accepts a size of more than 0 bytes, such as 10MiB or 24G.
CLI::Validator is_size();

// This validator must be used together with is_size(). An option with rate_suffix() and is_size()
// also accepts rates in the form that data sheets use. For example, the option accepts "7000MB/s"
// as 7000MB, and "7G" as 7GB.
CLI::Validator rate_suffix();

// Must be called once, after all options have been defined. After the call, each numeric option of
// `app` and its subcommands accepts only finite decimal numbers. An option of an integer type
// accepts only whole numbers. An option of an unsigned type accepts no negative numbers. A number
// may end in K (thousands), M (millions), B or G (billions) or T (trillions), in upper or lower
// case.
void check_numbers(CLI::App& app);

}  // namespace sluice
