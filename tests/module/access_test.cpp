#include <algorithm>
#include <functional>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/init.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/sharded_tensor.h"
#include "support/layouts.h"
#include "support/messages.h"

// Promise of this file: a weight that is used while it is sharded, in whatever way, throws our
// text, which names it; what only asks for its shape or type is answered; and neither harms
// training.
namespace fsdp {
namespace {

using testing::message_thrown;

constexpr int64_t kDim = 32;
constexpr int64_t kChannels = 8;

// One group of four parameters. Their values are whole numbers, so that sums are exact in any order
// and results can be compared bit for bit. For some of the uses, first.weight is positive definite
// and nothing is negative.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", fsdp::nn::Linear(kDim, kDim));
    torch::nn::Conv2dOptions options(kChannels, kChannels, /*kernel_size=*/3);
    conv = register_module("conv", fsdp::nn::Conv2d(options.padding(1)));
    const c10::NoGradGuard no_grad;
    first->weight.copy_(at::eye(kDim).mul(kDim).add(1));
    for (const at::Tensor& param : {first->bias, conv->weight, conv->bias}) {
      param.copy_(at::arange(param.numel()).remainder(5).view(param.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x_BD) {
    return conv(first(x_BD).relu().view({-1, kChannels, 2, 2}));
  }
  fsdp::nn::Linear first{nullptr};
  fsdp::nn::Conv2d conv{nullptr};
};
FSDP_MODULE(Net);

// The uses ----------------------------------------------------------------------------------------

struct Use {
  std::string text;                                     // the expression
  std::function<std::string(const at::Tensor& w)> run;  // returns what it found
};

struct UseGroup {
  std::string kind;
  std::string parameter;  // which weight `w` is
  std::vector<Use> uses;
};

constexpr const char* kWorked = "works";
constexpr const char* kMatrix = "first.weight";  // [kDim, kDim]
constexpr const char* kVector = "first.bias";    // [kDim]
constexpr const char* kKernel = "conv.weight";   // [kChannels, kChannels, 3, 3]

template <class... Uses>
UseGroup group_of(const char* kind, const char* parameter, Uses&&... uses) {
  return {.kind = kind, .parameter = parameter, .uses = {std::forward<Uses>(uses)...}};
}

// A use of the weight `w`.
#define USE(...) \
  Use(#__VA_ARGS__, [](const at::Tensor& w) { return (static_cast<void>(__VA_ARGS__), kWorked); })
// One that writes to it, which torch allows for a parameter in no-grad mode only.
#define EDIT(...)                                     \
  Use(#__VA_ARGS__, [](at::Tensor w) {                \
    const c10::NoGradGuard no_grad;                   \
    return (static_cast<void>(__VA_ARGS__), kWorked); \
  })
// Those that need no values: a question, a view that nobody reads, a new tensor.
#define ASK(...) Use(#__VA_ARGS__, [](const at::Tensor& w) { return c10::str(__VA_ARGS__); })
#define VIEW(...) \
  Use(#__VA_ARGS__, [](const at::Tensor& w) { return describe_view(__VA_ARGS__, w); })
#define MAKE(...) Use(#__VA_ARGS__, [](const at::Tensor& w) { return describe_new(__VA_ARGS__); })

// Wherever `w` itself begins in its storage.
std::string describe_view(const at::Tensor& view, const at::Tensor& w) {
  return c10::str(view.sizes(), view.strides(), view.storage_offset() - w.storage_offset(),
                  view.scalar_type(), view.requires_grad(), view.is_alias_of(w));
}

std::string describe_new(const at::Tensor& tensor) {
  return c10::str(tensor.sizes(), tensor.strides(), tensor.dtype(), tensor.device());
}

using List = std::vector<at::Tensor>;

// The other operands: ones of the weight's dtype.
at::Tensor ones(const at::Tensor& w, at::IntArrayRef sizes) {
  return at::ones(sizes, w.options().requires_grad(false));
}
at::Tensor rows(const at::Tensor& w) { return ones(w, {4, kDim}); }
at::Tensor matrix(const at::Tensor& w) { return ones(w, {kDim, kDim}); }
at::Tensor vector(const at::Tensor& w) { return ones(w, {kDim}); }
at::Tensor image(const at::Tensor& w) { return ones(w, {2, kChannels, 6, 6}); }
at::Tensor two_rows() { return at::tensor({1, 3}, at::kLong); }
at::Tensor first_row() { return at::zeros({1, kDim}, at::kLong); }
at::Tensor mask() { return at::ones({kDim, kDim}, at::kBool); }

std::string printed(const at::Tensor& tensor) {
  std::ostringstream stream;
  stream << tensor;
  return stream.str();
}

void torch_save(const at::Tensor& tensor) {
  std::ostringstream stream;
  torch::save(tensor, stream);
}

UseGroup values() {
  return group_of(
      "its values and its memory", kMatrix, USE(w[0][0].item<float>()), USE(printed(w)),
      USE(w.sum().is_nonzero()), USE(w[1][2].is_nonzero()), USE(w.data_ptr<float>()),
      USE(w.data_ptr()), USE(w.const_data_ptr()), USE(w.is_pinned()),
      USE(w.const_data_ptr<float>()), USE(w.mutable_data_ptr()), USE(w.mutable_data_ptr<float>()),
      USE(w.view(-1).narrow(0, 5, 3).const_data_ptr<float>()), USE(w.storage().data()),
      USE(w.is_alias_of(matrix(w))), USE(w.storage().data_ptr()),
      USE(w.storage().mutable_data_ptr()), USE(w.accessor<float, 2>()),
      USE(w.packed_accessor32<float, 2>()), USE(w.packed_accessor64<float, 2>()),
      USE(at::from_blob(w.data_ptr(), w.sizes())), USE(at::fromDLPack(at::toDLPack(w.detach()))),
      USE(torch_save(w)), USE(torch::pickle_save(w)),
      USE(torch::jit::pickle_save(std::vector<at::Tensor>{w.detach()})));
}

UseGroup copies() {
  return group_of(
      "copies and conversions", kMatrix, USE(w.clone()), USE(w.detach().clone()),
      USE(w.t().contiguous()), USE(w.t().reshape(-1)), USE(w.to(at::kDouble).to(at::kHalf)),
      USE(w.to(at::kBFloat16).to(at::kFloat)), USE(w.to(at::kLong)),
      USE(w.to(at::kCPU, w.scalar_type(), /*non_blocking=*/false, /*copy=*/true)),
      USE(w.to(at::kComplexFloat)), USE(w.detach().to_mkldnn()), USE(w.to_sparse()),
      USE(matrix(w).copy_(w)), USE(at::ones({kDim, kDim}, at::kDouble).copy_(w)),
      USE(at::cat({w, matrix(w)})), USE(at::cat({matrix(w), w}, 1)), USE(at::stack({w, w})),
      USE(w.repeat({2, 1})), USE(w.flip(0)), USE(w.roll(1)), USE(w.tril()),
      USE(at::constant_pad_nd(w, {1, 1})), USE(torch::nn::utils::parameters_to_vector({w, w})));
}

UseGroup products() {
  return group_of(
      "products", kMatrix, USE(at::matmul(rows(w), w)), USE(at::matmul(w, matrix(w))),
      USE(at::mm(rows(w), w)), USE(at::mm(w.t(), w)), USE(w.mv(vector(w))),
      USE(at::addmm(vector(w), rows(w), w)),
      USE(at::bmm(ones(w, {2, 4, kDim}), w.expand({2, kDim, kDim}))),
      USE(at::bmm(w.view({4, 8, kDim}), ones(w, {4, kDim, 8}))),
      USE(at::baddbmm(ones(w, {1, 4, kDim}), rows(w).unsqueeze(0), w.unsqueeze(0))),
      USE(at::linear(rows(w), w)), USE(at::linear(rows(w), w, vector(w))),
      USE(at::linear(ones(w, {2, 3, kDim}), w)), USE(at::linear(ones(w, {512, kDim}), w)),
      USE(at::mkldnn_linear(rows(w).to_mkldnn(), w)), USE(at::einsum("ij,jk->ik", {rows(w), w})),
      USE(at::einsum("ii->i", {w}).sum()), USE(at::dot(w[0], vector(w))),
      USE(at::inner(rows(w), w)), USE(at::outer(w[0], vector(w))),
      USE(at::kron(w, ones(w, {2, 2}))), USE(at::cdist(rows(w), w)),
      USE(at::mm(matrix(w).to_sparse(), w)),
      USE(at::lstm_cell(rows(w), {ones(w, {4, 8}), ones(w, {4, 8})}, w, ones(w, {kDim, 8}))),
      USE(at::lstm(ones(w, {3, 4, kDim}), {ones(w, {1, 4, 8}), ones(w, {1, 4, 8})},
                   {w, ones(w, {kDim, 8}), vector(w), vector(w)}, true, 1, 0., false, false,
                   false)));
}

UseGroup lookups() {
  return group_of(
      "look-ups", kMatrix, USE(at::embedding(w, two_rows())),
      USE(at::embedding(w, at::zeros({64, 4}, at::kLong))),
      USE(at::embedding_bag(w, two_rows(), at::zeros({1}, at::kLong))),
      EDIT(at::embedding_renorm_(w, two_rows(), 0.5, 2.)), USE(w.index({two_rows()})),
      USE(w.index({mask()})),
      USE(w.index({at::indexing::Slice(1, 9, 2), at::indexing::Slice()}).sum()),
      USE(w.index_select(0, two_rows())), USE(w.gather(0, first_row())), USE(w.take(two_rows())),
      USE(w.masked_select(mask())), USE(at::where(mask(), w, matrix(w))), USE(at::where(w)),
      USE(at::where(w > 0, 1, 0)), USE(w.masked_fill(mask(), 0)), USE(w.scatter(0, first_row(), 1)),
      USE(matrix(w).index_put_({at::arange(kDim)}, w)), USE(w.nonzero()), USE(w.count_nonzero()),
      USE(at::searchsorted(w, matrix(w))));
}

UseGroup views() {
  return group_of(
      "views, read", kMatrix, USE(w.narrow(0, 0, 0).sum()), USE(w.view(-1).sum()),
      USE(w.reshape({-1, 8}).sum()), USE(w.t().sum()), USE(w.transpose(0, 1).sum(0)),
      USE(w.permute({1, 0}).add(1)), USE(w.as_strided({3}, {1}, w.storage_offset()).sum()),
      USE(w.expand({2, kDim, kDim}).sum()), USE(w.unsqueeze(0).squeeze().sum()),
      USE(w.narrow(0, 1, 3).sum()), USE(w.select(0, 3).sum()), USE(w.diagonal().sum()),
      USE(w.unfold(0, 2, 1).sum()), USE(w.chunk(3)[2].sum()), USE(w.unbind()[1].sum()),
      USE(w.detach().sum()), USE(w.data().sum()), USE(w.variable_data().sum()),
      USE(w.tensor_data().sum()), USE(w.alias().sum()), USE(w.detach().view(at::kByte).sum()),
      USE(at::view_as_complex(w.view({kDim, kDim / 2, 2})).abs()));
}

UseGroup arithmetic() {
  return group_of(
      "arithmetic and functions", kMatrix, USE(w + 1), USE(1 - w), USE(w * w), USE(w / matrix(w)),
      USE(matrix(w).add_(w)), USE(w * at::scalar_tensor(2.)), USE(at::ones({}, at::kDouble) * w),
      USE((w * 2).sum().backward()), USE(torch::autograd::grad({w.pow(2).sum()}, {w})), USE(-w),
      USE(w.abs()), USE(w.pow(3)), USE(w.sqrt()), USE(w.clamp(0, 1)), USE(w.relu()),
      USE(at::gelu(w)), USE(w.softmax(-1)), USE(w.log_softmax(0)),
      USE(at::dropout(w, 0.5, /*train=*/true)), USE(at::lerp(matrix(w), w, 0.5)),
      USE(at::addcmul(matrix(w), w, w)), USE(at::mse_loss(w, matrix(w))),
      USE(at::cross_entropy_loss(w, at::zeros({kDim}, at::kLong))),
      USE(at::scaled_dot_product_attention(ones(w, {1, 2, 4, 16}), w.view({1, 2, kDim, 16}),
                                           ones(w, {1, 2, kDim, 16}))),
      USE(at::scaled_dot_product_attention(w.view({1, 2, kDim, 16}), ones(w, {1, 2, kDim, 16}),
                                           ones(w, {1, 2, kDim, 16}), {}, 0., true)));
}

UseGroup comparisons() {
  return group_of("comparisons, order and counts", kMatrix, USE(w == w), USE(w < 1),
                  USE(w.logical_not()), USE(at::maximum(w, matrix(w))), USE(w.equal(matrix(w))),
                  USE(w.equal(w)), USE(matrix(w).equal(w)), USE(w.allclose(matrix(w))),
                  USE(w.isnan()), USE(w.isfinite().all()), USE(w.sort()), USE(w.topk(3)),
                  USE(w.kthvalue(2)), USE(w.median()), USE(w.quantile(0.5)), USE(w.mode()),
                  USE(at::unique_consecutive(w)), USE(at::_unique2(w)), USE(w.histc(4)),
                  USE(w.view(-1).histogram(4)), USE(w.view(-1).to(at::kLong).bincount()),
                  USE(w.cumsum(0)), USE(w.cummax(0)), USE(w.diff()));
}

UseGroup reductions() {
  return group_of("reductions, decompositions, transforms", kMatrix, USE(w.sum()), USE(w.sum(1)),
                  USE(w.prod()), USE(w.max()), USE(w.min(0)), USE(w.all()), USE(w.var()),
                  USE(w.logsumexp(0)), USE(w.trace()), USE(w.norm()), USE(w.norm(1, {0})),
                  USE(at::linalg_vector_norm(w, 3)), USE(at::linalg_matrix_norm(w)),
                  USE(at::linalg_svd(w)), USE(at::linalg_qr(w)), USE(at::linalg_cholesky(w)),
                  USE(at::linalg_eigh(w)), USE(at::linalg_inv(w)), USE(at::linalg_det(w)),
                  USE(at::linalg_solve(w, matrix(w))), USE(at::linalg_lstsq(w, matrix(w))),
                  USE(at::linalg_lu_factor(w)), USE(w.cov()), USE(at::fft_fft(w)),
                  USE(at::fft_rfft(w)), USE(at::_weight_norm(w, ones(w, {kDim, 1}))),
                  USE(at::multinomial(w, 1)));
}

UseGroup edits() {
  return group_of(
      "writes into it", kMatrix, EDIT(w.add_(1)), EDIT(w.mul_(2)), EDIT(w.zero_()),
      EDIT(w.fill_(1)), EDIT(w.normal_()), EDIT(w.uniform_()), EDIT(w.bernoulli_(0.5)),
      EDIT(w.clamp_(0, 1)), EDIT(w.lerp_(matrix(w), 0.5)), EDIT(w.addmm_(matrix(w), matrix(w))),
      EDIT(w.copy_(matrix(w))), EDIT(w.copy_(at::ones({kDim, kDim}, at::kDouble))),
      EDIT(w.copy_(vector(w))), EDIT(w.set_(matrix(w))), EDIT(w.detach().copy_(matrix(w))),
      EDIT(w.data().mul_(2)), EDIT(w[0].zero_()), EDIT(w.view(-1).narrow(0, 2, 5).fill_(1)),
      EDIT(w.t().zero_()), EDIT(w.fill_diagonal_(1)), EDIT(w.masked_fill_(mask(), 0)),
      EDIT(w.index_put_({two_rows()}, ones(w, {2, kDim}))),
      EDIT(w.index_put_({two_rows()}, ones(w, {2, kDim}), /*accumulate=*/true)),
      EDIT(w.scatter_(0, first_row(), 1)), EDIT(w.relu_()), EDIT(w.renorm_(2, 0, 1)),
      EDIT(torch::nn::init::kaiming_uniform_(w)), EDIT(torch::nn::init::orthogonal_(w)),
      EDIT(torch::nn::init::eye_(w)));
}

UseGroup outputs() {
  return group_of(
      "the result of another operator (out=)", kMatrix, EDIT(at::add_out(w, matrix(w), matrix(w))),
      EDIT(at::mm_out(w, matrix(w), matrix(w))), EDIT(at::exp_out(w, matrix(w))),
      EDIT(at::cat_out(w, {rows(w), ones(w, {28, kDim})})), EDIT(at::cumsum_out(w, matrix(w), 0)),
      EDIT(at::eye_out(w, kDim)), EDIT(at::ones_out(w, {kDim, kDim})),
      EDIT(at::linalg_inv_out(w, at::eye(kDim, w.options()))));
}

UseGroup optimizers() {
  return group_of(
      "an optimizer's kernels", kMatrix, USE(at::_foreach_add({w, w}, 1)),
      USE(at::_foreach_norm({w, w})), USE(at::_foreach_mul(List{matrix(w)}, List{w})),
      EDIT(at::_foreach_add_(List{w}, List{matrix(w)})), EDIT(at::_foreach_mul_({w}, 2)),
      EDIT(at::_foreach_zero_({w})), EDIT(at::_foreach_copy_({w}, {matrix(w)})),
      EDIT(at::_foreach_copy_({matrix(w)}, {w})), EDIT(at::_foreach_lerp_({w}, {matrix(w)}, 0.5)),
      EDIT(at::_fused_adamw_({w}, {matrix(w)}, {matrix(w)}, {matrix(w)}, {}, {at::ones({})}, 0.1,
                             0.9, 0.9, 0., 1e-8, false, false)),
      EDIT(at::_fused_adamw_({matrix(w)}, {matrix(w)}, {w}, {matrix(w)}, {}, {at::ones({})}, 0.1,
                             0.9, 0.9, 0., 1e-8, false, false)),
      EDIT(at::_fused_sgd_({w}, {matrix(w)}, {matrix(w)}, 0., 0.9, 0.1, 0., false, false, false)),
      EDIT(at::_fused_adagrad_({w}, {matrix(w)}, {matrix(w)}, {at::ones({})}, 0.1, 0., 0., 1e-8,
                               false)));
}

UseGroup quantizers() {
  return group_of("quantisation", kMatrix, USE(at::quantize_per_tensor(w, 0.1, 0, at::kQInt8)),
                  USE(at::quantize_per_tensor_dynamic(w, at::kQInt8, false)),
                  USE(at::quantize_per_channel(w, at::ones({kDim}, at::kDouble),
                                               at::zeros({kDim}, at::kLong), 0, at::kQInt8)),
                  USE(at::fake_quantize_per_tensor_affine(w, 0.1, 0, 0, 255)),
                  USE(at::fbgemm_pack_gemm_matrix_fp16(w.detach())));
}

UseGroup norms() {
  return group_of(
      "the weight or bias of a norm, and other vectors", kVector,
      USE(at::layer_norm(rows(w), {kDim}, w)), USE(at::layer_norm(rows(w), {kDim}, w, vector(w))),
      USE(at::layer_norm(rows(w), {kDim}, vector(w), w)), USE(at::rms_norm(rows(w), {kDim}, w)),
      USE(at::group_norm(rows(w), 4, w)),
      USE(at::batch_norm(rows(w), w, {}, {}, {}, true, 0.1, 1e-5, false)),
      USE(at::batch_norm(rows(w), vector(w), w, {}, {}, true, 0.1, 1e-5, false)),
      USE(at::batch_norm(rows(w), w, {}, vector(w), vector(w), false, 0.1, 1e-5, false)),
      USE(at::batch_norm(rows(w), {}, {}, w.detach(), vector(w), false, 0.1, 1e-5, false)),
      USE(at::batch_norm(ones(w, {2, kDim, 4, 4}), w, w, vector(w), vector(w), false, 0.1, 1e-5,
                         false)),
      USE(at::prelu(rows(w), w)), USE(at::linear(rows(w), matrix(w), w)),
      USE(at::conv2d(ones(w, {1, 4, 6, 6}), ones(w, {kDim, 4, 3, 3}), w)), USE(rows(w) + w),
      USE(at::nll_loss(rows(w), at::zeros({4}, at::kLong), w.detach())), USE(at::dot(w, w)),
      USE(w.diag()), USE(at::repeat_interleave(w.to(at::kLong))), USE(w.index({w.to(at::kLong)})),
      USE(vector(w).index({w > 0})), EDIT(vector(w).masked_fill_(mask()[0], w[0])),
      EDIT(vector(w).fill_(w[0])));
}

UseGroup convolutions() {
  return group_of(
      "the kernel of a convolution", kKernel, USE(at::conv1d(image(w).flatten(2), w.flatten(2))),
      USE(at::conv2d(image(w), w)), USE(at::conv2d(image(w), w, ones(w, {kChannels}), 2, 1)),
      USE(at::conv2d(image(w).contiguous(at::MemoryFormat::ChannelsLast), w)),
      USE(at::conv2d(image(w).repeat({1, 2, 1, 1}), w, {}, 1, at::IntArrayRef(0), 1,
                     /*groups=*/2)),
      USE(at::conv2d(w, ones(w, {kChannels, kChannels, 3, 3}))),
      USE(at::conv3d(ones(w, {1, kChannels, 2, 6, 6}), w.unsqueeze(2))),
      USE(at::conv_transpose1d(image(w).flatten(2), w.flatten(2))),
      USE(at::conv_transpose2d(image(w), w)),
      USE(at::mkldnn_convolution(image(w), w, {}, {0, 0}, {1, 1}, {1, 1}, 1)),
      USE(at::mkldnn_convolution(image(w).to_mkldnn(), w, {}, {0, 0}, {1, 1}, {1, 1}, 1)),
      USE(at::max_pool2d(w, 2)), USE(at::upsample_nearest2d(w, {6, 6})),
      USE(w.contiguous(at::MemoryFormat::ChannelsLast)));
}

std::vector<UseGroup> uses_of_values() {
  return {values(),     copies(),      products(),   lookups(),     views(),
          arithmetic(), comparisons(), reductions(), edits(),       outputs(),
          optimizers(), quantizers(),  norms(),      convolutions()};
}

// Uses that need no values ------------------------------------------------------------------------

bool lies_in_its_storage(const at::Tensor& w) {
  const size_t begin = w.storage_offset() * w.itemsize();
  return w.storage_offset() >= 0 && begin + w.nbytes() <= w.storage().nbytes();
}

UseGroup properties() {
  return group_of(
      "properties", kMatrix, ASK(w.defined()), ASK(w.sizes()), ASK(w.strides()), ASK(w.dim()),
      ASK(w.numel()), ASK(w.nbytes()), ASK(w.itemsize()), ASK(w.size(1)), ASK(w.stride(-2)),
      ASK(w.sym_sizes()), ASK(w.scalar_type()), ASK(w.dtype()), ASK(w.device()), ASK(w.layout()),
      ASK(w.options()), ASK(w.toString()), ASK(w.requires_grad()), ASK(w.is_leaf()),
      ASK(w.grad_fn() == nullptr), ASK(w.has_storage()), ASK(lies_in_its_storage(w)),
      ASK(w.is_contiguous()), ASK(w.is_non_overlapping_and_dense()), ASK(w.suggest_memory_format()),
      ASK(w.is_cpu()), ASK(w.is_sparse()), ASK(w.is_quantized()), ASK(w.is_inference()),
      ASK(w.is_complex()), ASK(w.is_floating_point()), ASK(w.is_conj()), ASK(w.is_neg()),
      ASK(w.is_view()), ASK(w.is_same(w)), ASK(w.is_set_to(w)), ASK(w.is_alias_of(w.detach())),
      ASK(w.is_same_size(matrix(w))), ASK(w.is_same_size(vector(w))), ASK(at::result_type(w, 1)),
      ASK(w.equal(vector(w))), ASK(w.contiguous().is_same(w)), ASK(w.cpu().is_same(w)),
      ASK(w.to(w.scalar_type()).is_same(w)), ASK(w.to(w.device()).is_same(w)));
}

UseGroup unread_views() {
  return group_of(
      "views that nobody reads", kMatrix, VIEW(w.view(-1)), VIEW(w.view({4, -1})),
      VIEW(w.view_as(matrix(w))), VIEW(w.reshape({8, -1})), VIEW(w.flatten()), VIEW(w.t()),
      VIEW(w.transpose(0, 1)), VIEW(w.permute({1, 0})), VIEW(w.unsqueeze(0)), VIEW(w.squeeze()),
      VIEW(w.expand({2, kDim, kDim})), VIEW(w[3]), VIEW(w.narrow(0, 1, 3)), VIEW(w.select(1, 2)),
      VIEW(w.slice(0, 2, 9, 3)), VIEW(w.index({at::indexing::Slice(1, 4)})),
      VIEW(w.as_strided({3}, {2}, w.storage_offset())), VIEW(w.diagonal()), VIEW(w.unfold(0, 2, 1)),
      VIEW(w.chunk(3)[2]), VIEW(w.split(5, 1)[1]), VIEW(w.unbind()[1]), VIEW(w.movedim(0, 1)),
      VIEW(w.detach()), VIEW(w.data()), VIEW(w.alias()), VIEW(w.variable_data()),
      VIEW(w.tensor_data()), VIEW(w.detach().view(at::kInt)), ASK(w.view(-1).grad_fn()->name()));
}

// Whose values do not come from the weight.
UseGroup new_tensors() {
  return group_of("new tensors", kMatrix, MAKE(at::empty_like(w)), MAKE(at::rand_like(w)),
                  MAKE(w.bernoulli(0.5)), MAKE(w.new_empty({2})), MAKE(w.to(at::kMeta)),
                  MAKE(at::mm(ones(w, {0, kDim}), w)), ASK(at::zeros_like(w).sum()),
                  ASK(at::ones_like(w).sum()), ASK(at::full_like(w, 2).sum()),
                  ASK(w.new_zeros({2})), ASK(w.new_full({2}, 3)));
}

std::vector<UseGroup> uses_without_values() {
  return {properties(), unread_views(), new_tensors()};
}

// What is expected --------------------------------------------------------------------------------

const at::Tensor& weight_of(const Net& net, const std::string& parameter) {
  if (parameter == kMatrix) return net->first->weight;
  return parameter == kVector ? net->first->bias : net->conv->weight;
}

class NoWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

/// What the use returns, or the error that it throws.
std::string outcome(const Use& use, const at::Tensor& w) {
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  std::string result;
  const std::string error = message_thrown<c10::Error>([&] { result = use.run(w); });
  return result.empty() ? error : result;
}

bool is_refusal(const std::string& outcome, const std::string& parameter) {
  return outcome.starts_with("fsdp: ") && outcome.find("'" + parameter + "'") != outcome.npos &&
         outcome.find("is sharded") != outcome.npos &&
         outcome.find("call unshard()") != outcome.npos;
}

/// Expects that no use has an unexpected outcome; shows the first few that have.
void expect_none(const std::vector<std::string>& unexpected, const std::string& state) {
  const size_t num_shown = std::min<size_t>(unexpected.size(), 5);
  const std::vector<std::string> shown(unexpected.begin(), unexpected.begin() + num_shown);
  EXPECT_TRUE(unexpected.empty()) << unexpected.size() << " uses " << state << ", as\n"
                                  << c10::Join("\n", shown);
}

/// Expects every use of values to throw our text and to count as no edit, with autograd and
/// without; and all others to say what they say of a weight that was never sharded.
void expect_sharded(const Net& net, const std::string& state) {
  std::vector<std::string> unexpected;
  for (const UseGroup& group : uses_of_values()) {
    const at::Tensor& w = weight_of(net, group.parameter);
    for (const Use& use : group.uses) {
      for (const bool grad_mode : {true, false}) {
        const c10::AutoGradMode guard(grad_mode);
        const int64_t version = w._version();
        const std::string got = outcome(use, w);
        if (is_refusal(got, group.parameter) && w._version() == version) continue;
        unexpected.push_back(group.kind + ": " + use.text + ": " + got);
      }
    }
  }
  const Net whole;
  for (const UseGroup& group : uses_without_values()) {
    for (const Use& use : group.uses) {
      const std::string got = outcome(use, weight_of(net, group.parameter));
      if (got == outcome(use, weight_of(whole, group.parameter))) continue;
      unexpected.push_back(group.kind + ": " + use.text + ": " + got);
    }
  }
  expect_none(unexpected, state);
}

/// A training step, with all uses in each state that a sharded weight can be in.
void expect_sharded_through_a_step(const FullyShardOptions& options, const ProcessGroupPtr& group) {
  const auto part_of = [&](const at::Tensor& batch) {
    return batch.chunk(group->getSize())[group->getRank()];
  };
  const at::Tensor x_BD = at::arange(12 * kDim, at::kFloat).remainder(7).sub(3).view({12, kDim});
  const at::Tensor factors = at::arange(12 * kDim).remainder(3).sub(1).view({12, kChannels, 2, 2});
  Net whole;
  const at::Tensor whole_y = whole(x_BD);
  (whole_y * factors).sum().backward();

  Net net;
  FSDPModule& fsdp_module = fully_shard(*net, options);
  fsdp_module.set_gradient_divide_factor(1);  // a sum over ranks: a third would not be exact
  expect_sharded(net, "before any forward");
  UnshardHandle gather = fsdp_module.unshard_async();
  expect_sharded(net, "while a gather is in flight");
  gather.wait();
  EXPECT_TRUE(net->first->weight.equal(whole->first->weight));
  fsdp_module.reshard();

  const at::Tensor y = net(part_of(x_BD));
  EXPECT_TRUE(y.equal(part_of(whole_y)));
  expect_sharded(net, "between forward and backward");
  gather = fsdp_module.unshard_async();
  expect_sharded(net, "while the gather for backward is in flight");
  gather.wait();
  (y * part_of(factors)).sum().backward();
  expect_sharded(net, "after backward");

  torch::optim::SGD(fsdp::parameters(*net), /*lr=*/0.25).step();
  torch::optim::SGD(whole->parameters(), /*lr=*/0.25).step();
  expect_sharded(net, "after the optimizer's step");
  const auto params = net->named_parameters();
  for (const auto& entry : whole->named_parameters()) {
    const at::Tensor& param = params[entry.key()];
    EXPECT_TRUE(full_tensor(param.grad()).equal(entry.value().grad())) << entry.key();
    EXPECT_TRUE(full_tensor(param).equal(entry.value())) << entry.key();
  }
}

// The tests ---------------------------------------------------------------------------------------

// Promise: each use in the tables works on a weight that is whole, and there are many.
TEST(AccessTables, HoldUsesThatWork) {
  std::set<std::string> refused, answered;
  std::vector<std::string> unexpected;
  for (const UseGroup& group : uses_of_values()) {
    for (const Use& use : group.uses) {
      refused.insert(group.parameter + use.text);
      const std::string got = outcome(use, weight_of(Net(), group.parameter));
      if (got != kWorked) unexpected.push_back(use.text + ": " + got);
    }
  }
  expect_none(unexpected, "do not work at all");
  for (const UseGroup& group : uses_without_values()) {
    for (const Use& use : group.uses) answered.insert(use.text);
  }
  std::cout << refused.size() << " uses are refused, " << answered.size() << " answered\n";
  EXPECT_GE(refused.size(), 250u);
  EXPECT_GE(answered.size(), 80u);
}

class AccessWhileSharded : public testing::LayoutTest {};
FSDP_BOTH_LAYOUTS(AccessWhileSharded);

// Promise: before, between and after forward and backward, and while a gather is in flight; and
// the step is, bit for bit, that of a model that was never sharded.
TEST_P(AccessWhileSharded, ThrowsOurText) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const ProcessGroupPtr& group) {
      expect_sharded_through_a_step({.reshard_after_forward = true, .layout = GetParam()}, group);
    });
  }
}

