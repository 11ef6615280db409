"""Strong and weak scaling of 09 on this machine, and where the time goes.

    python tests/scaling.py        (or ./run.sh scaling)

Strong: the same batch on more ranks. Weak: a batch that grows with them. Efficiency is what a rank
gets done, against one rank alone. Ranks that share a core cannot all be as fast as one alone: the
column beside it says what the cores allow, and the gap between the two is parallelism's own cost.
The shares are rank 0's: standing still for others, and the rest, which computes (or has no core).
"""

import contextlib
import csv
import io
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
combined = import_module("09_combined_5d")

STEPS, LEFT_OUT = 9, 2
DP = [(f"--dp {n}", n) for n in (1, 2, 4)]
AXES = [("--dp 1", 1), ("--dp 2", 2), ("--dp 2 --zero 3", 2), ("--tp 2", 2), ("--cp 2", 2),
        ("--pp 2 --micro-batch 2", 2)]  # fmt: skip


def count_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def measure(layout, batch):
    """Median seconds of a step, and the share of it that rank 0 waits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.csv")
        argv = ["--steps", str(STEPS), "--batch", str(batch), "--seq", "256", "--csv", str(file)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = combined.main([*layout.split(), *argv])
        if code:
            raise SystemExit(out.getvalue())
        rows = list(csv.DictReader(file.open()))[LEFT_OUT:]
    return [median(float(row[name]) for row in rows) for name in ("seconds", "wait")]


def table(title, layouts, batch, grow):
    """Run the layouts; grow(n) is by how much the batch of n ranks is larger than that of one."""
    cores, rows = count_cores(), []
    for layout, n in layouts:
        seconds, wait = measure(layout, batch * grow(n))
        first = seconds if not rows else first
        got = first * grow(n) / (seconds * n)
        allowed = min(1, cores / n)
        rows.append([layout, n, f"{seconds:.3f}", f"{got:.0%}", f"{allowed:.0%}",
                     f"{wait:.0%}", f"{1 - wait:.0%}"])  # fmt: skip
    print()
    head = [title, "ranks", "s/step", "efficiency", "cores allow", "waits", "the rest"]
    combined.dp.table(head, rows)


def main():
    print(f"{count_cores()} cores, tiny, sequences of 256, float32; median of"
          f" {STEPS - LEFT_OUT} steps")  # fmt: skip
    table("strong: 8 sequences", DP, 8, lambda n: 1)
    table("weak: 4 a rank", DP, 4, lambda n: n)
    table("axes: 8 sequences", AXES, 8, lambda n: 1)


if __name__ == "__main__":
    main()
