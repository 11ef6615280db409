"""ZeRO-1 beside ZeroRedundancyOptimizer, ZeRO-3 beside FSDP2: seconds and bytes of a training step.

Same model, weights, data, ranks and dtype; the weights after three steps are compared first. Then
the two take turns in one run, so that what else the machine does hits both. Ratio is ours / theirs.

Run   python tests/bench_03.py [--ranks 2] [--pairs 21]
"""

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
memory = import_module("01_memory")
dp = import_module("02_dp")
zero = import_module("03_zero")

CONFIG = memory.Config(vocab=512, dim=256, layers=6, heads=8, kv_heads=4, ffn=768)
B, T, LR = 4, 128, 1e-3


class Peak(TorchDispatchMode):
    """The most bytes alive at once, of all storages that an operator of the step has touched."""

    def __init__(self):
        super().__init__()
        self.seen, self.bytes = {}, 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage)
        alive = (r for r in self.seen.values() if not r.expired())
        total = sum(torch.UntypedStorage._new_with_weak_ptr(r.cdata).nbytes() for r in alive)
        self.bytes = max(self.bytes, total)
        return result


def build():
    model = memory.build(CONFIG, seed=0)
    for p in model.parameters():
        p.grad_dtype = None  # as torch's own expect it; in fp32 it is the same
    return model


def loss_of(model, module, tokens, labels):
    return model.loss(module(tokens), labels) / (labels.numel() * dist.get_world_size())


def adamw(matrices, vectors):
    return torch.optim.AdamW(matrices + vectors, lr=LR, fused=True)


def ours(stage):
    model = build()
    cut = {name: (dist.group.WORLD, ()) for name, _ in model.named_parameters()}
    optimizer = zero.Optimizer(
        model, zero.llama_units(model), cut, stage, adamw, memory.on_finished
    )

    def step(tokens, labels):
        loss_of(model, model, tokens, labels).backward()
        optimizer.sum_gradients()
        optimizer.step(LR)

    return step, lambda: optimizer.gathered([flat.shard for flat in optimizer.flats])


def zero_redundancy():
    """DistributedDataParallel with ZeroRedundancyOptimizer, both with their buckets as views."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = build()
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
    )

    def step(tokens, labels):
        # it takes the mean over ranks, we the sum
        (loss_of(model, module, tokens, labels) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: {name: p.detach() for name, p in model.named_parameters()}


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = build()
    parts = [model.embed_tokens, *model.layers.values(), [model.norm, model.lm_head], model]
    for part in parts:
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens, labels):
        (loss_of(model, model, tokens, labels) * dist.get_world_size()).backward()  # a mean again
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def pairs(mine, theirs, count):
    """Seconds of each step, the two taking turns, who goes first taking turns too."""
    times = [], []
    for i in range(count):
        for which in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            (mine, theirs)[which]()
            dist.barrier()
            times[which].append(time.perf_counter() - begin)
    return times


def peak(step):
    with Peak() as meter:
        step()
    return meter.bytes


def compare(make_ours, make_theirs, count):
    """On every rank: worst difference of a weight, seconds, peak bytes."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randint(CONFIG.vocab, (2, B, T), generator=generator)
    (mine, my_weights), (theirs, their_weights) = make_ours(), make_theirs()
    for _ in range(3):
        mine(*data)
        theirs(*data)
    error, name = dp.worst_error(my_weights(), their_weights())
    assert error < 1e-4, f"{name} differs by {error}"
    times = pairs(lambda: mine(*data), lambda: theirs(*data), count)
    return error, times, (peak(lambda: mine(*data)), peak(lambda: theirs(*data)))


def stage_1(count):
    return compare(lambda: ours(1), zero_redundancy, count)


def stage_3(count):
    return compare(lambda: ours(3), fsdp2, count)


def median_and_interval(ratios):
    """The median, and the two order statistics that enclose it with 95 % or a little more."""
    from math import comb

    ratios, n = sorted(ratios), len(ratios)
    k = max(k for k in range(n // 2) if 2 * sum(comb(n, i) for i in range(k + 1)) <= 0.05 * 2**n)
    return ratios[n // 2], ratios[k], ratios[n - 1 - k]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    adamw([torch.zeros(1)], [])
    rows = []
    for name, worker in (
        ("ZeRO-1 / ZeroRedundancyOptimizer", stage_1),
        ("ZeRO-3 / FSDP2 fully_shard", stage_3),
    ):
        error, (mine, theirs), peaks = dp.launch(worker, args.ranks, args.pairs, timeout=60)[0]
        ratio, low, high = median_and_interval([a / b for a, b in zip(mine, theirs)])
        interval = f"{low:.2f}-{high:.2f}"
        rows.append([name, f"{ratio:.3f}", interval, *peaks, f"{error:.0e}"])
    dp.table(["", "time", "95 %", "peak bytes", "theirs", "differ"], rows)


if __name__ == "__main__":
    main()
