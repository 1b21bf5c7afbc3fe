"""The peer of bench/module/host_overhead_bench.cpp: the same chain of small linears in PyTorch's
FSDP2, its collectives replaced by nothing. One JSON line per configuration.

Process CPU time of forward and backward per group, the unsharded chain subtracted, the fastest of
the repetitions.
"""
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


class Done(dist.Work):
    def wait(self, timeout=None):
        return True


def no_collectives():
    """The calls that FSDP2 makes, returning at once: what is left is its own host time."""
    done = Done()
    dist.all_gather_into_tensor = lambda *args, **kwargs: done if kwargs.get("async_op") else None
    dist.reduce_scatter_tensor = lambda *args, **kwargs: done if kwargs.get("async_op") else None


def chain(num_groups, params_per_group):
    blocks = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(params_per_group // 2)))
              for _ in range(num_groups)]
    return nn.Sequential(*blocks)


def fastest_step(model, repetitions):
    x = torch.ones(1, 8, requires_grad=True)
    forward = backward = float("inf")
    for i in range(repetitions + 2):
        begin = time.process_time()
        loss = model(x).sum()
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        for param in model.parameters():
            param.grad = None
        if i >= 2:
            forward, backward = min(forward, middle - begin), min(backward, end - middle)
    return forward * 1e6, backward * 1e6


def run(num_groups, world_size, params_per_group, repetitions):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    eager, sharded = chain(num_groups, params_per_group), chain(num_groups, params_per_group)
    for block in sharded:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    without, with_ = fastest_step(eager, repetitions), fastest_step(sharded, repetitions)
    forward, backward = ((w - e) / num_groups for w, e in zip(with_, without))
    print(json.dumps({
        "case": "host-overhead", "who": "FSDP2", "groups": num_groups, "world_size": world_size,
        "params_per_group": params_per_group, "unit": "us of CPU per group",
        "forward": round(forward, 1), "backward": round(backward, 1),
        "total": round(forward + backward, 1), "eager": round(sum(without) / num_groups, 1)}),
        flush=True)
    dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    no_collectives()
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for num_groups in (50, 100, 400):
        run(num_groups, 2, 2, repetitions)
    for world_size in (128, 1024):
        run(100, world_size, 2, repetitions)
    run(50, 2, 64, repetitions)


if __name__ == "__main__":
    main()
