"""02 against published runs: the Ultra-Scale Playbook's data-parallel scaling of a 1.34B model.

The global batch is fixed, so with more ranks N each has fewer micro-batches m, and the one sum of
the gradients weighs more: t = m·t_micro + exposed. t_micro comes from the smallest run; exposed is
the time of an all-reduce of fp32 gradients over the bandwidth published for as many nodes, none of
it hidden (their last micro-batch has 4,096 tokens a rank, and tokens_to_hide says tens of
thousands). The published figure is read as bus bandwidth, what a rank sends. Nothing is fitted.
"""

import csv
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
dp = import_module("02_dp")

BATCH, T, NODE = 256, 4096, 8  # samples of a step, tokens of a sample, GPUs of a node


def read(path, **wanted):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return [r for r in rows if all(r[key] == value for key, value in wanted.items())]


def exposed(parameters, n, bandwidth):
    """Seconds of an all-reduce over n ranks: the bytes a rank sends, by its bandwidth."""
    _, size = dp.sent([4 * parameters], n)
    return float(size) / bandwidth


def chapter_02(facts):
    """Print the published throughput beside ours; returns the failures.

    Two series: micro-batches of one sample throughout (within 4 %), and the figure as published,
    which took two samples at 8 and at 128 ranks (within 6 %: with 8,192 tokens a rank part of the
    sum is hidden after all).
    """
    facts = Path(facts)
    bandwidth = {
        int(r["gpus"]): 1e9 * float(r["bandwidth_GBps_line_mean"])
        for r in read(facts / "playbook_comm_bandwidth.csv", collective="AllReduce")
    }
    runs = read(facts / "playbook_runs.csv", status="ok", family="1B", tp="1", pp="1", zero="0",
                gbs_samples=str(BATCH), mbs="1")  # fmt: skip
    alike = {int(r["dp"]): (1, float(r["tok_s_gpu"])) for r in runs}
    figure = {
        int(r["degree"]): (int(r["mbs"]), float(r["tok_s_gpu"]))
        for r in read(facts / "playbook_scaling_curves.csv", series="DP (fig dp_scaling)")
    }
    parameters = int(runs[0]["n_params"])
    twos = read(facts / "playbook_runs.csv", status="ok", family="1B", tp="1", pp="1", zero="0",
                gbs_samples=str(BATCH), mbs="2", dp="8")  # fmt: skip
    assert len(alike) == len(figure) == 6 and len(twos) == 1

    def micro_seconds(size, speed):  # of a micro-batch, from the run on one node
        m = BATCH // NODE // size
        step = BATCH * T / NODE / speed
        return (step - exposed(parameters, NODE, bandwidth[NODE])) / m

    t_micro = {1: micro_seconds(*alike[NODE]), 2: micro_seconds(2, float(twos[0]["tok_s_gpu"]))}
    rows, failures = [], []
    for series, published, bound in (("alike", alike, 0.04), ("figure", figure, 0.06)):
        before = ours_before = None
        for n, (size, speed) in sorted(published.items()):
            m = BATCH // n // size
            t = m * t_micro[size] + exposed(parameters, n, bandwidth[n])
            ours = BATCH * T / n / t
            drop = f"{speed / before - 1:+.1%}" if before else ""
            our_drop = f"{ours / ours_before - 1:+.1%}" if before else ""
            rows.append([series, n, f"{m} x {size}", speed, ours, f"{ours / speed - 1:+.1%}",
                         drop, our_drop])  # fmt: skip
            if abs(ours / speed - 1) > bound:
                failures.append(f"02 {series} dp {n}: {ours:.0f} tokens/s, published {speed:.0f}")
            before, ours_before = speed, ours
    print("02 data parallelism, 1.34B, tokens/s/GPU (8 GPUs give t_micro; nothing is fitted)")
    dp.table(["", "dp", "micro", "published", "ours", "error", "drop", "ours"], rows)
    return failures
