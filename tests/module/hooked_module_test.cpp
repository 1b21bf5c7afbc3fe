// FSDP_MODULE stands where TORCH_MODULE stood: holders, containers, printing, saving and cloning
// are as they were.

#include <memory>
#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include "fsdp/error.h"
#include "fsdp/module.h"
#include "module/recording_hooks.h"

namespace fsdp {
namespace {

using at::Tensor;
using testing::calls;
using testing::record;

// D: the width of everything here.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(int64_t width = 2, double scale = 1) : width(width), scale(scale) {
    BlockImpl::reset();
  }
  void reset() override {
    weight = register_parameter("weight", at::ones({width}));
    running = register_buffer("running", at::zeros({width}));
  }
  Tensor forward(const Tensor& x_D) { return x_D * weight * scale; }

  int64_t width;
  double scale;
  Tensor weight, running;
};
FSDP_MODULE(Block);
TORCH_MODULE_IMPL(PlainBlock, BlockImpl);

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    block = register_module("block", Block(2, 3));
    plain = register_module("plain", torch::nn::Linear(2, 2));
    layers = register_module("layers", torch::nn::ModuleList(Block(2), Block(2)));
    chain = register_module("chain", torch::nn::Sequential(Block(2), torch::nn::Linear(2, 2)));
  }
  Tensor forward(Tensor x_D) {
    x_D = plain(block(x_D));
    for (const auto& layer : *layers) x_D = layer->as<Block>()->forward(x_D);
    return chain->forward(x_D);
  }

  Block block{nullptr};
  torch::nn::Linear plain{nullptr};
  torch::nn::ModuleList layers;
  torch::nn::Sequential chain;
};
FSDP_MODULE(Net);

