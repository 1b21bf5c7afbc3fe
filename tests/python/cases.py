"""What the tests share: runs of the same program on the CPU and on the simulated accelerator."""

import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

import npu
from models import Block
from ranks import run_ranks

Execution = npu.sim.Execution
OnRace = npu.sim.OnRace
EXECUTIONS = (
    Execution.EAGER,
    Execution.LATE_SIDE_STREAMS,
    Execution.LATE_DEFAULT_STREAMS,
    Execution.LATE,
)


def to_host(value):
    """`value` with its tensors whole and on the CPU."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.distributed.tensor.DTensor):
            value = value.full_tensor()
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)):
        return [to_host(item) for item in value]
    if isinstance(value, dict):
        return {name: to_host(item) for name, item in value.items()}
    return value


def differences(expected, found, path="result"):
    """Where two results are not the same bits."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or expected.dtype != found.dtype:
            return [f"{path}: {type(found)}"]
        if torch.equal(expected, found):
            return []
        if expected.shape != found.shape:
            return [f"{path}: expected shape {expected.shape}, found {found.shape}"]
        worst = (expected.double() - found.double()).abs().max().item()
        return [f"{path}: differs by up to {worst}"]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return [f"{path}: expected {len(expected)} items, found {len(found)}"]
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, found))]
    elif isinstance(expected, dict):
        if expected.keys() != found.keys():
            return [f"{path}: expected {list(expected)}, found {list(found)}"]
        pairs = [(f"{path}.{name}", item, found[name]) for name, item in expected.items()]
    else:
        return [] if expected == found else [f"{path}: expected {expected!r}, found {found!r}"]
    return [text for name, a, b in pairs for text in differences(a, b, name)]


class SimTestCase(unittest.TestCase):
    """Races are recorded; a test that leaves one behind fails."""

    def setUp(self):
        npu.sim.set_execution(Execution.EAGER)
        npu.sim.set_on_race(OnRace.RECORD)
        npu.sim.take_races()

    def tearDown(self):
        npu.sim.set_execution(Execution.EAGER)
        self.check_no_races()

    def check_no_races(self):
        races = npu.sim.take_races()
        self.assertEqual(len(races), 0, "\n\n".join(races[:3]))

    def check_same(self, expected, found):
        texts = differences(expected, found)
        self.assertEqual(len(texts), 0, "\n".join(texts[:10]))

    def run_everywhere(self, world_size, function, *arguments, executions=EXECUTIONS):
        """Runs function(rank, device_type, *arguments) on CPU and in each execution on npu.

        The results must be the same bits, and no accesses may race. Returns those of the ranks.
        """

        def run(device_type):
            return run_ranks(
                world_size,
                lambda rank: to_host(function(rank, device_type, *arguments)),
                device_type=device_type,
            )

        expected = run("cpu")
        for execution in executions:
            npu.sim.set_execution(execution)
            with self.subTest(execution=execution):
                self.check_same(expected, run("npu"))
                self.check_no_races()
        npu.sim.set_execution(Execution.EAGER)
        return expected


def shard_transformer(model, **options):
    """A group for each block, and one for the rest."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def fsdp_modules(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def average(value):
    """The mean over the ranks, which all of them get."""
    mean = value.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean
