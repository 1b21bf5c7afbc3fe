#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "fsdp/process_group.h"

namespace fsdp {

/// The ranks of a job laid out as a box with named dimensions, and a process group along each.
///
/// A 1-D mesh shards over all its ranks. A 2-D mesh ("replicate", "shard") holds copies along its
/// first dimension and shards along the second (HSDP).
class DeviceMesh {
 public:
  /// Lays the ranks of `group` out in row-major order over `shape`.
  ///
  /// Ranks:   collective over `group` when ndim > 1 (makes the sub-groups).
  /// Errors:  ConfigError if the product of `shape` is not the group's size, a size is < 1, or the
  ///          names are not one per dimension, empty or repeated (a 1-D mesh may have none).
  DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> shape,
             std::vector<std::string> dim_names, ProcessGroupPtr group);

  [[nodiscard]] c10::DeviceType device_type() const { return device_type_; }
  [[nodiscard]] int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  [[nodiscard]] const std::vector<int64_t>& shape() const { return shape_; }
  [[nodiscard]] const std::vector<std::string>& dim_names() const { return dim_names_; }
  [[nodiscard]] int64_t size() const;                  ///< number of ranks
  [[nodiscard]] int64_t size(int64_t mesh_dim) const;  ///< number of ranks along one dimension
  /// The index of a dimension by its name; ConfigError lists the names there are.
  [[nodiscard]] int64_t mesh_dim(const std::string& dim_name) const;
  /// The group of the ranks that differ from this one in `mesh_dim` only.
  [[nodiscard]] const ProcessGroupPtr& get_group(int64_t mesh_dim = 0) const;
  /// This rank's position along `mesh_dim`.
  [[nodiscard]] int64_t get_local_rank(int64_t mesh_dim = 0) const;
  /// The group of all ranks of the mesh.
  [[nodiscard]] const ProcessGroupPtr& root_group() const { return root_group_; }
  /// The 1-D mesh along one named dimension through this rank. No communication.
  [[nodiscard]] std::shared_ptr<const DeviceMesh> operator[](const std::string& dim_name) const;

 private:
  DeviceMesh() = default;

  c10::DeviceType device_type_ = c10::DeviceType::CPU;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<int64_t> coordinate_;      // of this rank
  std::vector<ProcessGroupPtr> groups_;  // one per dimension
  ProcessGroupPtr root_group_;
};

using DeviceMeshPtr = std::shared_ptr<const DeviceMesh>;

/// A 1-D mesh over all ranks of the default group.
DeviceMeshPtr init_device_mesh(c10::DeviceType device_type);
/// A mesh over all ranks of the default group; see DeviceMesh's constructor.
DeviceMeshPtr init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                               std::vector<std::string> dim_names = {});

}  // namespace fsdp
