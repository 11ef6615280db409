"""Ours against what a user would otherwise take: python tests/bench.py [--pairs N] [row …]

A row has two sides. Both are the same model, weights, data, ranks and dtype; their results are
compared first. Then they take turns, in the order a b, b a, a b …, at least 15 times, each pair
giving one ratio of times (of the slowest rank). Machines speed up and slow down, but hardly
between two neighbours, so the median of the ratios stands when neither time does. Peak bytes are
what the CPU allocator held at most, from building a side to the end of its third step.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from math import comb
from pathlib import Path
from typing import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is talkative

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)

memory = import_module("01_memory")
dp = import_module("02_dp")


# --- 1. The harness ------------------------------------------------------------------------------


@dataclass
class Row:
    """ours and theirs: make(group) -> step, and step() -> the results to compare, by name."""

    ours: Callable
    theirs: Callable
    world: int = 2
    bound: float = 1.0  # the median ratio ours / theirs that we claim at most
    tolerance: float = 1e-5  # relative error of the results


def interval(values, coverage=0.95):
    """An interval that holds the true median with at least this probability, whatever the law.

    How many of n values lie below the median is a toss of n coins.
    """
    n, values = len(values), sorted(values)
    k, outside = 0, 2 * 0.5**n
    while outside <= 1 - coverage and k < n // 2:
        k += 1
        outside += 2 * comb(n, k) * 0.5**n
    return values[max(0, k - 1)], values[min(n - 1, n - k)]


def seconds(step, group):
    """How long the slowest rank takes."""
    dist.barrier(group)
    begin = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return took.item()


def take_turns(row, pairs, width=0.1, most=4):
    """One rank's part: (error, its place, [(our seconds, their seconds)]).

    Goes on up to `most` times as many pairs while the interval is wider than `width`; the width,
    not the ratio, decides, so stopping favours nobody.
    """
    group = dist.new_group(range(dist.get_world_size()), timedelta(seconds=60))
    sides = [row.ours(group), row.theirs(group)]
    for _ in range(2):  # warm up; and compare the second step, when buffers are used again
        ours, theirs = ({k: g.clone() for k, g in step().items()} for step in sides)
    error, name = dp.worst_error(ours, theirs)
    times = []
    while len(times) < most * pairs:
        order = [0, 1] if len(times) % 2 == 0 else [1, 0]
        took = {side: seconds(sides[side], group) for side in order}
        times.append((took[0], took[1]))
        low, high = interval([a / b for a, b in times])
        if len(times) >= pairs and high - low <= width:
            break
    return error, name, len(ours), times


def peak_bytes(make):
    """One rank's peak of allocated CPU bytes while a side is built and takes three steps."""
    group = dist.new_group(range(dist.get_world_size()), timedelta(seconds=60))
    # (torch.profiler.profile does the same, and imports the compiler in every rank.)
    with torch.autograd.profiler.profile(profile_memory=True) as record:
        step = make(group)
        for _ in range(3):
            step()
    changes = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def run(name, row, pairs):
    """Measure a row: (cells of the table, failure or None)."""
    error, where, count, times = dp.launch(take_turns, row.world, row, pairs, timeout=120)[0]
    ratios = [ours / theirs for ours, theirs in times]
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    ours, theirs = (1000 * statistics.median(side) for side in zip(*times))
    peaks = [max(dp.launch(peak_bytes, row.world, make, timeout=120)) / 2**20
             for make in (row.ours, row.theirs)]  # fmt: skip
    cells = [name, row.world, len(times), f"{ratio:.3f}", f"{low:.3f}-{high:.3f}",
             f"{ours:.0f} / {theirs:.0f}", f"{peaks[0]:.1f} / {peaks[1]:.1f}"]  # fmt: skip
    if not error <= row.tolerance or count == 0:
        return cells, f"{name}: {where} differs, relative error {error:.3g}"
    if not ratio <= row.bound:
        return cells, f"{name}: median ratio {ratio:.3f} above {row.bound}"
    return cells, None


# --- 2. Rows: 02, buckets against DistributedDataParallel --------------------------------------------

T = 32  # short, so that communication weighs
CONFIG = memory.Config(vocab=256, dim=256, layers=4, heads=8, kv_heads=4, ffn=768)
MIB = 4  # of a bucket, for both


def batches_and_model(micro):
    rank, world = dist.get_rank(), dist.get_world_size()
    sample = dp.Samples(dp.open_tokens(), T, seed=0)
    batches = dp.micro_batches(sample, dp.my_samples(0, 6 * world, rank, world), micro, "cpu")
    return batches, 6 * world * T, memory.build(CONFIG)


def buckets(micro, group):
    batches, N, model = batches_and_model(micro)
    ours = dp.Buckets(model.named_parameters(), group, MIB * 2**20)

    def step():
        ours.start(passes=len(batches))
        dp.accumulate_gradients(model, batches, N)
        ours.finish()
        return dp.gradients(model)

    return step


def ddp(micro, group, **options):
    batches, N, model = batches_and_model(micro)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=MIB, **options
    )

    def step():
        wrapped.zero_grad()
        scale = group.size() / N  # it averages over the ranks
        with wrapped.no_sync():
            for tokens, labels in batches[:-1]:
                (model.loss(wrapped(tokens), labels) * scale).backward()
        tokens, labels = batches[-1]
        (model.loss(wrapped(tokens), labels) * scale).backward()
        return dp.gradients(model)

    return step


def against_ddp(micro, bound=1.0, **options):
    return Row(partial(buckets, micro), partial(ddp, micro, **options), bound=bound)


ROWS = {
    "02 buckets / DDP": against_ddp(6),
    "02 buckets / DDP, 3 micro-batches": against_ddp(2),
    # With this option DDP copies as often as we do: a tie, up to what the hooks cost in Python.
    "02 buckets / DDP with views": against_ddp(6, 1.05, gradient_as_bucket_view=True),
}


def main():
    parser = argparse.ArgumentParser(description="ours against PyTorch's own")
    parser.add_argument("rows", nargs="*", help="rows whose name starts so (default: all)")
    parser.add_argument("--pairs", type=int, default=15, help="at least, for each row")
    args = parser.parse_args()
    rows = {n: r for n, r in ROWS.items() if n.startswith(tuple(args.rows or [""]))}
    if not rows or args.pairs < 15:
        parser.error("no such row" if not rows else "--pairs: at least 15")
    print(f"bench   cpu/gloo   torch {torch.__version__}   ours / theirs, below 1 is ours\n")
    line = "{:34} {:>5} {:>5} {:>6} {:>12} {:>12} {:>12}".format
    print(line("", "ranks", "pairs", "ratio", "95 %", "ms", "peak MiB"))
    failures = []
    for name, row in rows.items():
        cells, failure = run(name, row, args.pairs)
        print(line(*cells), flush=True)
        failures += [failure] if failure else []
    print("\nbench " + (f"FAIL: {failures[0]}" if failures else "OK"))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
