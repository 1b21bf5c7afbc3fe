#pragma once

#include <string>
#include <string_view>

#include <ATen/record_function.h>

namespace fsdp {

/// Names what this thread does while it lives, "label (path)", for profilers, CommDebugMode and the
/// simulated accelerator. Without one that listens it costs a test.
class Range {
 public:
  explicit Range(const char* label, const std::string& path = {}, const char* before_path = " (",
                 const char* after_path = ")")
      : record_(at::RecordScope::USER_SCOPE) {
    if (!record_.isActive()) return;
    name_ = path.empty() ? label : label + (before_path + path + after_path);
    record_.before(std::string_view(name_));
  }

 private:
  std::string name_;  // the record refers to it
  at::RecordFunction record_;
};

}  // namespace fsdp
