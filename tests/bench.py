"""Ours against what a user would otherwise take: python tests/bench.py [--pairs N] [row …]

A row has two sides: the same model, weights, data, ranks and dtype. Their results are compared
first. Then they take turns, in the order a b, b a, a b …, at least 15 times, each pair giving one
ratio of times. Machines speed up and slow down, but hardly between two neighbours, so the median
of the ratios stands when neither time does. What is measured of both:

wall   time until the slowest rank is done. Claims are about this.
cpu    processor time of the busiest rank. Where ranks share cores, a rank that waits leaves its
       core to the others and wall is about the work of all together; with a core for each rank,
       the others wait for this one.
peak   what the CPU allocator held at most on any rank, from building a side to the end of its
       third step. Some rows claim this too: the median of nine runs then.

To add a row of chapter 0N, write both sides into tests/bench_0N.py and name them in ROWS below. A
side is make(group) -> (step, results): step() is what is timed, and results() is called once after
the second step and returns tensors by name. They must be equal on every rank, so a side whose ranks
hold other parts than its rival's gathers them there.
"""

import argparse
import math
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

import bench_01
import bench_02
import bench_03
import bench_04
import bench_05
import bench_06
import bench_07
import bench_09

dp = import_module("02_dp")


@dataclass
class Row:
    """Two sides, and what we claim: the ratios ours / theirs are at most `wall` and `peak`."""

    ours: Callable
    theirs: Callable
    world: int = 2
    wall: float = 1.0
    peak: float = math.inf
    tolerance: float = 1e-5  # relative error of the results


RING = partial(bench_07.attention, "ring", True)

ROWS = {
    "01 one device / as nanoGPT writes it": Row(
        bench_01.ours, partial(bench_01.theirs, False), world=1, peak=1.0, tolerance=1e-4
    ),
    "01 one device / the same, torch.compile": Row(  # printed, and nothing claimed
        bench_01.ours, partial(bench_01.theirs, True), world=1, wall=math.inf, tolerance=1e-4
    ),
    "02 buckets / DDP": Row(partial(bench_02.buckets, 6), partial(bench_02.ddp, 6)),
    "02 buckets / DDP, 3 micro-batches": Row(
        partial(bench_02.buckets, 2), partial(bench_02.ddp, 2)
    ),
    # With this option DDP copies as often as we do: a tie, up to what the hooks cost in Python.
    "02 buckets / DDP with views": Row(
        partial(bench_02.buckets, 6),
        partial(bench_02.ddp, 6, gradient_as_bucket_view=True),
        wall=1.05,
    ),
    "03 stage 1 / ZeroRedundancyOptimizer": Row(
        partial(bench_03.stage, 1), bench_03.zero_redundancy, peak=1.0
    ),
    "03 stage 3 / FSDP2 fully_shard": Row(partial(bench_03.stage, 3), bench_03.fsdp2, peak=1.0),
    "04 TP + SP / parallelize_module": Row(bench_04.tp_sp, bench_04.torch_tp),
    "04 TP + SP / parallelize_module, 4 ranks": Row(bench_04.tp_sp, bench_04.torch_tp, world=4),
    **{
        f"05 {name} / torch.distributed.pipelining": Row(
            partial(bench_05.ours, name), partial(bench_05.theirs, name, theirs), tolerance=1e-4
        )
        for name, theirs in bench_05.SCHEDULES.items()
    },
    "06 one device / loop over experts": Row(bench_06.ours, bench_06.theirs, world=1),
    "06 ep 2 / all-gather MoE": Row(bench_06.ours, bench_06.theirs),
    "06 ep 4 / all-gather MoE": Row(bench_06.ours, bench_06.theirs, world=4),
    "07 ring zigzag / all-gather": Row(RING, partial(bench_07.attention, "allgather", True)),
    "07 ring zigzag / plain ring": Row(RING, partial(bench_07.attention, "ring", False)),
    "09 dp 2 x tp 2 x pp 2 / FSDP2 + DTensor + pipelining": Row(
        bench_09.ours, bench_09.theirs, world=8, peak=1.0, tolerance=1e-4
    ),
}


# --- The harness ---------------------------------------------------------------------------------


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


def milliseconds(step, group):
    """Of one step: [until the slowest rank is done, processor time of the busiest rank]."""
    dist.barrier(group)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    took = [time.perf_counter() - wall, time.process_time() - cpu]
    took = torch.tensor(took, dtype=torch.float64) * 1000
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return took.tolist()


def new_group():
    return dist.new_group(range(dist.get_world_size()), timedelta(seconds=60))


