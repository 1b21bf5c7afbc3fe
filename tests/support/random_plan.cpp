#include "support/random_plan.h"

#include <algorithm>
#include <array>
#include <random>
#include <sstream>

namespace fsdp::testing {
namespace {

// std's distributions give other numbers in other libraries.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  /// 0 to n - 1.
  int64_t draw(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool chance(int64_t percent) { return draw(100) < percent; }
  template <class Values>
  auto pick(const Values& values) {
    return values[static_cast<size_t>(draw(static_cast<int64_t>(std::size(values))))];
  }

 private:
  std::mt19937_64 engine_;
};

constexpr int64_t kWidths[] = {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 31};
constexpr int kWorldSizes[] = {1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 6, 7, 8, 8, 9};
constexpr BlockKind kKinds[] = {
    BlockKind::kLinearStack, BlockKind::kLinearStack, BlockKind::kMlp,        BlockKind::kMlp,
    BlockKind::kResidual,    BlockKind::kResidual,    BlockKind::kLayerNorm,  BlockKind::kBranches,
    BlockKind::kBranches,    BlockKind::kBareParams,  BlockKind::kBareParams, BlockKind::kScale,
    BlockKind::kNoParameters};

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> result;
  for (int64_t i = 1; i <= n; ++i) {
    if (n % i == 0) result.push_back(i);
  }
  return result;
}

bool keeps_width(const BlockPlan& block) { return block.widths.front() == block.widths.back(); }

bool has_linear(const BlockPlan& block) { return block.widths.size() > 1; }

// Draws one plan, part after part.
class Drawer {
 public:
  explicit Drawer(uint64_t seed) : dice_(seed) { plan_.seed = seed; }

  ModelPlan draw() {
    draw_training();
    draw_ranks();
    draw_layers();
    draw_tie();
    return plan_;
  }

 private:
  void draw_training() {
    const int64_t percent = dice_.draw(100);
    plan_.precision = percent < 15   ? Precision::kDouble
                      : percent < 30 ? Precision::kBFloat16Policy
                                     : Precision::kFloat;
    plan_.rows_per_rank = 1 + dice_.draw(3);
    plan_.optimizer = dice_.chance(50) ? OptimizerKind::kSgdMomentum : OptimizerKind::kAdamW;
    plan_.zero_grad_to_none = dice_.chance(50);
  }

  void draw_ranks() {
    plan_.world_size = dice_.pick(kWorldSizes);
    if (dice_.chance(30)) plan_.num_replicas = dice_.pick(divisors(plan_.world_size));
    shard_size_ = plan_.world_size / plan_.num_replicas.value_or(1);
    plan_.root_reshard = draw_reshard();
    plan_.reshard_after_backward = dice_.chance(80);
    if (dice_.chance(35)) {
      plan_.accumulation = dice_.chance(60) ? Accumulation::kNoSync : Accumulation::kSyncEach;
      if (plan_.num_replicas && dice_.chance(50)) plan_.accumulation = Accumulation::kNoAllReduce;
    }
  }

  ReshardAfterForward draw_reshard() {
    switch (dice_.draw(4)) {
      case 0:
        return {};
      case 1:
        return true;
      case 2:
        return false;
      default:
        return dice_.pick(divisors(shard_size_));
    }
  }

  ShardPlan draw_shard(int64_t percent) {
    return dice_.chance(percent) ? ShardPlan(draw_reshard()) : std::nullopt;
  }

  void draw_layers() {
    if (dice_.chance(50)) width_ = dice_.pick(kWidths);
    hidden_width_ = dice_.pick(kWidths);
    int64_t inputs = draw_width();
    if (dice_.chance(35)) {
      plan_.vocab_size = dice_.pick(kWidths);
      plan_.embedding_shard = draw_shard(40);
      plan_.embedding_frozen = dice_.chance(20);
    }
    const size_t num_blocks = 1 + static_cast<size_t>(dice_.draw(5));
    while (plan_.blocks.size() < num_blocks) {
      plan_.blocks.push_back(draw_block(inputs));
      inputs = plan_.blocks.back().widths.back();
    }
    draw_stages();
    plan_.head_width = draw_width();
    plan_.head_bias = dice_.chance(70);
    plan_.head_shard = draw_shard(25);
  }

  int64_t draw_width() { return width_ ? *width_ : dice_.pick(kWidths); }

