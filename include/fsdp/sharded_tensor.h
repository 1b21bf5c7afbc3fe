#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "fsdp/device_mesh.h"
#include "fsdp/policy.h"

namespace fsdp {

/// What a sharded parameter or gradient knows about itself.
///
/// It travels with the tensor through detach(), in-place operations and optimizers; view(), clone()
/// and to() lose it.
struct ShardedTensorSpec {
  std::string fqn;  ///< name from the root module; from the sharded module before lazy init
  std::vector<int64_t> sizes;  ///< shape of the whole tensor
  at::ScalarType dtype;
  DeviceMeshPtr mesh;
  int64_t shard_mesh_dim = 0;  ///< the mesh dimension that shards; all others replicate
  int64_t shard_dim = 0;       ///< the tensor dimension that is cut
  int64_t row_begin = 0;       ///< first index along shard_dim that this rank holds
  int64_t num_rows = 0;        ///< how many it holds, maybe none
  /// The tensor begins at this element of a buffer of which each rank owns `shard_numel` elements,
  /// one rank after the other. Per parameter it is a buffer of its own, and begins with it.
  int64_t flat_start = 0;
  int64_t shard_numel = 0;

  [[nodiscard]] const ProcessGroupPtr& shard_group() const {
    return mesh->get_group(shard_mesh_dim);
  }
};

/// The specification of a sharded tensor; null for a plain one.
[[nodiscard]] const ShardedTensorSpec* spec_of(const at::Tensor& tensor);

/// The whole tensor, gathered from all ranks of its shard group; a plain tensor is returned as it
/// is.
///
/// Shapes:  the specification's `sizes`, contiguous, on the tensor's device; no autograd.
/// Ranks:   collective over the shard group.
/// Errors:  StateError if the local tensor's shape is not the one that its specification says.
[[nodiscard]] at::Tensor full_tensor(const at::Tensor& tensor);

/// This rank's part of `full`, which every rank holds, with its specification. No communication.
///
/// Errors:  ConfigError for a 0-dim tensor, a shard dimension that it does not have, or one other
///          than 0 whose size the number of ranks does not divide.
[[nodiscard]] at::Tensor distribute_tensor(const at::Tensor& full, const DeviceMeshPtr& mesh,
                                           Shard placement = {});

/// The part of `full` that this rank holds of the sharded tensor `like`, to be copied into it. No
/// communication.
///
/// Errors:  ConfigError if `like` is not sharded or is of another shape.
[[nodiscard]] at::Tensor distribute_tensor(const at::Tensor& full, const at::Tensor& like);

}  // namespace fsdp
