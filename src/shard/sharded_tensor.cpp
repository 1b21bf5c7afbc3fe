#include "fsdp/sharded_tensor.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "mesh/work.h"
#include "shard/shard_range.h"
#include "shard/sharded_spec.h"

namespace fsdp {
namespace {

struct SpecMeta : c10::BackendMeta {
  explicit SpecMeta(ShardedTensorSpecPtr s) : spec(std::move(s)) {}
  ShardedTensorSpecPtr spec;
};

struct UnshardedParamMeta : c10::BackendMeta {};

int64_t numel(at::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

// [outer, cut dimension, inner]: what lies before and behind the dimension that is cut.
struct Blocks {
  int64_t outer, rows, inner;
};

Blocks blocks_of(const ShardedTensorSpec& spec) {
  const auto dim = static_cast<size_t>(spec.shard_dim);
  const at::IntArrayRef sizes = spec.sizes;
  return {.outer = numel(sizes.slice(0, dim)),
          .rows = sizes[dim],
          .inner = numel(sizes.slice(dim + 1))};
}

}  // namespace

void attach_spec(const at::Tensor& tensor, ShardedTensorSpecPtr spec) {
  attach_label(tensor, make_label(std::move(spec)));
}

c10::intrusive_ptr<c10::BackendMeta> make_label(ShardedTensorSpecPtr spec) {
  return c10::make_intrusive<SpecMeta>(std::move(spec));
}

void attach_label(const at::Tensor& tensor, const c10::intrusive_ptr<c10::BackendMeta>& label) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(label);
}

const ShardedTensorSpec* spec_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const auto* meta = dynamic_cast<SpecMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta == nullptr ? nullptr : meta->spec.get();
}

void mark_unsharded_param(const at::Tensor& param) {
  param.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<UnshardedParamMeta>());
}

