#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "module/engine.h"

namespace fsdp {

/// Moves saved tensors to the host, but for parameters: they are alive anyway, and the bytes of a
/// group come and go with it.
///
/// A tensor that is saved several times is copied once. Streams: the current one; the host waits
/// for the copy to it, and not for the way back.
class OffloadPacker final : public SavedTensorPacker {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  /// The same values on the host; an alias if the tensor is a parameter.
  [[nodiscard]] at::Tensor pack(const at::Tensor& tensor);

 private:
  struct Place {
    std::vector<int64_t> sizes, strides;
    int64_t offset, version;
    at::ScalarType dtype;
    bool is_conj, is_neg;
    bool operator==(const Place&) const = default;
  };
  struct Copy {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so its address is not another's
    Place place;
    at::Tensor host;
  };
  std::unordered_map<const c10::StorageImpl*, std::vector<Copy>> copies_;
};

}  // namespace fsdp
