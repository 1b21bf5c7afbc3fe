#include "scenario/scenario_run.h"

#include <cmath>
#include <map>

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include "fsdp/adamw.h"
#include "fsdp/comm_debug.h"
#include "fsdp/events.h"
#include "fsdp/process_group.h"
#include "fsdp/sharded_tensor.h"
#include "scenario/scenario_model.h"

namespace fsdp::testing {
namespace {

using nlohmann::json;

constexpr int kWorldSize = 2;

// "UF:layers.0 RF:layers.0": as docs/scenario.md has them.
class EventWriter : public ScheduleObserver {
 public:
  void on_event(const ScheduleEvent& event) override {
    const bool is_unshard = event.kind == ScheduleEventKind::kUnshard;
    const bool kept = event.kind == ScheduleEventKind::kReshard &&
                      event.training_state == TrainingState::kForward;
    if ((is_unshard || kept) && !event.changed) return;
    if (!text_.empty()) text_ += ' ';
    text_ += "URP"[static_cast<int>(event.kind)];
    text_ += "IFBP"[static_cast<int>(event.training_state)];
    text_ += ':';
    for (const char c : event.module_path) {
      if (c != ' ') text_ += c;
    }
  }
  std::string take() { return std::exchange(text_, {}); }

 private:
  std::string text_;
};

// The norm, and a checksum that sees where each element is.
json summary(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const at::Tensor flat = full_tensor(tensor).detach().to(at::kDouble).flatten();
  const at::Tensor weight = at::arange(1, flat.numel() + 1, at::kDouble) / flat.numel();
  return {flat.norm().item<double>(), (flat * weight).sum().item<double>()};
}

int64_t num_calls(const CommDebugMode& comm, const std::string& part) {
  int64_t calls = 0;
  for (const auto& [operation, count] : comm.counts()) {
    if (operation.find(part) != std::string::npos) calls += count.calls;
  }
  return calls;
}

// One rank's run.
class Run {
 public:
  Run(const json& scenario, Layout layout, int rank)
      : rank_(rank), model_(build_model(scenario)), writer_(std::make_shared<EventWriter>()) {
    shard(model_, scenario, layout);
    set_schedule_observer(*model_.root, writer_);
    for (auto& [name, param] : unique_parameters(*model_.root)) {
      params_.push_back(param);
      named_.emplace(name, param);
    }
    if (scenario["optimizer"] == "adamw") {
      adamw_ = std::make_unique<AdamW>(params_, AdamWOptions(3e-3));
    } else {
      sgd_ =
          std::make_unique<torch::optim::SGD>(params_, torch::optim::SGDOptions(0.1).momentum(0.9));
    }
  }

  json operation(const json& op) {
    const std::string name = op["op"];
    json record = json::object();
    {
      const CommDebugMode comm;
      perform(name, op, record);
      const json counts = {num_calls(comm, "allgather"), num_calls(comm, "reduce_scatter"),
                           num_calls(comm, "allreduce")};
      if (comm.total() > 0) record["counts"] = counts;
    }
    const std::string events = writer_->take();
    if (!events.empty()) record["events"] = events;
    for (const at::Tensor& param : params_) {
      if (name == "backward") record["grads"].push_back(summary(param.grad()));
      if (name == "step") record["params"].push_back(summary(param));
    }
    return record;
  }

 private:
  void perform(const std::string& name, const json& op, json& record) {
    if (name == "forward") {
      record["losses"] = json::array({forward(op)});
    } else if (name == "backward") {
      backward(op);
    } else if (name == "step") {
      adamw_ ? adamw_->step() : sgd_->step();
    } else if (name == "zero_grad") {
      adamw_ ? adamw_->zero_grad(op["to_none"]) : sgd_->zero_grad(op["to_none"]);
    } else if (name == "wait") {
      handles_.at(op["handle"].get<size_t>()).wait();
    } else if (name == "set_requires_grad") {
      named_.at(op["parameter"]).set_requires_grad(op["value"].get<bool>());
    } else {
      change(model_.module(op["module"]), name, op);
    }
  }

  json forward(const json& op) {
    const std::string key =
        "input/" + std::to_string(op["seed"].get<int64_t>()) + "/" + std::to_string(rank_);
    at::Tensor x = uniform({op["rows"].get<int64_t>(), op["width"].get<int64_t>()}, key) * 2;
    const bool grad = op["grad"];
    x.set_requires_grad(grad && op["input_grad"].get<bool>());
    const c10::AutoGradMode mode(grad);
    auto& losses = losses_.emplace_back();
    json values = json::array();
    for (const at::Tensor& output : model_.calls.at(op["module"])(x)) {
      const at::Tensor y = output.to(at::kFloat);
      losses.push_back((y.square() + y).mean());
      values.push_back(losses.back().item<double>());
    }
    return values;
  }

  void backward(const json& op) {
    at::Tensor loss;
    for (const json& forward : op["forwards"]) {
      const auto& losses = losses_.at(forward.get<size_t>());
      for (size_t i = 0; i < losses.size(); ++i) {
        if (op.contains("output") && op["output"].get<size_t>() != i) continue;
        loss = loss.defined() ? loss + losses[i] : losses[i];
      }
    }
    loss.backward({}, op["retain"].get<bool>());
  }

