#include "shard/flat_layout.h"

#include <algorithm>
#include <numeric>

#include "shard/shard_range.h"

namespace fsdp {
namespace {

constexpr int64_t kAlignmentBytes = 64;  // a cache line; the widest vector registers
constexpr int64_t kNegligibleBytes = 4096;
constexpr int64_t kNegligiblePart = 100;  // one part in so many

int64_t total_numel(std::span<const FlatExtent> extents) {
  int64_t total = 0;
  for (const FlatExtent& extent : extents) total += extent.numel;
  return total;
}

// The first place at or behind `begin` where no boundary between ranks cuts a row.
std::optional<int64_t> first_start(const FlatExtent& extent, int64_t begin, int64_t shard_numel,
                                   int64_t alignment) {
  begin = round_up(begin, alignment);
  // What does not go into this part and the next does not go into later ones either.
  for (int part = 0; part < 2; ++part) {
    const int64_t boundary = (begin / shard_numel + 1) * shard_numel;
    if (begin + extent.numel <= boundary) return begin;
    const int64_t step = std::lcm(extent.unit, alignment);
    const int64_t start = boundary - (boundary - begin) / step * step;  // whole rows before it
    const bool is_cut_once = start + extent.numel <= boundary + shard_numel;
    if (is_cut_once || shard_numel % extent.unit == 0) return start;
    begin = boundary;
  }
  return std::nullopt;
}

FlatRangePlan plan_members(std::span<const FlatExtent> extents, std::vector<size_t> members,
                           int64_t world_size, int64_t alignment) {
  std::vector<FlatExtent> own;
  for (const size_t member : members) own.push_back(extents[member]);
  FlatRangePlan plan = plan_range(own, world_size, alignment);
  plan.members = std::move(members);
  return plan;
}

// Parameters that span several ranks, by length of row; a length that divides another joins it. The
// others, which fit anywhere, go where a row, and so the padding, is shortest.
std::vector<std::vector<size_t>> members_by_row(std::span<const FlatExtent> extents,
                                                int64_t world_size) {
  const int64_t least_shard = total_numel(extents) / world_size + 1;
  std::vector<int64_t> units;
  for (const FlatExtent& extent : extents) {
    if (extent.numel > 2 * least_shard) units.push_back(extent.unit);
  }
  std::sort(units.begin(), units.end(), std::greater<>());
  std::vector<int64_t> classes;
  for (const int64_t unit : units) {
    const auto holds = [&](int64_t longer) { return longer % unit == 0; };
    if (std::none_of(classes.begin(), classes.end(), holds)) classes.push_back(unit);
  }
  if (classes.empty()) classes.push_back(1);
  std::vector<std::vector<size_t>> result(classes.size());
  for (size_t i = 0; i < extents.size(); ++i) {
    size_t own = classes.size() - 1;
    if (extents[i].numel > 2 * least_shard) {
      own = 0;
      while (classes[own] % extents[i].unit != 0) ++own;
    }
    result[own].push_back(i);
  }
  return result;
}

}  // namespace

std::optional<std::vector<int64_t>> place_in_order(std::span<const FlatExtent> extents,
                                                   int64_t world_size, int64_t shard_numel,
                                                   int64_t alignment) {
  std::vector<int64_t> starts;
  int64_t end = 0;
  for (const FlatExtent& extent : extents) {
    if (extent.numel == 0) {
      starts.push_back(end);
      continue;
    }
    const auto start = first_start(extent, end, shard_numel, alignment);
    if (!start || *start + extent.numel > world_size * shard_numel) return std::nullopt;
    starts.push_back(*start);
    end = *start + extent.numel;
  }
  return starts;
}

FlatRangePlan plan_range(std::span<const FlatExtent> extents, int64_t world_size,
                         int64_t alignment) {
  FlatRangePlan plan;
  plan.members.resize(extents.size());
  std::iota(plan.members.begin(), plan.members.end(), size_t{0});
  plan.starts.resize(extents.size());
  const int64_t total = total_numel(extents);
  if (total == 0) return plan;

  int64_t shard_numel = round_up((total + world_size - 1) / world_size, alignment);
  for (;; shard_numel += alignment) {
    // What is longer than two parts is cut twice or more: then parts must be whole rows of it.
    for (size_t i = 0; i < extents.size(); ++i) {
      const auto& [numel, unit] = extents[i];
      if (numel <= 2 * shard_numel || shard_numel % unit == 0) continue;
      shard_numel = std::min(round_up(shard_numel, std::lcm(unit, alignment)),
                             round_up((numel + 1) / 2, alignment));
      i = static_cast<size_t>(-1);  // the others again
    }
    if (auto starts = place_in_order(extents, world_size, shard_numel, alignment)) {
      plan.starts = std::move(*starts);
      plan.shard_numel = shard_numel;
      return plan;
    }
  }
}

int64_t padding_numel(std::span<const FlatRangePlan> ranges, std::span<const FlatExtent> extents,
                      int64_t world_size) {
  int64_t numel = -total_numel(extents);
  for (const FlatRangePlan& range : ranges) numel += range.shard_numel * world_size;
  return numel;
}

std::vector<FlatRangePlan> plan_flat_layout(std::span<const FlatExtent> extents, int64_t world_size,
                                            int64_t element_bytes) {
  const int64_t negligible = std::max(total_numel(extents) / kNegligiblePart,
                                      world_size * kNegligibleBytes / element_bytes);
  std::vector<size_t> all(extents.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const std::vector<std::vector<size_t>> in_one{all};
  const std::vector<std::vector<size_t>> by_row = members_by_row(extents, world_size);

  std::vector<FlatRangePlan> best;
  int64_t best_padding = 0;
  for (const int64_t alignment :
       {std::max<int64_t>(kAlignmentBytes / element_bytes, 1), int64_t{1}}) {
    for (const auto* members_of_ranges : {&in_one, &by_row}) {
      std::vector<FlatRangePlan> ranges;
      for (const std::vector<size_t>& members : *members_of_ranges) {
        ranges.push_back(plan_members(extents, members, world_size, alignment));
      }
      const int64_t padding = padding_numel(ranges, extents, world_size);
      if (padding <= negligible) return ranges;
      if (best.empty() || padding < best_padding) {
        best = std::move(ranges);
        best_padding = padding;
      }
    }
  }
  return best;
}

}  // namespace fsdp
