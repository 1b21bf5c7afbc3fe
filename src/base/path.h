#pragma once

#include <string>

namespace fsdp {

/// "a" and "b" give "a.b"; an empty part is left out.
[[nodiscard]] inline std::string join_path(const std::string& prefix, const std::string& name) {
  if (prefix.empty()) return name;
  return name.empty() ? prefix : prefix + "." + name;
}

}  // namespace fsdp
