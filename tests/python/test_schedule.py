"""The schedule of PyTorch's FSDP2 on the simulated accelerator: its order is that of the CPU, no
accesses race, and where one of its waits is taken away both the detector and late execution tell."""

import copy
import unittest
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import npu
from cases import Execution, OnRace, SimTestCase, to_host
from ranks import run_ranks


def make_model():
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))


def train(rank, device_type, model, reshard=True):
    model = copy.deepcopy(model).to(device_type)
    for layer in model:
        fully_shard(
            layer, mesh=init_device_mesh(device_type, (2,)), reshard_after_forward=reshard
        )
    fully_shard(model, mesh=init_device_mesh(device_type, (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x = torch.arange(24.0).view(2, 12).add(rank).div(24).to(device_type).requires_grad_()
    losses = []
    for _ in range(3):
        loss = model(x).relu().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters())


class ScheduleTest(SimTestCase):
    def test_order_of_events(self):
        """The groups' gathers, reshards and reductions come in the CPU's order."""

        model = make_model()

        def order(device_type):
            events = {}

            def record(name):
                original = getattr(FSDPParamGroup, name)

                def call(group, *arguments):
                    rank = torch.distributed.get_rank()
                    events.setdefault(rank, []).append((name, group._module_fqn))
                    return original(group, *arguments)

                return mock.patch.object(FSDPParamGroup, name, call)

            with record("unshard"), record("reshard"), record("post_backward"):
                run_ranks(2, train, device_type, model, device_type=device_type)
            return events

        on_cpu = order("cpu")
        self.assertEqual(len(on_cpu[0]), 3 * (4 + 4 + 4 + 4 + 4 + 3), on_cpu[0])
        self.assertEqual(order("npu"), on_cpu)

    def test_training_without_races(self):
        model = make_model()
        for reshard in (True, False):
            with self.subTest(reshard=reshard):
                self.run_everywhere(2, train, model, reshard)


class ControlTest(SimTestCase):
    def test_a_stream_that_does_not_wait(self):
        for waits in (True, False):
            x = torch.ones(64, device="npu:0")
            side = torch.npu.Stream()
            x.add_(1)
            if waits:
                side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.sum()
            torch.npu.synchronize()
            races = npu.sim.take_races()
            self.assertEqual(len(races) == 0, waits, races)
            if not waits:
                self.assertIn("aten::add_", races[0])
                self.assertIn("aten::sum", races[0])

    def test_a_gather_that_nobody_waits_for(self):
        model = make_model()
        expected = run_ranks(2, lambda rank: to_host(train(rank, "npu", model)))
        self.check_no_races()
        copy_out = _fsdp_param_group.foreach_all_gather_copy_out

        def without_wait(result, *arguments):
            return copy_out(
                result._replace(all_gather_event=None, all_gather_work=None), *arguments
            )

        with mock.patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", without_wait):
            run_ranks(2, lambda rank: to_host(train(rank, "npu", model)))
            races = npu.sim.take_races()
            self.assertTrue(any("FSDP::all_gather_copy_out" in race for race in races), races)
            npu.sim.set_on_race(OnRace.IGNORE)
            npu.sim.set_execution(Execution.LATE_SIDE_STREAMS)
            found = run_ranks(2, lambda rank: to_host(train(rank, "npu", model)))
        self.assertFalse(torch.equal(found[0][1][0], expected[0][1][0]))


if __name__ == "__main__":
    unittest.main()
