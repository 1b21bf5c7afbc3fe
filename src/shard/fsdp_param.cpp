#include "shard/fsdp_param.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/error.h"
#include "shard/storage.h"

namespace fsdp {

FSDPParam::FSDPParam(at::Tensor param, std::string name, ShardedTensorSpecPtr spec, FlatParam& flat)
    : name_(std::move(name)),
      spec_(std::move(spec)),
      local_sizes_(local_sizes(*spec_)),
      flat_(&flat),
      unsharded_param_(std::move(param)) {
  const int64_t rank = spec_->mesh->get_local_rank(spec_->shard_mesh_dim);
  shard_offset_ =
      std::clamp<int64_t>(spec_->flat_start - rank * spec_->shard_numel, 0, spec_->shard_numel);
  const bool requires_grad = unsharded_param_.requires_grad();
  sharded_param_ = part_of_flat_shard();
  sharded_param_.copy_(
      unsharded_param_.detach().narrow(spec_->shard_dim, spec_->row_begin, spec_->num_rows));
  sharded_param_.set_requires_grad(requires_grad);
}

void FSDPParam::set_fqn(const std::string& fqn) {
  auto spec = std::make_shared<ShardedTensorSpec>(*spec_);
  spec->fqn = fqn;
  spec->dtype = sharded_param_.scalar_type();
  spec_ = std::move(spec);
  label_ = make_label(spec_);
  attach_label(sharded_param_, label_);
  if (sharded_param_.grad().defined()) attach_label(sharded_param_.grad(), label_);
}

at::Tensor FSDPParam::part_of_flat_shard() const {
  return tensor_over(flat_->shard().storage(), flat_->orig_dtype(), shard_offset_, local_sizes_);
}

bool FSDPParam::is_on_flat_unsharded() const {
  const at::Tensor& flat = flat_->unsharded();
  return unsharded_param_.storage().unsafeGetStorageImpl() ==
             flat.storage().unsafeGetStorageImpl() &&
         unsharded_param_.storage_offset() == flat.storage_offset() + spec_->flat_start &&
         unsharded_param_.sizes() == at::IntArrayRef(spec_->sizes) &&
         unsharded_param_.is_contiguous();
}

void FSDPParam::init_unsharded_param() {
  if (is_on_flat_unsharded()) return;
  const at::Tensor& flat = flat_->unsharded();
  unsharded_param_.set_data(tensor_over(flat.storage(), flat.scalar_type(),
                                        flat.storage_offset() + spec_->flat_start, spec_->sizes));
  mark_unsharded_param(unsharded_param_);
  note_unsharded();
  admit_gradients();
  refused_grad_.reset();
}

bool FSDPParam::is_on_flat_shard() const {
  return sharded_param_.storage().is_alias_of(flat_->shard().storage()) &&
         sharded_param_.storage_offset() == shard_offset_ &&
         sharded_param_.scalar_type() == flat_->orig_dtype() &&
         sharded_param_.sizes() == at::IntArrayRef(local_sizes_);
}

void FSDPParam::check_local_shape() const {
  FSDP_CHECK(StateError, sharded_param_.sizes() == at::IntArrayRef(local_sizes_),
             "unshard: the sharded parameter ", describe(spec_->fqn, spec_->sizes),
             " was replaced by a tensor of shape ", sharded_param_.sizes(),
             ", expected this rank's part, ", at::IntArrayRef(local_sizes_),
             ". A whole tensor must be cut first: distribute_tensor(tensor, sharded_parameter).");
}

void FSDPParam::move_to_flat_shard() {
  const at::Tensor part = part_of_flat_shard();
  part.copy_(sharded_param_.detach());
  sharded_param_.set_data(part);
}

bool FSDPParam::changed_since_gather() const {
  return sharded_param_._version() != gathered_version_ || !is_on_flat_shard();
}

void FSDPParam::check_not_written() {
  const bool has_own_storage = unsharded_param_.storage().is_alias_of(flat_->unsharded().storage());
  const int64_t version = unsharded_param_._version();
  if (has_own_storage && version == unsharded_version_) return;
  unsharded_version_ = version;  // told once; the next reshard goes on
  if (!has_own_storage) init_unsharded_param();
  FSDP_CHECK(
      StateError, false, "reshard: the unsharded parameter ", describe(spec_->fqn, spec_->sizes),
      " was ", has_own_storage ? "written to" : "given other data with set_data()",
      " while it was gathered, and would lose that now. Write to the sharded parameter (that "
      "of parameters()) instead: copy_(distribute_tensor(whole, sharded_parameter)).");
}

void FSDPParam::check_in_place() {
  if (is_on_flat_unsharded()) return;
  init_unsharded_param();  // told once
  FSDP_CHECK(StateError, false, "unshard: the unsharded parameter ",
             describe(spec_->fqn, spec_->sizes),
             " was given another shape or other data while it was sharded (as t_() and set_data() "
             "do). Write to the sharded parameter (that of parameters()) instead: "
             "copy_(distribute_tensor(whole, sharded_parameter)).");
}

void FSDPParam::refuse_optimizers() {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (grad.defined() || !unsharded_param_.requires_grad()) return;
  if (!refused_grad_.defined()) {
    const c10::InferenceMode normal_tensors(/*enabled=*/false);
    const at::ScalarType dtype = unsharded_param_.scalar_type();
    const at::Storage storage = make_freed_storage(
        c10::multiply_integers(spec_->sizes) * static_cast<int64_t>(c10::elementSize(dtype)),
        unsharded_param_.device(),
        c10::str("fsdp: the gradient of ", describe(spec_->fqn, spec_->sizes),
                 " is at the sharded parameter. An optimizer (or whoever reads this one) that was "
                 "given the module's parameters before fully_shard() would train nothing: build it "
                 "after fully_shard(), from fsdp::parameters(model)."));
    refused_grad_ = tensor_over(storage, dtype, 0, spec_->sizes);
  }
  grad = refused_grad_;
}

void FSDPParam::admit_gradients() {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (grad.defined() && grad.is_same(refused_grad_)) grad.reset();
}

void FSDPParam::copy_out(const at::Tensor& parts_WN) const {
  const at::Tensor& flat = flat_->unsharded();
  if (flat_->has_post_forward_shard()) {
    flat.view(parts_WN.sizes()).copy_(parts_WN);  // parts of the whole, in order
  } else {
    copy_parts_to_whole(*spec_, parts_WN, flat);
  }
}

void FSDPParam::sync_requires_grad() {
  const bool requires_grad = sharded_param_.requires_grad();
  if (unsharded_param_.requires_grad() != requires_grad) {
    unsharded_param_.set_requires_grad(requires_grad);
  }
}

void FSDPParam::to_unsharded() {
  sync_requires_grad();
  note_unsharded();
  admit_gradients();  // of a use outside of forward
}

void FSDPParam::accumulate_unsharded_grad() {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (!accumulated_grad_.defined() || !grad.defined()) return;
  accumulated_grad_.add_(grad);
  grad.reset();
}

void FSDPParam::keep_unsharded_grad(at::ScalarType dtype) {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (!grad.defined() || grad.scalar_type() == dtype) return;
  accumulated_grad_ = grad.to(dtype);
  grad.reset();
}

bool FSDPParam::has_unsharded_grad() const {
  return accumulated_grad_.defined() || unsharded_param_.grad().defined();
}

at::Tensor FSDPParam::take_unsharded_grad() {
  at::Tensor grad = std::move(unsharded_param_.mutable_grad());
  return accumulated_grad_.defined() ? std::move(accumulated_grad_) : grad;
}

void FSDPParam::accept_sharded_grad(const at::Tensor& grads, int64_t offset) {
  const at::Tensor grad = tensor_over(grads.storage(), grads.scalar_type(),
                                      grads.storage_offset() + offset, local_sizes_);
  at::Tensor& existing = sharded_param_.mutable_grad();
  if (existing.defined()) {
    existing.add_(grad);
  } else {
    existing = grad;
  }
  attach_label(existing, label_);  // autograd may have made the existing one
  if (auto* hook = torch::autograd::impl::post_acc_grad_hooks(sharded_param_).get()) {
    (*hook)(sharded_param_);
  }
}

}  // namespace fsdp
