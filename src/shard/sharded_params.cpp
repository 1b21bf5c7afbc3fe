#include "shard/sharded_params.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "base/path.h"
#include "fsdp/error.h"
#include "shard/flat_layout.h"
#include "shard/shard_range.h"
#include "shard/storage.h"

namespace fsdp {
namespace {

constexpr int64_t kStorageAlignment = 256;  // of each flat parameter in the group's storage
constexpr size_t kMaxNamedParams = 8;       // in one message
const std::string kNotGathering = "fsdp: a gather's output was used while no gather is in flight.";

bool cuts_rows(const ParamToShard& param) { return param.shard_dim == 0; }

}  // namespace

ShardedParams::ShardedParams(const std::vector<ParamToShard>& params, const FSDPMeshInfo& mesh_info,
                             Layout layout, c10::Device device)
    : layout_(std::all_of(params.begin(), params.end(), cuts_rows) ? layout
                                                                   : Layout::kPerParameter),
      device_(device),
      pool_(std::make_shared<BufferPool>(device)) {
  const c10::InferenceMode normal_tensors(/*enabled=*/false);
  const c10::NoGradGuard no_grad;
  params_.reserve(params.size());
  if (layout_ == Layout::kFlat) {
    cut_flat(params, mesh_info);
  } else {
    cut(params, mesh_info);
  }
  size_t num_modules = 0;
  for (const ParamToShard& param : params) {
    module_of_.push_back(param.module);
    num_modules = std::max(num_modules, param.module + 1);
  }
  set_fqns(std::vector<std::string>(num_modules));
  init_dtypes({});
}

void ShardedParams::cut(const std::vector<ParamToShard>& params, const FSDPMeshInfo& mesh_info) {
  for (const auto& [tensor, name, shard_dim, module] : params) {
    const ShardedTensorSpecPtr spec =
        make_spec(name, tensor.sizes(), tensor.scalar_type(), mesh_info.mesh,
                  mesh_info.shard_mesh_dim, shard_dim);
    flats_.push_back(std::make_unique<FlatParam>(spec->shard_numel, mesh_info.shard_size(),
                                                 tensor.scalar_type(), device_));
    params_.emplace_back(tensor, name, spec, *flats_.back());
  }
}

void ShardedParams::cut_flat(const std::vector<ParamToShard>& params,
                             const FSDPMeshInfo& mesh_info) {
  // Trainable parameters first: only they are reduced.
  std::map<std::tuple<bool, at::ScalarType>, std::vector<size_t>> kinds;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& tensor = params[i].tensor;
    kinds[{!tensor.requires_grad(), tensor.scalar_type()}].push_back(i);
  }
  std::vector<FlatParam*> flat_of(params.size());
  std::vector<int64_t> start_of(params.size());
  for (const auto& [kind, members] : kinds) {
    const at::ScalarType dtype = std::get<at::ScalarType>(kind);
    std::vector<FlatExtent> extents;
    for (const size_t i : members) {
      const at::Tensor& tensor = params[i].tensor;
      extents.push_back(
          {.numel = tensor.numel(), .unit = std::max<int64_t>(row_numel(tensor.sizes()), 1)});
    }
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
    for (const FlatRangePlan& range :
         plan_flat_layout(extents, mesh_info.shard_size(), element_bytes)) {
      flats_.push_back(
          std::make_unique<FlatParam>(range.shard_numel, mesh_info.shard_size(), dtype, device_));
      for (size_t m = 0; m < range.members.size(); ++m) {
        flat_of[members[range.members[m]]] = flats_.back().get();
        start_of[members[range.members[m]]] = range.starts[m];
      }
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& tensor = params[i].tensor;
    const ShardedTensorSpecPtr spec =
        make_flat_spec(params[i].name, tensor.sizes(), tensor.scalar_type(), mesh_info.mesh,
                       mesh_info.shard_mesh_dim, start_of[i], flat_of[i]->shard_numel());
    params_.emplace_back(tensor, params[i].name, spec, *flat_of[i]);
  }
}

void ShardedParams::set_fqns(const std::vector<std::string>& module_paths) {
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_fqn(join_path(module_paths[module_of_[i]], params_[i].name()));
  }
  describe_access_errors();
}