// Promise: the same where each rank keeps a half of the weights after forward.
TEST_P(AccessWhileSharded, ThrowsOurTextWhileShardedPostForward) {
  run_ranks(4, [](const ProcessGroupPtr& group) {
    const FullyShardOptions options{.reshard_after_forward = int64_t{2}, .layout = GetParam()};
    expect_sharded_through_a_step(options, group);
  });
}

// Promise: the kernels of other dtypes (oneDNN has its own for bfloat16) ask for the data too. Uses
// that a dtype does not have are left out.
TEST_P(AccessWhileSharded, ThrowsOurTextInEveryDtype) {
  const auto shard_and_use = [](at::ScalarType dtype) {
    const bool has_onednn = at::globalContext().userEnabledMkldnn();
    Net net;
    net->to(dtype);
    fully_shard(*net, {.layout = GetParam()});
    size_t num_used = 0;
    std::vector<std::string> unexpected;
    for (const UseGroup& group : uses_of_values()) {
      for (const Use& use : group.uses) {
        Net whole;
        whole->to(dtype);
        if (outcome(use, weight_of(whole, group.parameter)) != kWorked) continue;
        ++num_used;
        const std::string got = outcome(use, weight_of(net, group.parameter));
        // Torch takes any error in oneDNN's bfloat16 bmm for a fault of oneDNN: it warns, turns
        // oneDNN off for the process and tries another kernel, from which our text comes.
        at::globalContext().setUserEnabledMkldnn(has_onednn);
        if (!is_refusal(got, group.parameter)) unexpected.push_back(use.text + ": " + got);
      }
    }
    expect_none(unexpected, c10::str("of ", dtype));
    EXPECT_GE(num_used, 200u) << dtype;
  };
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    run_ranks(1, [&](const ProcessGroupPtr&) { shard_and_use(dtype); });
  }
}

// Promise: so do views and graphs that were made while the weight was whole.
TEST_P(AccessWhileSharded, ThrowsOurTextThroughWhatWasMadeBefore) {
  run_ranks(2, [](const ProcessGroupPtr&) {
    Net net;
    FSDPModule& fsdp_module = fully_shard(*net, {.layout = GetParam()});
    fsdp_module.unshard();
    const at::Tensor w = net->first->weight;
    const at::Tensor square = (w * w).sum();
    std::vector<at::Tensor> views = {w.t(), w.view(-1), w.detach(), w.data(), w[0], w.chunk(3)[2]};
    fsdp_module.reshard();
    for (const at::Tensor& view : views) {
      EXPECT_TRUE(is_refusal(message_thrown<c10::Error>([&] { view.sum(); }), kMatrix));
    }
    EXPECT_TRUE(is_refusal(message_thrown<c10::Error>([&] { square.backward(); }), kMatrix));
    fsdp_module.unshard();
    EXPECT_TRUE(views.front().t().equal(Net()->first->weight));
  });
}

}  // namespace
}  // namespace fsdp
