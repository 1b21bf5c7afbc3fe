"""The peer of tests/scenario/scenario.cpp: runs the same scenarios (docs/scenario.md) with PyTorch's
FSDP2 on two Gloo processes and writes what happened.

    python bench/peer/scenario.py scenarios.json outputs.json

An output is the list of the operations' records, or {"dropped": why} where the original raised.
Where it errs as docs/parity.md says, it is mended here (look for parity.md) or dropped.
"""
import argparse
import json
import math
import multiprocessing
import os
import pathlib
import socket
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

WORLD_SIZE = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
STATES = {TrainingState.IDLE: "I", TrainingState.FORWARD: "F", TrainingState.PRE_BACKWARD: "B",
          TrainingState.POST_BACKWARD: "P"}


class Dropped(Exception):
    """The original does here what docs/parity.md lists as different on purpose."""


# --- Numbers: the same bits as scenario_model.cpp makes.


def fnv1a(text):
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def uniform(shape, key):
    """Numbers in [-0.5, 0.5), multiples of 2^-24: integer arithmetic alone."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    value = (index * 2654435761 + fnv1a(key) * 40503 + 12345) % 2**32
    value = (value * 1103515245 + 12345) % 2**31 >> 7
    return (value.to(torch.float32) / 2**24 - 0.5).view(shape)


def rounded(value):
    if not math.isfinite(value):
        raise Dropped("a number that is not finite")
    return float(f"{value:.9g}")


def summary(tensor):
    """The norm, and a checksum that sees where each element is."""
    if tensor is None:
        return None
    flat = tensor.detach().double().flatten()
    weight = torch.arange(1, flat.numel() + 1, dtype=torch.float64) / flat.numel()
    return [rounded(flat.norm().item()), rounded((flat * weight).sum().item())]


# --- The modules. What a forward returns is a tensor or a tuple of tensors.


class MLP(nn.Module):
    def __init__(self, dim, mult):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(dim, dim * mult), nn.Linear(dim * mult, dim)

    def forward(self, x):
        return torch.relu(self.out_proj(torch.relu(self.in_proj(x))))


class DoubleLinear(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return torch.relu(self.lin1(x)), torch.relu(self.lin2(x))


def outputs_of(value):
    return value if isinstance(value, tuple) else (value,)


class Chain(nn.Module):
    """Runs its children in the order of "run"; "pass" says which output of one goes to the next."""

    def __init__(self, node):
        super().__init__()
        self.layers = nn.ModuleList(build(child) for child in node["children"])
        self.run = node.get("run", list(range(len(self.layers))))
        self.passed = [child.get("pass") for child in node["children"]]

    def forward(self, x):
        for position, index in enumerate(self.run):
            if position > 0:
                passed = self.passed[self.run[position - 1]]
                x = sum(outputs[1:], outputs[0]) if passed is None else outputs[passed]
            outputs = outputs_of(self.layers[index](x))
        return outputs


def build(node):
    kind = node["type"]
    if kind == "linear":
        return nn.Linear(node["in"], node["out"], bias=node["bias"])
    if kind == "mlp":
        return MLP(node["dim"], node["mult"])
    if kind == "double":
        return DoubleLinear(node["dim"])
    if kind == "sequential":
        return nn.Sequential(*(build(child) for child in node["children"]))
    return Chain(node)


def make_model(scenario):
    model = build(scenario["model"])
    for first, other in scenario.get("ties", []):
        path, name = other.rsplit(".", 1) if "." in other else ("", other)
        setattr(model.get_submodule(path), name, model.get_parameter(first))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(uniform(param.shape, f"{scenario['seed']}/{name}"))
    for name in scenario.get("frozen", []):
        model.get_parameter(name).requires_grad_(False)
    return model


def shard(model, scenario):
    shape = scenario.get("mesh", [WORLD_SIZE])
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    for call in scenario["shard"]:
        mp = call.get("mp", {})
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[mp.get("param")], reduce_dtype=DTYPES[mp.get("reduce")],
            output_dtype=DTYPES[mp.get("output")], cast_forward_inputs=mp.get("cast_inputs", True))
        paths = call["module"]
        modules = ([model.get_submodule(path) for path in paths] if isinstance(paths, list)
                   else model.get_submodule(paths))
        fully_shard(modules, mesh=mesh, mp_policy=policy,
                    reshard_after_forward=call.get("reshard"))


# --- What is recorded: events and collectives, by wrapping what FSDP2 calls.

events, counts, groups = [], {}, set()
reducing = []  # the group whose post_backward runs


def log(letter, group):
    events.append(f"{letter}{STATES[group._training_state]}:{group._module_fqn or ''}")


def counted(name, function):
    def call(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        return function(*args, **kwargs)
    return call


def drop_stale_params(group):
    """docs/parity.md, a forward after an optimizer step on parameters still unsharded: the original
    computes with the old ones. Here it does as the library, which gathers anew where a step is
    likely, so that the rest can be compared."""
    pending = group._all_gather_result is not None
    if group._training_state != TrainingState.IDLE or not (pending or group.is_unsharded):
        return
    likely = group.was_reduced or (group.had_grads and group.is_unsharded)
    if group.was_written or (likely and not group._post_forward_indices):
        group._all_gather_result = None
        group.reshard()
    elif group.was_stepped:
        raise Dropped("a gather that waits over a step")


def record_fsdp():
    real = {name: getattr(FSDPParamGroup, name) for name in
            ("unshard", "reshard", "post_backward", "pre_forward", "_record_post_forward")}
    reduce = _fsdp_param_group.foreach_reduce

    def unshard(self, async_op=False):
        skipped = (self._all_gather_result is not None or self.is_unsharded or
                   (not self.unshard_in_backward and
                    self._training_state == TrainingState.PRE_BACKWARD))
        if not skipped:
            log("U", self)
            groups.add(self)
            self.was_reduced = self.was_stepped = self.was_written = False
            self.had_grads = any(p.sharded_param.grad is not None for p in self.fsdp_params)
        return real["unshard"](self, async_op)

    def reshard(self):
        if self._training_state != TrainingState.FORWARD or self._reshard_after_forward:
            log("R", self)
        return real["reshard"](self)

    def post_backward(self, *args):
        partial = self._partial_reduce_output
        reducing.append(self)
        real["post_backward"](self, *args)
        reducing.pop()
        if self.all_reduce_grads and partial is not None and self._partial_reduce_output is partial:
            raise Dropped("a partial sum that waits for the next step")  # docs/parity.md: HSDP
        log("P", self)

    def pre_forward(self, *args):
        drop_stale_params(self)
        return real["pre_forward"](self, *args)

    def record_post_forward(self):  # docs/parity.md: order list in evaluation
        if torch.is_grad_enabled():
            real["_record_post_forward"](self)

    def foreach_reduce(params, *args):
        group = reducing[-1]
        if group._partial_reduce_output is not None and group.reduced_params != params:
            raise Dropped("partial sums of different parameters")  # docs/parity.md: HSDP
        group.was_reduced, group.reduced_params = True, list(params)
        return reduce(params, *args)

    for function in (unshard, reshard, post_backward, pre_forward):
        setattr(FSDPParamGroup, function.__name__, function)
    FSDPParamGroup._record_post_forward = record_post_forward
    _fsdp_param_group.foreach_reduce = foreach_reduce
    dist.all_gather_single = counted("ag", dist.all_gather_single)
    dist.reduce_scatter_single = counted("rs", dist.reduce_scatter_single)
    dist.all_reduce = counted("ar", dist.all_reduce)


# --- The operations.


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Runner:
    def __init__(self, scenario, rank):
        self.scenario, self.rank = scenario, rank
        groups.clear()
        reducing.clear()
        self.model = make_model(scenario)
        shard(self.model, scenario)
        self.named = dict(self.model.named_parameters())
        self.params = list(self.named.values())
        if scenario["optimizer"] == "adamw":
            self.optimizer = torch.optim.AdamW(self.params, lr=3e-3, fused=True)
        else:
            self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9, foreach=False)
        self.losses, self.handles = [], []

    def run(self):
        records = []
        for operation in self.scenario["operations"]:
            events.clear()
            counts.clear()
            record = {}
            getattr(self, operation["op"], self.set)(operation, record)
            if events:
                record["events"] = " ".join(event.replace(", ", ",") for event in events)
            if counts:
                record["counts"] = [counts.get(name, 0) for name in ("ag", "rs", "ar")]
            if operation["op"] == "backward":
                record["grads"] = [summary(None if p.grad is None else full(p.grad))
                                   for p in self.params]
            if operation["op"] == "step":
                record["params"] = [summary(full(p)) for p in self.params]
            records.append(record)
        return records

    def module(self, operation):
        return self.model.get_submodule(operation.get("module", ""))

    def forward(self, operation, record):
        key = f"input/{operation['seed']}/{self.rank}"
        x = uniform([operation["rows"], operation["width"]], key) * 2
        x.requires_grad_(operation["grad"] and operation["input_grad"])
        with torch.set_grad_enabled(operation["grad"]):
            outputs = [y.float() for y in outputs_of(self.module(operation)(x))]
            losses = [(y.square() + y).mean() for y in outputs]
        self.losses.append(losses)
        record["losses"] = [rounded(loss.item()) for loss in losses]

    def backward(self, operation, record):
        chosen = []
        for forward in operation["forwards"]:
            losses = self.losses[forward]
            output = operation.get("output")
            chosen += losses if output is None else [losses[output]]
        loss = sum(chosen[1:], chosen[0])
        loss.backward(retain_graph=operation["retain"])

    def step(self, operation, record):
        self.optimizer.step()
        for group in groups:
            if any(p.sharded_param.grad is not None for p in group.fsdp_params):
                group.was_stepped = True
                # torch::optim::SGD writes through data(), which moves no version counter.
                group.was_written = self.scenario["optimizer"] == "adamw"

    def zero_grad(self, operation, record):
        self.optimizer.zero_grad(set_to_none=operation["to_none"])

    def unshard(self, operation, record):
        handle = self.module(operation).unshard(async_op=operation["async"])
        if operation["async"]:
            self.handles.append(handle)

    def wait(self, operation, record):
        self.handles[operation["handle"]].wait()

    def reshard(self, operation, record):
        self.module(operation).reshard()

    def set_requires_grad(self, operation, record):
        self.named[operation["parameter"]].requires_grad_(operation["value"])

    def set_gradient_divide_factor(self, operation, record):
        module = self.module(operation)
        # Gloo has no PREMUL_SUM; a sum and a division after it give the same.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(operation["value"])

    def set(self, operation, record):
        method = getattr(self.module(operation), operation["op"])
        if "modules" in operation:
            method([self.model.get_submodule(path) for path in operation["modules"]])
        elif "recurse" in operation:
            method(operation["value"], recurse=operation["recurse"])
        else:
            method(operation["value"])


# --- Two processes, and who looks after them.


def output_of(scenario, rank):
    try:
        return Runner(scenario, rank).run()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return {"dropped": f"{type(error).__name__}: {lines[0] if lines else ''}"}


def work(rank, port, path, first):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the original prints before it raises
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    record_fsdp()
    scenarios = json.loads(pathlib.Path(path).read_text())["scenarios"]
    with open(f"{path}.rank{rank}", "a") as file:
        for scenario in scenarios[first:]:
            file.write(json.dumps(output_of(scenario, rank)) + "\n")
            file.flush()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines_of(path, rank):
    file = pathlib.Path(f"{path}.rank{rank}")
    return file.read_text().splitlines() if file.exists() else []


def run_workers(path, first, timeout):
    """Forked, since torch takes seconds to import and has started no threads yet."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, port, path, first))
               for rank in range(WORLD_SIZE)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if any(worker.exitcode not in (0, None) for worker in workers):
            break
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.join()
    return all(worker.exitcode == 0 for worker in workers)