def take_turns(row, pairs, width=0.1, most=4):
    """One rank's part: (its largest error, where), [(ours, theirs)] of wall, the same of cpu.

    Goes on up to `most` times as many pairs while the interval of wall is wider than `width`; the
    width, not the ratio, decides, so stopping favours nobody.
    """
    group = new_group()
    sides = [row.ours(group), row.theirs(group)]
    for _ in range(2):  # warm up; and compare the second step, when buffers are used again
        for step, _ in sides:
            step()
    error = dp.worst_error(*(results() for _, results in sides))
    walls, cpus = [], []
    while len(walls) < most * pairs:
        order = [0, 1] if len(walls) % 2 == 0 else [1, 0]
        took = {side: milliseconds(sides[side][0], group) for side in order}
        wall, cpu = zip(took[0], took[1])
        walls.append(wall)
        cpus.append(cpu)
        low, high = interval([ours / theirs for ours, theirs in walls])
        if len(walls) >= pairs and high - low <= width:
            break
    return error, walls, cpus


def peak_bytes(make):
    """One rank's peak of allocated CPU bytes while a side is built and takes three steps."""
    group = new_group()
    # (torch.profiler.profile does the same, and imports the compiler in every rank.)
    with torch.autograd.profiler.profile(profile_memory=True) as record:
        step, _ = make(group)
        for _ in range(3):
            step()
    changes = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def measure(row, pairs, peaks=9):
    """(The largest error of all ranks, where), {quantity: [(ours, theirs), …]}."""
    ranks = dp.launch(take_turns, row.world, row, pairs, timeout=120)
    error = max(error for error, *_ in ranks)
    _, walls, cpus = ranks[0]  # the times are of all ranks already
    runs = 1 if row.peak == math.inf else peaks
    peak = tuple(usual_peak(make, row.world, runs) for make in (row.ours, row.theirs))
    return error, {"wall ms": walls, "cpu ms": cpus, "peak MiB": [peak]}


def usual_peak(make, world, runs):
    """MiB of the fullest rank, the median of so many runs.

    It varies by some percent: a transfer is let go of when it ends, and the profiler does not see
    what gloo's own threads free, if it is they who do it.
    """
    return statistics.median(
        max(dp.launch(peak_bytes, world, make, timeout=120)) / 2**20 for _ in range(runs)
    )


def report(name, row, error, measured):
    """Print a row; returns what does not hold."""
    error, where = error
    failures, claims = [], {"wall ms": row.wall, "peak MiB": row.peak}
    if not error <= row.tolerance:
        failures.append(f"{name}: {where} differs, relative error {error:.3g}")
    pairs = len(measured["wall ms"])
    print(f"\n{name}   ({row.world} ranks, {pairs} pairs, results differ by {error:.0e})")
    for quantity, values in measured.items():
        ratios = [ours / theirs for ours, theirs in values]
        ratio, claim = statistics.median(ratios), claims.get(quantity, math.inf)
        low, high = interval(ratios)
        within = f"{low:.3f}-{high:.3f}" if len(ratios) > 1 else ""
        ours, theirs = map(statistics.median, zip(*values))
        claimed = "" if claim == math.inf else f"<= {claim:.2f}"
        print(f"  {quantity:10}{ratio:7.3f}{within:>14}{claimed:>10}{ours:12.1f} / {theirs:.1f}")
        if not ratio <= claim:
            failures.append(f"{name}: {quantity.split()[0]} ratio {ratio:.3f} above {claim}")
    sys.stdout.flush()
    return failures


def main():
    parser = argparse.ArgumentParser(description="ours against PyTorch's own")
    parser.add_argument("rows", nargs="*", help="rows whose name starts so (default: all)")
    parser.add_argument("--pairs", type=int, default=15, help="at least, for each row")
    args = parser.parse_args()
    rows = {n: r for n, r in ROWS.items() if n.startswith(tuple(args.rows or [""]))}
    if not rows or args.pairs < 15:
        parser.error("no such row" if not rows else "--pairs: at least 15")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on the CPU, also where there are GPUs
    print(f"bench   cpu/gloo   {os.cpu_count()} cores   torch {torch.__version__}\n")
    print("wall   time until the slowest rank is done   ratio = ours / theirs, median of pairs")
    print("cpu    processor time of the busiest rank    claim = what the ratio must not exceed")
    print("peak   allocated bytes of the fullest rank\n")
    print(f"{'':12}{'ratio':>7}{'95 %':>14}{'claim':>10}{'ours':>12} / theirs")
    failures = []
    for name, row in rows.items():
        failures += report(name, row, *measure(row, args.pairs))
    print("\nbench " + (f"FAIL: {'; '.join(failures)}" if failures else "OK"))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