  BlockPlan draw_block(int64_t inputs) {
    BlockPlan block;
    block.kind = dice_.pick(kKinds);
    block.widths = {inputs};
    switch (block.kind) {
      case BlockKind::kLinearStack:
        for (int64_t i = dice_.draw(3); i >= 0; --i) block.widths.push_back(draw_width());
        break;
      case BlockKind::kMlp:
        block.widths.insert(block.widths.end(), {hidden_width_, draw_width()});
        break;
      case BlockKind::kResidual:
        block.widths.insert(block.widths.end(), {hidden_width_, inputs});
        break;
      case BlockKind::kBranches:
        block.widths.push_back(draw_width());
        break;
      case BlockKind::kBareParams:
        block.depth = dice_.pick(kWidths);
        break;
      case BlockKind::kLayerNorm:
      case BlockKind::kScale:
      case BlockKind::kNoParameters:
        break;
    }
    block.bias = dice_.chance(70);
    if (dice_.chance(20)) block.frozen_dtype = draw_other_dtype();
    const int64_t percent = dice_.draw(100);
    block.freeze = percent < 12   ? Freeze::kEverySecond
                   : percent < 20 ? Freeze::kAll
                                  : Freeze::kNone;
    block.shard = draw_shard(50);
    if (has_linear(block) || block.kind == BlockKind::kLayerNorm) {
      block.inner_shard = draw_shard(25);
    }
    draw_calls(block);
    return block;
  }

  at::ScalarType draw_other_dtype() {
    const at::ScalarType other_width =
        plan_.precision == Precision::kDouble ? at::kFloat : at::kDouble;
    return dice_.pick(std::array{at::kBFloat16, at::kHalf, at::kLong, other_width});
  }

  // Only a block whose outputs can be the next one's inputs may be left out, or called twice.
  void draw_calls(BlockPlan& block) {
    if (!keeps_width(block)) return;
    block.called_twice = dice_.chance(12);
    if (!dice_.chance(25)) return;
    block.use = dice_.pick(std::array{
        Use::kNever, Use::kDropped, Use::kOddSteps,
        plan_.accumulation == Accumulation::kNone ? Use::kDropped : Use::kFirstMicrobatch});
  }

  void draw_stages() {
    for (size_t first = 0; first < plan_.blocks.size();) {
      const auto rest = static_cast<int64_t>(plan_.blocks.size() - first);
      StagePlan stage;
      stage.num_blocks = 1 + static_cast<size_t>(dice_.draw(std::min<int64_t>(3, rest)));
      const int64_t inputs = plan_.blocks[first].widths.front();
      first += stage.num_blocks;
      if (plan_.blocks[first - 1].widths.back() == inputs) stage.called_twice = dice_.chance(10);
      stage.shard = draw_shard(35);
      plan_.stages.push_back(stage);
    }
  }

  // A tie has both ends in one group: neither is sharded on its own, nor in a stage that is unless
  // the other is in the same.
  void draw_tie() {
    const bool head_can_tie = plan_.vocab_size && !plan_.embedding_shard && !plan_.head_shard &&
                              plan_.blocks.back().widths.back() == plan_.input_width();
    if (head_can_tie && dice_.chance(60)) {
      plan_.head_tied = true;
      plan_.head_width = *plan_.vocab_size;
      plan_.embedding_frozen = false;
    }
    std::vector<TiePlan> possible;
    for (size_t i = 0; i < plan_.blocks.size(); ++i) {
      for (size_t j = i + 1; j < plan_.blocks.size(); ++j) {
        if (can_tie(i, j)) possible.push_back({.block = i, .other_block = j});
      }
    }
    if (!possible.empty()) plan_.ties.push_back(dice_.pick(possible));
  }

  bool can_tie(size_t i, size_t j) const {
    for (const size_t index : {i, j}) {
      const BlockPlan& block = plan_.blocks[index];
      if (!has_linear(block) || block.shard || block.inner_shard) return false;
    }
    const auto& widths_i = plan_.blocks[i].widths;
    const auto& widths_j = plan_.blocks[j].widths;
    const size_t stage_i = stage_of(i);
    const size_t stage_j = stage_of(j);
    return widths_i[0] == widths_j[0] && widths_i[1] == widths_j[1] &&
           (stage_i == stage_j || (!plan_.stages[stage_i].shard && !plan_.stages[stage_j].shard));
  }

  size_t stage_of(size_t block) const {
    size_t stage = 0;
    for (size_t end = plan_.stages[0].num_blocks; block >= end;) {
      end += plan_.stages[++stage].num_blocks;
    }
    return stage;
  }

