#include "shard/flat_layout.h"

#include <chrono>
#include <functional>
#include <string>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

// Whether some boundary k * shard_numel lies inside of a row of a parameter at `start`.
bool cuts_a_row(const FlatExtent& extent, int64_t start, int64_t shard_numel) {
  for (int64_t boundary = shard_numel; boundary < start + extent.numel; boundary += shard_numel) {
    if (boundary > start && (boundary - start) % extent.unit != 0) return true;
  }
  return false;
}

// Whether the parameters fit at any starts at all, in this order.
bool fits_anyhow(std::span<const FlatExtent> extents, int64_t begin, int64_t end,
                 int64_t shard_numel, int64_t alignment) {
  if (extents.empty()) return true;
  for (int64_t start = begin; start + extents[0].numel <= end; ++start) {
    if (start % alignment != 0 || cuts_a_row(extents[0], start, shard_numel)) continue;
    if (fits_anyhow(extents.subspan(1), start + extents[0].numel, end, shard_numel, alignment)) {
      return true;
    }
  }
  return false;
}

void expect_valid(const FlatRangePlan& plan, std::span<const FlatExtent> extents,
                  int64_t world_size, int64_t alignment) {
  ASSERT_EQ(plan.starts.size(), plan.members.size());
  EXPECT_EQ(plan.shard_numel % alignment, 0);
  int64_t end = 0;
  for (size_t i = 0; i < plan.starts.size(); ++i) {
    const FlatExtent& extent = extents[plan.members[i]];
    EXPECT_GE(plan.starts[i], end) << "overlaps the one before";
    if (extent.numel == 0) continue;
    EXPECT_EQ(plan.starts[i] % alignment, 0);
    EXPECT_FALSE(cuts_a_row(extent, plan.starts[i], plan.shard_numel));
    end = plan.starts[i] + extent.numel;
  }
  EXPECT_LE(end, world_size * plan.shard_numel);
}

// Promise: the parts are the smallest that any placement in this order needs: all combinations of
// two and three parameters of up to 4 rows of 1, 2, 3 and 5 elements, 1 to 4 ranks, alignment 1 and
// 2, against a search over all starts.
TEST(FlatLayout, PartsAreTheSmallestThatFit) {
  std::vector<FlatExtent> kinds;
  for (const int64_t unit : {1, 2, 3, 5}) {
    for (const int64_t rows : {1, 2, 4}) kinds.push_back({.numel = rows * unit, .unit = unit});
  }
  int num_cases = 0;
  const auto check = [&](const std::vector<FlatExtent>& extents) {
    for (const int64_t world_size : {1, 2, 3, 4}) {
      for (const int64_t alignment : {1, 2}) {
        const FlatRangePlan plan = plan_range(extents, world_size, alignment);
        expect_valid(plan, extents, world_size, alignment);
        for (int64_t smaller = alignment; smaller < plan.shard_numel; smaller += alignment) {
          ASSERT_FALSE(fits_anyhow(extents, 0, world_size * smaller, smaller, alignment))
              << "parts of " << smaller << " would do, planned " << plan.shard_numel << " for "
              << extents[0].numel << "/" << extents[0].unit << ", " << extents[1].numel << "/"
              << extents[1].unit << " over " << world_size << ", alignment " << alignment;
        }
        ++num_cases;
      }
    }
  };
  for (const FlatExtent& a : kinds) {
    for (const FlatExtent& b : kinds) {
      check({a, b});
      for (size_t c = 0; c < kinds.size(); c += 2) check({a, b, kinds[c]});
    }
  }
  EXPECT_EQ(num_cases, 12 * 12 * 7 * 8);
}

FlatExtent matrix(int64_t rows, int64_t columns) {
  return {.numel = rows * columns, .unit = columns};
}

double waste(std::span<const FlatExtent> extents, int64_t world_size, int64_t element_bytes) {
  const std::vector<FlatRangePlan> ranges = plan_flat_layout(extents, world_size, element_bytes);
  size_t num_members = 0;
  for (const FlatRangePlan& range : ranges) {
    expect_valid(range, extents, world_size, 1);
    num_members += range.members.size();
  }
  EXPECT_EQ(num_members, extents.size());
  int64_t numel = 0;
  for (const FlatExtent& extent : extents) numel += extent.numel;
  return static_cast<double>(padding_numel(ranges, extents, world_size)) /
         static_cast<double>(numel);
}

