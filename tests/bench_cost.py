"""What parallelism costs beyond the work itself, and how that grows.

    python tests/bench_cost.py axes         each axis on two ranks, beside the least it could take
    python tests/bench_cost.py growth       time, calls and bytes as one size grows
    python tests/bench_cost.py              both

Whole training steps of 09 on the CPU. Sent bytes and calls must equal 09's formulas, or the last
line is FAIL; times are the quickest of a few steps, shown and not judged.

least    the time of one device divided by the ranks: what two perfect ranks would take
above    measured time less that
link     bytes that a rank sends, over the bytes a second at which two ranks exchange 16 MiB here
peak     FLOPs of the step, over the FLOPs a second of a large matmul here, divided by the ranks
"""

import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)

memory = import_module("01_memory")
dp = import_module("02_dp")
ep = import_module("06_ep")
combined = import_module("09_combined_5d")

DENSE = memory.Config(vocab=256, dim=256, layers=4, heads=8, kv_heads=4, ffn=768)
MOE = ep.Config(vocab=256, dim=128, layers=2, heads=4, kv_heads=4, ffn=256, experts=8)


def measure(config, flags, steps):
    """One rank: (quickest step in ms, [(sent by, calls, bytes)], what differs from formulas)."""
    combined.MODELS["bench"] = config
    args = combined.parse(["--model", "bench", *flags.split()])
    groups = combined.make_groups(args, combined.layout(args))
    sample = dp.Samples(dp.open_tokens(), args.seq, args.seed)
    job = combined.compose(args, groups, "cpu")
    batches = combined.my_batches(args, groups, sample, 0, "cpu")
    rest = groups, batches, combined.my_positions(args, groups, "cpu"), args.lr
    combined.train_step(job, *rest)
    loads, times = [], []
    with dp.Wire() as wire:
        combined.train_step(job, *rest, loads=loads)
    formulas = combined.sent(args, job.optimizer, groups, loads)
    failures = []
    for key in dict.fromkeys([*formulas, *wire.calls]):
        found, expected = (wire.calls[key], wire.bytes[key]), formulas.get(key, (0, 0))
        if found != expected and key[1] != "barrier":
            failures.append(f"{flags}: {' '.join(key)} sent {found}, by formula {expected}")
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        combined.train_step(job, *rest)
        took = torch.tensor((time.perf_counter() - begin) * 1000)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(took.item())
    rows = [(axis, wire.calls[axis, by], n) for (axis, by), n in wire.bytes.items() if n]
    rows = [row for row in rows if row[0] not in ("control", "tokens")]
    return min(times), rows, failures


def run(config, flags, world, steps=5):
    """(ms, calls, bytes of the rank that sends most, failures of all)"""
    ranks = dp.launch(measure, world, config, flags, steps, timeout=120)
    calls, size = max(
        (sum(c for _, c, _ in rows), sum(n for *_, n in rows)) for _, rows, _ in ranks
    )
    return ranks[0][0], calls, float(size), sum((wrong for *_, wrong in ranks), [])


def bandwidth():
    """Bytes a second that a rank sends while two exchange 16 MiB; the best of several."""
    x, y, best = torch.ones(1 << 22), torch.empty(1 << 22), 0
    for _ in range(8):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(y, x)
        best = max(best, x.nbytes / 2 / (time.perf_counter() - begin))
    return best


def matmul_peak():
    """FLOPs a second of one core; the best of several."""
    a, best = torch.randn(768, 768), 0
    for _ in range(40):
        begin = time.perf_counter()
        a @ a
        best = max(best, 2 * 768**3 / (time.perf_counter() - begin))
    return best


def flops(config, sequences, T):
    """Executed in a step; with experts, of those that a token meets."""
    if hasattr(config, "experts"):
        config = replace(config, ffn=config.ffn * config.top_k)
    return sum(memory.executed_flops(config, sequences, T))


