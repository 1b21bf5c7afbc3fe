#pragma once

#include <string>
#include <type_traits>

#include <gtest/gtest.h>

#include "fsdp/error.h"

namespace fsdp::testing {

/// The message of the error that `function` throws, which has to be an `Error`.
template <class Error, class Function>
std::string message_thrown(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return message_of(error);
  } catch (const std::exception& error) {
    return std::string("an error of another type: ") + message_of(error);
  }
  return "nothing was thrown";
}

/// The message of whatever `function` throws.
template <class Function>
std::string message_thrown_by(Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return "(nothing was thrown)";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Expects `function` to throw an `Error` whose message contains `part`.
template <class Error, class Function>
void expect_message(Function&& function, const std::string& part) {
  const std::string message = message_thrown<Error>(std::forward<Function>(function));
  EXPECT_NE(message.find(part), std::string::npos) << "expected \"" << part << "\" in: " << message;
}

}  // namespace fsdp::testing
