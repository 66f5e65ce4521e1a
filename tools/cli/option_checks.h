// Checks of the values on the command line. No value is empty, unless an empty one has a meaning.
// Every number has to pass these checks, too. Without these checks, the parser would
// turn -1 into 2^64 - 1, read 010 as 8, and accept NaN in every range. Options also accept numbers
// such as 8B, 24G and 7000MB/s. Only this file defines how such numbers are read.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

// The validator accepts a number from `least` to `most`.
CLI::Validator between(double least, double most);

// The validator accepts the names of `values`, in upper or lower case, and puts the number of each
// in its place. So the option can be an enumeration.
CLI::Validator one_of(std::vector<std::pair<std::string, int>> values);

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

// Must be called once, after all options have been defined. After the call, no option of `app` and
// its subcommands accepts an empty value. Prompts and words without a name have checks of their
// own.
void refuse_empty_texts(CLI::App& app);

// Returns the first word of the form "--name=". Behind such a word the parser would take the next
// word for the value.
std::optional<std::string> option_without_value(std::span<const char* const> words);

}  // namespace sluice
