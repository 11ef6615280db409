"""Formulas of this repository beside published data: python tests/validate.py [FACTS or FILE]

FACTS is the folder with the collected figures; by default ../shared/facts beside the repository.
Each chapter adds a section: a function of the folder that prints its comparison and returns what
does not hold. A FILE with the columns of playbook_runs.csv, or of published_perf.csv, is compared
with 10's estimates alone. The last line is `validate OK` or `validate FAIL: what`, with the exit
code.
"""

import argparse
import csv
import math
import re
import statistics
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
memory = import_module("01_memory")
dp = import_module("02_dp")
tp = import_module("04_tp_sp")
plan = import_module("10_plan")
GiB = 2**30


def rows(facts, name, **wanted):
    """The rows of a table that have these values, all text."""
    path = facts / name if facts.is_dir() else facts
    if not path.exists():
        raise SystemExit(f"validate FAIL: {path} is missing; name the folder: validate.py FACTS")
    with open(path, newline="") as file:
        table = list(csv.DictReader(file))
    return [row for row in table if all(row[key] == value for key, value in wanted.items())]


# --- 01: the playbook's memory figures, by its own formulas and by ours -------------------------

LLAMA = {  # the shapes in the figures
    "1B": memory.Config(128256, 2048, 16, 32, 8, 8192, tied=True),
    "3B": memory.Config(128256, 3072, 28, 24, 8, 8192, tied=True),
    "8B": memory.PRESETS["llama3-8b"],
    "70B": memory.PRESETS["llama3-70b"],
    "405B": memory.PRESETS["llama3-405b"],
}


def without_norms(c, vocab=None):
    return memory.parameter_count(
        memory.Config(**{**vars(c), "vocab": vocab or c.vocab})
    ) - c.dim * (2 * c.layers + 1)


def gpt_activations(c, T, recompute):
    """Bytes of Korthikanti et al. 2022 for a GPT in half precision, with its dropout masks."""
    per_block = {"none": 34 + 5 * c.heads * T / c.dim, "selective": 34, "full": 2}[recompute]
    return c.layers * T * c.dim * per_block


def playbook_row(figure, panel, T):
    """(parameters, gradients, optimizer, activations) in bytes, as the playbook computed a bar."""
    size = panel.split()[0].removeprefix("Llama-3.1-")
    c = LLAMA[size]
    if figure in ("memusage_activations", "memory-recomputation"):
        # GPT-2's parameters (biases, LayerNorm, tied, positions learned), everything in fp32
        D, L = c.dim, c.layers
        N = D * c.vocab + L * (12 * D * D + 13 * D) + 2 * D + T * D
        kind = panel.rpartition("=")[2] if "=" in panel else "none"
        acts = gpt_activations(c, T, kind.lower()) + T * D  # and the embedding's dropout mask
        return 4 * N, 4 * N, 8 * N, acts
    old = figure in ("zero3_memoryusage", "tp_memoryusage", "tp_sp_memoryusage")
    N = without_norms(c, 131072 if old else None)
    states = [2 * N, 2 * N, 8 * N]  # no master copy
    acts = gpt_activations(c, T, "full" if panel.endswith("full") else "selective")
    table = c.vocab * c.dim
    for axis in panel.replace('"w/SP"', "").replace("+SP", " +SP").split()[1:]:
        name, _, n = axis.partition("=")
        if name == "TP":
            states = [s / int(n) for s in states]
            if not panel.endswith("full"):
                sp = "+SP" in panel  # the 5D figure says "w/SP" and computes without
                acts *= (34 / int(n) if sp else 10 + 24 / int(n)) / 34
        elif name == "PP":
            ratio = ((N - 2 * table) / int(n) + table) / N
            states = [s * ratio for s in states]
        elif name == "CP":
            acts /= int(n) ** (2 if figure.startswith("5D") else 1)  # the 5D figure divides by 64
        elif name == "EP":
            mlp = c.layers * 3 * c.dim * c.ffn
            states = [s * (N - mlp + mlp / int(n)) / N for s in states]
        elif name.startswith("ZeRO-"):
            stage = int(name[-1])
            states = [s / (8 if stage >= limit else 1) for s, limit in zip(states, (3, 2, 1))]
    return *states, acts


