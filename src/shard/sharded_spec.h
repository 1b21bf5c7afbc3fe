#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "fsdp/sharded_tensor.h"

namespace fsdp {

using ShardedTensorSpecPtr = std::shared_ptr<const ShardedTensorSpec>;

/// Makes `tensor` carry `spec` (replacing one it had).
void attach_spec(const at::Tensor& tensor, ShardedTensorSpecPtr spec);
/// The same in two steps, for a specification that many tensors will carry.
[[nodiscard]] c10::intrusive_ptr<c10::BackendMeta> make_label(ShardedTensorSpecPtr spec);
void attach_label(const at::Tensor& tensor, const c10::intrusive_ptr<c10::BackendMeta>& label);

/// The specification of a rank's part of a tensor of `sizes`, cut along `shard_dim` (not negative)
/// on its own, as torch.chunk does.
[[nodiscard]] ShardedTensorSpecPtr make_spec(std::string fqn, at::IntArrayRef sizes,
                                             at::ScalarType dtype, const DeviceMeshPtr& mesh,
                                             int64_t shard_mesh_dim, int64_t shard_dim);

/// The same in a flat buffer shared with other tensors.
[[nodiscard]] ShardedTensorSpecPtr make_flat_spec(std::string fqn, at::IntArrayRef sizes,
                                                  at::ScalarType dtype, const DeviceMeshPtr& mesh,
                                                  int64_t shard_mesh_dim, int64_t flat_start,
                                                  int64_t shard_numel);

/// The shape of this rank's part.
[[nodiscard]] std::vector<int64_t> local_sizes(const ShardedTensorSpec& spec);
/// Elements of one index of the first dimension.
[[nodiscard]] int64_t row_numel(at::IntArrayRef sizes);
/// The name and shape in an error message: "'layers.0.wq.weight' of shape [4, 2]".
[[nodiscard]] std::string describe(const std::string& fqn, at::IntArrayRef sizes);

/// Throws ConfigError, beginning with `caller`, unless a tensor of `sizes` can be cut along
/// `placement.dim` over `world_size` ranks. Returns that dimension, not negative.
int64_t checked_shard_dim(const char* caller, const std::string& name, at::IntArrayRef sizes,
                          Shard placement, int64_t world_size);

/// Copies gathered parts into the whole tensor.
/// Shapes: parts_WN [world_size, numel of a padded part], rows may be strided; whole: [padded
/// sizes]
///         as one flat contiguous tensor if shard_dim is 0 (padding lies at its end), else `sizes`.
void copy_parts_to_whole(const ShardedTensorSpec& spec, const at::Tensor& parts_WN,
                         const at::Tensor& whole);

/// The reverse: cuts a whole tensor into parts, zeros in the padding, converting the dtype.
/// Shapes: whole: the specification's sizes; parts_WN [world_size, numel of a padded part].
void copy_whole_to_parts(const ShardedTensorSpec& spec, const at::Tensor& whole,
                         const at::Tensor& parts_WN);

/// Marks the tensor that a module's member holds as an unsharded parameter of a group.
void mark_unsharded_param(const at::Tensor& param);
/// Whether `param` is one.
[[nodiscard]] bool is_unsharded_param(const at::Tensor& param);

}  // namespace fsdp
