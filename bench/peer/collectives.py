"""The peer of bench/mesh/collectives_bench.cpp: the same collectives between two processes over
Gloo. Median wall time of one, in microseconds. JSON lines from rank 0."""
import json
import statistics
import time

import torch
import torch.distributed as dist

DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16}


def size_name(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def median_us(repetitions, body):
    times = []
    for i in range(repetitions + 2):
        begin = time.perf_counter()
        body()
        if i >= 2:
            times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in (4 << 10, 256 << 10, 4 << 20, 64 << 20):
        repetitions = 5 if size >= 16 << 20 else 20 if size >= 1 << 20 else 100
        for gathers, dtype in ((True, "Float"), (False, "Float"), (False, "BFloat16")):
            whole = torch.ones(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
            part = torch.ones(whole.numel() // 2, dtype=DTYPES[dtype])
            if gathers:
                value = median_us(repetitions, lambda: dist.all_gather_into_tensor(whole, part))
            else:
                value = median_us(repetitions, lambda: dist.reduce_scatter_tensor(part, whole))
            dist.barrier()
            if dist.get_rank() == 0:
                name = "all-gather" if gathers else "reduce-scatter"
                print(json.dumps({"metric": f"{name} {dtype} {size_name(size)}, 2 ranks",
                                  "unit": "us", "value": value}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