def playbook_figures(facts):
    print("01: the playbook's memory figures by its own formulas (GiB)")
    wrong, worst, names = [], {}, ("params", "grads", "optim", "activations")
    table = rows(facts, "playbook_figure_memory.csv")
    for row in table:
        ours = playbook_row(row["figure"], row["panel"], int(row["seq"]))
        for name, n in zip(names, ours):
            published = float(row[f"{name}_GiB"])
            off = abs(n / GiB - published)
            worst[row["figure"]] = max(worst.get(row["figure"], 0), off)
            # Four digits after the point; the 5D figure's were read from the height of bars.
            if off > (0.001 * published + 0.001 if row["figure"].startswith("5D") else 6e-5):
                wrong.append(f"{row['figure']} {row['panel']} {row['seq']} {name}")
    for figure, off in worst.items():
        count = sum(row["figure"] == figure for row in table)
        print(f"  {figure.split('.')[0]:30}{count:4} rows   largest difference {off:.4f}")

    print("\n  and what our Llama holds (bf16, fp32 master and gradients), nothing cut:")
    print("            states: playbook  ours    activations: playbook none/sel.   ours none/sel.")
    for size in ("8B", "70B", "405B"):
        c, T = LLAMA[size], 4096
        theirs = sum(playbook_row("dp_ourjourney_memoryusage", f"{size} selective", T)[:3])
        states = sum(memory.state_bytes(c, memory.RECIPES["bf16"]).values())
        acts = [gpt_activations(c, T, kind) / GiB for kind in ("none", "selective")]
        kept = [
            sum(memory.kept_bytes(c, 1, T, torch.bfloat16, kind).values()) / GiB
            for kind in ("none", "selective")
        ]
        print(
            f"  {size:5} 1 x {T}{theirs / GiB:11,.0f}{states / GiB:9,.0f}"
            f"{acts[0]:23,.1f} {acts[1]:7,.1f}{kept[0]:12,.1f} {kept[1]:7,.1f}"
        )
    c = LLAMA["8B"]
    gpt = c.dim * c.vocab + c.layers * (12 * c.dim**2 + 13 * c.dim) + 2 * c.dim
    one = gpt_activations(c, 1024, "selective") / GiB
    short = gpt / memory.parameter_count(c) - 1
    no_sp = playbook_row("5D", '8B TP=8 "w/SP" selective', 1024)[3] / GiB
    master = memory.state_bytes(c, memory.RECIPES["bf16"])["master copy"] / GiB
    print(f"""
  Errors in the figures:
  - the GPT-2 count gives Llama-3.1-8B {gpt:,} parameters, {short:+.1%};
  - 12 bytes a parameter in most: the fp32 master copy is missing, {master:.1f} GiB of 8B;
  - scores of T x T and dropout masks are counted, which no fused attention or Llama keeps;
    SwiGLU, GQA, logits and loss are not counted;
  - norms are left out; zero3 and tp use a vocabulary of 131,072 instead of 128,256;
  - 5D figure: "TP w/ SP" is computed without SP ({no_sp:.3f}, not {one / 8:.3f} GiB at 1,024);
  - 5D figure: CP = 8 divides activations by 64 ({one / 64:.3f}, not {one / 8:.3f} GiB at 1,024).
""")
    return wrong


def measured_slope(facts):
    """GiB that one more sample of 4,096 tokens costs on a GPU, in the playbook's own runs."""
    runs = rows(facts, "playbook_runs.csv", status="ok", family="1B", tp="1", pp="1", zero="0")
    by_size = {}
    for r in runs:
        by_size.setdefault(int(r["mbs"]), []).append(float(r["mem_gib"]))
    mean = {mbs: sum(gib) / len(gib) for mbs, gib in by_size.items()}
    slope = mean[2] - mean[1]
    c, n = memory.Config(131072, 2048, 16, 32, 32, 8192, tied=True), 4096
    kept = sum(memory.kept_bytes(c, 1, n, torch.bfloat16).values()) / GiB
    # The most that plain autograd adds, by 01's reasons for three functions: three fp32 tensors of
    # the logits' size, two of the input's for each norm, silu(gate).
    loss = n * c.vocab * 3 * 4 / GiB
    norms = n * (2 * c.layers + 1) * c.dim * 2 * 4 / GiB
    silu = n * c.layers * c.ffn * 2 / GiB
    most = kept + loss + norms + silu
    print("01: 1.34B, GiB for each sample of 4,096 tokens, TP = PP = 1")
    print(f"  measured in {len(runs)} runs, micro-batch 2 - 1    {slope:6.2f}")
    print(f"  34·s·h·L, the playbook           {gpt_activations(c, n, 'selective') / GiB:12.2f}")
    print(f"  ours, which it cannot be below   {kept:12.2f}")
    print(f"  with all that plain autograd adds{most:12.2f}\n")
    return [] if kept < slope < most else ["slope of memory by micro-batch"]


# --- 01: published training runs ----------------------------------------------------------------

SMOLLM3 = memory.Config(128256, 2048, 36, 16, 4, 11008, tied=True, head_dim=128)
RUNS = [  # name, config, tokens, T, published H100-hours, source
    ("Llama 3.1 8B", LLAMA["8B"], 15e12, 8192, 1.46e6, "model card"),
    ("Llama 3.1 70B", LLAMA["70B"], 15e12, 8192, 7.0e6, "model card"),
    ("Llama 3.1 405B", LLAMA["405B"], 15.6e12, 8192, 30.84e6, "model card; MFU 38-43 %"),
    ("SmolLM3 3B", SMOLLM3, 11.2e12, 4096, 384 * 24 * 24, "384 H100 for 24 days"),
]


