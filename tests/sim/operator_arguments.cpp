#include "sim/operator_arguments.h"

#include <map>
#include <set>

#include <ATen/ATen.h>

namespace fsdp::testing {
namespace {

// Values in (0, 1), where most functions are defined; small numbers where they are whole.
at::Tensor values(at::ScalarType dtype, at::IntArrayRef sizes, size_t which) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  const at::Tensor index = at::arange(numel, at::kDouble).view(sizes);
  if (dtype == at::kBool) return (index + static_cast<double>(which)).remainder(3).gt(0);
  if (at::isIntegralType(dtype, /*includeBool=*/false)) {
    return (index * 3 + static_cast<double>(which)).remainder(3).to(dtype);
  }
  const at::Tensor wave = 0.5 + 0.4 * at::sin(index * (1.0 + static_cast<double>(which)) + 1);
  if (at::isComplexType(dtype)) return at::complex(wave, wave.cos()).to(dtype);
  return wave.to(dtype);
}

at::Tensor tensor_for(const c10::Argument& argument, const Recipe& recipe, size_t which) {
  static const std::set<std::string> indices = {
      "index", "indices", "target", "offsets", "lengths", "repeats", "batch_sizes", "tril_indices"};
  static const std::set<std::string> masks = {"mask", "condition"};
  if (argument.is_out()) return at::empty({0}, recipe.out_dtype);
  if (indices.count(argument.name()) > 0) return values(at::kLong, recipe.sizes, which);
  if (masks.count(argument.name()) > 0) return values(at::kBool, recipe.sizes, which);
  return values(recipe.dtype, recipe.sizes, which);
}

// By the names that ATen gives them.
int64_t integer_for(const c10::Argument& argument, const Recipe& recipe) {
  static const std::map<std::string, int64_t> known = {
      {"dim", 0},          {"dim0", 0},        {"dim1", 1},
      {"dim2", 1},         {"axis", 0},        {"k", 1},
      {"groups", 1},       {"num_groups", 1},  {"start", 0},
      {"end", 2},          {"step", 1},        {"num_classes", 5},
      {"padding_idx", -1}, {"num_weights", 4}, {"output_size", 2},
      {"kernel_size", 2},  {"blank", 0},       {"interpolation_mode", 0},
      {"padding_mode", 0}};
  const auto found = known.find(argument.name());
  return found == known.end() ? recipe.integer : found->second;
}

std::vector<int64_t> integers_for(const c10::Argument& argument, const Recipe& recipe) {
  const std::string& name = argument.name();
  if (name == "size" || name == "sizes" || name == "shape" || name == "input_sizes" ||
      name == "self_sizes" || name == "input_size" || name == "grad_output_size") {
    return recipe.sizes;
  }
  if (name == "normalized_shape") return {recipe.sizes.back()};
  if (name == "split_sizes" || name == "split_size") {
    return {1, recipe.sizes.front() - 1};
  }
  static const std::map<std::string, int64_t> known = {
      {"dim", 0},         {"dims", 0},     {"stride", 1},         {"padding", 0},
      {"kernel_size", 2}, {"dilation", 1}, {"output_padding", 0}, {"pad", 1},
      {"shifts", 1},      {"repeats", 2},  {"indices", 1},        {"scale_factors", 2}};
  const auto found = known.find(name);
  const int64_t value = found == known.end() ? recipe.integer : found->second;
  // A list that has one length in the schema, "int[2]", has a value for each of those dimensions.
  const auto type = argument.N() ? static_cast<size_t>(*argument.N()) : size_t{1};
  const bool for_each_dim = name == "repeats" || name == "stride";
  std::vector<int64_t> list(for_each_dim && !argument.N() ? recipe.sizes.size() : type, value);
  if (name == "dim" || name == "dims") {
    for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int64_t>(i);
  }
  return list;
}

// Without a default. Nothing if there is no value of the type.
std::optional<c10::IValue> value_for(const c10::Argument& argument, const c10::TypePtr& type,
                                     const Recipe& recipe, size_t which) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return tensor_for(argument, recipe, which);
    case c10::TypeKind::IntType:
      if (argument.real_type()->kind() == c10::TypeKind::ScalarTypeType) {
        return static_cast<int64_t>(recipe.out_dtype);
      }
      if (argument.real_type()->kind() == c10::TypeKind::LayoutType) {
        return static_cast<int64_t>(at::kStrided);
      }
      if (argument.real_type()->kind() == c10::TypeKind::MemoryFormatType) {
        return static_cast<int64_t>(at::MemoryFormat::Contiguous);
      }
      return integer_for(argument, recipe);
    case c10::TypeKind::SymIntType:
      return integer_for(argument, recipe);
    case c10::TypeKind::FloatType:
      return 0.5;
    case c10::TypeKind::NumberType:
      return c10::IValue(at::Scalar(at::isIntegralType(recipe.dtype, true) ? 2 : 1));
    case c10::TypeKind::BoolType:
      return recipe.boolean;
    case c10::TypeKind::StringType:
      return std::string("none");
    case c10::TypeKind::DeviceObjType:
      return c10::Device(c10::kCPU);
    case c10::TypeKind::OptionalType: {
      const c10::TypePtr element = type->castRaw<c10::OptionalType>()->getElementType();
      const bool is_tensor = element->kind() == c10::TypeKind::TensorType;
      if (element->kind() == c10::TypeKind::DeviceObjType)
        return c10::IValue(c10::Device(c10::kCPU));
      if (!is_tensor || !recipe.fills_optional) return c10::IValue();
      return values(recipe.dtype, {recipe.sizes.size() > 1 ? recipe.sizes[1] : recipe.sizes[0]},
                    which);
    }
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      switch (element->kind()) {
        case c10::TypeKind::TensorType:
          return std::vector<at::Tensor>{tensor_for(argument, recipe, which),
                                         tensor_for(argument, recipe, which + 1)};
        case c10::TypeKind::OptionalType: {
          c10::List<std::optional<at::Tensor>> list;
          list.push_back(values(at::kLong, {recipe.sizes.front()}, which));
          return c10::IValue(list);
        }
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
          return integers_for(argument, recipe);
        case c10::TypeKind::FloatType:
          return std::vector<double>(argument.N() ? static_cast<size_t>(*argument.N()) : 2, 1.5);
        case c10::TypeKind::BoolType:
          return c10::IValue(c10::List<bool>({true, true, true}).copy());
        case c10::TypeKind::NumberType:
          return c10::IValue(c10::List<at::Scalar>({at::Scalar(1), at::Scalar(2)}));
        default:
          return std::nullopt;
      }
    }
    default:
      return std::nullopt;
  }
}

