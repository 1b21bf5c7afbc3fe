#include "module/offload.h"

#include <ATen/ops/empty_like.h>

#include "shard/storage.h"

namespace fsdp {
namespace {

class OffloadHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit OffloadHooks(OffloadPacker& packer) : packer_(&packer) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    device_ = tensor.device();
    packed_ = packer_->pack(tensor);
    packer_ = nullptr;
  }
  at::Tensor call_unpack_hook() override {
    return packed_.to(device_, packed_.scalar_type(), /*non_blocking=*/true);
  }

 private:
  OffloadPacker* packer_;  // until packed
  at::Tensor packed_;
  c10::Device device_ = c10::Device(c10::kCPU);
};

// A parameter, or a view of one as `weight.t()` is.
bool is_parameter(const at::Tensor& tensor) {
  if (is_group_storage(tensor.storage())) return true;
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  return base.is_leaf() && base.requires_grad();
}

}  // namespace

std::unique_ptr<torch::autograd::SavedVariableHooks> OffloadPacker::make_hooks() {
  return std::make_unique<OffloadHooks>(*this);
}

at::Tensor OffloadPacker::pack(const at::Tensor& tensor) {
  if (!tensor.has_storage() || is_parameter(tensor)) return tensor.tensor_data();
  const Place place{.sizes = tensor.sizes().vec(),
                    .strides = tensor.strides().vec(),
                    .offset = tensor.storage_offset(),
                    .version = static_cast<int64_t>(tensor._version()),
                    .dtype = tensor.scalar_type(),
                    .is_conj = tensor.is_conj(),
                    .is_neg = tensor.is_neg()};
  std::vector<Copy>& copies = copies_[tensor.storage().unsafeGetStorageImpl()];
  for (const Copy& copy : copies) {
    if (copy.place == place && !copy.storage.expired()) return copy.host;
  }
  const at::Tensor host =
      at::empty_like(tensor, tensor.options().device(c10::kCPU).pinned_memory(!tensor.is_cpu()));
  host.copy_(tensor);
  copies.push_back(
      {.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()),
       .place = place,
       .host = host});
  return host;
}

}  // namespace fsdp