void ShardedParams::describe_access_errors() {
  constexpr const char* kWhereItIsWhole =
      " sharded, so its values are not here. It is whole during its module's forward and "
      "backward; elsewhere call unshard() on the sharded module first, or take the sharded "
      "parameter from parameters(). (An optimizer must be built after fully_shard(), from "
      "fsdp::parameters(model).)";
  access_errors_.clear();
  if (layout_ == Layout::kPerParameter || params_.size() == 1) {
    for (const FSDPParam& param : params_) {
      access_errors_.push_back(c10::str("fsdp: parameter ",
                                        describe(param.spec()->fqn, param.spec()->sizes), " is",
                                        kWhereItIsWhole));
    }
  } else {
    std::string names;
    const size_t num_named = std::min(params_.size(), kMaxNamedParams);
    for (size_t i = 0; i < num_named; ++i) {
      names += (i == 0 ? "" : ", ") + describe(params_[i].spec()->fqn, params_[i].spec()->sizes);
    }
    if (num_named < params_.size()) names += c10::str(", ", params_.size() - num_named, " more");
    access_errors_.push_back(c10::str("fsdp: a parameter of a group that is sharded together (",
                                      names, ") is", kWhereItIsWhole));
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (!is_allocated(storages_[i])) free_storage(storages_[i], access_errors_[i]);
  }
}

void ShardedParams::init_dtypes(const MixedPrecisionPolicy& policy) {
  // The clamp of the reduce dtype comes first, against the policy's own param_dtype, as in FSDP2.
  reduce_dtype_ = policy.reduce_dtype;
  if (reduce_dtype_ == policy.param_dtype) reduce_dtype_.reset();
  const c10::InferenceMode normal_tensors(/*enabled=*/false);
  const c10::NoGradGuard no_grad;
  bool changed = storages_.empty();
  std::vector<at::ScalarType> dtypes;
  for (const auto& flat : flats_) {
    const bool casts = policy.param_dtype && at::isFloatingType(flat->orig_dtype());
    dtypes.push_back(casts ? *policy.param_dtype : flat->orig_dtype());
    changed = changed || dtypes.back() != flat->compute_dtype();
  }
  if (!changed) return;

  // Offsets within one storage, or zeros within one storage each.
  storages_.clear();
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (size_t i = 0; i < flats_.size(); ++i) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtypes[i]));
    if (layout_ == Layout::kPerParameter) {
      storages_.push_back(make_freed_storage(flats_[i]->unsharded_numel() * element_bytes, device_,
                                             access_errors_[i]));
    }
    offsets.push_back(bytes / element_bytes);
    if (layout_ == Layout::kFlat) {
      bytes += flats_[i]->unsharded_numel() * element_bytes;
      bytes = round_up(bytes, kStorageAlignment);
    }
  }
  if (layout_ == Layout::kFlat) {
    storages_.push_back(make_freed_storage(bytes, device_, access_errors_.front()));
  }
  for (size_t i = 0; i < flats_.size(); ++i) {
    const at::Storage& storage = layout_ == Layout::kFlat ? storages_.front() : storages_[i];
    flats_[i]->set_unsharded(
        tensor_over(storage, dtypes[i], offsets[i], {flats_[i]->unsharded_numel()}));
  }
  if (layout_ == Layout::kFlat) make_gather_storage();
  for (FSDPParam& param : params_) param.init_unsharded_param();
}

at::ScalarType ShardedParams::reduce_dtype() const {
  if (reduce_dtype_) return *reduce_dtype_;
  for (const FSDPParam& param : params_) {
    if (param.sharded_param().requires_grad()) return param.flat().compute_dtype();
  }
  return flats_.front()->compute_dtype();
}

void ShardedParams::check_device() const {
  for (const FSDPParam& param : params_) {
    const at::Tensor& sharded = param.sharded_param();
    FSDP_CHECK(StateError, sharded.device() == device_, "unshard: the sharded parameter ",
               describe(param.spec()->fqn, param.spec()->sizes), " is on ", sharded.device(),
               ", its group works on ", device_,
               ". Move the model before fully_shard(), with the mesh of that device.");
  }
}