bool is_unsharded_param(const at::Tensor& param) {
  return param.defined() && dynamic_cast<UnshardedParamMeta*>(
                                param.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

ShardedTensorSpecPtr make_spec(std::string fqn, at::IntArrayRef sizes, at::ScalarType dtype,
                               const DeviceMeshPtr& mesh, int64_t shard_mesh_dim,
                               int64_t shard_dim) {
  const int64_t world_size = mesh->size(shard_mesh_dim);
  const ShardRange range =
      shard_range(sizes[shard_dim], world_size, mesh->get_local_rank(shard_mesh_dim));
  std::vector<int64_t> part_sizes = sizes.vec();
  part_sizes[shard_dim] = chunk_rows(sizes[shard_dim], world_size);
  return std::make_shared<ShardedTensorSpec>(ShardedTensorSpec{.fqn = std::move(fqn),
                                                               .sizes = sizes.vec(),
                                                               .dtype = dtype,
                                                               .mesh = mesh,
                                                               .shard_mesh_dim = shard_mesh_dim,
                                                               .shard_dim = shard_dim,
                                                               .row_begin = range.begin,
                                                               .num_rows = range.length,
                                                               .flat_start = 0,
                                                               .shard_numel = numel(part_sizes)});
}

ShardedTensorSpecPtr make_flat_spec(std::string fqn, at::IntArrayRef sizes, at::ScalarType dtype,
                                    const DeviceMeshPtr& mesh, int64_t shard_mesh_dim,
                                    int64_t flat_start, int64_t shard_numel) {
  const ShardRange range = flat_shard_range(sizes[0], row_numel(sizes), flat_start, shard_numel,
                                            mesh->get_local_rank(shard_mesh_dim));
  return std::make_shared<ShardedTensorSpec>(ShardedTensorSpec{.fqn = std::move(fqn),
                                                               .sizes = sizes.vec(),
                                                               .dtype = dtype,
                                                               .mesh = mesh,
                                                               .shard_mesh_dim = shard_mesh_dim,
                                                               .shard_dim = 0,
                                                               .row_begin = range.begin,
                                                               .num_rows = range.length,
                                                               .flat_start = flat_start,
                                                               .shard_numel = shard_numel});
}

std::vector<int64_t> local_sizes(const ShardedTensorSpec& spec) {
  std::vector<int64_t> sizes = spec.sizes;
  sizes[spec.shard_dim] = spec.num_rows;
  return sizes;
}

int64_t row_numel(at::IntArrayRef sizes) { return numel(sizes.slice(1)); }

std::string describe(const std::string& fqn, at::IntArrayRef sizes) {
  return c10::str("'", fqn, "' of shape ", sizes);
}

int64_t checked_shard_dim(const char* caller, const std::string& name, at::IntArrayRef sizes,
                          Shard placement, int64_t world_size) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  FSDP_CHECK(ConfigError, ndim > 0, caller, ": cannot shard ", describe(name, sizes),
             ": a scalar has no rows. Change it to a 1-D tensor with one element.");
  FSDP_CHECK(ConfigError, placement.dim >= -ndim && placement.dim < ndim, caller, ": cannot shard ",
             describe(name, sizes), " on dim ", placement.dim, ": it has dimensions ", -ndim,
             " to ", ndim - 1, ".");
  const int64_t dim = placement.dim < 0 ? placement.dim + ndim : placement.dim;
  FSDP_CHECK(ConfigError, dim == 0 || sizes[dim] % world_size == 0, caller, ": cannot shard ",
             describe(name, sizes), " on dim ", dim, ": its size ", sizes[dim],
             " is not a multiple of the shard mesh size ", world_size,
             ". Use dim 0, which is padded, or a mesh size that divides ", sizes[dim], ".");
  return dim;
}

void copy_parts_to_whole(const ShardedTensorSpec& spec, const at::Tensor& parts_WN,
                         const at::Tensor& whole) {
  const int64_t world_size = parts_WN.size(0);
  if (spec.shard_dim == 0) {
    whole.view({world_size, parts_WN.size(1)}).copy_(parts_WN);
    return;
  }
  const Blocks blocks = blocks_of(spec);
  const int64_t rows = blocks.rows / world_size;
  whole.view({blocks.outer, world_size, rows * blocks.inner})
      .copy_(parts_WN.unflatten(1, {blocks.outer, rows * blocks.inner}).transpose(0, 1));
}

void copy_whole_to_parts(const ShardedTensorSpec& spec, const at::Tensor& whole,
                         const at::Tensor& parts_WN) {
  const int64_t world_size = parts_WN.size(0);
  const int64_t part_numel = parts_WN.size(1);
  if (part_numel == 0) return;
  const at::Tensor source = whole.contiguous();
  if (spec.shard_dim != 0) {
    const Blocks blocks = blocks_of(spec);
    const int64_t rows = blocks.rows / world_size;
    parts_WN.unflatten(1, {blocks.outer, rows * blocks.inner})
        .copy_(source.view({blocks.outer, world_size, rows * blocks.inner}).transpose(0, 1));
    return;
  }
  const at::Tensor flat = source.view(-1);
  const int64_t num_full = flat.numel() / part_numel;
  if (num_full > 0) {
    parts_WN.narrow(0, 0, num_full)
        .copy_(flat.narrow(0, 0, num_full * part_numel).view({num_full, part_numel}));
  }
  if (num_full == world_size) return;
  const int64_t rest = flat.numel() - num_full * part_numel;
  const at::Tensor last = parts_WN.select(0, num_full);
  if (rest > 0) last.narrow(0, 0, rest).copy_(flat.narrow(0, num_full * part_numel, rest));
  last.narrow(0, rest, part_numel - rest).zero_();
  parts_WN.narrow(0, num_full + 1, world_size - num_full - 1).zero_();
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  const ShardedTensorSpec* spec = spec_of(tensor);
  if (spec == nullptr) return tensor;
  const c10::NoGradGuard no_grad;
  FSDP_CHECK(StateError, tensor.sizes() == at::IntArrayRef(local_sizes(*spec)),
             "full_tensor: the local part of ", describe(spec->fqn, spec->sizes), " has shape ",
             tensor.sizes(), ", expected ", at::IntArrayRef(local_sizes(*spec)),
             ". Pass a parameter or gradient of a sharded module as it is, not a view of it.");
  const int64_t world_size = spec->mesh->size(spec->shard_mesh_dim);
  const int64_t part_numel = std::min(spec->shard_numel, numel(spec->sizes));
  if (part_numel == 0) return at::zeros(spec->sizes, tensor.options());

  at::Tensor part = at::zeros({part_numel}, tensor.options());
  part.narrow(0, 0, tensor.numel()).copy_(tensor.contiguous().view(-1));
  at::Tensor parts = at::empty({world_size * part_numel}, tensor.options());
  const ProcessGroupPtr& group = spec->shard_group();
  wait_for(*group->_allgather_base(parts, part), *group, "all-gather of full_tensor");
  const at::Tensor parts_WN = parts.view({world_size, part_numel});
  at::Tensor whole = at::empty(spec->sizes, tensor.options());
  if (spec->shard_dim != 0) {
    copy_parts_to_whole(*spec, parts_WN, whole);
    return whole;
  }
  const int64_t row = row_numel(spec->sizes);
  const int64_t last = spec->flat_start + whole.numel() - 1;
  for (int64_t rank = spec->flat_start / spec->shard_numel; rank <= last / spec->shard_numel;
       ++rank) {
    const ShardRange rows =
        flat_shard_range(spec->sizes[0], row, spec->flat_start, spec->shard_numel, rank);
    whole.view(-1)
        .narrow(0, rows.begin * row, rows.length * row)
        .copy_(parts_WN[rank].narrow(0, 0, rows.length * row));
  }
  return whole;
}

at::Tensor distribute_tensor(const at::Tensor& full, const DeviceMeshPtr& mesh, Shard placement) {
  const c10::NoGradGuard no_grad;
  FSDP_CHECK(ConfigError, mesh != nullptr, "distribute_tensor: the mesh is null.");
  const int64_t shard_mesh_dim = mesh->ndim() - 1;
  const int64_t shard_dim = checked_shard_dim("distribute_tensor", "", full.sizes(), placement,
                                              mesh->size(shard_mesh_dim));
  const ShardedTensorSpecPtr spec =
      make_spec("", full.sizes(), full.scalar_type(), mesh, shard_mesh_dim, shard_dim);
  at::Tensor local = full.detach()
                         .narrow(shard_dim, spec->row_begin, spec->num_rows)
                         .clone(at::MemoryFormat::Contiguous);
  attach_spec(local, spec);
  return local;
}

at::Tensor distribute_tensor(const at::Tensor& full, const at::Tensor& like) {
  const c10::NoGradGuard no_grad;
  const ShardedTensorSpec* spec = spec_of(like);
  FSDP_CHECK(ConfigError, spec != nullptr,
             "distribute_tensor: the tensor to follow is not sharded. Pass a parameter of a module "
             "after fully_shard(), or a mesh.");
  FSDP_CHECK(ConfigError, full.sizes() == at::IntArrayRef(spec->sizes),
             "distribute_tensor: the whole tensor has shape ", full.sizes(), ", but ",
             describe(spec->fqn, spec->sizes), " is to follow.");
  at::Tensor local = full.detach()
                         .narrow(spec->shard_dim, spec->row_begin, spec->num_rows)
                         .clone(at::MemoryFormat::Contiguous);
  attach_spec(local, std::make_shared<ShardedTensorSpec>(*spec));
  return local;
}

}  // namespace fsdp
