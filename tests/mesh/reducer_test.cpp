#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fsdp/process_group.h"

namespace fsdp {
namespace {

constexpr int kWorldSize = 3;
constexpr int64_t kFirstBucketBytes = 64;  // several buckets, so several all-reduces are in flight
constexpr int64_t kBucketBytes = 256;

std::vector<at::Tensor> make_parameters() {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < 4; ++i) {
    parameters.push_back((at::arange(64, at::kFloat).view({8, 8}) * 0.01 + i).requires_grad_(true));
  }
  return parameters;
}

at::Tensor loss_of(const std::vector<at::Tensor>& parameters, double input) {
  at::Tensor x = at::full({2, 8}, input);
  for (const at::Tensor& parameter : parameters) x = at::tanh(at::matmul(x, parameter) * 0.1);
  return x.sum();
}

// The constructor got one more parameter in some release after torch 2.11.
template <typename... Common>
std::shared_ptr<c10d::Reducer> make_reducer(const Common&... common) {
  using Limits = std::vector<int64_t>;
  if constexpr (std::is_constructible_v<c10d::Reducer, const Common&..., bool, bool, Limits>) {
    return std::make_shared<c10d::Reducer>(common..., /*skip_all_reduce_unused_params=*/false,
                                           /*use_python_reducer=*/false, Limits{});
  } else {
    return std::make_shared<c10d::Reducer>(common..., /*skip_all_reduce_unused_params=*/false,
                                           /*use_python_reducer=*/false);
  }
}

// Promise: DDP's own Reducer works over rank threads: gradients are the mean over the ranks.
TEST(ThreadBackend, ServesTheReducerOfDdp) {
  std::vector<at::Tensor> expected = make_parameters();
  at::Tensor total;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const at::Tensor loss = loss_of(expected, rank + 1.0);
    total = rank == 0 ? loss : total + loss;
  }
  (total / kWorldSize).backward();

  run_ranks(kWorldSize, [&](const ProcessGroupPtr& group) {
    const std::vector<at::Tensor> parameters = make_parameters();
    const std::vector<bool> not_sparse(parameters.size(), false);
    auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
        parameters, {kFirstBucketBytes, kBucketBytes}, not_sparse);
    std::reverse(buckets.begin(), buckets.end());
    std::unordered_map<size_t, std::string> names;
    for (size_t i = 0; i < parameters.size(); ++i) names[i] = c10::str("p", i);
    const auto reducer = make_reducer(parameters, buckets, group, not_sparse, kBucketBytes,
                                      /*find_unused_parameters=*/false,
                                      /*gradient_as_bucket_view=*/true, names, kFirstBucketBytes);
    for (int step = 0; step < 3; ++step) {
      for (const at::Tensor& parameter : parameters) {
        if (parameter.grad().defined()) parameter.grad().zero_();
      }
      reducer->prepare_for_forward();
      if (reducer->should_rebuild_buckets()) reducer->rebuild_buckets();
      const at::Tensor loss = loss_of(parameters, group->getRank() + 1.0);
      reducer->prepare_for_backward({});
      loss.backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        // The sums are taken in another order than those of the reference.
        EXPECT_TRUE(at::allclose(parameters[i].grad(), expected[i].grad(), 1e-5, 1e-7))
            << "parameter " << i << ", step " << step;
      }
    }
  });
}

}  // namespace
}  // namespace fsdp