  void change(FSDPModule& module, const std::string& name, const json& op) {
    using Setter = void (FSDPModule::*)(bool, bool);
    static const std::map<std::string, Setter> recursive = {
        {"set_requires_gradient_sync", &FSDPModule::set_requires_gradient_sync},
        {"set_requires_all_reduce", &FSDPModule::set_requires_all_reduce},
        {"set_reshard_after_forward", &FSDPModule::set_reshard_after_forward},
        {"set_reshard_after_backward", &FSDPModule::set_reshard_after_backward},
        {"set_reduce_scatter_unused_params", &FSDPModule::set_reduce_scatter_unused_params}};
    if (recursive.count(name) != 0) {
      (module.*recursive.at(name))(op["value"], op["recurse"]);
    } else if (name == "unshard" && op["async"].get<bool>()) {
      handles_.push_back(module.unshard_async());
    } else if (name == "unshard") {
      module.unshard();
    } else if (name == "reshard") {
      module.reshard();
    } else if (name == "set_is_last_backward") {
      module.set_is_last_backward(op["value"]);
    } else if (name == "set_unshard_in_backward") {
      module.set_unshard_in_backward(op["value"]);
    } else if (name == "set_gradient_divide_factor") {
      module.set_gradient_divide_factor(op["value"]);
    } else {
      std::vector<FSDPModule*> targets;
      for (const json& path : op["modules"]) targets.push_back(&model_.module(path));
      name == "set_modules_to_forward_prefetch" ? module.set_modules_to_forward_prefetch(targets)
                                                : module.set_modules_to_backward_prefetch(targets);
    }
  }

  int rank_;
  ScenarioModel model_;
  std::shared_ptr<EventWriter> writer_;
  std::vector<at::Tensor> params_;
  std::map<std::string, at::Tensor> named_;
  std::unique_ptr<AdamW> adamw_;
  std::unique_ptr<torch::optim::SGD> sgd_;
  std::vector<std::vector<at::Tensor>> losses_;  // by forward and output
  std::vector<UnshardHandle> handles_;
};

bool close(double ours, double original, double size, double tolerance) {
  return std::abs(ours - original) <= tolerance * std::max(std::abs(original), size) + 1e-7;
}

// Of gradients and parameters: norm and checksum, which may be zero although its terms are not.
bool equal_summary(const json& ours, const json& original, double tolerance) {
  if (original.is_null() || ours.is_null()) return ours.is_null() && original.is_null();
  return close(ours[0], original[0], 0, tolerance) &&
         close(ours[1], original[1], original[0], tolerance);
}

bool equal_losses(const json& ours, const json& original, double tolerance) {
  if (ours.size() != original.size()) return false;
  for (size_t i = 0; i < original.size(); ++i) {
    if (!close(ours[i], original[i], 0, tolerance)) return false;
  }
  return true;
}

std::string line(const std::string& what, const json& ours, const json& original) {
  return what + ": " + ours.dump() + ", the original " + original.dump();
}

// What differs under one key of two records.
std::vector<std::string> differences_at(const std::string& key, const json& ours,
                                        const json& original, double tolerance) {
  const bool is_list = key == "losses" || key == "grads" || key == "params";
  if (!is_list || ours.size() != original.size()) {
    return ours == original ? std::vector<std::string>{}
                            : std::vector<std::string>{line(key, ours, original)};
  }
  std::vector<std::string> lines;
  for (size_t i = 0; i < original.size(); ++i) {
    const bool is_equal = key == "losses" ? equal_losses(ours[i], original[i], tolerance)
                                          : equal_summary(ours[i], original[i], tolerance);
    if (!is_equal) lines.push_back(line(key + " " + std::to_string(i), ours[i], original[i]));
  }
  return lines;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

json run_scenario(const json& scenario, Layout layout) {
  std::vector<json> ranks(kWorldSize, json::array());
  try {
    run_ranks(kWorldSize, [&](const ProcessGroupPtr& group) {
      json& records = ranks[group->getRank()];
      Run run(scenario, layout, group->getRank());
      for (const json& op : scenario["operations"]) records.push_back(run.operation(op));
    });
  } catch (const std::exception& error) {
    ranks[0].push_back({{"error", first_line(error.what())}});
  }
  json result = ranks[0];
  for (size_t i = 0; i < result.size() && i < ranks[1].size(); ++i) {
    const json& other = ranks[1][i];
    for (const char* key : {"events", "counts"}) {
      if (result[i].value(key, json()) == other.value(key, json())) continue;
      result[i]["rank 1 has " + std::string(key)] = other.value(key, json());
    }
    if (result[i].contains("losses")) result[i]["losses"].push_back(other["losses"][0]);
  }
  return result;
}

std::vector<std::string> differences(const json& scenario, const json& ours, const json& original,
                                     double tolerance) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < std::max(ours.size(), original.size()); ++i) {
    const json a = i < ours.size() ? ours[i] : json::object();
    const json b = i < original.size() ? original[i] : json::object();
    const std::string op = scenario["operations"].at(i)["op"];
    json keys = a;
    keys.update(b);
    for (const auto& [key, unused] : keys.items()) {
      for (const std::string& text :
           differences_at(key, a.value(key, json()), b.value(key, json()), tolerance)) {
        lines.push_back("operation " + std::to_string(i) + " (" + op + ") " + text);
      }
    }
    if (a.contains("error")) break;
  }
  return lines;
}

}  // namespace fsdp::testing
