"""The peer of bench/module/transformer_bench.cpp: the same decoder, parameters and tokens in
PyTorch's FSDP2 over Gloo, with its fused AdamW. Run by torchrun's environment, two processes.

    transformer.py small|large float32|bfloat16 STEPS
"""
import ctypes
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIZES = {"small": dict(dim=64, layers=24, heads=4, seq=32, batch=2, vocab=256),
         "large": dict(dim=1024, layers=4, heads=16, seq=128, batch=2, vocab=4096)}
WARM_UP = 2


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Decoder(nn.Module):
    def __init__(self, dim, layers, heads, seq, batch, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_parameters(model):
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            values = (torch.arange(param.numel(), dtype=torch.float64) * 0.618 + number).sin()
            param.copy_((values * 0.05).view(param.shape))
            if param.dim() == 1:  # of layer norms
                param.add_(1.0 if number % 2 == 0 else 0.0)


def main():
    size, dtype, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        tracker = ctypes.CDLL(None)
        tracker.malloc_tracker_live.restype = ctypes.c_int64
        tracker.malloc_tracker_peak.restype = ctypes.c_int64
        baseline = tracker.malloc_tracker_live()
    except AttributeError:
        tracker = None
    sizes = SIZES[size]
    model = Decoder(**sizes)
    init_parameters(model)
    num_params = sum(param.numel() for param in model.parameters())
    policy = (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
              if dtype == "bfloat16" else MixedPrecisionPolicy())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batch, seq, vocab = sizes["batch"], sizes["seq"], sizes["vocab"]
    tokens = ((torch.arange(batch * (seq + 1)) * 31 + 17 * rank) % vocab).view(batch, seq + 1)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().view(-1)
    times, losses = [], []
    for step in range(WARM_UP + steps):
        dist.barrier()
        if step == WARM_UP and tracker:
            tracker.malloc_tracker_reset_peak()
        begin = time.perf_counter()
        loss = F.cross_entropy(model(inputs).float().view(-1, vocab), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            times.append((time.perf_counter() - begin) * 1e3)
        if step < 4:
            losses.append(loss.item())
    result = {"case": f"transformer-{size}", "step_ms": statistics.median(times),
              "best_ms": min(times), "params": num_params, "losses": losses}
    if tracker:
        result["peak_mib"] = (tracker.malloc_tracker_peak() - baseline) / 2**20
    dist.barrier()
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
