#include "fsdp/replicate.h"

#include <sstream>
#include <unordered_set>

#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/error.h"
#include "module/fsdp_state.h"
#include "module/module_tree.h"
#include "module/replicate_state.h"
#include "module/same_model.h"
#include "shard/sharded_spec.h"

namespace fsdp {
namespace {

std::shared_ptr<ReplicateState> replicate_state_of(const torch::nn::Module& module) {
  const auto* fsdp_module = dynamic_cast<const FSDPModule*>(&module);
  if (fsdp_module == nullptr) return nullptr;
  return std::dynamic_pointer_cast<ReplicateState>(fsdp_module->forward_hooks());
}

using Ignored = std::unordered_set<const c10::TensorImpl*>;

// What `module` and those below it hold, in the order of parameters(), which is about that of
// forward. `seen` begins with what is ignored.
class Collector {
 public:
  explicit Collector(Ignored ignored) : seen_tensors_(std::move(ignored)) {}

  void visit(const std::string& path, torch::nn::Module& module) {
    if (!seen_modules_.insert(&module).second) return;
    for (const auto& entry : parameter_dict(module)) {
      add_param(join_path(path, entry.key()), entry.value());
    }
    for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
      if (is_new(entry.value())) tensors_.buffers.push_back(entry.value());
    }
    for (const auto& child : module.named_children()) {
      if (state_of(*child.value()) || is_replicated(*child.value())) continue;
      visit(join_path(path, child.key()), *child.value());
    }
  }
  ReplicatedTensors take() { return std::move(tensors_); }

 private:
  bool is_new(const at::Tensor& tensor) {
    return tensor.defined() && seen_tensors_.insert(tensor.unsafeGetTensorImpl()).second;
  }

  void add_param(const std::string& name, const at::Tensor& param) {
    if (!is_new(param) || spec_of(param) != nullptr) return;
    FSDP_CHECK(ConfigError, !is_unsharded_param(param), "replicate: parameter '", name,
               "' is shared with a module that was sharded on its own. Shard or replicate their "
               "common parent instead, or do not share it.");
    FSDP_CHECK(ConfigError, param.layout() == at::kStrided && !param.is_meta(),
               "replicate: parameter ", describe(name, param.sizes()), " is ",
               param.is_meta() ? "on the meta device" : "sparse",
               ", and has no values that a bucket could hold. Make it a dense tensor first.");
    tensors_.params.push_back(param);
    tensors_.names.push_back(name);
  }

  std::unordered_set<torch::nn::Module*> seen_modules_;
  Ignored seen_tensors_;
  ReplicatedTensors tensors_;
};

// Also that one Reducer can serve them.
void check_params(const ReplicatedTensors& tensors, const std::string& module_name) {
  const at::Tensor* first = nullptr;
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    const at::Tensor& param = tensors.params[i];
    if (!param.requires_grad()) continue;
    if (first == nullptr) first = &param;
    FSDP_CHECK(ConfigError, param.device() == first->device(), "replicate: parameter '",
               tensors.names[i], "' is on ", param.device(), ", those before it on ",
               first->device(), ". Move the module to one device first.");
  }
  FSDP_CHECK(ConfigError, first != nullptr, "replicate: module of type ", module_name, " has ",
             tensors.params.size(),
             " parameters that are neither sharded, replicated nor ignored already, and none of "
             "them requires a gradient, so there is nothing to reduce. Do not replicate it.");
}

// What all ranks must have in common, a line each.
std::string description_of(const ReplicatedTensors& tensors, const ReplicateOptions& options) {
  std::ostringstream text;
  for (size_t i = 0; i < tensors.params.size(); ++i) {
    const at::Tensor& param = tensors.params[i];
    text << "'" << tensors.names[i] << "' " << param.sizes() << " " << param.scalar_type()
         << (param.requires_grad() ? "" : " frozen") << " replicated\n";
  }
  text << std::boolalpha << tensors.buffers.size() << " buffers, bucket_cap_mb "
       << options.bucket_cap_mb << ", first_bucket_cap_mb " << options.first_bucket_cap_mb
       << ", find_unused_parameters " << options.find_unused_parameters << ", static_graph "
       << options.static_graph << ", init_sync " << options.init_sync << ", broadcast_buffers "
       << options.broadcast_buffers << "\n";
  return text.str();
}

FSDPModule& checked_module(torch::nn::Module& module) {
  auto* fsdp_module = dynamic_cast<FSDPModule*>(&module);
  FSDP_CHECK(ConfigError, fsdp_module != nullptr, "replicate: module of type ", module.name(),
             " runs no hooks around forward, so nobody would say when a step begins. Declare it "
             "with FSDP_MODULE(Name) instead of TORCH_MODULE(Name), use fsdp::nn for torch's own "
             "modules, or replicate its parent.");
  FSDP_CHECK(ConfigError, state_of(module) == nullptr, "replicate: module of type ", module.name(),
             " is sharded already. For copies of shards give fully_shard() a 2-D mesh "
             "(replicate, shard); to replicate only what is not sharded, replicate its parent.");
  FSDP_CHECK(ConfigError, !is_replicated(module), "replicate: module of type ", module.name(),
             " is replicated already; it can be replicated only once.");
  return *fsdp_module;
}

}  // namespace

void replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  FSDPModule& fsdp_module = checked_module(module);
  FSDP_CHECK(ConfigError, options.bucket_cap_mb > 0 && options.first_bucket_cap_mb > 0,
             "replicate: bucket_cap_mb and first_bucket_cap_mb must be positive, found ",
             options.bucket_cap_mb, " and ", options.first_bucket_cap_mb, ".");
  ReplicateOptions complete = options;
  if (!complete.process_group) complete.process_group = default_process_group();
  Ignored ignored;
  for (size_t i = 0; i < options.ignored_params.size(); ++i) {
    FSDP_CHECK(ConfigError, options.ignored_params[i].defined(), "replicate: ignored parameter ", i,
               " is undefined.");
    ignored.insert(options.ignored_params[i].unsafeGetTensorImpl());
  }
  complete.ignored_params.clear();
  Collector collector(std::move(ignored));
  collector.visit("", module);
  ReplicatedTensors tensors = collector.take();
  check_params(tensors, module.name());
  check_same_on_ranks(description_of(tensors, options), *complete.process_group, "replicate");
  fsdp_module.set_forward_hooks(std::make_shared<ReplicateState>(std::move(tensors), complete));
}

bool is_replicated(const torch::nn::Module& module) {
  return replicate_state_of(module) != nullptr;
}

NoSync::NoSync(torch::nn::Module& module) {
  bool any = false;
  for_each_module(module, [&](const std::string&, torch::nn::Module& submodule) {
    const auto state = replicate_state_of(submodule);
    any = any || state != nullptr;
    if (state != nullptr && state->requires_sync()) states_.push_back(state);
  });
  FSDP_CHECK(StateError, any, "NoSync: no module in the tree of ", module.name(),
             " is replicated. Call replicate() first; for sharded modules there is "
             "set_requires_gradient_sync().");
  for (const auto& state : states_) state->set_requires_sync(false);
}

NoSync::~NoSync() {
  for (const auto& state : states_) state->set_requires_sync(true);
}

}  // namespace fsdp
