#include "mesh/host_kernels.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "fsdp/error.h"

namespace fsdp {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

constexpr int64_t kBlock = 2048;  // elements; the accumulators stay in the first-level cache
constexpr int64_t kLanes = 64;    // a loop of constant length is vectorised at -O2 too

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

template <typename Body>
inline void for_each_element(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) body(i + lane);
  }
  for (; i < count; ++i) body(i);
}

struct Sum {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a + b);
  }
};
struct Product {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a * b);
  }
};
struct Min {
  template <typename A>
  A operator()(A a, A b) const {
    return (b < a || b != b) ? b : a;  // a NaN stays
  }
};
struct Max {
  template <typename A>
  A operator()(A a, A b) const {
    return (b > a || b != b) ? b : a;
  }
};
struct And {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a & b);
  }
};
struct Or {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a | b);
  }
};
struct Xor {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a ^ b);
  }
};

#if defined(__x86_64__)
#define FSDP_HAS_F16C 1
// Every processor with AVX2 has F16C; conversions without it are ten times slower.
__attribute__((target("avx,f16c"))) void half_to_float(const c10::Half* from, float* to,
                                                       int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(bits));
  }
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

__attribute__((target("avx,f16c"))) void float_to_half(const float* from, c10::Half* to,
                                                       int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
  for (; i < count; ++i) to[i] = static_cast<c10::Half>(from[i]);
}

// The same bits as c10's conversion, without its branch.
__attribute__((target("avx2"))) void bfloat16_to_float(const c10::BFloat16* from, float* to,
                                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i].x) << 16);
  }
}

__attribute__((target("avx2"))) void float_to_bfloat16(const float* from, c10::BFloat16* to,
                                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    to[i].x = static_cast<uint16_t>(is_nan ? 0x7FC0U : rounded);
  }
}

bool can_convert_halves() { return __builtin_cpu_supports("avx2"); }
#endif

// The elements as accumulators: the source itself where it is of that type, else converted.
template <typename T, typename A>
const A* load(const T* source, A* buffer, int64_t count) {
  if constexpr (std::is_same_v<T, A>) return source;
#ifdef FSDP_HAS_F16C
  if constexpr (std::is_same_v<T, c10::Half>) {
    if (can_convert_halves()) {
      half_to_float(source, buffer, count);
      return buffer;
    }
  }
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (can_convert_halves()) {
      bfloat16_to_float(source, buffer, count);
      return buffer;
    }
  }
#endif
  if constexpr (!std::is_same_v<T, A>) {
    for_each_element(count, [&](int64_t i) { buffer[i] = static_cast<A>(source[i]); });
  }
  return buffer;
}

template <typename T, typename A>
void store(const A* sums, T* destination, int64_t count) {
#ifdef FSDP_HAS_F16C
  if constexpr (std::is_same_v<T, c10::Half>) {
    if (can_convert_halves()) return float_to_half(sums, destination, count);
  }
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (can_convert_halves()) return float_to_bfloat16(sums, destination, count);
  }
#endif
  for_each_element(count, [&](int64_t i) { destination[i] = static_cast<T>(sums[i]); });
}

template <typename T, typename Combine>
void reduce_blocks(const HostReduction& reduction, Combine combine) {
  using A = Accumulator<T>;
  alignas(64) A sums[kBlock];
  alignas(64) A buffer[kBlock];
  const size_t num_ranks = reduction.sources.size();
  const bool scaled = reduction.op == RedOp::PREMUL_SUM;
  for (int64_t begin = 0; begin < reduction.numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, reduction.numel - begin);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      const T* const source = static_cast<const T*>(reduction.sources[rank]) + begin;
      const A* const block = load<T, A>(source, buffer, count);
      if (scaled) {
        const A factor = static_cast<A>(reduction.factors[rank]);
        for_each_element(count, [&](int64_t i) {
          const A value = static_cast<A>(factor * block[i]);
          sums[i] = rank == 0 ? value : combine(sums[i], value);
        });
      } else if (rank == 0) {
        for_each_element(count, [&](int64_t i) { sums[i] = block[i]; });
      } else {
        for_each_element(count, [&](int64_t i) { sums[i] = combine(sums[i], block[i]); });
      }
    }
    if (reduction.op == RedOp::AVG) {
      const A divisor = static_cast<A>(num_ranks);
      for_each_element(count, [&](int64_t i) { sums[i] = static_cast<A>(sums[i] / divisor); });
    }
    store<T, A>(sums, static_cast<T*>(reduction.destination) + begin, count);
  }
}

