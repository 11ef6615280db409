"""Time of the ring with zigzag beside its rivals: python tests/bench_07.py

Pairs in alternating order, the ratio of each pair, its median and the 95 % interval of the median.
"wall" is the time until the last rank is done. On a machine busy with other things it is mostly
theirs, so beside it "cpu": the processor time of the busiest rank, which a free core would take.
"""

import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

dp = import_module("02_dp")
cp = import_module("07_cp_ring")

SHAPE = 1, 8, 2, 64  # B, H, K, h
RIVALS = {
    "plain ring": ("ring", False),
    "all-gather": ("allgather", True),
    "ulysses": ("ulysses", True),
}


def seconds(kind, zigzag, q, k, v, group):
    """Forward and backward of one attention: (wall until the last rank is done, cpu of this)."""
    dist.barrier(group)
    wall, cpu = time.perf_counter(), time.process_time()
    out = cp.KINDS[kind](q, k, v, None, group=group, zigzag=zigzag)
    out.backward(torch.ones_like(out))
    cpu = time.process_time() - cpu
    dist.barrier(group)
    return time.perf_counter() - wall, cpu


def times(rival, C, pairs):
    """The times of ring with zigzag and of the rival, for each pair."""
    group, (B, H, K, h) = dist.group.WORLD, SHAPE
    torch.manual_seed(dist.get_rank())
    qkv = [torch.randn(B, heads, C, h, device=dp.device()).requires_grad_() for heads in (H, K, K)]
    both = [("ring", True), rival]
    result = []
    for i in range(pairs + 1):
        order = both if i % 2 else both[::-1]
        took = {case: seconds(*case, *qkv, group) for case in order}
        result.append([took[case] for case in both])
    return result[1:]  # the first pair warms up


def median_and_interval(values):
    """The median, and the order statistics that hold it with 95 % probability (binomial)."""
    ordered, n = sorted(values), len(values)
    away = round(0.98 * n**0.5)
    return ordered[n // 2], ordered[n // 2 - away], ordered[n // 2 + away]


def rows(world=2, C=1024, pairs=31):
    """[name, clock, ranks, pairs, median, low, high] for every rival; pairs is odd."""
    result = []
    for name, rival in RIVALS.items():
        ranks = torch.tensor(dp.launch(times, world, rival, C, pairs, timeout=120))
        slowest = ranks.amax(0)  # (pairs, ours and theirs, wall and cpu)
        for i, clock in enumerate(("wall", "cpu")):
            ratios = (slowest[:, 0, i] / slowest[:, 1, i]).tolist()
            result.append([name, clock, world, pairs, *median_and_interval(ratios)])
    return result


if __name__ == "__main__":
    print("ring with zigzag: time divided by the rival's, forward and backward")
    dp.table(["rival", "clock", "ranks", "pairs", "median", "from", "to"], rows())