def training_hours(facts):
    peak, wrong = memory.PEAKS["h100", "bf16"], []
    print("01: H100-hours of published training runs")
    print(f"  {'':14}{'FLOPs':>10}{'6·N·D':>10}{'at 40 %':>12}{'published':>12}{'MFU then':>10}")
    for name, c, tokens, T, published, source in RUNS:
        flops, rough = memory.flops_per_token(c, T) * tokens, 6 * memory.parameter_count(c) * tokens
        hours = memory.gpu_hours(flops, peak, 0.4)
        mfu = memory.utilisation(flops, published * 3600, peak)
        print(
            f"  {name:14}{flops:10.2e}{rough:10.2e}{hours:12,.0f}{published:12,.0f}{mfu:10.1%}"
            f"  {source}"
        )
        if not 0.1 < mfu < 0.5:
            wrong.append(f"{name}: MFU {mfu:.1%}")
    # The 405B report gives its FLOPs (3.8e25) and its MFU in pre-training: 38 to 43 %. The card's
    # hours cover more than that (restarts, long context, annealing), so they are above ours.
    c, tokens = LLAMA["405B"], 15.6e12
    if abs(6 * memory.parameter_count(c) * tokens / 3.8e25 - 1) > 0.01:
        wrong.append("6·N·D of Llama 3.1 405B")
    flops = memory.flops_per_token(c, 8192) * tokens
    least, most = (memory.gpu_hours(flops, peak, mfu) for mfu in (0.43, 0.38))
    print(f"  405B at MFU 43 to 38 %: {least / 1e6:.1f} to {most / 1e6:.1f} of the 30.84 M hours")
    if not 0.75 < least / 30.84e6 < most / 30.84e6 < 1:
        wrong.append("hours of Llama 3.1 405B")
    seven = memory.gpu_hours(6 * 7e9 * 140e9, peak, 0.5)
    print(f"  7B, 140B tokens, 50 %: {seven:,.0f} (often quoted: about 3,300)")
    smol = 6 * memory.parameter_count(memory.PRESETS["smollm-1.7b"]) * 11e12
    print(f"  SmolLM2 1.7B, 11T tokens: {smol:.2e} FLOPs (its report: about 1e23)")
    if abs(seven / 3300 - 1) > 0.01 or not 0.9 < smol / 1e23 < 1.2:
        wrong.append("hours of 7B or FLOPs of SmolLM2")
    return wrong


def seven_billion(facts):
    """An often quoted sum for a 7B model, exactly, and what it leaves out."""
    c = memory.Config(vocab=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn=11008)
    quoted = memory.state_bytes(c, memory.RECIPES["no-master"])
    bf16 = memory.state_bytes(c, memory.RECIPES["bf16"])
    kept = sum(memory.kept_bytes(c, 1, 4096, torch.bfloat16).values())
    parts = [quoted["parameters"], quoted["gradients"], quoted["moments"], kept]
    peak = max(memory.peak_bytes(c, 1, 4096, memory.RECIPES["bf16"]).values())
    more = bf16["gradients"] - quoted["gradients"]
    print("\n01: Llama-2 7B, 1 x 4,096, GB")
    print("  often quoted  14 + 14 + 56 + about 30 = about 114")
    print(f"  exactly       {' + '.join(f'{n / 1e9:.1f}' for n in parts)} = {sum(parts) / 1e9:.1f}")
    master = bf16["master copy"] / 1e9
    print(f"  left out      fp32 master copy {master:.1f}, fp32 gradients {more / 1e9:.1f}")
    print(f"  with both, the fullest instant of a step: {peak / 1e9:.1f}")
    # 14 + 14 + 56 is 12 bytes for each of 7.0e9 parameters
    return [] if abs(sum(parts[:3]) / 1e9 / 84 - 1) < 0.05 else ["states of 7B"]


# --- 02: the playbook's data-parallel scaling of a 1.34B model ----------------------------------
#
# The global batch is fixed, so with more ranks N each has fewer micro-batches m, and the one sum of
# the gradients weighs more: t = m·t_micro + exposed. t_micro comes from the smallest run; exposed
# is the time of an all-reduce of fp32 gradients over the bandwidth published for as many nodes,
# none of it hidden (their last micro-batch has 4,096 tokens a rank, and tokens_to_hide says tens of
# thousands). The published figure is read as bus bandwidth, what a rank sends. Nothing is fitted.

BATCH, T, NODE = 256, 4096, 8  # samples of a step, tokens of a sample, GPUs of a node


def exposed(parameters, n, bandwidth):
    """Seconds of an all-reduce over n ranks: the bytes a rank sends, by its bandwidth."""
    _, size = dp.sent([4 * parameters], n)
    return float(size) / bandwidth


