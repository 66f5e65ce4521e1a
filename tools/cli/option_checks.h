// The checks that every number on the command line has to pass. The parser alone would wrap -1
// around to 2^64 - 1, read 010 as 8, and let NaN through every range.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace sluice {

// A number from `least` to `most`.
CLI::Validator between(double least, double most);

// A size in bytes, such as 10MiB, above 0.
CLI::Validator is_size();

// "8B" for 8e9, "1.5T" for 1.5e12, "124M", "500K": as people write numbers of parameters.
CLI::Validator count_suffix();
// "7000MB/s" for 7000MB, "7G" for 7GB: as drives are advertised.
CLI::Validator rate_suffix();
// "24G" for 24GiB: as memory is bought.
CLI::Validator memory_suffix();

// To be called once, when all options are there. Makes each numeric option of `app` and its
// subcommands require text that is a decimal number, whole and not negative where the type is, and
// finite.
void check_numbers(CLI::App& app);

// The message for a command line with an unknown command, which the parser reports as missing;
// empty when that is not the mistake.
std::string unknown_command(const CLI::App& app);

}  // namespace sluice