bool ShardedParams::are_in_place() const {
  return std::all_of(params_.begin(), params_.end(),
                     [](const FSDPParam& param) { return param.is_on_flat_shard(); });
}

void ShardedParams::take_back_sharded_params() {
  check_device();
  std::map<const FlatParam*, const FSDPParam*> first_of;
  for (const FSDPParam& param : params_) {
    param.check_local_shape();
    const FSDPParam& first = *first_of.emplace(&param.flat(), &param).first->second;
    FSDP_CHECK(StateError,
               param.sharded_param().scalar_type() == first.sharded_param().scalar_type(),
               "unshard: the sharded parameters ", describe(first.spec()->fqn, first.spec()->sizes),
               " and ", describe(param.spec()->fqn, param.spec()->sizes),
               " lie in one buffer, but one was converted to ", first.sharded_param().scalar_type(),
               " and the other is ", param.sharded_param().scalar_type(),
               ". Convert both, or shard with Layout::kPerParameter.");
  }
  const c10::InferenceMode normal_tensors(/*enabled=*/false);
  const c10::NoGradGuard no_grad;
  for (const auto& flat : flats_) {
    const auto first = first_of.find(flat.get());
    if (first == first_of.end()) continue;
    const at::ScalarType dtype = first->second->sharded_param().scalar_type();
    if (dtype == flat->orig_dtype()) continue;
    flat->set_shard(at::zeros({flat->shard_numel()}, flat->shard().options().dtype(dtype)));
  }
  for (FSDPParam& param : params_) {
    if (param.is_on_flat_shard()) continue;
    param.move_to_flat_shard();
    param.set_fqn(param.spec()->fqn);
  }
}

void ShardedParams::allocate_unsharded() {
  for (const at::Storage& storage : storages_) allocate_storage(storage);
}

void ShardedParams::make_gather_storage() {
  gather_storage_ =
      make_freed_storage(static_cast<int64_t>(storage().nbytes()), device_, kNotGathering);
  for (const auto& flat : flats_) {
    const at::Tensor& unsharded = flat->unsharded();
    flat->set_gathered(tensor_over(gather_storage_, unsharded.scalar_type(),
                                   unsharded.storage_offset(), unsharded.sizes()));
  }
}

void ShardedParams::allocate_gathered() {
  if (is_allocated(gather_storage_)) return;
  set_bytes(gather_storage_, pool_->allocate(gather_storage_.nbytes()));
}

void ShardedParams::adopt_gathered() { move_bytes(gather_storage_, storages_.front()); }

void ShardedParams::drop_gathered() {
  pool_->give_back(free_storage(gather_storage_, kNotGathering), gather_storage_.nbytes());
}

void ShardedParams::abandon_gathered() { make_gather_storage(); }

at::DataPtr ShardedParams::free_unsharded() {
  at::DataPtr bytes;
  for (size_t i = 0; i < storages_.size(); ++i) {
    bytes = free_storage(storages_[i], access_errors_[i]);
  }
  if (layout_ != Layout::kFlat) bytes.clear();
  return bytes;
}

at::DataPtr ShardedParams::to_sharded() {
  if (sharded_state_ == ShardedState::kSharded) return {};
  at::DataPtr bytes = free_unsharded();
  for (const auto& flat : flats_) flat->drop_post_forward_shard();
  sharded_state_ = ShardedState::kSharded;
  return bytes;
}

at::DataPtr ShardedParams::to_sharded_post_forward(const FSDPMeshInfo& mesh_info) {
  if (sharded_state_ != ShardedState::kUnsharded) return {};
  const c10::NoGradGuard no_grad;
  for (const auto& flat : flats_) {
    flat->keep_post_forward_shard(mesh_info.shard_size(), mesh_info.shard_rank());
  }
  sharded_state_ = ShardedState::kShardedPostForward;
  return free_unsharded();
}

void ShardedParams::to_unsharded() {
  if (sharded_state_ == ShardedState::kUnsharded) return;
  for (FSDPParam& param : params_) param.to_unsharded();
  for (const auto& flat : flats_) flat->drop_post_forward_shard();
  sharded_state_ = ShardedState::kUnsharded;
}

}  // namespace fsdp
