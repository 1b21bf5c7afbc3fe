#include "shard/fsdp_param.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/error.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

int64_t numel_of(at::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

}  // namespace

FSDPParam::FSDPParam(at::Tensor param, std::string name, const FSDPMeshInfo& mesh_info,
                     int64_t shard_dim, c10::Device device)
    : name_(std::move(name)),
      spec_(make_spec(name_, param.sizes(), param.scalar_type(), mesh_info.mesh,
                      mesh_info.shard_mesh_dim, shard_dim)),
      unsharded_param_(std::move(param)) {
  const c10::InferenceMode normal_tensors(/*enabled=*/false);
  const c10::NoGradGuard no_grad;
  const bool requires_grad = unsharded_param_.requires_grad();
  make_shard(unsharded_param_.detach().to(device));
  sharded_param_.set_requires_grad(requires_grad);
  set_fqn(name_);
  make_unsharded_storage(orig_dtype());
}

void FSDPParam::set_fqn(const std::string& fqn) {
  auto spec = std::make_shared<ShardedTensorSpec>(*spec_);
  spec->fqn = fqn;
  spec->dtype = sharded_param_.scalar_type();
  spec_ = std::move(spec);
  attach_spec(sharded_param_, spec_);
  if (sharded_param_.grad().defined()) attach_spec(sharded_param_.grad(), spec_);
  access_error_ = c10::str(
      "fsdp: parameter ", describe(fqn, spec_->sizes),
      " is sharded, so its values are not here. It is whole during its module's forward and "
      "backward; elsewhere call unshard() on the sharded module first, or take the sharded "
      "parameter from parameters().");
  if (gathered_.defined() && state_ != ShardedState::kUnsharded) {
    free_storage(gathered_.storage(), access_error_);
  }
}

// The padded flat shard, and the sharded parameter as its leading part.
void FSDPParam::make_shard(const at::Tensor& full) {
  const at::Tensor rows = full.narrow(spec_->shard_dim, spec_->row_begin, spec_->num_rows);
  flat_shard_ = at::zeros({numel_of(padded_local_sizes(*spec_))}, full.options());
  flat_shard_.narrow(0, 0, rows.numel()).copy_(rows.contiguous().view(-1));
  sharded_param_ =
      tensor_over(flat_shard_.storage(), full.scalar_type(), /*offset=*/0, local_sizes(*spec_));
}

int64_t FSDPParam::gathered_numel() const {
  return flat_shard_.numel() * spec_->mesh->size(spec_->shard_mesh_dim);
}

// The storage that gathers fill: padding lies behind the parameter's own elements.
void FSDPParam::make_unsharded_storage(at::ScalarType dtype) {
  gathered_ = at::empty({gathered_numel()}, flat_shard_.options().dtype(dtype));
  unsharded_param_.set_data(tensor_over(gathered_.storage(), dtype, /*offset=*/0, spec_->sizes));
  mark_unsharded_param(unsharded_param_);
  free_storage(gathered_.storage(), access_error_);
}

void FSDPParam::init_dtypes(const MixedPrecisionPolicy& policy) {
  // The clamp of the reduce dtype comes first, against the policy's own param_dtype, as in FSDP2.
  reduce_dtype_ = policy.reduce_dtype;
  if (reduce_dtype_ == policy.param_dtype) reduce_dtype_.reset();
  at::ScalarType compute_dtype = orig_dtype();
  if (policy.param_dtype && at::isFloatingType(orig_dtype())) compute_dtype = *policy.param_dtype;
  if (compute_dtype != this->compute_dtype() || gathered_.device() != flat_shard_.device()) {
    const c10::InferenceMode normal_tensors(/*enabled=*/false);
    const c10::NoGradGuard no_grad;
    make_unsharded_storage(compute_dtype);
  }
}

bool FSDPParam::is_on_flat_shard() const {
  return sharded_param_.storage().is_alias_of(flat_shard_.storage()) &&
         sharded_param_.storage_offset() == 0 &&
         sharded_param_.scalar_type() == flat_shard_.scalar_type();
}

bool FSDPParam::changed_since_gather() const {
  return sharded_param_._version() != gathered_version_ || !is_on_flat_shard();
}

