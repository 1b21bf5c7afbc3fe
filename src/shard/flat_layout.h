#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fsdp {

/// What the planner knows of one parameter, in elements.
struct FlatExtent {
  int64_t numel = 0;
  int64_t unit = 1;  ///< of a row: the end of a rank's part cuts the parameter at multiples of it
};

/// Some parameters of one dtype one after the other in a flat buffer, which is cut into equal parts
/// of `shard_numel`: rank r owns the elements [r * shard_numel, (r + 1) * shard_numel).
struct FlatRangePlan {
  std::vector<size_t> members;  ///< which parameters, by index
  std::vector<int64_t> starts;  ///< where each of them begins
  int64_t shard_numel = 0;
};

/// The first element of each parameter, in order, for parts of `shard_numel`; nothing if they do
/// not fit into `world_size` parts without a row being cut.
///
/// `shard_numel` and all starts are multiples of `alignment`. Each start is the smallest possible,
/// so that no other places in this order end earlier.
[[nodiscard]] std::optional<std::vector<int64_t>> place_in_order(
    std::span<const FlatExtent> extents, int64_t world_size, int64_t shard_numel,
    int64_t alignment);

/// All parameters in one range, with the smallest parts for which place_in_order() finds places.
[[nodiscard]] FlatRangePlan plan_range(std::span<const FlatExtent> extents, int64_t world_size,
                                       int64_t alignment);

/// One range, or more where that saves padding.
///
/// Parameters whose rows are of different lengths, and which span several ranks, need parts that
/// hold whole rows of each: for them a range per length of row wastes less. Padding of 1 %, or of
/// 4 KiB a rank, is not worth another range, nor a start that is not at a multiple of 64 bytes.
[[nodiscard]] std::vector<FlatRangePlan> plan_flat_layout(std::span<const FlatExtent> extents,
                                                          int64_t world_size,
                                                          int64_t element_bytes);

/// The elements of all ranges that belong to no parameter.
[[nodiscard]] int64_t padding_numel(std::span<const FlatRangePlan> ranges,
                                    std::span<const FlatExtent> extents, int64_t world_size);

}  // namespace fsdp