AXES = {  # flags, for a batch of 8; the model
    "dp": ("--dp 2 --micro-batch 4", DENSE),
    "dp, ZeRO-1": ("--dp 2 --micro-batch 4 --zero 1", DENSE),
    "dp, ZeRO-2": ("--dp 2 --micro-batch 4 --zero 2", DENSE),
    "dp, ZeRO-3": ("--dp 2 --micro-batch 4 --zero 3", DENSE),
    "tp": ("--tp 2 --micro-batch 8", DENSE),
    "cp": ("--cp 2 --micro-batch 8", DENSE),
    "pp, 1f1b": ("--pp 2 --micro-batch 1", DENSE),
    "pp, zb-v": ("--pp 2 --micro-batch 1 --schedule zb-v", DENSE),
    "ep": ("--dp 2 --ep 2 --micro-batch 4", MOE),
}


def axes(T=128):
    peak, link = matmul_peak(), min(dp.launch(bandwidth, 2))
    print(f"matmul {peak / 1e9:.0f} GFLOP/s a core   link {link / 1e9:.2f} GB/s a rank\n")
    common, failures, rows, alone = f" --batch 8 --seq {T}", [], [], {}
    for name, (flags, config) in AXES.items():
        if config not in alone:
            alone[config], *_, wrong = run(config, "--micro-batch 8" + common, 1)
            failures += wrong
        took, calls, size, wrong = run(config, flags + common, 2)
        failures += wrong
        least = alone[config] / 2
        rows.append([name, took, least, took - least, calls, int(size), size / link * 1000,
                     flops(config, 8, T) / peak / 2 * 1000])  # fmt: skip
    head = ["two ranks", "ms", "least", "above", "calls", "sent", "link ms", "peak ms"]
    dp.table(head, rows)
    return failures


def with_width(dim):
    return replace(DENSE, dim=dim, ffn=3 * dim, head_dim=dim // 8, layers=2)


GROWTH = {  # what grows: its values, and for each one (world, model, batch, sequence, flags)
    "ranks (02 and 03, a sequence each)": (
        (1, 2, 4, 8, 16),
        lambda n: (n, replace(DENSE, layers=1), n, 64, f"--dp {n} --micro-batch 1 --zero 1"),
    ),
    "parameters (03, width)": (
        (64, 128, 256, 512),
        lambda dim: (2, with_width(dim), 2, 128, "--dp 2 --micro-batch 1 --zero 3"),
    ),
    "layers (05)": (
        (2, 4, 8, 16),
        lambda n: (2, replace(DENSE, layers=n, dim=128, ffn=384, head_dim=16), 4, 64,
                   "--pp 2 --micro-batch 1"),
    ),
    "experts (06)": (
        (4, 8, 16, 32, 64),
        lambda n: (2, replace(MOE, experts=n, ffn=128), 4, 256, "--dp 2 --ep 2 --micro-batch 2"),
    ),
    "sequence (07)": (
        (256, 512, 1024, 2048, 4096, 8192),
        lambda T: (2, replace(DENSE, layers=1, dim=64, head_dim=16, heads=4, kv_heads=2, ffn=128),
                   1, T, "--cp 2 --micro-batch 1"),
    ),
}  # fmt: skip


def grow(name, values=None, steps=3):
    """Print one table; returns failures. GFLOP are those of all ranks."""
    every, setting = GROWTH[name]
    rows, failures = [], []
    for value in values or every:
        world, config, batch, T, flags = setting(value)
        common = f" --batch {batch} --seq {T}"
        took, calls, size, wrong = run(config, flags + common, world, steps)
        work = flops(config, batch, T) / 1e9
        rows.append([value, took, work, took / work, calls, int(size)])
        failures += wrong
    dp.table([name, "ms", "GFLOP", "ms / GFLOP", "calls", "bytes a rank sends"], rows)
    return failures


def main():
    what, failures = sys.argv[1:] or ["axes", "growth"], []
    if "axes" in what:
        failures += axes()
    for name in GROWTH if "growth" in what else ():
        print()
        failures += grow(name)
    print("\nbench_cost " + (f"FAIL: {failures[0]}" if failures else "OK"))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