template <typename T>
void reduce_as(const HostReduction& reduction) {
  switch (reduction.op) {
    case RedOp::SUM:
    case RedOp::AVG:
    case RedOp::PREMUL_SUM:
      return reduce_blocks<T>(reduction, Sum());
    case RedOp::PRODUCT:
      return reduce_blocks<T>(reduction, Product());
    case RedOp::MIN:
      return reduce_blocks<T>(reduction, Min());
    case RedOp::MAX:
      return reduce_blocks<T>(reduction, Max());
    case RedOp::BAND:
      if constexpr (std::is_integral_v<T>) return reduce_blocks<T>(reduction, And());
      break;
    case RedOp::BOR:
      if constexpr (std::is_integral_v<T>) return reduce_blocks<T>(reduction, Or());
      break;
    case RedOp::BXOR:
      if constexpr (std::is_integral_v<T>) return reduce_blocks<T>(reduction, Xor());
      break;
    case RedOp::UNUSED:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "check_reduction let ", reduce_op_name(reduction.op), " of ",
                        reduction.dtype, " pass");
}

bool reducible(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kBool:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:  // c10's list of dtypes grows with every release
      return false;
  }
}

}  // namespace

std::string_view reduce_op_name(RedOp op) {
  switch (op) {
    case RedOp::SUM:
      return "SUM";
    case RedOp::AVG:
      return "AVG";
    case RedOp::PRODUCT:
      return "PRODUCT";
    case RedOp::MIN:
      return "MIN";
    case RedOp::MAX:
      return "MAX";
    case RedOp::BAND:
      return "BAND";
    case RedOp::BOR:
      return "BOR";
    case RedOp::BXOR:
      return "BXOR";
    case RedOp::PREMUL_SUM:
      return "PREMUL_SUM";
    case RedOp::UNUSED:
      return "UNUSED";
  }
  return "unknown";
}

void check_reduction(std::string_view function, RedOp op, at::ScalarType dtype) {
  const bool linear = op == RedOp::SUM || op == RedOp::AVG || op == RedOp::PREMUL_SUM;
  const bool bitwise = op == RedOp::BAND || op == RedOp::BOR || op == RedOp::BXOR;
  const bool floating = at::isFloatingType(dtype);
  bool defined = reducible(dtype) && op != RedOp::UNUSED;
  if (bitwise) defined = defined && at::isIntegralType(dtype, /*includeBool=*/true);
  if (at::isComplexType(dtype)) defined = defined && linear;
  if (op == RedOp::PREMUL_SUM) defined = defined && (floating || at::isComplexType(dtype));
  if (op == RedOp::AVG) defined = defined && dtype != at::kBool;
  FSDP_CHECK(ConfigError, defined, function, ": the reduction ", reduce_op_name(op),
             " is not defined for tensors of ", dtype,
             ". Convert the tensors to a dtype that has it.");
}

void reduce_on_host(const HostReduction& reduction) {
  switch (reduction.dtype) {
    case at::kFloat:
      return reduce_as<float>(reduction);
    case at::kDouble:
      return reduce_as<double>(reduction);
    case at::kHalf:
      return reduce_as<c10::Half>(reduction);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16>(reduction);
    case at::kByte:
      return reduce_as<uint8_t>(reduction);
    case at::kChar:
      return reduce_as<int8_t>(reduction);
    case at::kShort:
      return reduce_as<int16_t>(reduction);
    case at::kInt:
      return reduce_as<int32_t>(reduction);
    case at::kLong:
      return reduce_as<int64_t>(reduction);
    case at::kBool:
      return reduce_as<bool>(reduction);
    case at::kComplexFloat:
    case at::kComplexDouble: {
      HostReduction parts = reduction;  // linear: real and imaginary parts go their own ways
      parts.dtype = c10::toRealValueType(reduction.dtype);
      parts.numel = reduction.numel * 2;
      return reduce_on_host(parts);
    }
    default:
      TORCH_INTERNAL_ASSERT(false, "check_reduction let ", reduction.dtype, " pass");
  }
}

void copy_on_host(void* destination, const void* source, int64_t bytes) {
  if (bytes > 0 && destination != source) {
    std::memcpy(destination, source, static_cast<size_t>(bytes));
  }
}

}  // namespace fsdp
