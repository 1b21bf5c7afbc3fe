#pragma once

#include <initializer_list>
#include <memory>
#include <utility>

#include <torch/nn/modules.h>

#include "fsdp/module.h"

/// The modules of torch::nn with hooks: `fsdp::nn::Linear` stands where `torch::nn::Linear` stood.
///
/// [Note: composite modules of torch]
/// MultiheadAttention, the Transformer family and AdaptiveLogSoftmaxWithLoss make plain children of
/// their own, and some read the members of those directly. So shard such a module as a whole: its
/// hooks run around its own forward, and all below belongs to its group. For a group per layer
/// write the loop over fsdp::nn::TransformerEncoderLayer in a module of your own.
namespace fsdp {

template <>
struct TensorTraits<torch::nn::ASMoutput> : TensorFields<&torch::nn::ASMoutput::output> {};

/// A Sequential whose hooks run around the whole of it. Of any result: `forward<R>(x)`.
template <>
class Hooked<torch::nn::SequentialImpl> : public HookedModule<torch::nn::SequentialImpl> {
 public:
  using HookedModule<torch::nn::SequentialImpl>::HookedModule;

  template <class ReturnType = at::Tensor, class... A>
  ReturnType forward(A&&... args) {
    const auto plain_forward = [this]<class... Passed>(Passed&&... passed) -> ReturnType {
      torch::nn::SequentialImpl& plain = *this;
      return plain.template forward<ReturnType>(std::forward<Passed>(passed)...);
    };
    return call_as_forward(*this, plain_forward, std::forward<A>(args)...);
  }

  torch::nn::Module& as_module() override { return *this; }
};

namespace nn {

#define FSDP_NN_MODULE(Name) FSDP_MODULE_IMPL(Name, ::torch::nn::Name##Impl)

// With parameters.
FSDP_NN_MODULE(Linear);
FSDP_NN_MODULE(Bilinear);
FSDP_NN_MODULE(LayerNorm);
FSDP_NN_MODULE(GroupNorm);
FSDP_NN_MODULE(BatchNorm1d);
FSDP_NN_MODULE(BatchNorm2d);
FSDP_NN_MODULE(BatchNorm3d);
FSDP_NN_MODULE(InstanceNorm1d);
FSDP_NN_MODULE(InstanceNorm2d);
FSDP_NN_MODULE(InstanceNorm3d);
FSDP_NN_MODULE(Conv1d);
FSDP_NN_MODULE(Conv2d);
FSDP_NN_MODULE(Conv3d);
FSDP_NN_MODULE(ConvTranspose1d);
FSDP_NN_MODULE(ConvTranspose2d);
FSDP_NN_MODULE(ConvTranspose3d);
FSDP_NN_MODULE(PReLU);
FSDP_NN_MODULE(RNN);
FSDP_NN_MODULE(LSTM);
FSDP_NN_MODULE(GRU);
FSDP_NN_MODULE(RNNCell);
FSDP_NN_MODULE(LSTMCell);
FSDP_NN_MODULE(GRUCell);
FSDP_NN_MODULE(MultiheadAttention);
FSDP_NN_MODULE(TransformerEncoderLayer);
FSDP_NN_MODULE(TransformerDecoderLayer);
FSDP_NN_MODULE(TransformerEncoder);
FSDP_NN_MODULE(TransformerDecoder);
FSDP_NN_MODULE(Transformer);
FSDP_NN_MODULE(AdaptiveLogSoftmaxWithLoss);

class Embedding : public HookedHolder<torch::nn::EmbeddingImpl> {
 public:
  using HookedHolder<torch::nn::EmbeddingImpl>::HookedHolder;
  using Impl = Hooked<torch::nn::EmbeddingImpl>;

  /// As torch::nn::Embedding::from_pretrained: frozen unless `options` says otherwise.
  static Embedding from_pretrained(const at::Tensor& embeddings,
                                   const torch::nn::EmbeddingFromPretrainedOptions& options = {}) {
    Embedding embedding(torch::nn::Embedding::from_pretrained(embeddings, options)->options);
    embedding->weight.set_requires_grad(!options.freeze());
    return embedding;
  }
};

class EmbeddingBag : public HookedHolder<torch::nn::EmbeddingBagImpl> {
 public:
  using HookedHolder<torch::nn::EmbeddingBagImpl>::HookedHolder;
  using Impl = Hooked<torch::nn::EmbeddingBagImpl>;

  /// As torch::nn::EmbeddingBag::from_pretrained: frozen unless `options` says otherwise.
  static EmbeddingBag from_pretrained(
      const at::Tensor& embeddings,
      const torch::nn::EmbeddingBagFromPretrainedOptions& options = {}) {
    EmbeddingBag bag(torch::nn::EmbeddingBag::from_pretrained(embeddings, options)->options);
    bag->weight.set_requires_grad(!options.freeze());
    return bag;
  }
};

// Of other modules.
class Sequential : public HookedHolder<torch::nn::SequentialImpl> {
 public:
  using HookedHolder<torch::nn::SequentialImpl>::HookedHolder;
  using Impl = Hooked<torch::nn::SequentialImpl>;

  Sequential() = default;
  /// Of named modules: `Sequential({{"up", Linear(2, 8)}, {"down", Linear(8, 2)}})`.
  Sequential(std::initializer_list<torch::nn::NamedAnyModule> named_modules)
      : HookedHolder(std::make_shared<Impl>(named_modules)) {}
};

// Without parameters.
FSDP_NN_MODULE(Identity);
FSDP_NN_MODULE(Functional);
FSDP_NN_MODULE(Flatten);
FSDP_NN_MODULE(Unflatten);
FSDP_NN_MODULE(Dropout);
FSDP_NN_MODULE(Dropout2d);
FSDP_NN_MODULE(ReLU);
FSDP_NN_MODULE(LeakyReLU);
FSDP_NN_MODULE(ELU);
FSDP_NN_MODULE(GELU);
FSDP_NN_MODULE(SiLU);
FSDP_NN_MODULE(Mish);
FSDP_NN_MODULE(Tanh);
FSDP_NN_MODULE(Sigmoid);
FSDP_NN_MODULE(Softmax);
FSDP_NN_MODULE(LogSoftmax);
FSDP_NN_MODULE(MaxPool1d);
FSDP_NN_MODULE(MaxPool2d);
FSDP_NN_MODULE(AvgPool1d);
FSDP_NN_MODULE(AvgPool2d);
FSDP_NN_MODULE(AdaptiveAvgPool1d);
FSDP_NN_MODULE(AdaptiveAvgPool2d);
FSDP_NN_MODULE(Upsample);

#undef FSDP_NN_MODULE

}  // namespace nn
}  // namespace fsdp
