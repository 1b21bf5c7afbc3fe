"""Golden values of the original: trains the tests' small decoder with PyTorch's FSDP2 on two Gloo
ranks and writes losses and gradients to golden.json; --check compares with what is stored instead.

tests/module/golden_test.cpp trains the same decoder with this library and compares. Weights and
tokens come from a hash of their index, so that both sides have the same bits without a file.
Run by `make golden`; needs the torch wheel's own Python packages, which tools/bootstrap installs.
"""
import argparse
import json
import math
import os
import pathlib
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORLD_SIZE = 2
NUM_STEPS = 10
BATCH_SIZE, SEQ_LEN = 8, 7
VOCAB, DIM, HEADS, FFN = 13, 15, 3, 17  # no size is a multiple of the number of ranks
GOLDEN = pathlib.Path(__file__).parent / "golden.json"


def hashed(count, seed):
    """count numbers in [0, 2^24), the same in every language: integer arithmetic only."""
    index = torch.arange(count, dtype=torch.int64)
    value = (index * 2654435761 + seed * 40503 + 12345) % 2**32
    value = (value * 1103515245 + 12345) % 2**31
    return value >> 7


def init_parameters(model):
    for k, (name, param) in enumerate(model.named_parameters()):
        uniform = hashed(param.numel(), k).to(torch.float32) / 2**24 - 0.5  # exact
        is_scale = "norm.weight" in name or "scale" in name
        value = uniform * 2**-4 + 1.0 if is_scale else uniform * 2**-1
        with torch.no_grad():
            param.copy_(value.view_as(param))


def batch_of_step(step):
    start = hashed(BATCH_SIZE, 1000 + step).view(-1, 1) % (VOCAB // 2)
    steps = hashed(BATCH_SIZE * SEQ_LEN, 2000 + step).view(BATCH_SIZE, SEQ_LEN) % 2
    return torch.cat([start, start + steps.cumsum(1)], 1) % VOCAB


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        # Registered in the order of the C++ block, its own parameter first as both list it.
        self.attention_norm = nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.ffn_norm = nn.LayerNorm(DIM)
        self.w1, self.w2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)
        self.residual_scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        normed = self.attention_norm(x)
        heads = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            heads(self.wq(normed)), heads(self.wk(normed)), heads(self.wv(normed)), is_causal=True)
        h = x + self.wo(attended.transpose(1, 2).flatten(-2)) * self.residual_scale
        return h + self.w2(F.gelu(self.w1(self.ffn_norm(h))))


class Transformer(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.pos_embeddings = nn.Embedding(SEQ_LEN, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()


def summary(tensor):
    """The norm, and a checksum that sees where each element is."""
    flat = tensor.double().flatten()
    weight = torch.arange(1, flat.numel() + 1, dtype=torch.float64) / flat.numel()
    return [flat.norm().item(), (flat * weight).sum().item()]


def train(case, rank):
    policy = MixedPrecisionPolicy()
    if case["dtype"] == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Transformer(case["tied"])
    init_parameters(model)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=case["reshard"])
    fully_shard(model, mp_policy=policy, reshard_after_forward=case["reshard"])
    if case["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = {"losses": [], "grads": {}}
    local = BATCH_SIZE // WORLD_SIZE
    for step in range(NUM_STEPS):
        tokens = batch_of_step(step)[rank * local:(rank + 1) * local]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        result["losses"].append(mean.item() / WORLD_SIZE)
        if step in (0, NUM_STEPS - 1):
            result["grads"][str(step)] = {
                name: summary(param.grad.full_tensor()) for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return result


def cases():
    for dtype in ("fp32", "bf16"):
        for optimizer in ("sgd", "adamw"):
            for tied, reshard in ((True, True), (False, False)):
                yield {"dtype": dtype, "optimizer": optimizer, "tied": tied, "reshard": reshard}


def run_rank(rank, port, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    results = [{**case, **train(case, rank)} for case in cases()]
    dist.destroy_process_group()
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(
            {"torch": torch.__version__.split("+")[0], "cases": results}, indent=1) + "\n")


def differences(stored, fresh, where=""):
    """Paths of what differs by more than what libraries of other machines may."""
    if isinstance(stored, dict):
        if stored.keys() != fresh.keys():
            return [f"{where}: keys differ"]
        return [d for key in stored for d in differences(stored[key], fresh[key], f"{where}/{key}")]
    if isinstance(stored, list):
        if len(stored) != len(fresh):
            return [f"{where}: lengths differ"]
        return [d for i, (a, b) in enumerate(zip(stored, fresh))
                for d in differences(a, b, f"{where}[{i}]")]
    if isinstance(stored, float):
        tolerance = 1e-2 if "bf16" in where else 1e-5
        close = math.isclose(stored, fresh, rel_tol=tolerance, abs_tol=tolerance)
        return [] if close else [f"{where}: {stored} became {fresh}"]
    return [] if stored == fresh else [f"{where}: {stored} became {fresh}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored values")
    check = parser.parse_args().check
    path = GOLDEN.with_suffix(".fresh.json") if check else GOLDEN
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(port, str(path)), nprocs=WORLD_SIZE)
    if not check:
        print(f"wrote {path}")
        return 0
    fresh = json.loads(path.read_text())
    path.unlink()
    stored = json.loads(GOLDEN.read_text())
    name = lambda c: "{dtype} {optimizer} tied={tied} reshard={reshard}".format(**c)
    found = differences({name(c): c for c in stored["cases"]}, {name(c): c for c in fresh["cases"]})
    print("\n".join(found) if found else f"no difference in {len(stored['cases'])} cases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
