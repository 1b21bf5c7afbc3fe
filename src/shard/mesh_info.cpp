#include "shard/mesh_info.h"

#include "fsdp/error.h"

namespace fsdp {

FSDPMeshInfoPtr get_post_forward_mesh_info(const ReshardAfterForward& reshard,
                                           const FSDPMeshInfoPtr& mesh_info) {
  if (const bool* flag = std::get_if<bool>(&reshard)) return *flag ? mesh_info : nullptr;
  if (std::holds_alternative<std::monostate>(reshard)) return mesh_info;
  const int64_t k = std::get<int64_t>(reshard);
  const int64_t shard_size = mesh_info->shard_size();
  FSDP_CHECK(ConfigError, k >= 1 && k <= shard_size && shard_size % k == 0,
             "fully_shard: reshard_after_forward = ", k,
             " must be a factor of the shard mesh size ", shard_size, ".");
  if (k == shard_size) return mesh_info;
  if (k == 1) {
    TORCH_WARN_ONCE(
        "fully_shard: reshard_after_forward = 1 keeps all of each parameter on every "
        "rank; it is taken as false.");
    return nullptr;
  }
  const DeviceMesh& mesh = *mesh_info->mesh;
  auto post_forward_mesh = std::make_shared<const DeviceMesh>(
      mesh.device_type(), std::vector<int64_t>{mesh.size() / k, k},
      std::vector<std::string>{"fsdp_replicate", "fsdp_shard"}, mesh.root_group());
  return std::make_shared<const FSDPMeshInfo>(FSDPMeshInfo{
      .mesh = std::move(post_forward_mesh), .shard_mesh_dim = 1, .replicate_mesh_dim = 0});
}

}  // namespace fsdp
