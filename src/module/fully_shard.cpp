#include "fsdp/fully_shard.h"

#include <unordered_map>
#include <unordered_set>

#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include "fsdp/error.h"
#include "fsdp/replicate.h"
#include "module/fsdp_state.h"
#include "module/module_tree.h"
#include "shard/sharded_spec.h"

namespace fsdp {
namespace {

// A parameter of the group, with every dictionary entry that names it.
struct ManagedParam {
  struct Entry {
    torch::nn::Module* module;
    std::string key;
  };
  ParamToShard param;
  std::vector<Entry> entries;
};

struct ManagedModule {
  torch::nn::Module* module;
  std::string path;  // from the sharded module above it
  size_t root;       // which one that is
};

struct Managed {
  std::vector<ManagedParam> params;
  std::vector<ManagedModule> modules;
};

// Children before their parent, as FSDP2 orders a group's parameters; modules that are sharded or
// replicated already, and what lies below them, are left out.
void collect_modules(const std::string& path, torch::nn::Module& module, size_t root,
                     std::unordered_set<torch::nn::Module*>& visited, Managed& managed) {
  if (!visited.insert(&module).second) return;
  for (const auto& child : module.named_children()) {
    if (state_of(*child.value()) != nullptr || is_replicated(*child.value())) continue;
    collect_modules(join_path(path, child.key()), *child.value(), root, visited, managed);
  }
  managed.modules.push_back({&module, path, root});
}

// They hand out what stands in the dictionary, and so would give forward this rank's part.
void check_container(const std::string& path, torch::nn::Module& module) {
  FSDP_CHECK(ConfigError,
             dynamic_cast<torch::nn::ParameterListImpl*>(&module) == nullptr &&
                 dynamic_cast<torch::nn::ParameterDictImpl*>(&module) == nullptr,
             "fully_shard: '", path,
             "' is a ParameterList or ParameterDict, from which forward "
             "would read this rank's part of each parameter. Hold the parameters as tensor members "
             "of a module instead.");
}

Managed collect(const std::vector<torch::nn::Module*>& roots, const FullyShardOptions& options) {
  std::unordered_set<const c10::TensorImpl*> ignored;
  for (const at::Tensor& param : options.ignored_params)
    ignored.insert(param.unsafeGetTensorImpl());

  Managed managed;
  std::unordered_set<torch::nn::Module*> visited;
  for (size_t root = 0; root < roots.size(); ++root) {
    collect_modules("", *roots[root], root, visited, managed);
  }
  std::unordered_map<const c10::TensorImpl*, size_t> index_of;
  for (const auto& [submodule, path, root] : managed.modules) {
    check_container(path, *submodule);
    for (const auto& entry : parameter_dict(*submodule)) {
      const at::Tensor& tensor = entry.value();
      if (!tensor.defined() || ignored.count(tensor.unsafeGetTensorImpl()) != 0) continue;
      const auto [it, is_new] =
          index_of.emplace(tensor.unsafeGetTensorImpl(), managed.params.size());
      if (is_new) {
        managed.params.push_back(
            {.param = {.tensor = tensor, .name = join_path(path, entry.key()), .module = root},
             .entries = {}});
      }
      managed.params[it->second].entries.push_back({submodule, entry.key()});
    }
  }
  return managed;
}

void check_param(ParamToShard& param, const FullyShardOptions& options, int64_t shard_size) {
  const at::Tensor& tensor = param.tensor;
  const std::string described = describe(param.name, tensor.sizes());
  FSDP_CHECK(ConfigError, spec_of(tensor) == nullptr, "fully_shard: parameter '", param.name,
             "' is sharded already, by a call on a parent of this module. Shard bottom-up: "
             "children first, their parent after them.");
  FSDP_CHECK(ConfigError, !is_unsharded_param(tensor), "fully_shard: parameter '", param.name,
             "' is shared with a module that was sharded on its own. Shard their common parent in "
             "one call instead, or do not share it.");
  FSDP_CHECK(ConfigError, tensor.layout() == at::kStrided && tensor.is_contiguous(),
             "fully_shard: parameter ", described, " with strides ", tensor.strides(),
             " is not contiguous, and only contiguous parameters can be cut into rows. "
             "Register tensor.contiguous() instead.");
  FSDP_CHECK(ConfigError, !tensor.is_meta(), "fully_shard: parameter ", described,
             " is on the meta device and has no values. Materialize it before sharding.");
  FSDP_CHECK(ConfigError, tensor.is_leaf(), "fully_shard: parameter ", described,
             " is the result of an operation, not a leaf. Register tensor.detach() instead.");
  FSDP_CHECK(
      ConfigError,
      torch::autograd::impl::get_autograd_meta(tensor) == nullptr ||
          torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr,
      "fully_shard: parameter ", described,
      " has a post-accumulate-gradient hook, which would see whole gradients of this rank alone "
      "or none. Set it after fully_shard(), on the sharded parameter of named_parameters().");
  Shard placement;
  if (options.shard_placement_fn) {
    placement = options.shard_placement_fn(param.name, tensor).value_or(Shard{});
  }
  param.shard_dim =
      checked_shard_dim("fully_shard", param.name, tensor.sizes(), placement, shard_size);
}

// They may be on any device, and stay there.
void check_ignored(const FullyShardOptions& options) {
  for (size_t i = 0; i < options.ignored_params.size(); ++i) {
    FSDP_CHECK(ConfigError, options.ignored_params[i].defined(), "fully_shard: ignored parameter ",
               i, " is undefined.");
  }
}

// The groups of a tree share streams and the order of their gathers.
void check_same_device(const std::vector<torch::nn::Module*>& roots, c10::Device device) {
  for (torch::nn::Module* root : roots) {
    for_each_module(*root, [&](const std::string& path, torch::nn::Module& submodule) {
      const std::shared_ptr<FSDPState> state = state_of(submodule);
      FSDP_CHECK(ConfigError, state == nullptr || state->device() == device, "fully_shard: '", path,
                 "' of the module of type ", root->name(), " was sharded on ",
                 state ? state->device() : device, ", but the mesh of this call is on ", device,
                 ". All modules of a tree compute on one device: shard them with meshes of one "
                 "device type, and make that device the current one before each call.");
    });
  }
}

// A tensor that only the dictionary holds is reached through the dictionary: by a reference member
// (`Tensor& weight = register_parameter(...)`), or by name. Forward would read this rank's part.
void check_members(const Managed& managed) {
  for (const ManagedParam& managed_param : managed.params) {
    const ParamToShard& param = managed_param.param;
    const size_t known = managed_param.entries.size() + 1;  // the dictionaries, and our handle
    FSDP_CHECK(
        ConfigError, param.tensor.use_count() > known, "fully_shard: parameter ",
        describe(param.name, param.tensor.sizes()),
        " is held by no member of its module, only by the module's dictionary: forward, if it "
        "reads it through a reference member (`Tensor& w = register_parameter(...)`) or by "
        "name, would read this rank's part. Hold it as a member of type Tensor, or pass it "
        "in ignored_params if forward does not use it.");
  }
}

FSDPMeshInfoPtr make_mesh_info(const DeviceMeshPtr& mesh) {
  FSDP_CHECK(ConfigError, mesh->ndim() == 1 || mesh->ndim() == 2,
             "fully_shard: expects a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but got ",
             mesh->ndim(), " dimensions. Take the part to shard over: mesh[\"name\"].");
  FSDP_CHECK(ConfigError, mesh->ndim() == 1 || mesh->dim_names().size() == 2,
             "fully_shard: a 2-D mesh needs named dimensions, as in ",
             "init_device_mesh(type, {2, 4}, {\"replicate\", \"shard\"}).");
  FSDPMeshInfo info{.mesh = mesh, .shard_mesh_dim = mesh->ndim() - 1};
  if (mesh->ndim() == 2) info.replicate_mesh_dim = 0;
  return std::make_shared<const FSDPMeshInfo>(std::move(info));
}

// The device to compute on: the mesh's type, this rank's index.
c10::Device checked_device(const DeviceMesh& mesh) {
  const c10::DeviceType type = mesh.device_type();
  FSDP_CHECK(ConfigError, type != c10::kMeta && c10::impl::hasDeviceGuardImpl(type),
             "fully_shard: the mesh is of device type '", c10::DeviceTypeName(type, true),
             "', on which this build of libtorch does not compute. Make the mesh with "
             "c10::DeviceType::CPU, or use a libtorch that was built for that device.");
  return with_index(c10::Device(type));
}

void move_buffers(const Managed& managed, c10::Device device) {
  const c10::NoGradGuard no_grad;
  for (const auto& [module, path, root] : managed.modules) {
    for (const auto& buffer : module->named_buffers(/*recurse=*/false)) {
      if (buffer.value().defined() && buffer.value().device() != device) {
        buffer.value().set_data(buffer.value().to(device));
      }
    }
  }
}

std::shared_ptr<FSDPParamGroup> make_group(const Managed& managed, const FSDPMeshInfoPtr& mesh_info,
                                           Layout layout, c10::Device device,
                                           GroupSettings settings) {
  if (managed.params.empty()) return nullptr;
  std::vector<ParamToShard> params;
  for (const ManagedParam& managed_param : managed.params) params.push_back(managed_param.param);
  auto group =
      std::make_shared<FSDPParamGroup>(params, mesh_info, layout, device, std::move(settings));
  for (size_t i = 0; i < managed.params.size(); ++i) {
    for (const ManagedParam::Entry& entry : managed.params[i].entries) {
      parameter_dict(*entry.module)[entry.key] = group->params()[i].sharded_param();
    }
  }
  return group;
}

// Those that lie below no other, in order.
std::vector<torch::nn::Module*> checked_roots(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  FSDP_CHECK(ConfigError, !modules.empty(), "fully_shard: the list of modules is empty.");
  std::unordered_set<const torch::nn::Module*> all, below;
  for (torch::nn::Module& module : modules) {
    FSDP_CHECK(
        ConfigError, dynamic_cast<FSDPModule*>(&module) != nullptr, "fully_shard: module of type ",
        module.name(),
        " runs no hooks around forward, so it cannot be sharded as a unit. Declare it with "
        "FSDP_MODULE(Name) instead of TORCH_MODULE(Name), use fsdp::nn for torch's own "
        "modules, or shard its parent. Containers without a forward (ModuleList, ModuleDict) "
        "are not supported: shard their elements.");
    FSDP_CHECK(ConfigError, state_of(module) == nullptr, "fully_shard: module of type ",
               module.name(), " is sharded already; it can be sharded only once.");
    FSDP_CHECK(
        ConfigError, !is_replicated(module), "fully_shard: module of type ", module.name(),
        " is replicated, so its parameters are to stay whole. Shard its parent, which leaves "
        "it out, or do not replicate it.");
    FSDP_CHECK(ConfigError, all.insert(&module).second, "fully_shard: the module of type ",
               module.name(), " is twice in the list.");
    for_each_module(module, [&](const std::string&, torch::nn::Module& submodule) {
      if (&submodule != &module) below.insert(&submodule);
    });
  }
  std::vector<torch::nn::Module*> roots;
  for (torch::nn::Module& module : modules) {
    if (below.count(&module) == 0) roots.push_back(&module);
  }
  return roots;
}

std::string key_of(torch::nn::Module& module, const at::Tensor& param) {
  for (const auto& entry : parameter_dict(module)) {
    if (entry.value().is_same(param)) return entry.key();
  }
  FSDP_CHECK(ConfigError, false, "tie: the tensor of shape ", param.sizes(),
             " is not a parameter of the module of type ", module.name(),
             " itself. Pass the module that registered it, before it is sharded.");
}

}  // namespace

FSDPModule& fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  fully_shard(std::vector<std::reference_wrapper<torch::nn::Module>>{module}, options);
  return dynamic_cast<FSDPModule&>(module);
}