  Dice dice_;
  ModelPlan plan_;
  int64_t shard_size_ = 1;
  std::optional<int64_t> width_;  // set: of all blocks
  int64_t hidden_width_ = 1;
};

const char* name_of(BlockKind kind) {
  switch (kind) {
    case BlockKind::kLinearStack:
      return "linears";
    case BlockKind::kMlp:
      return "mlp";
    case BlockKind::kResidual:
      return "residual";
    case BlockKind::kLayerNorm:
      return "norm";
    case BlockKind::kBranches:
      return "branches";
    case BlockKind::kBareParams:
      return "bare";
    case BlockKind::kScale:
      return "scale";
    case BlockKind::kNoParameters:
      return "tanh";
  }
  return "?";
}

const char* name_of(Use use) {
  switch (use) {
    case Use::kAlways:
      return "";
    case Use::kNever:
      return " never called";
    case Use::kDropped:
      return " result dropped";
    case Use::kOddSteps:
      return " in odd steps";
    case Use::kFirstMicrobatch:
      return " in first microbatch";
  }
  return "?";
}

const char* name_of(Accumulation accumulation) {
  switch (accumulation) {
    case Accumulation::kNone:
      return "1 microbatch";
    case Accumulation::kNoSync:
      return "2 microbatches, no sync";
    case Accumulation::kSyncEach:
      return "2 microbatches, sync each";
    case Accumulation::kNoAllReduce:
      return "2 microbatches, one all-reduce";
  }
  return "?";
}

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kFloat:
      return "fp32";
    case Precision::kDouble:
      return "double";
    case Precision::kBFloat16Policy:
      return "bf16 policy";
  }
  return "?";
}

std::string name_of(const ReshardAfterForward& reshard) {
  if (const bool* flag = std::get_if<bool>(&reshard)) return *flag ? "true" : "false";
  if (const int64_t* ranks = std::get_if<int64_t>(&reshard)) return std::to_string(*ranks);
  return "unset";
}

std::string name_of(const ShardPlan& shard, const char* key) {
  return shard ? std::string(" ") + key + "=" + name_of(*shard) : "";
}

void describe(std::ostream& out, const BlockPlan& block) {
  out << name_of(block.kind);
  for (size_t i = 0; i < block.widths.size(); ++i) out << (i == 0 ? " " : "-") << block.widths[i];
  if (block.kind == BlockKind::kBareParams) out << " depth " << block.depth;
  if (has_linear(block) && !block.bias) out << " no bias";
  if (block.frozen_dtype) out << " *" << *block.frozen_dtype;
  if (block.freeze == Freeze::kAll) out << " frozen";
  if (block.freeze == Freeze::kEverySecond) out << " half frozen";
  out << name_of(block.use) << (block.called_twice ? " twice" : "") << name_of(block.shard, "shard")
      << name_of(block.inner_shard, "inner");
}

}  // namespace

ModelPlan draw_plan(uint64_t seed) { return Drawer(seed).draw(); }

std::string describe(const ModelPlan& plan) {
  std::ostringstream out;
  out << "seed " << plan.seed << ": " << name_of(plan.precision) << ", " << plan.world_size
      << " ranks";
  if (plan.num_replicas) out << " in " << *plan.num_replicas << " replicas";
  out << " of " << plan.rows_per_rank << " rows, " << name_of(plan.accumulation)
      << (plan.optimizer == OptimizerKind::kAdamW ? ", AdamW" : ", SGD")
      << (plan.zero_grad_to_none ? "" : ", zeroed grads")
      << (plan.reshard_after_backward ? "" : ", kept after backward")
      << name_of(ShardPlan(plan.root_reshard), "root") << " |";
  if (plan.vocab_size) {
    out << " embedding " << *plan.vocab_size << (plan.embedding_frozen ? " frozen" : "")
        << name_of(plan.embedding_shard, "shard") << ",";
  }
  auto block = plan.blocks.begin();
  for (const StagePlan& stage : plan.stages) {
    out << " (";
    for (size_t i = 0; i < stage.num_blocks; ++i, ++block) {
      out << (i == 0 ? "" : ", ");
      describe(out, *block);
    }
    out << ")" << (stage.called_twice ? " twice" : "") << name_of(stage.shard, "shard") << ",";
  }
  out << " head " << plan.head_width << (plan.head_bias ? "" : " no bias")
      << (plan.head_tied ? " tied to embedding" : "") << name_of(plan.head_shard, "shard");
  for (const TiePlan& tie : plan.ties) {
    out << ", blocks " << tie.block << " and " << tie.other_block << " tied";
  }
  return out.str();
}

}  // namespace fsdp::testing
