#include "fsdp/device_mesh.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "fsdp/process_group.h"

namespace fsdp {
namespace {

using Shape = std::vector<int64_t>;
using Names = std::vector<std::string>;

template <typename Body>
std::string config_error_of(Body body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return message_of(error);
  }
  return "(no ConfigError)";
}

// The ranks of a group, by asking them.
std::vector<int64_t> members(const ProcessGroupPtr& group, int rank) {
  at::Tensor mine = at::full({1}, rank, at::kLong);
  at::Tensor all = at::empty({group->getSize()}, at::kLong);
  group->_allgather_base(all, mine)->wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

class DeviceMeshTest : public ::testing::TestWithParam<Shape> {};

// Promise: along each dimension a rank's group holds the ranks that differ in that dimension only,
// in order; this is torch.arange(n).view(shape) read along the dimension.
TEST_P(DeviceMeshTest, GroupsAreTheLinesOfTheBox) {
  const Shape& shape = GetParam();
  int64_t world_size = 1;
  Names names;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    world_size *= shape[dim];
    names.push_back(c10::str("d", dim));
  }
  const at::Tensor box = at::arange(world_size, at::kLong).view(shape);
  run_ranks(static_cast<int>(world_size), [&](const ProcessGroupPtr& group) {
    const int rank = group->getRank();
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU, shape, names);
    EXPECT_EQ(mesh->ndim(), static_cast<int64_t>(shape.size()));
    EXPECT_EQ(mesh->size(), world_size);
    EXPECT_EQ(mesh->root_group(), group);
    const at::Tensor where = (box == rank).nonzero()[0];
    for (int64_t dim = 0; dim < mesh->ndim(); ++dim) {
      const int64_t local = where[dim].item<int64_t>();
      at::Tensor line = box;
      for (int64_t other = mesh->ndim(); other-- > 0;) {
        if (other != dim) line = line.select(other, where[other].item<int64_t>());
      }
      line = line.contiguous();
      const std::vector<int64_t> expected(line.data_ptr<int64_t>(),
                                          line.data_ptr<int64_t>() + line.numel());
      EXPECT_EQ(mesh->size(dim), shape[static_cast<size_t>(dim)]);
      EXPECT_EQ(mesh->get_local_rank(dim), local);
      EXPECT_EQ(mesh->get_group(dim)->getRank(), local);
      EXPECT_EQ(members(mesh->get_group(dim), rank), expected);
      const DeviceMeshPtr line_mesh = (*mesh)[names[static_cast<size_t>(dim)]];
      EXPECT_EQ(line_mesh->ndim(), 1);
      EXPECT_EQ(line_mesh->get_group(), mesh->get_group(dim));
      EXPECT_EQ(line_mesh->root_group(), mesh->get_group(dim));
      EXPECT_EQ(line_mesh->get_local_rank(), local);
      EXPECT_EQ(line_mesh->dim_names(), Names{names[static_cast<size_t>(dim)]});
      EXPECT_EQ(mesh->mesh_dim(names[static_cast<size_t>(dim)]), dim);
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Shapes, DeviceMeshTest,
                         ::testing::Values(Shape{1}, Shape{4}, Shape{2, 3}, Shape{1, 4},
                                           Shape{4, 1}, Shape{1, 1}, Shape{2, 3, 2},
                                           Shape{2, 1, 2, 2}));

// Promise: without names a 1-D mesh covers the default group.
TEST(DeviceMesh, OneDimensionNeedsNoNames) {
  run_ranks(3, [](const ProcessGroupPtr& group) {
    const DeviceMeshPtr mesh = init_device_mesh(c10::DeviceType::CPU);
    EXPECT_EQ(mesh->shape(), Shape{3});
    EXPECT_TRUE(mesh->dim_names().empty());
    EXPECT_EQ(mesh->get_group(), group);
    EXPECT_EQ(mesh->device_type(), c10::DeviceType::CPU);
  });
}

// Promise: what cannot be a mesh is refused before any group is made, with the numbers.
TEST(DeviceMesh, RefusesWhatIsNotAMesh) {
  run_ranks(2, [](const ProcessGroupPtr& group) {
    const auto error = [&](Shape shape, Names names) {
      return config_error_of([&] { DeviceMesh(c10::DeviceType::CPU, shape, names, group); });
    };
    EXPECT_EQ(error({3}, {}),
              "DeviceMesh: the shape [3] holds 3 ranks, but the process group has 2.");
    EXPECT_EQ(error({2, 0}, {"a", "b"}),
              "DeviceMesh: every size must be at least 1, found [2, 0].");
    EXPECT_EQ(error({}, {}), "DeviceMesh: the shape has no dimensions.");
    EXPECT_EQ(error({2, 1}, {}),
              "DeviceMesh: expected one name for each of the 2 dimensions, found [].");
    EXPECT_EQ(error({2, 1}, {"a", ""}), "DeviceMesh: a dimension has an empty name.");
    EXPECT_EQ(error({2, 1}, {"a", "a"}), "DeviceMesh: two dimensions are named 'a'.");
    EXPECT_EQ(config_error_of([&] { DeviceMesh(c10::DeviceType::CPU, {2}, {}, nullptr); }),
              "DeviceMesh: the process group is null.");
    const DeviceMesh mesh(c10::DeviceType::CPU, {2, 1}, {"replicate", "shard"}, group);
    EXPECT_EQ(config_error_of([&] { (void)mesh["tensor"]; }),
              "DeviceMesh: no dimension is named 'tensor'; the names are [replicate, shard].");
    EXPECT_EQ(config_error_of([&] { (void)mesh.get_group(2); }),
              "DeviceMesh::get_group: dimension 2 of a mesh of 2 dimensions.");
    EXPECT_EQ(config_error_of([&] { (void)mesh.size(-1); }),
              "DeviceMesh::size: dimension -1 of a mesh of 2 dimensions.");
    EXPECT_EQ(config_error_of([&] { (void)mesh.get_local_rank(5); }),
              "DeviceMesh::get_local_rank: dimension 5 of a mesh of 2 dimensions.");
  });
}

// Promise: without a process group the error says what to call.
TEST(DeviceMesh, NeedsAProcessGroup) {
  try {
    init_device_mesh(c10::DeviceType::CPU);
    ADD_FAILURE() << "no error";
  } catch (const StateError& error) {
    EXPECT_NE(message_of(error).find("Call init_process_group() first"), std::string::npos);
  }
}

}  // namespace
}  // namespace fsdp