bool FSDPParam::reset_sharded_param() {
  const std::vector<int64_t> expected = local_sizes(*spec_);
  FSDP_CHECK(StateError, sharded_param_.sizes() == at::IntArrayRef(expected),
             "unshard: the sharded parameter ", describe(spec_->fqn, spec_->sizes),
             " was replaced by a tensor of shape ", sharded_param_.sizes(),
             ", expected this rank's part, ", at::IntArrayRef(expected),
             ". A whole tensor must be cut first: distribute_tensor(tensor, mesh).");
  if (is_on_flat_shard()) return false;
  const c10::InferenceMode normal_tensors(/*enabled=*/false);
  const c10::NoGradGuard no_grad;
  at::Tensor flat = at::zeros({flat_shard_.numel()}, sharded_param_.options());
  flat.narrow(0, 0, sharded_param_.numel()).copy_(sharded_param_.detach().contiguous().view(-1));
  flat_shard_ = std::move(flat);
  sharded_param_.set_data(
      tensor_over(flat_shard_.storage(), flat_shard_.scalar_type(), /*offset=*/0, expected));
  set_fqn(spec_->fqn);
  return true;
}

const at::Tensor& FSDPParam::all_gather_input() const {
  return state_ == ShardedState::kShardedPostForward ? post_forward_shard_ : flat_shard_;
}

void FSDPParam::copy_out(const at::Tensor& parts_WN) {
  allocate_storage(gathered_.storage());
  if (state_ == ShardedState::kShardedPostForward) {
    gathered_.view(parts_WN.sizes()).copy_(parts_WN);  // parts of the whole, in order
  } else {
    copy_parts_to_whole(*spec_, parts_WN, gathered_);
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
  post_forward_shard_.reset();
  state_ = ShardedState::kUnsharded;
}

void FSDPParam::to_sharded() {
  if (state_ == ShardedState::kSharded) return;
  free_storage(gathered_.storage(), access_error_);
  post_forward_shard_.reset();
  state_ = ShardedState::kSharded;
}

void FSDPParam::to_sharded_post_forward(int64_t world_size, int64_t rank) {
  TORCH_INTERNAL_ASSERT(state_ == ShardedState::kUnsharded && gathered_.numel() % world_size == 0);
  const int64_t part_numel = gathered_.numel() / world_size;
  post_forward_shard_ = gathered_.narrow(0, part_numel * rank, part_numel).clone();
  free_storage(gathered_.storage(), access_error_);
  state_ = ShardedState::kShardedPostForward;
}

void FSDPParam::accumulate_unsharded_grad() {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (!accumulated_grad_.defined() || !grad.defined()) return;
  accumulated_grad_.add_(grad);
  grad.reset();
}

void FSDPParam::keep_unsharded_grad() {
  at::Tensor& grad = unsharded_param_.mutable_grad();
  if (!grad.defined() || !reduce_dtype_ || grad.scalar_type() == *reduce_dtype_) return;
  accumulated_grad_ = grad.to(*reduce_dtype_);
  grad.reset();
}

bool FSDPParam::has_unsharded_grad() const {
  return accumulated_grad_.defined() || unsharded_param_.grad().defined();
}

at::Tensor FSDPParam::take_unsharded_grad() {
  at::Tensor grad = std::move(unsharded_param_.mutable_grad());
  return accumulated_grad_.defined() ? std::move(accumulated_grad_) : grad;
}

at::Tensor FSDPParam::zero_unsharded_grad() const {
  return at::zeros(spec_->sizes,
                   flat_shard_.options().dtype(reduce_dtype_.value_or(compute_dtype())));
}

void FSDPParam::accept_sharded_grad(const at::Tensor& grad) {
  at::Tensor& existing = sharded_param_.mutable_grad();
  if (existing.defined()) {
    existing.add_(grad);
  } else {
    existing = grad;
  }
  attach_spec(existing, spec_);  // autograd may have made the existing one
  if (auto* hook = torch::autograd::impl::post_acc_grad_hooks(sharded_param_).get()) {
    (*hook)(sharded_param_);
  }
}

}  // namespace fsdp
