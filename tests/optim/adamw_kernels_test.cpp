#include "optim/adamw_kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

AdamWLists make_lists(at::ScalarType dtype, bool amsgrad) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  AdamWLists lists;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 7}, {1}, {64}, {3, 0}, {}}) {
    lists.params.push_back(at::randn(sizes, generator).to(dtype));
    lists.grads.push_back(at::zeros_like(lists.params.back()));
    lists.exp_avgs.push_back(at::zeros_like(lists.params.back()));
    lists.exp_avg_sqs.push_back(at::zeros_like(lists.params.back()));
    if (amsgrad) lists.max_exp_avg_sqs.push_back(at::zeros_like(lists.params.back()));
    // Of different ages, as after a late start.
    lists.steps.push_back(at::zeros({}) + static_cast<double>(lists.steps.size() * 3));
  }
  return lists;
}

void set_grads(const AdamWLists& lists, int step) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  for (const at::Tensor& grad : lists.grads) grad.copy_(at::randn(grad.sizes(), generator));
  at::_foreach_add_(lists.steps, 1);
}

void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                  double tolerance, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(a[i].allclose(b[i], tolerance, tolerance)) << what << " " << i;
  }
}

// Promise: where torch has no fused kernel, the operators that stand in for it compute the same:
// parameters and state over 20 steps, for each option that changes the formula. Tolerance: some
// roundings of the dtype, in another order of operations.
TEST(AdamWKernels, ForeachIsFused) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-14;
    for (const bool amsgrad : {false, true}) {
      for (const bool maximize : {false, true}) {
        for (const double weight_decay : {0.0, 0.1}) {
          const AdamWOptions options = AdamWOptions(1e-2)
                                           .betas({0.8, 0.99})
                                           .weight_decay(weight_decay)
                                           .amsgrad(amsgrad)
                                           .maximize(maximize);
          const AdamWLists fused = make_lists(dtype, amsgrad);
          const AdamWLists foreach = make_lists(dtype, amsgrad);
          for (int step = 0; step < 20; ++step) {
            set_grads(fused, step);
            fused_adamw(fused, options);
            set_grads(foreach, step);
            foreach_adamw(foreach, options);
          }
          expect_close(fused.params, foreach.params, tolerance, "parameter");
          expect_close(fused.exp_avgs, foreach.exp_avgs, tolerance, "exp_avg");
          expect_close(fused.exp_avg_sqs, foreach.exp_avg_sqs, tolerance, "exp_avg_sq");
          expect_close(fused.max_exp_avg_sqs, foreach.max_exp_avg_sqs, tolerance, "maximum");
          expect_close(fused.grads, foreach.grads, 0, "gradient");
        }
      }
    }
  }
}

// Promise: the fused kernel is used where there is one.
TEST(AdamWKernels, WhereThereIsAFusedOne) {
  EXPECT_TRUE(has_fused_adamw(c10::Device(c10::kCPU)));
  EXPECT_FALSE(has_fused_adamw(c10::Device(c10::kPrivateUse1, 0)));  // until one is registered
}

}  // namespace
}  // namespace fsdp
