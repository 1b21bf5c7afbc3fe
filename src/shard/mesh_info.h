#pragma once

#include <memory>
#include <optional>

#include "fsdp/device_mesh.h"

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

}  // namespace fsdp
