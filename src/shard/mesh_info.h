#pragma once

#include <memory>
#include <optional>

#include "fsdp/device_mesh.h"
#include "fsdp/policy.h"

namespace fsdp {

/// The part of a mesh that one group works over.
struct FSDPMeshInfo {
  DeviceMeshPtr mesh;
  int64_t shard_mesh_dim = 0;
  std::optional<int64_t> replicate_mesh_dim;  ///< set for HSDP

  [[nodiscard]] int64_t shard_size() const { return mesh->size(shard_mesh_dim); }
  [[nodiscard]] int64_t shard_rank() const { return mesh->get_local_rank(shard_mesh_dim); }
  [[nodiscard]] const ProcessGroupPtr& shard_group() const {
    return mesh->get_group(shard_mesh_dim);
  }
  [[nodiscard]] int64_t replicate_size() const {
    return replicate_mesh_dim ? mesh->size(*replicate_mesh_dim) : 1;
  }
};

using FSDPMeshInfoPtr = std::shared_ptr<const FSDPMeshInfo>;

/// Where a group's parameters stay after forward. Null: unsharded. `mesh_info` itself: resharded.
/// Another: each rank keeps a part, to be gathered over its shard dimension, of fewer ranks.
///
/// Ranks:  an integer makes process groups: every rank of the mesh calls it.
/// Errors: ConfigError for an integer that does not divide the number of ranks that shard.
/// Source: PyTorch 2.13, _fsdp_init._get_post_forward_mesh_info.
[[nodiscard]] FSDPMeshInfoPtr get_post_forward_mesh_info(const ReshardAfterForward& reshard,
                                                         const FSDPMeshInfoPtr& mesh_info);

}  // namespace fsdp
