#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

namespace fsdp {

/// The arguments of a recorded call: RecordFunction::inputs(), which asserts in a debug build what
/// only a debug build of libtorch sets. (An explicit instantiation may name a private member.)
inline c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& record);

template <auto kInputs>
struct InputsOf {
  friend inline c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& record) {
    return record.*kInputs;
  }
};
template struct InputsOf<&at::RecordFunction::inputs_>;

}  // namespace fsdp
