"""PyTorch's FSDP2 trains on the simulated accelerator as one unsharded model on the CPU does.

The reference is one model that computes the ranks' gradients one after another and sums them in the
order of the process groups, so all comparisons are of the same bits.
"""

import copy
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from cases import EXECUTIONS, SimTestCase, average, shard_transformer
from models import Transformer

NUM_STEPS = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def make_model(**options):
    torch.manual_seed(42)
    return Transformer(**options)


def tokens(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 8, (2, 16), generator=generator)


def make_optimizer(model, foreach):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)


def loss_of(logits, inputs):
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())


def reduce_mean(grads, group_size):
    """The mean of the ranks' gradients, as a reduction in each group and then across groups.

    Each adds up in float32 and rounds once.
    """

    def mean_of(values):
        total = values[0].float()
        for value in values[1:]:
            total = total + value.float()
        return (total / len(values)).to(values[0].dtype)

    groups = [grads[i : i + group_size] for i in range(0, len(grads), group_size)]
    partial = [mean_of(group) for group in groups]
    return mean_of(partial) if len(partial) > 1 else partial[0]


def train_unsharded(model, world_size, group_size, policy, foreach, num_micro_batches):
    optimizer = make_optimizer(model, foreach)
    losses = []
    for step in range(NUM_STEPS):
        rank_grads, rank_losses = [], []
        for rank in range(world_size):
            replica = copy.deepcopy(model).to(policy.param_dtype or torch.float32)
            for micro in range(num_micro_batches):
                inputs = tokens(step * num_micro_batches + micro, rank)
                loss = loss_of(replica(inputs), inputs)
                loss.backward()
            rank_losses.append(loss.detach())
            rank_grads.append([param.grad for param in replica.parameters()])
        for i, param in enumerate(model.parameters()):
            grads = [grads[i].to(policy.reduce_dtype or grads[i].dtype) for grads in rank_grads]
            param.grad = reduce_mean(grads, group_size).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(reduce_mean(rank_losses, world_size))
    return losses, [param.detach() for param in model.parameters()]


def train_sharded(
    rank, device_type, model, mesh_shape, foreach, num_micro_batches, prefetch, **options
):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh(device_type, mesh_shape, mesh_dim_names=names)
    model = copy.deepcopy(model)
    if not isinstance(options.get("offload_policy"), CPUOffloadPolicy):
        model = model.to(device_type)
    shard_transformer(model, mesh=mesh, **options)
    if prefetch:
        for layer, following in zip(model.layers, model.layers[1:]):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    optimizer = make_optimizer(model, foreach)
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(num_micro_batches):
            model.set_requires_gradient_sync(micro == num_micro_batches - 1)
            inputs = tokens(step * num_micro_batches + micro, rank).to(device_type)
            loss = loss_of(model(inputs), inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(average(loss))
    # Shards that are on the host (offload) are gathered where the mesh is.
    params = [param.detach().to(device_type) for param in model.parameters()]
    return losses, params


class TrainingTest(SimTestCase):
    def check_training(
        self,
        mesh_shape,
        *,
        model=None,
        foreach=True,
        num_micro_batches=1,
        prefetch=False,
        **options,
    ):
        model = model or make_model()
        group_size = mesh_shape[-1]
        world_size = group_size * (mesh_shape[0] if len(mesh_shape) == 2 else 1)
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        expected = train_unsharded(
            copy.deepcopy(model), world_size, group_size, policy, foreach, num_micro_batches
        )
        results = self.run_everywhere(
            world_size,
            lambda rank, device_type: train_sharded(
                rank,
                device_type,
                model,
                mesh_shape,
                foreach,
                num_micro_batches,
                prefetch,
                **options,
            ),
        )
        for result in results:
            self.check_same(expected, result)

    def test_worlds(self):
        for world_size in (1, 2, 3, 4):
            for reshard in (True, False) if world_size < 3 else (True,):
                with self.subTest(world_size=world_size, reshard=reshard):
                    self.check_training((world_size,), reshard_after_forward=reshard)

    def test_reshard_to_two(self):
        self.check_training((4,), reshard_after_forward=2)

    def test_mixed_precision(self):
        for policy, reshards in ((BF16, (True, 2)), (ALL_BF16, (False,))):
            for reshard in reshards:
                with self.subTest(policy=policy, reshard=reshard):
                    self.check_training((4,), mp_policy=policy, reshard_after_forward=reshard)

    def test_hsdp(self):
        for policy, reshard in ((MixedPrecisionPolicy(), True), (BF16, False)):
            with self.subTest(policy=policy, reshard=reshard):
                self.check_training((2, 2), mp_policy=policy, reshard_after_forward=reshard)

    def test_activation_checkpointing(self):
        for policy in (MixedPrecisionPolicy(), BF16):
            with self.subTest(policy=policy):
                self.check_training(
                    (2,), model=make_model(recomputes=True), mp_policy=policy
                )

    def test_gradient_accumulation(self):
        for mesh_shape in ((2,), (2, 2)):
            with self.subTest(mesh_shape=mesh_shape):
                self.check_training(mesh_shape, num_micro_batches=3)

    def test_explicit_prefetch(self):
        self.check_training((2,), model=make_model(num_layers=4), prefetch=True)

    def test_optimizer_of_single_tensors(self):
        self.check_training((2,), foreach=False)

    def test_parameters_on_the_host(self):
        for pin_memory in (True, False):
            with self.subTest(pin_memory=pin_memory):
                self.check_training((2,), offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))


class ClippingTest(SimTestCase):
    def test_clip_grad_norm(self):
        """The norm over shards is that of the whole, up to the order of its sum."""
        model = make_model()

        def run(rank, device_type):
            sharded = copy.deepcopy(model).to(device_type)
            shard_transformer(sharded, mesh=init_device_mesh(device_type, (4,)))
            inputs = tokens(0, rank).to(device_type)
            loss_of(sharded(inputs), inputs).backward()
            norm = nn.utils.clip_grad_norm_(sharded.parameters(), max_norm=0.1)
            return norm, [param.grad for param in sharded.parameters()]

        # Where the default stream is late, the norm's last bit is another one.
        norm, grads = self.run_everywhere(4, run, executions=EXECUTIONS[:2])[0]
        whole = copy.deepcopy(model)
        for rank in range(4):
            (loss_of(whole(tokens(0, rank)), tokens(0, rank)) / 4).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm=0.1)
        self.assertGreater(expected.item(), 0.1)
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(grads, [param.grad for param in whole.parameters()])


if __name__ == "__main__":
    unittest.main()