// Arguments that must fit each other, by operator and name; the others come from the recipe.
using Overrides = std::map<std::string, c10::IValue>;

std::map<std::string, Overrides> make_overrides() {
  const auto floats = [](at::IntArrayRef sizes) { return values(at::kFloat, sizes, 3); };
  const auto longs = [](at::IntArrayRef sizes) { return values(at::kLong, sizes, 1); };
  const auto scalar = [](double value) { return at::scalar_tensor(value); };
  const std::vector<at::Tensor> one = {floats({4, 4})}, steps = {at::ones({})};
  const Overrides targets_of_rows = {{"target", longs({4})}};
  const Overrides image = {{"input", floats({2, 4, 4, 4})}, {"self", floats({2, 4, 4, 4})},
                           {"weight", floats({4})},         {"bias", floats({4})},
                           {"running_mean", floats({4})},   {"running_var", floats({4})}};
  const Overrides adam = {{"self", one},
                          {"grads", one},
                          {"exp_avgs", one},
                          {"exp_avg_sqs", one},
                          {"max_exp_avg_sqs", std::vector<at::Tensor>{}},
                          {"state_steps", steps},
                          {"lr", 0.1},
                          {"grad_scale", c10::IValue()},
                          {"found_inf", c10::IValue()}};
  const Overrides bags = {{"weight", floats({4, 4})},
                          {"indices", longs({4})},
                          {"offsets", at::tensor({0, 2}, at::kLong)},
                          {"per_sample_weights", {}}};
  const Overrides gru = {
      {"hx", floats({4, 4})}, {"w_ih", floats({12, 4})}, {"w_hh", floats({12, 4})}};
  const Overrides lstm = {{"hx", std::vector<at::Tensor>{floats({4, 4}), floats({4, 4})}},
                          {"w_ih", floats({16, 4})},
                          {"w_hh", floats({16, 4})}};
  const Overrides filter = {{"stride", std::vector<int64_t>{1, 1}},
                            {"padding", std::vector<int64_t>{1, 1}},
                            {"dilation", std::vector<int64_t>{1, 1}},
                            {"output_padding", std::vector<int64_t>{0, 0}},
                            {"input", floats({2, 4, 5, 5})},
                            {"weight", floats({4, 4, 3, 3})},
                            {"self", floats({2, 4, 5, 5})}};
  Overrides transposed_filter = filter;
  transposed_filter["transposed"] = true;
  const auto resized = [](size_t num_dims) {
    return Overrides{{"output_size", c10::IValue()},
                     {"scale_factors", std::vector<double>(num_dims, 2)}};
  };
  const Overrides two_classes = {{"self", floats({2, 2, 4, 4})},
                                 {"target", longs({2, 4, 4}).remainder(2)}};
  return {
      {"addmv", {{"self", floats({4})}, {"vec", floats({4})}}},
      {"addmv_", {{"self", floats({4})}, {"vec", floats({4})}}},
      {"addbmm",
       {{"self", floats({4, 4})}, {"batch1", floats({2, 4, 4})}, {"batch2", floats({2, 4, 4})}}},
      {"mv", {{"vec", floats({4})}}},
      {"cross_entropy_loss", targets_of_rows},
      {"nll_loss", targets_of_rows},
      {"nll_loss_nd", targets_of_rows},
      {"nll_loss_forward", targets_of_rows},
      {"multi_margin_loss", targets_of_rows},
      {"nll_loss2d", two_classes},
      {"nll_loss2d_forward", two_classes},
      {"batch_norm", image},
      {"native_batch_norm", image},
      {"_native_batch_norm_legit", image},
      {"_native_batch_norm_legit_no_training", image},
      {"native_group_norm",
       {{"input", floats({2, 4, 4, 4})},
        {"weight", floats({4})},
        {"bias", floats({4})},
        {"N", 2},
        {"C", 4},
        {"HxW", 16},
        {"group", 2}}},
      {"prelu", {{"weight", floats({4})}}},
      {"embedding_bag", bags},
      {"_embedding_bag", bags},
      {"gru_cell", gru},
      {"lstm_cell", lstm},
      {"conv2d", filter},
      {"convolution", filter},
      {"convolution_overrideable", filter},
      {"conv_transpose2d.input", filter},
      {"_convolution", transposed_filter},
      {"conv_transpose1d", {{"input", floats({2, 4, 6})}, {"weight", floats({4, 4, 3})}}},
      {"einsum", {{"equation", std::string("ij,jk->ik")}, {"path", c10::IValue()}}},
      {"constant_pad_nd", {{"pad", std::vector<int64_t>{1, 2}}}},
      {"pad", {{"pad", std::vector<int64_t>{1, 2}}, {"mode", std::string("constant")}}},
      {"clamp", {{"min", 0.3}, {"max", 0.6}}},
      {"clamp_", {{"min", 0.3}, {"max", 0.6}}},
      {"clamp.Tensor", {{"min", floats({4}) - 0.1}, {"max", floats({4})}}},
      {"upsample_linear1d.vec", resized(1)},
      {"upsample_nearest2d.vec", resized(2)},
      {"upsample_bilinear2d.vec", resized(2)},
      {"upsample_bicubic2d.vec", resized(2)},
      {"upsample_trilinear3d.vec", resized(3)},
      {"grid_sampler", {{"input", floats({2, 4, 4, 4})}, {"grid", floats({2, 3, 3, 2})}}},
      {"grid_sampler_2d", {{"input", floats({2, 4, 4, 4})}, {"grid", floats({2, 3, 3, 2})}}},
      {"masked_fill.Tensor", {{"value", scalar(2)}}},
      {"masked_fill_.Tensor", {{"value", scalar(2)}}},
      {"index_fill.int_Tensor", {{"index", longs({2})}, {"value", scalar(2)}}},
      {"index_fill_.int_Tensor", {{"index", longs({2})}, {"value", scalar(2)}}},
      {"fill.Tensor", {{"value", scalar(2)}}},
      {"fill_.Tensor", {{"value", scalar(2)}}},
      {"select_scatter", {{"src", floats({4})}}},
      {"diagonal_scatter", {{"src", floats({4})}}},
      {"scatter.reduce", {{"reduce", std::string("add")}}},
      {"scatter_.reduce", {{"reduce", std::string("multiply")}}},
      {"scatter_reduce.two", {{"reduce", std::string("amax")}}},
      {"scatter_reduce_.two", {{"reduce", std::string("mean")}}},
      {"index_reduce", {{"index", longs({4})}, {"reduce", std::string("prod")}}},
      {"meshgrid.indexing",
       {{"indexing", std::string("xy")},
        {"tensors", std::vector<at::Tensor>{floats({3}), floats({2})}}}},
      {"stft", {{"self", floats({16})}, {"n_fft", 8}, {"return_complex", true}}},
      {"cross", {{"self", floats({4, 3})}, {"other", floats({4, 3}).cos()}, {"dim", 1}}},
      {"col2im", {{"self", floats({2, 16, 9})}, {"output_size", std::vector<int64_t>{4, 4}}}},
      {"ctc_loss.Tensor",
       {{"log_probs", floats({6, 2, 4}).log()},
        {"targets", longs({2, 2}) + 1},
        {"input_lengths", at::full({2}, 6, at::kLong)},
        {"target_lengths", at::full({2}, 2, at::kLong)}}},
      {"_fused_adam_", adam},
      {"_fused_adamw_", adam},
      {"_fused_adam", adam},
      {"_fused_adamw", adam},
  };
}