void fully_shard(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules,
                 const FullyShardOptions& options) {
  const std::vector<torch::nn::Module*> roots = checked_roots(modules);
  const DeviceMeshPtr mesh = options.mesh ? options.mesh : init_device_mesh(c10::DeviceType::CPU);
  const FSDPMeshInfoPtr mesh_info = make_mesh_info(mesh);
  const c10::Device device = checked_device(*mesh);
  check_ignored(options);
  check_same_device(roots, device);
  Managed managed = collect(roots, options);
  check_members(managed);
  for (ManagedParam& managed_param : managed.params) {
    check_param(managed_param.param, options, mesh_info->shard_size());
  }
  GroupSettings settings{.mp_policy = options.mp_policy,
                         .post_forward_mesh_info =
                             get_post_forward_mesh_info(options.reshard_after_forward, mesh_info),
                         .require_equal_gradients = options.require_equal_gradients};

  // Nothing has changed so far; from here on nothing is refused.
  move_buffers(managed, device);
  std::shared_ptr<FSDPParamGroup> group =
      make_group(managed, mesh_info, options.layout, device, std::move(settings));
  const bool auto_reshard = std::holds_alternative<std::monostate>(options.reshard_after_forward);
  const auto state =
      std::make_shared<FSDPState>(std::vector<const torch::nn::Module*>(roots.begin(), roots.end()),
                                  device, std::move(group), options.mp_policy, auto_reshard);
  for (torch::nn::Module* root : roots) dynamic_cast<FSDPModule&>(*root).set_forward_hooks(state);
}

void tie(torch::nn::Module& module_a, const at::Tensor& a, torch::nn::Module& module_b,
         at::Tensor& b) {
  const std::string key_a = key_of(module_a, a);
  const std::string key_b = key_of(module_b, b);
  FSDP_CHECK(ConfigError, spec_of(a) == nullptr && spec_of(b) == nullptr, "tie: '", key_a, "' or '",
             key_b, "' is sharded already. Tie before fully_shard().");
  FSDP_CHECK(
      ConfigError,
      a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device(),
      "tie: '", key_a, "' is ", a.scalar_type(), " ", a.sizes(), " on ", a.device(), ", '", key_b,
      "' is ", b.scalar_type(), " ", b.sizes(), " on ", b.device(),
      "; tied parameters must agree in dtype, shape and device.");
  parameter_dict(module_b)[key_b] = a;
  b = a;
}

}  // namespace fsdp
