#include "mesh/device_kernels.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "base/stream.h"

namespace fsdp {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

at::Tensor over(const DeviceRange& range) {
  return at::for_blob(range.data, {range.numel})
      .target_device(range.device)
      .options(at::TensorOptions().dtype(range.dtype).device(range.device))
      .make_tensor();
}

// A NaN stays; of equal values the first.
at::Tensor smaller(const at::Tensor& a, const at::Tensor& b) {
  return at::where(b.lt(a).logical_or(b.ne(b)), b, a);
}
at::Tensor larger(const at::Tensor& a, const at::Tensor& b) {
  return at::where(b.gt(a).logical_or(b.ne(b)), b, a);
}

at::Tensor combine_bools(RedOp op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case RedOp::PRODUCT:
    case RedOp::MIN:
    case RedOp::BAND:
      return at::logical_and(a, b);
    case RedOp::BXOR:
      return at::bitwise_xor(a, b);
    default:
      return at::logical_or(a, b);
  }
}

at::Tensor combine(RedOp op, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kBool) return combine_bools(op, a, b);
  switch (op) {
    case RedOp::PRODUCT:
      return at::mul(a, b);
    case RedOp::MIN:
      return smaller(a, b);
    case RedOp::MAX:
      return larger(a, b);
    case RedOp::BAND:
      return at::bitwise_and(a, b);
    case RedOp::BOR:
      return at::bitwise_or(a, b);
    case RedOp::BXOR:
      return at::bitwise_xor(a, b);
    default:
      return at::add(a, b);
  }
}

// By a tensor: devices multiply with the reciprocal of a number, which rounds otherwise.
at::Tensor average(const at::Tensor& sum, size_t count) {
  const at::Tensor divisor = at::scalar_tensor(static_cast<double>(count), sum.options());
  if (at::isIntegralType(sum.scalar_type(), /*includeBool=*/false)) {
    return at::div(sum, divisor, "trunc");
  }
  return at::div(sum, divisor);
}

// The elements on `device` as accumulators: half precision as float, complex numbers as pairs.
// Moved first: only a copy between devices is ordered behind the current stream of its destination.
at::Tensor load(const DeviceRange& range, c10::Device device) {
  const at::Tensor values = over(range).to(device, /*non_blocking=*/true);
  if (at::isComplexType(range.dtype)) return at::view_as_real(values);
  return at::isReducedFloatingType(range.dtype) ? values.to(at::kFloat) : values;
}

}  // namespace

void copy_on_device(const DeviceRange& destination, const DeviceRange& source) {
  if (source.numel == 0 ||
      (destination.data == source.data && destination.device == source.device)) {
    return;
  }
  const c10::NoGradGuard no_grad;
  over(destination).copy_(over(source), /*non_blocking=*/true);
}

void reduce_on_device(const DeviceRange& destination, RedOp op,
                      std::span<const DeviceRange> sources, std::span<const double> factors) {
  if (destination.numel == 0) return;
  const c10::NoGradGuard no_grad;
  const c10::Device here = with_index(c10::Device(destination.device.type()));
  const bool adds_up = (op == RedOp::SUM || op == RedOp::AVG || op == RedOp::PREMUL_SUM) &&
                       destination.dtype != at::kBool;
  at::Tensor result;
  bool is_own = false;  // not the memory of a source
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    at::Tensor value = load(sources[rank], here);
    if (op == RedOp::PREMUL_SUM) value = at::mul(value, factors[rank]);
    if (rank == 0) {
      is_own = value.const_data_ptr() != sources[0].data;
      result = std::move(value);
    } else if (is_own && adds_up) {
      result.add_(value);
    } else {
      result = combine(op, result, value);
      is_own = true;
    }
  }
  if (op == RedOp::AVG) result = average(result, sources.size());
  at::Tensor target = over(destination);
  if (at::isComplexType(destination.dtype)) target = at::view_as_real(target);
  target.copy_(result, /*non_blocking=*/true);
}

}  // namespace fsdp