def merged(outputs):
    """One output of the ranks': events, counts and sums are those of all, losses are listed."""
    for output in outputs:
        if isinstance(output, dict):
            return output
    result = []
    for records in zip(*outputs):
        record = dict(records[0])
        for key in ("events", "counts"):
            if any(other.get(key) != record.get(key) for other in records):
                return {"dropped": "ranks differ"}
        if "losses" in record:
            record["losses"] = [other["losses"] for other in records]
        result.append(record)
    return result


def run(scenarios, timeout=900):
    """The outputs of all scenarios. One that ends a process is dropped, and the others go on."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "scenarios.json")
        pathlib.Path(path).write_text(json.dumps({"scenarios": scenarios}))
        while True:
            first = len(lines_of(path, 0))
            if first == len(scenarios) or run_workers(path, first, timeout):
                break
            done = min(len(lines_of(path, rank)) for rank in range(WORLD_SIZE))
            if done == len(scenarios):
                break
            for rank in range(WORLD_SIZE):
                lines = lines_of(path, rank)[:done] + [json.dumps({"dropped": "crash"})]
                pathlib.Path(f"{path}.rank{rank}").write_text("\n".join(lines) + "\n")
        ranks = [[json.loads(line) for line in lines_of(path, rank)] for rank in range(WORLD_SIZE)]
    return [merged(outputs) for outputs in zip(*ranks)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scenarios")
    parser.add_argument("outputs")
    arguments = parser.parse_args()
    scenarios = json.loads(pathlib.Path(arguments.scenarios).read_text())["scenarios"]
    outputs = run(scenarios)
    pathlib.Path(arguments.outputs).write_text(json.dumps({"outputs": outputs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