def scaling(facts):
    """Two series of throughput, published and ours.

    Micro-batches of one sample throughout (within 4 %), and the figure as published, which took two
    samples at 8 and at 128 ranks (within 6 %: with 8,192 tokens a rank part of the sum is hidden
    after all).
    """
    bandwidth = {
        int(r["gpus"]): 1e9 * float(r["bandwidth_GBps_line_mean"])
        for r in rows(facts, "playbook_comm_bandwidth.csv", collective="AllReduce")
    }
    runs = rows(facts, "playbook_runs.csv", status="ok", family="1B", tp="1", pp="1", zero="0",
                gbs_samples=str(BATCH))  # fmt: skip
    alike = {int(r["dp"]): (1, float(r["tok_s_gpu"])) for r in runs if r["mbs"] == "1"}
    figure = {
        int(r["degree"]): (int(r["mbs"]), float(r["tok_s_gpu"]))
        for r in rows(facts, "playbook_scaling_curves.csv", series="DP (fig dp_scaling)")
    }
    parameters = int(runs[0]["n_params"])
    (two,) = (float(r["tok_s_gpu"]) for r in runs if (r["mbs"], r["dp"]) == ("2", str(NODE)))
    assert len(alike) == len(figure) == 6

    def micro_seconds(size, speed):  # of a micro-batch, from the run on one node
        m = BATCH // NODE // size
        step = BATCH * T / NODE / speed
        return (step - exposed(parameters, NODE, bandwidth[NODE])) / m

    t_micro = {1: micro_seconds(*alike[NODE]), 2: micro_seconds(2, two)}
    table, wrong = [], []
    for series, published, bound in (("alike", alike, 0.04), ("figure", figure, 0.06)):
        before = ours_before = None
        for n, (size, speed) in sorted(published.items()):
            m = BATCH // n // size
            t = m * t_micro[size] + exposed(parameters, n, bandwidth[n])
            ours = BATCH * T / n / t
            drop = f"{speed / before - 1:+.1%}" if before else ""
            our_drop = f"{ours / ours_before - 1:+.1%}" if before else ""
            table.append([series, n, f"{m} x {size}", speed, ours, f"{ours / speed - 1:+.1%}",
                          drop, our_drop])  # fmt: skip
            if abs(ours / speed - 1) > bound:
                wrong.append(f"02 {series} dp {n}: {ours:.0f} tokens/s, published {speed:.0f}")
            before, ours_before = speed, ours
    print("\n02: data parallelism, 1.34B, tokens/s/GPU (8 GPUs give t_micro; nothing is fitted)")
    dp.table(["", "dp", "micro", "published", "ours", "error", "drop", "ours"], table)
    return wrong


# --- 04: what it costs to let tp leave the node -------------------------------------------------
#
# Pairs of the playbook's runs on 16 nodes of 8 H100s that differ in tp alone, 8 (inside a node) or
# 16 (over two): same model, micro-batch, batch; dp makes up for it. 04 says why: with 8 ranks on
# 450 GB/s the gathers take less time than the products they feed, with 16 on 50 GB/s much more.


def tp_over_nodes(facts):
    """The drops of throughput, and the ratios of transfer to products by 04's formula."""
    runs = rows(facts, "playbook_runs.csv", status="ok", nodes="16", pp="1", zero="0")
    speed = {(r["family"], int(r["mbs"]), r["tp"]): float(r["tok_s_gpu"]) for r in runs}
    ratios = [
        tp.transfer_to_compute(2 * 8192, n, 989e12, bandwidth, 2)  # F of both models
        for n, bandwidth in ((8, 450e9), (16, 50e9))
    ]
    wrong = [] if ratios[0] < 1 < ratios[1] else [f"04: transfer / products {ratios}"]
    table, drops = [], []
    for family, micro, degree in sorted(speed):
        if degree == "8" and (family, micro, "16") in speed:
            inside, across = speed[family, micro, "8"], speed[family, micro, "16"]
            drops.append(1 - across / inside)
            table.append([family, micro, inside, across, f"{-drops[-1]:.0%}", *ratios])
    print("\n04: tp 8 inside a node and 16 over two, tokens/s/GPU; transfer / products by formula")
    head = ["", "micro-batch", "tp 8", "tp 16", "drop", "tp 8, formula", "tp 16, formula"]
    dp.table(head, table)
    said = re.search(r"(\d+) to (\d+) % fewer tokens", tp.__doc__).groups()
    if [f"{min(drops):.0%}", f"{max(drops):.0%}"] != [f"{n}%" for n in said] or len(drops) < 10:
        wrong.append(f"04 says {' to '.join(said)} %, the runs {min(drops)} to {max(drops)}")
    return wrong


# --- 10: the planner beside the playbook's runs --------------------------------------------------
#
# Rows are left out by the columns suspect_* and by tp > 8, by nothing else; beside it, all rows.
# The planner's constants and the baseline's are fitted to the runs of one model and tested on the
# other's. The baseline has six constants: efficiency, seconds a micro-batch, bandwidth of tp,
# seconds more a micro-batch in a pipeline, share of the published all-reduce curve, seconds a step.

EFA = plan.HARDWARE["h100-efa"]
FITTED = ("matmul", "passes", "host", "tp_exposed", "step", "spread", "crossing", "unbucketed")
BASELINE = (0.567, 0.0383, 1.78e11, 6.9e-4, 0.80, 0.051)  # fitted to playbook_runs.csv
IMPOSSIBLE = 2.5e9  # bytes of a GPU that even the leanest run cannot have: context, NCCL