template <class Value>
std::string text_of(const Value& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

template <class Function>
std::string message_thrown_by(const Function& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(HookedModuleTest, IsConstructedAsATorchModuleIs) {
  EXPECT_EQ(Block()->width, 2);
  EXPECT_EQ(Block(8)->weight.size(0), 8);
  EXPECT_EQ(Block(8, 0.5)->scale, 0.5);
  Block empty{nullptr};
  EXPECT_TRUE(empty.is_empty());
  EXPECT_THROW((void)empty->width, c10::Error);

  Block block(4);
  const Block same = block;
  EXPECT_EQ(same.ptr(), block.ptr());
  empty = block;
  EXPECT_EQ(empty.get(), block.get());
  const Block made(std::make_shared<Block::Impl>(6));
  EXPECT_EQ(made->width, 6);
  static_assert(!std::is_constructible_v<Block, std::string>);
  static_assert(std::is_default_constructible_v<Block>);
}

TEST(HookedModuleTest, RefusesAPlainModuleThatRunsNoHooks) {
  std::shared_ptr<BlockImpl> hooked = Block(4).ptr();
  const Block from_base_pointer = hooked;
  EXPECT_EQ(from_base_pointer->width, 4);
  EXPECT_TRUE(Block(std::shared_ptr<BlockImpl>()).is_empty());

  const std::string message = message_thrown_by([] { Block(std::make_shared<BlockImpl>(4)); });
  EXPECT_NE(message.find("BlockImpl, which runs no hooks"), std::string::npos) << message;
  EXPECT_THROW(Block(std::make_shared<BlockImpl>(4)), ConfigError);
}

TEST(HookedModuleTest, IsAModuleAndAnFSDPModule) {
  Block block;
  torch::nn::Module& module = *block;
  FSDPModule& fsdp_module = *block;
  EXPECT_EQ(&fsdp_module.as_module(), &module);
  EXPECT_EQ(dynamic_cast<FSDPModule*>(&module), &fsdp_module);
  EXPECT_FALSE(block->is_fully_sharded());
  EXPECT_THROW(block->unshard(), StateError) << "was never sharded";
}

// Promise: wherever libtorch stores the module, and gives it back, calls run the hooks.
TEST(HookedModuleTest, IsStoredInContainersAsATorchModuleIs) {
  Net net;
  EXPECT_EQ(net->named_parameters().size(), 1 + 2 + 2 + 3);
  EXPECT_NE(net->children().at(0)->as<Block>(), nullptr);
  EXPECT_NE(net->children().at(0)->as<BlockImpl>(), nullptr);
  EXPECT_EQ(net->children().at(1)->as<Block>(), nullptr);
  EXPECT_NE(std::dynamic_pointer_cast<BlockImpl>(net->named_children()["block"]), nullptr);

  const auto hooks = record(net);
  int num_hooked = 0;
  for (const auto& module : net->modules()) {
    if (auto* hooked = dynamic_cast<FSDPModule*>(module.get())) {
      hooked->set_forward_hooks(hooks);
      ++num_hooked;
    }
  }
  EXPECT_EQ(num_hooked, 5);  // the net, its block, two in the list, one in the chain
  net(at::ones({2}));
  EXPECT_EQ(hooks->take(), calls(5, 1, 1));

  torch::nn::AnyModule any(net->block);
  EXPECT_EQ(any.get<Block>().get(), net->block.get());
  net->chain->at<Block::ContainedType>(0).forward(at::ones({2}));
  torch::nn::ModuleList list;
  list->push_back(net->block);
  list[0]->as<Block>()->forward(at::ones({2}));
  any.get<Block>()(at::ones({2}));
  EXPECT_EQ(hooks->take(), calls(3, 1, 1));
}

TEST(HookedModuleTest, PrintsAsATorchModuleDoes) {
  EXPECT_EQ(text_of(Block(2)), text_of(PlainBlock(2)));
  const std::string net = text_of(Net());
  EXPECT_EQ(net.find("Hooked"), std::string::npos) << net;
  EXPECT_NE(Block()->name().find("Hooked<"), std::string::npos) << "name() tells the real class";

  struct NamedImpl : torch::nn::Module {
    NamedImpl() : Module("given name") {}
    Tensor forward(Tensor x) { return x; }
  };
  FSDP_MODULE(Named);
  EXPECT_EQ(text_of(Named()), "given name");
  EXPECT_EQ(Named()->name(), "given name");
}

TEST(HookedModuleTest, IsSavedAndLoadedAsATorchModuleIs) {
  const Block saved(2);
  saved->weight.detach().fill_(7);
  std::stringstream stream;
  torch::save(saved, stream);
  PlainBlock loaded(2);
  torch::load(loaded, stream);
  EXPECT_TRUE(at::equal(loaded->weight, saved->weight));
}

// ---- clone()

TEST(HookedModuleTest, ClonesAreHookedDeepCopies) {
  Net net;
  net->eval();
  {
    at::NoGradGuard no_grad;
    for (Tensor& parameter : net->parameters()) parameter.mul_(1.5);
  }
  Net clone(std::dynamic_pointer_cast<NetImpl>(net->clone()));

  const auto parameters = net->named_parameters();
  const auto cloned_parameters = clone->named_parameters();
  ASSERT_EQ(cloned_parameters.size(), parameters.size());
  for (const auto& item : parameters) {
    EXPECT_TRUE(at::equal(cloned_parameters[item.key()], item.value())) << item.key();
    EXPECT_FALSE(cloned_parameters[item.key()].is_alias_of(item.value())) << item.key();
  }
  EXPECT_TRUE(clone->block->weight.is_same(cloned_parameters["block.weight"]));
  EXPECT_TRUE(clone->block->running.is_same(clone->named_buffers()["block.running"]));
  EXPECT_EQ(clone->block->scale, 3);
  EXPECT_FALSE(clone->is_training());
  EXPECT_TRUE(at::equal(clone(at::ones({2})), net(at::ones({2}))));

  const auto hooks = record(clone);
  for (const auto& module : clone->modules()) {
    auto* hooked = dynamic_cast<FSDPModule*>(module.get());
    if (hooked != nullptr) hooked->set_forward_hooks(hooks);
  }
  clone(at::ones({2}));
  EXPECT_EQ(hooks->take(), calls(5, 1, 1));
  EXPECT_FALSE(net->is_fully_sharded()) << "the hooks of the clone are not those of the original";
}

TEST(HookedModuleTest, RefusesToCloneWhatIsSharded) {
  Net net;
  record(net->block);
  for (const torch::nn::Module* module : {static_cast<const torch::nn::Module*>(net->block.get()),
                                          static_cast<const torch::nn::Module*>(net.get())}) {
    const std::string message = message_thrown_by([module] { module->clone(); });
    EXPECT_NE(message.find("BlockImpl is sharded"), std::string::npos) << message;
    EXPECT_NE(message.find("Clone before fully_shard()"), std::string::npos) << message;
    EXPECT_THROW(module->clone(), StateError);
  }
}

// Promise: what libtorch would copy as its base class, losing a part, is refused.
struct DerivedBlockImpl : BlockImpl {
  Tensor forward(const Tensor& x_D) { return BlockImpl::forward(x_D) + 1; }
};
FSDP_MODULE(DerivedBlock);

TEST(HookedModuleTest, RefusesToCloneAsItsBaseClass) {
  const DerivedBlock block;
  const std::string message = message_thrown_by([&block] { block->clone(); });
  EXPECT_NE(message.find("DerivedBlockImpl::clone() made a"), std::string::npos) << message;
  EXPECT_THROW(block->clone(), ConfigError);
}

}  // namespace
}  // namespace fsdp
