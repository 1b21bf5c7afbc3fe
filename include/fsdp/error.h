#pragma once

#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

/// The four kinds of error that the library raises, all of them c10::Error.
///
/// A message says: which function; which parameter, rank or file; what was expected and what was
/// found; what to do. FSDP_CHECK is for what a user, a file or a peer can cause,
/// TORCH_INTERNAL_ASSERT for what only a bug of this library can.
namespace fsdp {

/// What was asked for cannot be done. Nothing has changed.
class ConfigError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// Not now: the message says what has to be called first.
class StateError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// A peer or a link failed. The group is lost; the message names the ranks where they are known.
class CommError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// A file is missing, damaged or of another model. Nothing was loaded.
class CheckpointError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// The text of an error without the C++ stack trace.
[[nodiscard]] std::string message_of(const std::exception& error);

}  // namespace fsdp

/// Throws `Type` with the message made of the remaining arguments unless `condition` holds.
#define FSDP_CHECK(Type, condition, ...)                                                          \
  do {                                                                                            \
    if (C10_UNLIKELY(!(condition))) {                                                             \
      throw Type({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, ::c10::str(__VA_ARGS__)); \
    }                                                                                             \
  } while (false)