def runs_as_layouts(path):
    """[(row, layout)] of a file of runs; its models join 10's."""
    result = []
    for row in rows(path, "playbook_runs.csv"):
        whole = {key: x for key, x in row.items() if re.fullmatch(r"\d+(\.0)?", x)}
        n = {key: int(float(x)) for key, x in whole.items()}
        shape = [n[key] for key in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")]
        c = memory.Config(*shape, tied=bool(n["tied_embed"]))
        name = f"{row['family']} of {c.layers} x {c.dim}, kv {c.kv_heads}, vocab {c.vocab}"
        plan.MODELS[name] = c
        axes = {axis: n[axis] for axis in ("dp", "tp", "pp", "zero")}
        batch = n["mbs"] * n["grad_acc"] * n["dp"]
        sizes = dict(micro_batch=n["mbs"], batch=batch, seq=n["seq_len"])
        result.append((row, plan.Layout(name, **axes, **sizes)))
    return result


def trusted(row):
    return row["suspect_slow_slot"] != "1" and row["suspect_gbs"] != "1" and int(row["tp"]) <= 8


def search_constants(loss, start, steps=(1.3, 1.1, 1.03), turns=6):
    """Multiply one constant at a time by a step, up or down, for as long as the loss falls."""
    best, constants = loss(start), dict(start)
    for step in steps:
        for name in constants:
            for factor in (step, 1 / step):
                for _ in range(turns):
                    trial = constants | {name: constants[name] * factor}
                    if (worse := loss(trial)) >= best - 1e-6:
                        break
                    best, constants = worse, trial
    return constants


def mean_log_error(pairs):
    return statistics.fmean(abs(math.log(ours / measured)) for ours, measured in pairs)


def seconds(stack, layout):
    return plan.estimate(EFA, stack, layout).seconds


def fit_planner(runs):
    def loss(constants):
        stack = replace(eager, **constants)
        return mean_log_error((seconds(stack, lay), float(row["step_time_s"])) for row, lay in runs)

    eager = plan.STACKS["eager"]
    return replace(eager, **search_constants(loss, {name: getattr(eager, name) for name in FITTED}))


def baseline_terms(lay):
    """What the baseline's six constants multiply or divide: of a layout, computed once."""
    c, n = plan.MODELS[lay.model], lay.dp
    cut = lay.tp * lay.pp
    compute = memory.flops_per_token(c, lay.seq) * lay.micro_batch * lay.seq / cut / EFA.peak
    x = lay.micro_batch * lay.seq * c.dim * 2 * (lay.tp - 1) / lay.tp
    gradients = 2 * (n - 1) / n * 4 * memory.parameter_count(c) / cut
    curve = plan.interpolate(EFA.curve, -(-lay.world // EFA.node), 1)
    return lay.m + lay.pp - 1, compute, 8 * c.layers / lay.pp * x, lay.pp > 1, gradients / curve


def baseline_seconds(terms, constants):
    slots, compute, moved, piped, gradients = terms
    share, slot, bandwidth, more, curve, step = constants
    each = compute / share + slot + moved / bandwidth + piped * more
    return slots * each + gradients / curve + step


def fit_baseline(runs):
    terms = [(baseline_terms(lay), float(row["step_time_s"])) for row, lay in runs]

    def loss(constants):
        return mean_log_error((baseline_seconds(t, constants.values()), s) for t, s in terms)

    steps = (1.5, 1.2, 1.08, 1.03, 1.01)
    return tuple(search_constants(loss, dict(enumerate(BASELINE)), steps, 8).values())


def rank_correlation(xs, ys):
    """Spearman's, ties in the order of the rows."""
    ranks = [sorted(range(len(v)), key=v.__getitem__) for v in (xs, ys)]
    place = [dict(zip(order, range(len(order)))) for order in ranks]
    n = len(xs)
    return 1 - 6 * sum((place[0][i] - place[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


PARTS = {
    "pp = 1": lambda lay: lay.pp == 1,
    "pp > 1": lambda lay: lay.pp > 1,
    "all": lambda lay: True,
}


def time_rows(stack, six, runs, label):
    """Rows of the table of throughput, and {part: (planner's median error, baseline's)}."""
    table, medians = [], {}
    for part, chosen in PARTS.items():
        some = [(row, lay) for row, lay in runs if chosen(lay)]
        if len(some) < 3:
            continue
        measured = [float(row["tok_s_gpu"]) for row, _ in some]
        tokens = [lay.batch * lay.seq / lay.world for _, lay in some]
        ours = [n / seconds(stack, lay) for n, (_, lay) in zip(tokens, some)]
        base = [n / baseline_seconds(baseline_terms(lay), six) for n, (_, lay) in zip(tokens, some)]
        errors = [sorted(abs(x / y - 1) for x, y in zip(xs, measured)) for xs in (ours, base)]
        medians[part] = [statistics.median(e) for e in errors]
        bias = statistics.median(x / y - 1 for x, y in zip(ours, measured))
        tenth = [f"{e[int(0.9 * len(some))]:.0%}" for e in errors]
        cells = [f"{medians[part][0]:.1%}", tenth[0], f"{bias:+.1%}"]
        cells += [f"{medians[part][1]:.1%}", tenth[1]]
        spearman = [f"{rank_correlation(xs, measured):.3f}" for xs in (ours, base)]
        table.append([label, part, len(some), *cells, *spearman])
    return table, medians


def fits(stack, lay):
    """Could the leanest version of the software run it? Inputs of tp gathered again, few copies."""
    lean = replace(stack, gathered=0, reserve=IMPOSSIBLE)
    return plan.peak(lean, lay)[0] <= plan.room(EFA, lean)


def first_choices(stack, runs):
    """[(model, nodes, regret, layout chosen, how many better ranked ones had failed)]"""
    cells, result = {}, []
    for row, lay in runs:
        cells.setdefault((row["family"], int(row["nodes"])), []).append((row, lay))
    for (family, nodes), cell in sorted(cells.items()):
        speeds = [float(row["tok_s_gpu"]) for row, _ in cell if row["status"] == "ok"]
        ranked = [(seconds(stack, lay), i) for i, (_, lay) in enumerate(cell) if fits(stack, lay)]
        failed = 0
        for _, i in sorted(ranked):
            row, lay = cell[i]
            if row["status"] == "ok":
                regret = 1 - float(row["tok_s_gpu"]) / max(speeds)
                result.append((family, nodes, regret, str(lay), failed, len(speeds)))
                break
            failed += 1
    return result


def memory_rows(stack, runs):
    """Rows of the table of memory, and the median error of all; measured on the first rank."""
    table, every = [], []
    for family in dict.fromkeys(row["family"] for row, _ in runs):
        for part in ("pp = 1", "pp > 1"):
            off = [
                sum(plan.held(stack, lay).values()) / GiB / float(row["mem_gib"]) - 1
                for row, lay in runs
                if row["family"] == family and PARTS[part](lay) and row["status"] == "ok"
            ]
            every += map(abs, off)
            if off:
                median, bias = statistics.median(map(abs, off)), statistics.median(off)
                table.append([family, part, len(off), f"{median:.1%}", f"{bias:+.1%}"])
    return table, statistics.median(every)


def out_of_memory(stack, runs):
    """(failed runs called impossible, failed runs; the same of successful ones)"""
    failed = [lay for row, lay in runs if row["status"] != "ok" and not row["mem_gib"]]
    good = [lay for row, lay in runs if row["status"] == "ok"]
    no = [sum(not fits(stack, lay) for lay in part) for part in (failed, good)]
    return no[0], len(failed), no[1], len(good)


def planner(facts):
    everything = runs_as_layouts(facts)
    families = list(dict.fromkeys(row["family"] for row, _ in everything))
    print("\n10: the planner beside measured runs; leaving out suspect rows and tp > 8")
    head = ["tested on", "", "runs", "error", "p90", "bias", "six constants", "p90", "rank", "six"]
    ok = [(row, lay) for row, lay in everything if row["status"] == "ok"]
    wrong, table, choices = [], [], []
    fitted = {family: (plan.STACKS["eager"], BASELINE, "as in 10") for family in families}
    if len(families) > 1:
        for family in families:
            others = [(row, lay) for row, lay in ok if row["family"] != family and trusted(row)]
            fitted[family] = fit_planner(others), fit_baseline(others), "fitted on others"
    for family, (stack, six, how) in fitted.items():
        constants = ", ".join(f"{name} {getattr(stack, name):.3g}" for name in FITTED)
        print(f"  {family}, {how}: {constants}")
        mine = [(row, lay) for row, lay in everything if row["family"] == family]
        good = [(row, lay) for row, lay in mine if trusted(row)]
        for label, some in ((family, good), (f"{family} all", mine)):
            done = [(row, lay) for row, lay in some if row["status"] == "ok"]
            lines, medians = time_rows(stack, six, done, label)
            table += lines
            if some is good:
                wrong += [
                    f"10 {family} {part}: error {ours:.1%}, six constants {base:.1%}"
                    for part, (ours, base) in medians.items()
                    if ours > base * 2 / 3 or ours > (0.1 if part == "pp = 1" else 0.15)
                ]
        for label, some in (("", good), ("all", mine)):
            choices += [(label, *choice) for choice in first_choices(stack, some)]
    dp.table(head, table)
    runs = [(row, lay) for row, lay in ok if trusted(row)]
    eager = plan.STACKS["eager"]
    for what, stack in (
        ("10's own constants, as they are", eager),
        ("without the host", replace(eager, host=0, crossing=0, spread=0)),
    ):
        off = [abs(float(row["step_time_s"]) / seconds(stack, lay) - 1) for row, lay in runs]
        print(f"  {what}: median error {statistics.median(off):.1%}")
    said = re.search(r"is not (\d+) but (\d+) %", plan.__doc__).group(2)
    if facts.is_dir() and f"{statistics.median(off):.0%}" != f"{said}%":
        wrong.append(f"10 says that without the host the error is {said} %")

    print("\n  first choice of the planner for each model and number of nodes, among runs made")
    for label, name in (("", "filtered"), ("all", "all rows")):
        some = [choice[1:] for choice in choices if choice[0] == label]
        regrets = [regret for _, _, regret, *_ in some]
        if not label:
            dp.table(
                ["model", "nodes", "of", "slower than the fastest", "layout", "failed above"],
                [[f, n, runs, f"{r:.1%}", lay, failed] for f, n, r, lay, failed, runs in some],
            )
        median, worst = statistics.median(regrets), max(regrets)
        print(f"  {name}: median {median:.1%}, worst {worst:.1%}")
        if not label and (median > 0.05 or worst > 0.15):
            wrong.append(f"10: first choices {median:.1%} median, {worst:.1%} worst")

    print("\n  memory of the first rank, GiB; nothing fitted")
    kept = [(row, lay) for row, lay in ok if row["suspect_gbs"] != "1" and int(row["tp"]) <= 8]
    table, median = memory_rows(plan.STACKS["eager"], kept)
    dp.table(["model", "", "runs", "error", "bias"], table)
    print(f"  all: {median:.1%}")
    wrong += [f"10: memory {median:.1%}"] * (median > 0.1)
    for name, some in (
        ("tp <= 8", [x for x in everything if int(x[0]["tp"]) <= 8]),
        ("all rows", everything),
    ):
        hit, failed, false, good = out_of_memory(plan.STACKS["eager"], some)
        recall = f"{hit} of {failed} failed runs ({hit / max(failed, 1):.0%})"
        print(f"  {name}: called impossible {recall}, {false} of {good} successful ones")
        wrong += [f"10: {false} successful runs called impossible"] * (false > 0)
    return wrong


# --- 10: the planner beside throughputs that others published ------------------------------------
#
# Each source counts FLOPs in its own way, so rows are compared by tokens a second and GPU; where
# only FLOP/s are given they are converted by the source's own count. What a row does not state, the
# planner chooses, as whoever published a good number did. Three constants are fitted to the other
# sources, each counting the same. Only a row that cannot be expressed is left out, and is counted.

GPT = {  # width, heads, layers; two matrices of 4·D in the FFN: as many FLOPs as three of 8/3·D
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
QWEN3 = plan.ep.Config(151936, 2048, 48, 32, 4, 768, head_dim=128, experts=128, top_k=8)
GPUS = {  # beside those of 10, with fp4 where a row needs it
    "b300": replace(plan.HARDWARE["b200"], memory=288e9),
    "gb300": replace(plan.HARDWARE["gb200"], peak=2500e12, fp8=5000e12, memory=288e9),
    "a100 40gb": replace(plan.HARDWARE["a100"], memory=42.5e9, hbm=1.56e12),
    "h100 hbm2e": replace(
        plan.HARDWARE["h100"], memory=100e9, hbm=2.4e12, peak=800e12, fp8=1600e12
    ),
}
FP4 = {"gb200": 10e15, "gb300": 15e15, "b200": 9e15, "b300": 13.5e15}
PUBLISHED = ("matmul", "passes", "attention")


def gpt(width, heads, layers, vocab):
    return memory.Config(vocab, width, layers, heads, heads, 8 * width // 3, tied=True)


def published_model(row):
    """The shape of a row's model, or a word why there is none."""
    name, notes = row["model"].lower(), row["notes"]
    if "nemotron" in name:
        return "state-space layers"
    if row["source"].startswith("nanotron"):
        return "in playbook_runs.csv"
    if name.startswith("mpt"):
        return gpt(*GPT[name.split()[1]], 50368)
    for size in ("8b", "70b", "405b"):
        if name.startswith("llama") and re.search(rf"\b_?{size}$", name.replace("_", " ")):
            return memory.PRESETS[f"llama3-{size}"]
    if name.startswith("qwen3_30b"):
        return QWEN3
    shape = {key: int(n) for key, n in re.findall(r"(heads|hidden|layers|vocab)=(\d+)", notes)}
    if {"hidden", "layers", "vocab"} <= shape.keys():
        heads = shape.get("heads", shape["hidden"] // 128)
        return gpt(shape["hidden"], heads, shape["layers"], shape["vocab"])
    return "its layout is not stated"


def published_gpu(row):
    """(hardware, does it compute in FP8) of a row."""
    name = row["gpu_type"].lower().replace("_80gb", "").replace("_", " ")
    precision = row["precision"]
    name = "h100 hbm2e" if "hbm2e" in name else name
    if not precision and "25.09" in row["notes"]:
        precision = "FP8"  # of that table: its notes tell apart two kinds of FP8
    hw = GPUS.get(name) or plan.HARDWARE[name]
    if precision == "NVFP4":
        hw = replace(hw, fp8=FP4[name])
    hw = HARDWARE_OF.setdefault((name, precision == "NVFP4"), hw)  # one object: caches know it
    return hw, bool(re.search("fp8|FP8|FP4", precision))


HARDWARE_OF = {}


def published_layouts(row, c):
    """Every layout that agrees with what a row states."""
    n = {key: int(float(row[key] or 1)) for key in ("tp", "pp", "cp", "ep", "vpp")}
    gpus, source, notes = int(row["gpus"]), row["source"], row["notes"]
    seq = int(row["seq"] or 8192)  # torchtitan's default
    name = f"{row['model']} {c.dim}"
    plan.MODELS[name] = c
    splits = [(n["tp"], n["pp"])]
    if together := re.search(r"TP\*PP=(\d+)", notes):  # Megatron 2021 states the product only
        k = int(together.group(1))
        splits = [(t, k // t) for t in (1, 2, 4, 8) if k % t == 0 and c.heads % t == 0]
    zero = 3 if "torchtitan" in source or "FULL_SHARD" in notes else 2 if "GRAD_OP" in notes else 1
    zero = 3 if re.search(r"\bFSDP=", notes) else zero
    recompute = row["recompute"] or ("full" if together else "none")
    for t, p in splits:
        ranks = gpus // (t * p * n["cp"])
        batch = int(row["gbs"] or 0) or ranks * int(row["mbs"])
        mine = batch // ranks
        sizes = [int(row["mbs"])] if row["mbs"] else [k for k in (1, 2, 4, 8) if mine % k == 0]
        if p > 1 and "torchtitan" in source:
            sizes = [1]  # its local batch, before it is cut
        for k in sizes:
            if mine >= k and p <= c.layers + 1:
                m = mine // k
                piped = p > 1 and n["vpp"] > 1 and m % p == 0 and p * n["vpp"] <= c.layers + 1
                yield plan.Layout(
                    name, dp=ranks, tp=t, pp=p, cp=n["cp"], ep=n["ep"], zero=zero, seq=seq,
                    recompute=recompute, micro_batch=k, batch=m * k * ranks,
                    schedule="interleaved" if piped else "1f1b", chunks=n["vpp"],
                )  # fmt: skip


def published_speed(row, c, seq):
    """Tokens a second and GPU; from FLOP/s by the source's own count (facts/frameworks.md 4.2)."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    D, L = c.dim, c.layers
    forward = 24 * L * D * D * (1 + seq / (6 * D) + c.vocab / (12 * L * D))  # Megatron-LM's papers
    passes = 4 if "2021" in row["source"] else 3  # in 2021 with the recomputed forward
    return float(row["tflops_per_gpu"]) * 1e12 / (passes * forward)


def published_source(row):
    short = re.match(r"[\w-]+", row["source"]).group()
    return short + (" 2021" if "2021" in row["source"] else "")


def published_seconds(stack, row):
    hw, fp8, layouts = row
    return min(1 / plan.estimate(hw, stack[fp8], lay).speed for lay in layouts)


def both_precisions(stack):
    return {False: stack, True: replace(stack, fp8=True)}


def published(facts):
    left, usable = {}, []
    for row in rows(facts, "published_perf.csv"):
        c = published_model(row)
        if "SFT" in row["notes"] or "LoRA" in row["notes"]:
            c = "fine-tuning"
        speed = row["tokens_per_s_per_gpu"] or row["tflops_per_gpu"]
        if not isinstance(c, str) and not (row["gpus"] and speed):
            c = "GPUs or speed are not stated"
        if not isinstance(c, str):
            hw, fp8 = published_gpu(row)
            layouts = list(published_layouts(row, c))
            if layouts:
                speed = published_speed(row, c, layouts[0].seq)
                usable.append((published_source(row), row["model"], (hw, fp8, layouts), 1 / speed))
                continue
            c = "no micro-batch fits its batch"
        left[c] = left.get(c, 0) + 1
    start = plan.STACKS["fused"]
    sources = list(dict.fromkeys(source for source, *_ in usable))

    def fitted(some):
        by_source = {}  # each source counts the same, however many rows it has
        for source, _, row, s in some:
            if len(row[2]) == 1:  # nothing left to choose
                by_source.setdefault(source, []).append((row, s))

        def loss(constants):
            stack = both_precisions(replace(start, **constants))
            return statistics.fmean(
                mean_log_error((published_seconds(stack, row), s) for row, s in part)
                for part in by_source.values()
            )

        return search_constants(loss, {name: getattr(start, name) for name in PUBLISHED})

    table, all_errors = [], []
    print("\n10: the planner beside published throughputs; constants fitted to the other sources")
    for source in sources:
        constants = fitted([x for x in usable if x[0] != source])
        print(f"  {source}: " + ", ".join(f"{k} {x:.3g}" for k, x in constants.items()))
        stack = both_precisions(replace(start, **constants))
        mine = [x for x in usable if x[0] == source]
        for model in [*dict.fromkeys(x[1] for x in mine), "all"]:
            some = [(row, s) for _, name, row, s in mine if model in (name, "all")]
            off = [s / published_seconds(stack, row) - 1 for row, s in some]
            cells = f"{statistics.median(map(abs, off)):.0%}", f"{statistics.median(off):+.0%}"
            table.append([source, model, len(off), *cells])
            all_errors += map(abs, off if model == "all" else [])
    dp.table(["source", "model", "rows", "error", "bias"], table)
    print(f"  all: {len(all_errors)} rows, median error {statistics.median(all_errors):.0%}")
    print("  fitted to all: " + ", ".join(f"{k} {x:.3g}" for k, x in fitted(usable).items()))
    for why, count in left.items():
        print(f"  left out: {count} rows, {why}")
    return []


CHAPTER_01 = [playbook_figures, measured_slope, training_hours, seven_billion]
SECTIONS = [*CHAPTER_01, scaling, tp_over_nodes, planner, published]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", nargs="?", type=Path, default=ROOT.parent / "shared" / "facts")
    facts = parser.parse_args().facts
    sections = SECTIONS
    if facts.is_file():
        with open(facts, newline="") as file:
            columns = next(csv.reader(file))
        sections = [planner] if "grad_acc" in columns else [published]
    wrong = [problem for section in sections for problem in section(facts)]
    shown = "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    print(f"\nvalidate FAIL: {shown}" if wrong else "\nvalidate OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