// A decoder block and what is around it, as Llama's models have them.
struct DecoderShape {
  std::string name;
  int64_t dim, ffn_dim, kv_dim, vocab_size;
};

const DecoderShape kDecoders[] = {{"405B", 16384, 53248, 1024, 128256},
                                  {"70B", 8192, 28672, 1024, 128256},
                                  {"8B", 4096, 14336, 1024, 128256},
                                  {"7B of the second", 4096, 11008, 4096, 32000}};

std::vector<FlatExtent> block_of(const DecoderShape& d) {
  return {matrix(d.dim, d.dim),     matrix(d.kv_dim, d.dim),  matrix(d.kv_dim, d.dim),
          matrix(d.dim, d.dim),     matrix(d.ffn_dim, d.dim), matrix(d.dim, d.ffn_dim),
          matrix(d.ffn_dim, d.dim), matrix(d.dim, 1),         matrix(d.dim, 1)};
}

std::vector<FlatExtent> root_of(const DecoderShape& d) {
  return {matrix(d.vocab_size, d.dim), matrix(d.dim, 1), matrix(d.vocab_size, d.dim)};
}

// Promise: the groups of real decoders waste less than 1 % as long as a rank holds a hundred rows
// or more; the largest still does over 1,024 ranks. Where a rank holds fewer, a row is more than 1
// % of its part, and the waste is at most two rows.
TEST(FlatLayout, RealDecodersWasteLessThanOnePercent) {
  int num_below = 0;
  for (const DecoderShape& d : kDecoders) {
    for (const int64_t world_size : {2, 3, 6, 8, 64, 100, 256, 1024}) {
      for (const auto& group : {block_of(d), root_of(d)}) {
        int64_t rows = 0;
        for (const FlatExtent& extent : group) rows += extent.numel / d.dim;
        const double rows_per_rank = static_cast<double>(rows) / static_cast<double>(world_size);
        const double allowed = std::max(0.01, 2 / rows_per_rank);
        num_below += allowed == 0.01 ? 1 : 0;
        for (const int64_t element_bytes : {2, 4}) {
          EXPECT_LT(waste(group, world_size, element_bytes), allowed)
              << d.name << " over " << world_size << ", " << rows_per_rank << " rows a rank";
        }
      }
    }
  }
  EXPECT_GT(num_below, 40);
  EXPECT_LT(waste(block_of(kDecoders[0]), 1024, 2), 0.01);
  EXPECT_LT(waste(root_of(kDecoders[0]), 1024, 2), 0.01);
}

// Promise: planning all groups of the largest over 1,024 ranks takes under 0.3 s. It takes about a
// millisecond; a search that tried all sizes would take minutes.
TEST(FlatLayout, TheLargestDecoderIsPlannedQuickly) {
  const std::vector<FlatExtent> block = block_of(kDecoders[0]);
  const auto begin = std::chrono::steady_clock::now();
  for (int layer = 0; layer < 126; ++layer) (void)plan_flat_layout(block, 1024, 4);
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(std::chrono::duration<double>(took).count(), 0.3);
}

// Promise: a row that does not fit before a boundary begins behind it, and small groups stay in one
// range at aligned starts.
TEST(FlatLayout, PadsBeforeARowThatWouldBeCut) {
  const std::vector<FlatExtent> extents{{.numel = 3, .unit = 3}, {.numel = 5, .unit = 5}};
  const FlatRangePlan plan = plan_range(extents, 2, 1);
  EXPECT_EQ(plan.shard_numel, 5);
  EXPECT_EQ(plan.starts, (std::vector<int64_t>{0, 5}));
  const std::vector<FlatRangePlan> ranges = plan_flat_layout(extents, 2, 4);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].starts[1] % 16, 0);
}

// Promise: parameters without elements, none at all, and one rank are nothing special.
TEST(FlatLayout, EmptyParametersAndOneRank) {
  EXPECT_EQ(plan_range({}, 4, 16).shard_numel, 0);
  const std::vector<FlatExtent> nothing{{.numel = 0}, {.numel = 0}};
  EXPECT_EQ(plan_range(nothing, 4, 16).shard_numel, 0);
  const std::vector<FlatExtent> some{{.numel = 0}, {.numel = 7, .unit = 7}, {.numel = 0}};
  EXPECT_EQ(plan_range(some, 1, 1).shard_numel, 7);
  EXPECT_EQ(plan_range(some, 3, 1).shard_numel, 7);
}

}  // namespace
}  // namespace fsdp
