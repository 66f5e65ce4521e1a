// Expects that a call throws sluice::Error with a certain code, and returns the message for further
// checks. Thread rule: any thread.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include <sluice/error.h>

namespace sluice::test {

template <class Body>
std::string expect_error(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(name_of(error.code()), name_of(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected an error \"" << name_of(code) << "\", none was thrown";
  return {};
}

}  // namespace sluice::test
