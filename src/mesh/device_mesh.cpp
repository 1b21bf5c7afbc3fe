#include "fsdp/device_mesh.h"

#include <set>
#include <utility>

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"

namespace fsdp {
namespace {

void check_mesh(const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names,
                int64_t group_size) {
  FSDP_CHECK(ConfigError, !shape.empty(), "DeviceMesh: the shape has no dimensions.");
  int64_t size = 1;
  for (const int64_t length : shape) {
    FSDP_CHECK(ConfigError, length >= 1, "DeviceMesh: every size must be at least 1, found ",
               at::IntArrayRef(shape), ".");
    size *= length;
  }
  FSDP_CHECK(ConfigError, size == group_size, "DeviceMesh: the shape ", at::IntArrayRef(shape),
             " holds ", size, " ranks, but the process group has ", group_size, ".");
  FSDP_CHECK(ConfigError,
             dim_names.size() == shape.size() || (shape.size() == 1 && dim_names.empty()),
             "DeviceMesh: expected one name for each of the ", shape.size(), " dimensions, found [",
             c10::Join(", ", dim_names), "].");
  std::set<std::string> seen;
  for (const std::string& name : dim_names) {
    FSDP_CHECK(ConfigError, !name.empty(), "DeviceMesh: a dimension has an empty name.");
    FSDP_CHECK(ConfigError, seen.insert(name).second, "DeviceMesh: two dimensions are named '",
               name, "'.");
  }
}

}  // namespace

DeviceMesh::DeviceMesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                       std::vector<std::string> dim_names, ProcessGroupPtr group)
    : device_type_(device_type),
      shape_(std::move(shape)),
      dim_names_(std::move(dim_names)),
      root_group_(std::move(group)) {
  FSDP_CHECK(ConfigError, root_group_, "DeviceMesh: the process group is null.");
  const int64_t world_size = root_group_->getSize();
  check_mesh(shape_, dim_names_, world_size);

  coordinate_.resize(shape_.size());
  int64_t rest = root_group_->getRank();
  for (size_t dim = shape_.size(); dim-- > 0;) {
    coordinate_[dim] = rest % shape_[dim];
    rest /= shape_[dim];
  }

  int64_t stride = world_size;  // between neighbours along a dimension
  for (const int64_t length : shape_) {
    stride /= length;
    if (length == world_size) {
      groups_.push_back(root_group_);
      continue;
    }
    ProcessGroupPtr mine;
    for (int64_t first = 0; first < world_size; ++first) {  // all ranks make all groups, in order
      if (first / stride % length != 0) continue;
      std::vector<int> ranks;
      for (int64_t i = 0; i < length; ++i) ranks.push_back(static_cast<int>(first + i * stride));
      if (ProcessGroupPtr made = new_group(root_group_, ranks)) mine = std::move(made);
    }
    groups_.push_back(std::move(mine));
  }
}

int64_t DeviceMesh::size() const {
  int64_t size = 1;
  for (const int64_t length : shape_) size *= length;
  return size;
}

int64_t DeviceMesh::size(int64_t mesh_dim) const {
  FSDP_CHECK(ConfigError, mesh_dim >= 0 && mesh_dim < ndim(), "DeviceMesh::size: dimension ",
             mesh_dim, " of a mesh of ", ndim(), " dimensions.");
  return shape_[static_cast<size_t>(mesh_dim)];
}

int64_t DeviceMesh::mesh_dim(const std::string& dim_name) const {
  for (size_t dim = 0; dim < dim_names_.size(); ++dim) {
    if (dim_names_[dim] == dim_name) return static_cast<int64_t>(dim);
  }
  FSDP_CHECK(ConfigError, false, "DeviceMesh: no dimension is named '", dim_name,
             "'; the names are [", c10::Join(", ", dim_names_), "].");
}

const ProcessGroupPtr& DeviceMesh::get_group(int64_t mesh_dim) const {
  FSDP_CHECK(ConfigError, mesh_dim >= 0 && mesh_dim < ndim(), "DeviceMesh::get_group: dimension ",
             mesh_dim, " of a mesh of ", ndim(), " dimensions.");
  return groups_[static_cast<size_t>(mesh_dim)];
}

int64_t DeviceMesh::get_local_rank(int64_t mesh_dim) const {
  FSDP_CHECK(ConfigError, mesh_dim >= 0 && mesh_dim < ndim(),
             "DeviceMesh::get_local_rank: dimension ", mesh_dim, " of a mesh of ", ndim(),
             " dimensions.");
  return coordinate_[static_cast<size_t>(mesh_dim)];
}

std::shared_ptr<const DeviceMesh> DeviceMesh::operator[](const std::string& dim_name) const {
  const size_t dim = static_cast<size_t>(mesh_dim(dim_name));
  DeviceMesh line;
  line.device_type_ = device_type_;
  line.shape_ = {shape_[dim]};
  line.dim_names_ = {dim_name};
  line.coordinate_ = {coordinate_[dim]};
  line.groups_ = {groups_[dim]};
  line.root_group_ = groups_[dim];
  return std::make_shared<const DeviceMesh>(std::move(line));
}

DeviceMeshPtr init_device_mesh(c10::DeviceType device_type) {
  const ProcessGroupPtr group = default_process_group();
  return std::make_shared<const DeviceMesh>(device_type, std::vector<int64_t>{group->getSize()},
                                            std::vector<std::string>{}, group);
}

DeviceMeshPtr init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                               std::vector<std::string> dim_names) {
  return std::make_shared<const DeviceMesh>(device_type, std::move(shape), std::move(dim_names),
                                            default_process_group());
}

}  // namespace fsdp
