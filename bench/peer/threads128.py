"""The peer of the reference suite's CollectiveOps tests: the same three tests with PyTorch's FSDP2.

128 ranks as threads of one process, on the threaded process group of torch's own test support:
parameters of the same shapes, the same ways of issuing the gather and the reduction, the same
checks, in what torch.distributed.fsdp calls foreach_all_gather and foreach_reduce. (Written after
PyTorch's class TestFullyShardCollectiveOps, which its wheel does not ship. As in newer versions of
it, gradients are rank % 8, and their reference is made before the reduction, which empties the list
that it is given.)

One JSON line for each test: its wall time in seconds, with starting and joining the threads.
"""
import json
import sys
import time
import unittest

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase

WORLD_SIZE = 128
SIZES = ((17, 257), (17,), (64, 312), (64,), (64, 64), (512, 64), (256,), (64, 297))
CPU = torch.device("cpu")
GATHERS = (  # async_op, side streams, reshard_after_forward
    (False, False, True), (False, True, True), (False, True, 8), (True, False, True),
    (True, True, True))


class CollectiveOps(MultiThreadedTestCase):
    @property
    def world_size(self):
        return WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def original_params(self):
        torch.manual_seed(42)  # threads share the generator: rank 0's count
        params = [torch.randn(size) for size in SIZES]
        for param in params:
            dist.broadcast(param, src=0)
        return params

    def make_group(self, originals, reshard_after_forward):
        module = nn.ParameterList([nn.Parameter(param.clone()) for param in originals])
        mesh_info = FSDPMeshInfo(init_device_mesh("cpu", (WORLD_SIZE,)), shard_mesh_dim=0)
        group = FSDPParamGroup(
            list(module.parameters()), (module,), mesh_info,
            _get_post_forward_mesh_info(reshard_after_forward, mesh_info), CPU, None,
            MixedPrecisionPolicy(), OffloadPolicy())
        group.lazy_init()
        return group, module

    def gather(self, group, process_group, async_op, streams):
        result = collectives.foreach_all_gather(
            group.fsdp_params, process_group, async_op=async_op,
            all_gather_copy_in_stream=streams[0], all_gather_stream=streams[1], device=CPU,
            all_gather_comm=collectives.DefaultAllGather())
        collectives.foreach_all_gather_copy_out(result, group.fsdp_params, process_group)
        for param in group.fsdp_params:
            param.init_unsharded_param()
        group._to_unsharded()

    def expect_unsharded(self, module, originals):
        for param, original in zip(module.parameters(), originals):
            self.assertNotIsInstance(param, DTensor)
            self.assertTrue(torch.equal(param, original))

    def test_all_gather_fp32(self):
        originals = self.original_params()
        for async_op, side_streams, reshard_after_forward in GATHERS:
            current = torch.cpu.current_stream()
            streams = (torch.cpu.Stream(), torch.cpu.Stream()) if side_streams else (current,) * 2
            group, module = self.make_group(originals, reshard_after_forward)
            for param, original in zip(module.parameters(), originals):
                self.assertIsInstance(param, DTensor)
                self.assertTrue(torch.equal(param.full_tensor(), original))
            self.gather(group, group.mesh_info.shard_process_group, async_op, streams)
            self.expect_unsharded(module, originals)
            if group.post_forward_mesh_info is group.mesh_info:
                continue
            group._to_sharded_post_forward()
            self.gather(group, group.post_forward_mesh_info.shard_process_group, async_op, streams)
            self.expect_unsharded(module, originals)

    def reduce_scatter(self, reduce_dtype):
        originals = self.original_params()
        for stream in (torch.cpu.current_stream(), torch.cpu.Stream()):
            group, _ = self.make_group(originals, True)
            group.comm_ctx.lazy_init(CPU)
            group.unshard()
            group.wait_for_unshard()
            group.reshard()
            process_group = group.mesh_info.shard_process_group
            grads = [torch.full_like(param, self.rank % 8) for param in originals]
            expected = [grad.to(reduce_dtype, copy=True) for grad in grads]
            pre, post, _, op = collectives._get_gradient_divide_factors(
                process_group, None, reduce_dtype)
            for grad in expected:
                if pre:
                    grad.div_(pre)
                dist.all_reduce(grad, op=op, group=process_group)
                if post:
                    grad.div_(post)
            result = collectives.foreach_reduce(
                group.fsdp_params, grads, process_group, stream,
                collectives.DefaultReduceScatter(), orig_dtype=torch.float32,
                reduce_dtype=reduce_dtype, device=CPU, gradient_divide_factor=None,
                all_reduce_group=None, all_reduce_stream=torch.cpu.Stream(),
                all_reduce_grads=True, partial_reduce_output=None, all_reduce_hook=None)
            del result
            for param, reference in zip(group.fsdp_params, expected):
                grad = param.sharded_param.grad
                self.assertIsInstance(grad, DTensor)
                whole = grad.full_tensor()
                self.assertTrue(torch.equal(whole, reference.to(torch.float32)))
                self.assertTrue(torch.equal(whole, torch.full_like(whole, 3.5)))

    def test_reduce_scatter_fp32(self):
        self.reduce_scatter(torch.float32)

    def test_reduce_scatter_fp16(self):
        self.reduce_scatter(torch.float16)


def main():
    for name in ("test_all_gather_fp32", "test_reduce_scatter_fp32", "test_reduce_scatter_fp16"):
        result = unittest.TestResult()
        begin = time.perf_counter()
        CollectiveOps(name).run(result)
        seconds = time.perf_counter() - begin
        if not result.wasSuccessful():
            sys.exit(f"{name}: {(result.errors + result.failures)[0][1]}")
        print(json.dumps({"case": "threads128", "who": "FSDP2", "test": name,
                          "world_size": WORLD_SIZE, "unit": "s", "seconds": round(seconds, 3)}),
              flush=True)


if __name__ == "__main__":
    main()
