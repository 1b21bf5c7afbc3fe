"""Ranks as threads of one process, each with PyTorch's process groups of its own."""

import datetime
import itertools
import threading

import torch
import torch.distributed as dist

import npu
from torch.testing._internal.distributed import multi_threaded_pg

_num_jobs = itertools.count()
_local = threading.local()


def _create_backend(options, backend_options):
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    return npu.sim.make_thread_backend(
        _local.job,
        _local.world_size,
        f"{options.group_id} of {ranks}",
        ranks,
        options.group_rank,
        options.timeout.total_seconds(),
    )


dist.Backend.register_backend(
    "sim_threads", _create_backend, extended_api=True, devices=["npu", "cpu"]
)


def run_ranks(world_size, function, *arguments, device_type="npu", timeout_s=120):
    """Calls function(rank, *arguments) on `world_size` threads; returns what each returned.

    On npu rank r has device r (modulo their number) as its current one. The first error that a rank
    throws is thrown here, after all have ended.
    """
    job = f"job {next(_num_jobs)}"
    store = dist.HashStore()
    results = [None] * world_size
    errors = []

    def run(rank):
        _local.job, _local.world_size = job, world_size
        npu.sim.name_thread(f"rank {rank}")
        try:
            if device_type == "npu":
                torch.npu.set_device(rank % torch.npu.device_count())
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group(
                    "sim_threads",
                    rank=rank,
                    world_size=world_size,
                    store=store,
                    timeout=datetime.timedelta(seconds=timeout_s),
                )
                try:
                    results[rank] = function(rank, *arguments)
                finally:
                    dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            npu.sim.abort_job(job, rank, str(error))

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        npu.sim.forget_job(job)
    if errors:
        raise errors[0]
    return results