const Overrides* overrides_for(const std::string& name) {
  static const std::map<std::string, Overrides> all = make_overrides();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : &found->second;
}

template <typename Convert>
c10::IValue convert(const c10::IValue& value, const Convert& of_tensor) {
  if (value.isTensor()) return of_tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(of_tensor(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(of_tensor(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

}  // namespace

std::vector<Recipe> recipes() {
  std::vector<Recipe> all;
  const std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> tensors = {
      {at::kFloat, {4, 4}},          {at::kLong, {4, 4}},         {at::kFloat, {2, 2, 4, 4}},
      {at::kFloat, {2, 4, 4}},       {at::kFloat, {4}},           {at::kBool, {4, 4}},
      {at::kFloat, {2, 2, 2, 4, 4}}, {at::kComplexFloat, {4, 4}}, {at::kInt, {4}},
      {at::kBFloat16, {4, 4}}};
  for (const auto& [dtype, sizes] : tensors) {
    for (const bool boolean : {false, true}) {
      for (const bool fills_optional : {false, true}) {
        for (const int64_t integer : {1, 2}) {
          for (const auto out_dtype : {dtype, at::kLong, at::kBool}) {
            all.push_back({dtype, sizes, integer, boolean, fills_optional, out_dtype});
          }
        }
      }
    }
  }
  return all;
}

std::optional<std::vector<c10::IValue>> arguments_for(const c10::FunctionSchema& schema,
                                                      const Recipe& recipe) {
  const std::string overload = schema.overload_name();
  const Overrides* overrides =
      overrides_for(schema.name().substr(6) + (overload.empty() ? "" : "." + overload));
  std::vector<c10::IValue> arguments;
  for (const c10::Argument& argument : schema.arguments()) {
    if (overrides != nullptr && overrides->count(argument.name()) > 0) {
      arguments.push_back(convert(overrides->at(argument.name()), [](const at::Tensor& tensor) {
        return tensor.detach().clone();
      }));
      continue;
    }
    const bool is_device = argument.type()->str().find("Device") != std::string::npos;
    if (argument.default_value() && !is_device && !recipe.fills_optional) {
      arguments.push_back(*argument.default_value());
      continue;
    }
    auto value = value_for(argument, argument.type(), recipe, arguments.size());
    if (!value && argument.default_value()) value = argument.default_value();
    if (!value) return std::nullopt;
    arguments.push_back(*value);
  }
  return arguments;
}

std::vector<c10::IValue> to_device(const std::vector<c10::IValue>& values,
                                   const c10::Device& device) {
  std::vector<c10::IValue> moved;
  for (const c10::IValue& value : values) {
    if (value.isDevice()) {
      moved.emplace_back(device);
      continue;
    }
    moved.push_back(convert(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return tensor.detach()
          .to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
          .set_requires_grad(tensor.requires_grad());
    }));
  }
  return moved;
}

std::vector<at::Tensor> tensors_in(const std::vector<c10::IValue>& values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    (void)convert(value, [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      return tensor;
    });
  }
  return tensors;
}

}  // namespace fsdp::testing
