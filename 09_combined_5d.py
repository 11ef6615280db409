"""
09 · All of it together

Idea      Each chapter changes one thing about the model of 01 or about how its gradients travel.
          Put together in the right order they make a training loop that computes exactly what one
          device would compute, and --check proves it: loss, every gradient, every weight.
Picture   the order of composition, which is the lesson (see compose below):
          mesh ─ model of this stage (05) ─ experts (06) ─ attention (07) ─ tensor cuts (04)
          ─ FP8 (08) ─ schedule (05) ─ optimizer on shards (03) ─ training steps
Cost      the sum of the chapters' costs, and five control numbers a step (valid tokens; loss,
          gradient norm, auxiliary loss, stop); the table at the end shows measured bytes beside
          the formulas.
Pays      when one device is not enough, or one axis: which degrees, is 10's question.
Forget    the sum of the gradients over dp. Every rank then trains its own model on its own data:
          losses still fall, and the gradients are wrong (relative error 1.89 at two ranks).
Run       python 09_combined_5d.py --dp 2 --steps 5 --check --dtype float64
          python 09_combined_5d.py --model tiny-moe --dp 2 --pp 2 --cp 2 --tp 2 --ep 4 --check
          torchrun --nproc-per-node 2 09_combined_5d.py --dp 2 --steps 200
          python 09_combined_5d.py --dry-run --rank 5 --dp 64 --tp 8 --pp 2 --model llama3-70b
                 --batch 128 --seq 8192 --dtype bfloat16 --zero 1       (one rank of 1,024, here)
Copy      mesh, expert_groups: the ranks of every group of a layout. Imports: math. (All else here
          puts the chapters together: copy from them.)
Read      Megatron-LM (2104.04473), Llama 3 (2407.21783) section 3.3

Letters as in 01; an axis such as "dp·cp" is two taken as one.
"""

import argparse
import contextlib
import difflib
import itertools
import math
import os
import re
import signal
import sys
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # torch.optim would import it (1.6 s): here once, not in every forked rank
import torch.distributed as dist

memory = import_module("01_memory")  # the model
dp = import_module("02_dp")  # ranks, samples, data parallelism
zero = import_module("03_zero")  # the optimizer on shards, checkpoints
tp = import_module("04_tp_sp")  # tensor and sequence parallelism
pp = import_module("05_pp_1f1b")  # pipeline schedules
ep = import_module("06_ep")  # mixture of experts
cp = import_module("07_cp_ring")  # context parallelism
fp8 = import_module("08_fp8")  # products and moments in 8 bits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TRACED = 5  # steps of --trace
MAX_NORM = 1.0
WEIGHT_DECAY = 0.1
REMEDIES = dict(balance=0.01, z=0.001, bias_rate=0.001)  # against an uneven load of experts
RECIPES = [name for name in fp8.RECIPES if name != "naive"]
MOST = dict.fromkeys(("dp", "cp", "tp", "pp", "ep"), 2**17) | dict(
    chunks=64, batch=2**24, micro_batch=2**24, seq=2**30, steps=2**31
)  # more than anybody means: the search for the nearest valid choice stays short
FORKED = 256  # ranks that one machine starts without torchrun
MODELS = memory.PRESETS | {name: replace(c, **REMEDIES) for name, c in ep.PRESETS.items()}


# --- 1. Arguments, and every rule they break -------------------------------------------------


def parse(argv=None):
    p = argparse.ArgumentParser(description="train a Llama on any layout; see the docstring")
    p.add_argument("--model", default="tiny", help=", ".join(MODELS))
    p.add_argument("--dp", type=int, default=1, help="data-parallel degree")
    p.add_argument("--cp", type=int, default=1, help="context-parallel degree")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel degree; cuts sequences, too")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel degree")
    p.add_argument("--ep", type=int, default=1, help="expert-parallel degree: divides dp x cp x tp")
    p.add_argument("--schedule", default="1f1b", help=", ".join(pp.schedules()))
    p.add_argument("--chunks", type=int, default=2, help="chunks a rank, when interleaved")
    p.add_argument("--cp-kind", default="ring", help=", ".join(cp.KINDS))
    p.add_argument("--zero", type=int, default=0, help="ZeRO stage, 0 to 3")
    p.add_argument("--hybrid", type=int, default=0, metavar="N",
                   help="ZeRO inside each N neighbours of dp x cp, sums across")  # fmt: skip
    p.add_argument("--recompute", default="none", help="none, selective, full, full:K (K layers)")
    p.add_argument("--fp8", metavar="RECIPE", help=f"products in FP8: {', '.join(RECIPES)}")
    p.add_argument("--fp8-optimizer", action="store_true", help="AdamW's moments in FP8")
    p.add_argument("--batch", type=int, default=12, help="global batch, in sequences")
    p.add_argument("--micro-batch", type=int, help="sequences at a time (default: all;"
                   " with --pp so that there are 2 pp micro-batches, if that fits)")  # fmt: skip
    p.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    p.add_argument("--optimizer", default="adamw", help="adamw, sgd")
    p.add_argument("--dtype", default="float32", help=", ".join(DTYPES))
    p.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    p.add_argument("--data", help="a text file, .bin (uint16) or .npy; default: Python's library")
    p.add_argument("--check", nargs="?", type=int, const=5, default=0, metavar="K",
                   help="compare the first K steps (5) with one device")  # fmt: skip
    p.add_argument("--ckpt", metavar="DIR", help="write checkpoints there, at least at the end")
    p.add_argument("--save-every", type=int, default=0, metavar="N", help="every N steps too")
    p.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint")
    p.add_argument("--on-nonfinite", default="stop", help="stop, or skip: on to the next batch")
    p.add_argument("--csv", metavar="FILE", help="write step,loss,… in full precision;"
                   " an older one is replaced, with --resume continued")  # fmt: skip
    p.add_argument("--trace", metavar="FILE", help=f"who did what when in the first {TRACED} steps,"
                   " for ui.perfetto.dev")  # fmt: skip
    p.add_argument("--timeout", type=float, default=300.0, help="seconds a collective may wait")
    p.add_argument("--dry-run", action="store_true", help="one step of one rank, on fake tensors")
    p.add_argument("--world", type=int, help="ranks of the dry run (default: as the layout needs)")
    p.add_argument("--rank", type=int, default=0, help="which rank to dry-run")
    args = p.parse_args(argv)
    if args.micro_batch is None:
        args.micro_batch = default_micro_batch(args)
    return args


def default_micro_batch(args):
    """All at once without a pipeline; with one as large as 2·pp micro-batches allow, or fewer."""
    mine, pieces = args.batch // max(1, args.dp), 1
    if args.pp > 1 and mine <= MOST["batch"]:
        fitting = [n for n in divisors(mine) if n % args.pp == 0]
        pieces = next((n for n in fitting if n >= 2 * args.pp), (fitting or [mine])[-1])
    return max(1, mine // max(1, pieces))


def divisors(n):
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def layout(args):
    """Degrees by axis, outermost first: neighbouring ranks differ in the last one.

    tp is innermost because it sends most, in every layer, and nothing hides it: its ranks belong on
    one node. Then cp, every layer too, behind attention; dp, once a step (with ZeRO 2 and 3 each
    micro-batch); and pp outermost, which sends least.
    """
    return {"pp": args.pp, "dp": args.dp, "cp": args.cp, "tp": args.tp}


def has_experts(args):
    return isinstance(MODELS[args.model], ep.Config)


def violations(args, world):
    """Every rule that the arguments break, with the numbers in it and the nearest valid choice."""
    wrong = []

    def known(flag, value, choices):
        if value not in choices:
            near = difflib.get_close_matches(value, choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(choices)}"
            wrong.append(f"{flag} {value}: {hint}")

    known("--model", args.model, list(MODELS))
    known("--schedule", args.schedule, list(pp.schedules()))
    if args.fp8 is not None:
        known("--fp8", args.fp8, RECIPES)
    if args.fp8_optimizer and args.optimizer != "adamw":
        wrong.append(f"--fp8-optimizer: for --optimizer adamw, not {args.optimizer}")
    known("--optimizer", args.optimizer, ["adamw", "sgd"])
    known("--dtype", args.dtype, list(DTYPES))
    known("--cp-kind", args.cp_kind, list(cp.KINDS))
    known("--on-nonfinite", args.on_nonfinite, ["stop", "skip"])
    if not re.fullmatch(r"none|selective|full(:\d+)?", args.recompute):
        wrong.append(f"--recompute {args.recompute}: none, selective, full, or full:K for K layers")
    if args.zero not in range(4):
        wrong.append(f"--zero {args.zero}: 0, 1, 2 or 3")
    for name, most in MOST.items():
        if not 1 <= getattr(args, name) <= most:
            bound = "at least 1" if getattr(args, name) < 1 else f"at most {most:,}"
            wrong.append(f"--{name.replace('_', '-')} {getattr(args, name)}: {bound}")
    if not 0 <= args.seed < 2**32:
        wrong.append(f"--seed {args.seed}: from 0 to 2^32 - 1")
    if not 0 < args.lr <= 1e6:
        wrong.append(f"--lr {args.lr}: above 0, at most a million")
    if not 1 <= args.timeout <= 1e6:
        wrong.append(f"--timeout {args.timeout}: at least 1 second, at most a million")
    if args.check < 0:
        wrong.append(f"--check {args.check}: how many steps to compare; 0 is none")
    if args.save_every < 0:
        wrong.append(f"--save-every {args.save_every}: at least 1")
    if (args.save_every or args.resume) and not args.ckpt:
        wrong.append("--save-every and --resume need --ckpt DIR")
    if args.ckpt and Path(args.ckpt).exists() and not Path(args.ckpt).is_dir():
        wrong.append(f"--ckpt {args.ckpt}: that is no folder")
    if args.ckpt and not args.resume and list(Path(args.ckpt).glob("step-*[0-9]")):
        wrong.append(f"--ckpt {args.ckpt} holds checkpoints: --resume, or another folder")
    for flag, path in (("--csv", args.csv), ("--trace", args.trace)):
        if path and not Path(path).absolute().parent.is_dir():
            wrong.append(f"{flag} {path}: no such folder")
        if path and Path(path).is_dir():
            wrong.append(f"{flag} {path}: that is a folder")
    if args.csv and Path(args.csv).is_file() and not Csv.is_ours(args.csv):
        wrong.append(f"--csv {args.csv} exists and is no list of losses: another name")
    if args.check and args.resume:
        wrong.append("--check compares the first steps of a run: not with --resume")
    need = math.prod(layout(args).values())
    if not args.dry_run and "WORLD_SIZE" not in os.environ and need > FORKED:
        wrong.append(f"{need} ranks on one machine: at most {FORKED}; more by torchrun --nnodes")
    if args.dry_run and world > MOST["dp"]:
        wrong.append(f"--world {world}: at most {MOST['dp']:,}")
    if args.world is not None and not args.dry_run:
        wrong.append("--world is for --dry-run; otherwise the degrees or torchrun decide")
    if world != need:
        larger = {axis: n for axis, n in layout(args).items() if n != 1} or {"dp": 1}
        product = " x ".join(f"{axis} {n}" for axis, n in larger.items())
        wrong.append(f"{world} ranks, but the layout {product} needs {need}")
    if args.dry_run and not 0 <= args.rank < world:
        wrong.append(f"--rank {args.rank}: from 0 to {world - 1}")
    if all(1 <= getattr(args, name) <= most for name, most in MOST.items()):
        wrong += _zero_violations(args) + _batch_violations(args) + _sequence_violations(args)
        if args.model in MODELS:
            wrong += [f"{args.model}: {rule}" for rule in tp.misfits(MODELS[args.model], args.tp)]
            wrong += _expert_violations(args)
            if args.schedule in pp.schedules():
                wrong += _pipeline_violations(args)
    if not args.dry_run and 1 <= args.seq <= MOST["seq"]:
        wrong += _data_violations(args)
    return wrong


def _zero_violations(args):
    n, shared = args.hybrid, args.dp * args.cp
    if n == 0 or (args.zero and n > 0 and shared % n == 0):
        return []
    return [
        f"--hybrid {n}: with --zero 1 to 3, a divisor of dp x cp = {shared}:"
        f" {', '.join(map(str, divisors(shared)))}"
    ]


def _batch_violations(args):
    unit = args.dp * args.micro_batch
    if args.batch % unit == 0:
        return []
    below = args.batch // unit * unit
    near = " or ".join(str(b) for b in (below, below + unit) if b)
    return [
        f"--batch {args.batch} is not a multiple of dp {args.dp} x micro-batch"
        f" {args.micro_batch} = {unit}: the nearest are {near}"
    ]


def _pipeline_violations(args):
    wrong, layers = [], MODELS[args.model].layers
    stages, v = args.pp * chunks_a_rank(args), chunks_a_rank(args)
    if layers < stages - 1:
        near = [n for n in range(1, args.pp + 1) if n * v - 1 <= layers]
        wrong.append(f"--pp {args.pp} with {v} chunks a rank is {stages} stages: the {layers}"
                     f" layers of {args.model} are enough for --pp {near[-1] if near else 1}"
                     f"{'' if near or v == 1 else ' with one chunk'}")  # fmt: skip
    m = count_micro_batches(args)
    if args.schedule == "interleaved" and m and m % args.pp:
        below = m // args.pp * args.pp
        near = " or ".join(str(n) for n in (below, below + args.pp) if n)
        wrong.append(f"--schedule interleaved: {m} micro-batches are no multiple of --pp {args.pp}:"
                     f" the nearest are {near}")  # fmt: skip
    if schedule(args).startswith("zb") and args.zero == 3 and args.recompute == "selective":
        wrong.append(f"--schedule {args.schedule} --recompute selective: a deferred weight gradient"
                     " needs the norm, which --zero 3 has let go: take --zero 2"
                     " or --recompute full")  # fmt: skip
    return wrong


def _expert_violations(args):
    wrong, ranks = [], args.dp * args.cp * args.tp
    if not has_experts(args):
        return [f"--ep {args.ep}: {args.model} has no experts"] * (args.ep > 1)
    E = MODELS[args.model].experts
    if ranks % args.ep or E % args.ep:
        fits = divisors(math.gcd(E, ranks))
        near = sorted(sorted(fits, key=lambda n: abs(n - args.ep))[:2])
        wrong.append(f"--ep {args.ep} does not divide both {E} experts and dp x cp x tp = {ranks}:"
                     f" the nearest are {' or '.join(map(str, near))}")  # fmt: skip
    elif args.hybrid and ranks // args.ep % args.hybrid:
        wrong.append(f"--hybrid {args.hybrid} does not divide the {ranks // args.ep} ranks that"
                     " hold the same experts")  # fmt: skip
    return wrong


def _sequence_violations(args):
    """What context and sequence parallelism ask of the sequence, and Ulysses of the heads."""
    wrong, n = [], args.cp
    factors = [2, f"cp {n}"] * (n > 1) + [f"tp {args.tp}"] * (args.tp > 1)
    unit = (2 * n if n > 1 else 1) * args.tp
    if args.seq % unit:
        below = args.seq // unit * unit
        near = " or ".join(str(T) for T in (below, below + unit) if T)
        product = " x ".join(map(str, factors)) + (f" = {unit}" if len(factors) > 1 else "")
        wrong.append(f"--seq {args.seq} is not a multiple of {product}: the nearest are {near}")
    if args.cp_kind == "ulysses" and args.model in MODELS:
        heads = max(MODELS[args.model].heads // args.tp, 1)
        if heads % n:
            near = sorted(sorted(divisors(heads), key=lambda d: abs(d - n))[:2])
            left = f" that --tp {args.tp} leaves a rank" * (args.tp > 1)
            wrong.append(
                f"--cp {n} does not divide the {heads} heads of {args.model}{left}, as ulysses"
                f" needs: the nearest are {' or '.join(map(str, near))}"
            )
    return wrong


def _data_violations(args):
    try:
        tokens = dp.open_tokens(args.data)
    except (ValueError, OSError) as error:
        return [str(error)]
    name = f"--data {args.data}" if args.data else "the standard library"
    if len(tokens) < args.seq + 1:
        return [f"{name}: {len(tokens)} tokens are too few for --seq {args.seq} and a next token"]
    if args.model in MODELS and np.iinfo(tokens.dtype).max < MODELS[args.model].vocab:
        return []  # whatever the file holds, of which nothing has been read yet
    low, high = dp.token_range(tokens)
    if args.model in MODELS and high >= MODELS[args.model].vocab:
        vocab = MODELS[args.model].vocab
        return [f"{name}: token id {high} is beyond the vocabulary of {vocab} ({args.model})"]
    return [f"{name}: token id {low} is negative"] if low < 0 else []


# --- 2. The mesh -----------------------------------------------------------------------------


def mesh(sizes, *joint):
    """The ranks of every group of every axis, and of joint axes such as "dp·cp".

    sizes {axis: degree}, outermost first -> {axis: [ranks of a group, …]}. In
    arange(8).view(2, 4) for {"dp": 2, "tp": 4} a row is a tp group and a column a dp group.
    """
    grid, axes, groups = torch.arange(math.prod(sizes.values())).view(*sizes.values()), [*sizes], {}
    for name in (*axes, *joint):
        places = [axes.index(axis) for axis in name.split("·")]
        size = math.prod(sizes[axis] for axis in name.split("·"))
        groups[name] = grid.movedim(places, [*range(-len(places), 0)]).reshape(-1, size).tolist()
    return groups


def expert_groups(stages, n):
    """The ranks of each pipeline stage (its dp·cp·tp) once more, as ep · edp with ep innermost.

    Experts are not cut by tp: with its sequence parallelism every tp rank has tokens of its own.
    """
    return {
        "ep": [ranks[i : i + n] for ranks in stages for i in range(0, len(ranks), n)],
        "edp": [ranks[i::n] for ranks in stages for i in range(n)],
    }


def zero_groups(args, groups):
    """Hybrid ZeRO's groups, of each axis over which the table of section 3 lets ZeRO cut: "inside"
    are N neighbours, over which it does, and "across" the ranks that then hold equal shards.
    """
    n, extra = args.hybrid, {}
    if n:
        for axis in dict.fromkeys(shard for _, shard, _ in SYNC if shard in groups):
            extra[f"{axis} inside"] = [
                g[i : i + n] for g in groups[axis] for i in range(0, len(g), n)
            ]
            extra[f"{axis} across"] = [g[i::n] for g in groups[axis] for i in range(n)]
    return extra


def sharing_ranks(args):
    """On how many neighbours of a tp group each kv head lies: more than 1 if tp > kv heads."""
    return max(args.tp // MODELS[args.model].kv_heads, 1)


def make_groups(args, sizes):
    """This rank's process group for every axis, for what the table of section 3 needs, and two
    for a few numbers a step.

    "tokens" is the ranks that together see every token once, "control" the whole world.
    Every rank creates every group, in the same order. Axes that have the same ranks still get
    groups of their own, or the wire meter could not tell their bytes apart.
    """
    wait = timedelta(seconds=args.timeout)  # a subgroup waits 30 minutes by default
    axes, mine = mesh(sizes, "dp·cp", "cp·tp", "dp·cp·tp"), {}
    if has_experts(args):
        axes |= expert_groups(axes["dp·cp·tp"], args.ep)
    axes |= zero_groups(args, axes) | {"tokens": axes["dp·cp"]}
    axes["control"], n = [list(range(dist.get_world_size()))], sharing_ranks(args)
    if n > 1:
        axes["sharing"] = [g[i : i + n] for g in axes["tp"] for i in range(0, len(g), n)]
    if table_copies(args) > 1:
        axes["ends"] = [[ranks[0], ranks[-1]] for ranks in axes["pp"]]
    for axis, groups in axes.items():
        for ranks in groups:
            group = dist.new_group(ranks, timeout=wait, group_desc=axis)
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine


# --- 3. Which gradient is summed over which ranks --------------------------------------------
#
# `shard` is the axes over which ZeRO may cut a parameter, `same` those whose ranks hold an equal
# shard beyond that. The gradient is summed over both. There are no other special cases; `placement`
# below says what --zero and --hybrid make of `shard`.

SYNC = [  # parameters, shard, same
    # "ends" is the first and the last stage, where a tied table lies on both.
    (r"(embed_tokens|lm_head)\.weight", "dp·cp", ("ends",)),
    (r"layers\.\d+\.(self_attn\.[qo]_proj|mlp\.(gate|up|down)_proj)\.weight", "dp·cp", ()),
    # "sharing" is the ranks that hold the same kv head, where there are fewer heads than tp ranks.
    (r"layers\.\d+\.self_attn\.[kv]_proj\.weight", "dp·cp", ("sharing",)),
    (r"(norm|layers\.\d+\.(input|post_attention)_layernorm)\.weight", "dp·cp", ("tp",)),
    (r"layers\.\d+\.mlp\.(router|shared_expert\.(gate|up|down)_proj)\.weight", "dp·cp", ("tp",)),
    (r"layers\.\d+\.mlp\.experts\.(gate|up|down)_proj", "edp", ()),
]


def sync_rows(names, table=SYNC):
    """Sort parameter names into the rows of the table: a list of names for each row.

    Raises ValueError unless each name matches exactly one row, in full.
    """
    rows = [[] for _ in table]
    for name in names:
        matches = [i for i, (pattern, *_) in enumerate(table) if re.fullmatch(pattern, name)]
        if len(matches) != 1:
            raise ValueError(f"{name} matches {len(matches)} rows of the sync table, not one")
        rows[matches[0]].append(name)
    return rows


def placement(args, names):
    """{name: (group that ZeRO cuts a parameter over, or None, groups that hold the same)}"""
    sizes = layout(args) | {"sharing": sharing_ranks(args), "ends": table_copies(args)}
    result = {}
    for row, (_, axis, same) in zip(sync_rows(names), SYNC):
        same = tuple(name for name in same if sizes[name] > 1)
        cut, rest = axis, ()
        if args.zero == 0:
            cut, rest = None, (axis,)
        elif args.hybrid:
            cut, rest = f"{axis} inside", (f"{axis} across",)
        result.update(dict.fromkeys(row, (cut, rest + same)))
    return result


# --- 4. The composition ----------------------------------------------------------------------


def compose(args, groups, device):
    """Everything a rank holds, in the order in which the chapters build on each other."""
    c, stages = MODELS[args.model], my_stages(args, dist.get_rank(groups["pp"]))
    build = ep.build_moe if has_experts(args) else memory.build
    model = build(c, args.seed, DTYPES[args.dtype], device)  # 01, 06
    pp.keep_stages(model, layers_by_stage(args), stages)  # 05
    ep.recompute_moe(model, args.recompute)  # 01
    for moe in ep.moe_layers(model):
        ep.cut_experts(moe, groups["ep"])  # 06
        moe.sequence_group = groups["cp·tp"] if args.cp * args.tp > 1 else None
    if args.cp > 1:
        cp.use(model, groups["cp"], args.cp_kind)  # 07
    if args.tp > 1:
        tp.cut(model, groups["tp"])  # 04
    group = groups["tp"] if args.tp > 1 else None
    scales = fp8.use(model, args.fp8, group=group) if args.fp8 else None  # 08
    pipeline = make_pipeline(args, groups, model, stages)  # 05
    units = [zero.llama_units(stage) for stage in pipeline.stages.values()]
    cuts = {
        name: (cut and groups[cut], tuple(groups[axis] for axis in same))
        for name, (cut, same) in placement(args, dict(model.named_parameters())).items()
    }
    inner = partial(fp8_optimizer if args.fp8_optimizer else torch_optimizer, args)
    optimizer = zero.Optimizer(
        model, sum(units, []), cuts, args.zero, inner, memory.on_finished, counts=[*map(len, units)]
    )  # 03
    return Job(model, pipeline, optimizer, scales)


class Job(NamedTuple):
    """What a rank trains with."""

    model: memory.Llama  # all of its stages' layers
    pipeline: pp.Pipeline
    optimizer: zero.Optimizer
    scales: fp8.State | None


def schedule(args):
    """Its name; without a pipeline there is nothing to choose."""
    return args.schedule if args.pp > 1 else "1f1b"


def chunks_a_rank(args):
    """Stages on each rank of the pipeline."""
    return pp.schedules(args.chunks)[schedule(args)].v


def count_micro_batches(args):
    return args.batch // args.dp // args.micro_batch


def actions(args):
    """For each rank of the pipeline what it does, in order (05)."""
    return pp.schedules(args.chunks)[schedule(args)].make(args.pp, count_micro_batches(args))


def my_stages(args, rank):
    """The stages on this rank of the pipeline, in the order in which a token meets them."""
    owners = pp.ranks_of_stages(schedule(args), args.pp, chunks_a_rank(args))
    return [stage for stage, owner in enumerate(owners) if owner == rank]


def layers_by_stage(args):
    """How many layers each stage has, so that all take the same time: the head counts as some."""
    c = MODELS[args.model]
    met = replace(c, ffn=c.ffn * (c.top_k + c.shared)) if has_experts(args) else c
    head = pp.head_flops(c) / pp.block_flops(met, args.seq)
    return pp.split(c.layers, args.pp * chunks_a_rank(args), head)


def table_copies(args):
    """On how many ranks of the pipeline a tied embedding lies."""
    owners = pp.ranks_of_stages(schedule(args), args.pp, chunks_a_rank(args))
    return 2 if MODELS[args.model].tied and owners[0] != owners[-1] else 1


def make_pipeline(args, groups, model, mine):
    """The executor of this rank's stages; without --pp it is one stage, and sends nothing."""
    lowered = pp.lower(actions(args))
    pp.check(lowered)
    stages = pp.cut_stages(model, layers_by_stage(args), mine)
    T = args.seq // args.cp // args.tp

    def shape(tokens):
        return len(tokens), T, MODELS[args.model].dim  # (B, T/cp/tp, D)

    return pp.Pipeline(stages, lowered, groups["pp"], shape, memory.Later)


def torch_optimizer(args, matrices, vectors):
    """Matrices decay, vectors (the norms) do not."""
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, fused=True)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def fp8_optimizer(args, matrices, vectors):
    """The same with FP8 moments (08)."""
    plain = torch_optimizer(args, matrices, vectors)
    return fp8.FP8AdamW(plain.param_groups, lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step, args):
    """Warm-up over the first tenth of the steps, then a cosine down to a tenth of --lr."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# --- 5. A training step ----------------------------------------------------------------------


def my_batches(args, groups, sample, step, device):
    """This rank's micro-batches: samples by its dp coordinate, a part of each by its cp one.

    The ranks of a tp group have the same: the vocabulary is cut over them, not the text.
    """
    numbers = dp.my_samples(step, args.batch, dist.get_rank(groups["dp"]), args.dp)
    rank = dist.get_rank(groups["cp"])
    return [
        tuple(cp.part(x, 1, rank, args.cp) for x in batch)  # (B, T) -> (B, T/cp)
        for batch in dp.micro_batches(sample, numbers, args.micro_batch, device)
    ]


def my_positions(args, groups, device):
    """Where in the sequence this rank's tokens are: (T/cp,)."""
    positions = torch.arange(args.seq, device=device)
    return cp.part(positions, 0, dist.get_rank(groups["cp"]), args.cp)


def train_step(job, groups, batches, positions, lr, gradients=None, loads=None, stop=False):
    """One step on this rank's micro-batches, all ranks together.

    Returns a tensor (loss, gradient norm, auxiliary loss, how many ranks gave `stop`, the loss of
    this rank's tokens), without having looked at a value: the host never waits for the device,
    except where 06 has to know how many rows to send. If loss, norm or auxiliary loss is not
    finite, no rank changes anything, and the gradients stay for a look at them.
    Two lists may ask for more: gradients receives this rank's shards of the summed gradients before
    and after clipping, loads how many of its tokens went to each expert, layer by layer.
    """
    model, pipeline, optimizer, scales = job
    N = dp.count_valid(batches, groups["tokens"])
    ep.begin_step(model, N)
    # Gradients may travel during the last backward, if it is known which one that is: not with
    # several stages on a rank, or weight gradients that are computed later.
    known = len(pipeline.stages) == 1 and not pipeline.queues
    optimizer.begin(len(batches) if known else None)
    loss = pipeline.step(batches, N, positions)
    optimizer.sum_gradients()  # forget
    if gradients is not None:
        gradients.append([flat.grad.clone() for flat in optimizer.flats])
    if loads is not None:
        loads.extend(moe.load.clone() for moe in ep.moe_layers(model))

    copies = dist.get_world_size(groups["tp"])  # each of its ranks has the loss of all its tokens
    auxiliary = sum(moe.loss for moe in ep.moe_layers(model))
    blank = loss.new_zeros((), dtype=torch.float64)
    loss_here, squares = loss.double() / copies, optimizer.squares()
    stats = torch.stack([loss_here, squares, blank + auxiliary, blank + stop])
    dist.all_reduce(stats, group=groups["control"])  # what all ranks have to agree on
    norm, finite = stats[1].sqrt(), torch.isfinite(stats).all()
    skip = 1 - finite.float()
    optimizer.scale(torch.where(finite, (MAX_NORM / (norm + 1e-6)).clamp(max=1), 1))
    if gradients is not None:
        gradients.append([flat.grad.clone() for flat in optimizer.flats])
    optimizer.step(lr, skip)
    ep.end_step(model, groups["dp·cp·tp"], skip)
    if scales:
        scales.end_step(groups["dp·cp·tp"], skip=skip)
    return torch.stack([stats[0], norm, stats[2], stats[3], loss.double()])


def sent(args, optimizer, groups, loads):
    """Calls and bytes a rank sends in a step: {(group, collective): (calls, bytes)}.

    loads: how many of its tokens went to each expert, by layer.
    """
    size = {name: dist.get_world_size(group) for name, group in groups.items()}
    rank = dist.get_rank(groups["pp"])
    costs = weights_sent(args, optimizer, size, rank)
    m = count_micro_batches(args)
    for key, (calls, nbytes) in activations_sent(args, rank).items():
        costs[key] = add(costs.get(key), (m * calls, m * nbytes))
    if loads:
        costs["ep", "all_to_all"] = experts_sent(args, groups["ep"], loads, rank)
        costs["dp·cp·tp", "all_reduce"] = dp.sent([8 * sum(map(len, loads))], size["dp·cp·tp"])
    if args.fp8 == "delayed":
        rows = linears(MODELS[args.model]) * len(sum(stage_kinds(args, rank).values(), []))
        scaled = fp8.sent(fp8.RECIPES["delayed"], rows, size["dp·cp·tp"])
        cost = scaled.get("all_reduce", (rows > 0, 0))  # in a group of one a call without bytes
        costs["dp·cp·tp", "all_reduce"] = add(costs.get(("dp·cp·tp", "all_reduce")), cost)
    if args.pp > 1:
        hidden = args.micro_batch * args.seq // args.cp // args.tp * MODELS[args.model].dim
        shape = args.pp, m, chunks_a_rank(args), rank, hidden * DTYPES[args.dtype].itemsize
        costs["pp", "send"] = pp.sent(schedule(args), *shape)
    # Control: the valid tokens in int64; loss, squared norm, auxiliary loss and stop in float64.
    costs["tokens", "all_reduce"] = dp.sent([8], size["tokens"])
    costs["control", "all_reduce"] = dp.sent([32], size["control"])
    return costs


def weights_sent(args, optimizer, size, rank):
    """Calls and bytes of weights gathered and gradients summed (03) in a step, a group of an axis
    having size[axis] ranks."""
    weight = DTYPES[args.dtype].itemsize
    gradient = memory.at_least_fp32(DTYPES[args.dtype]).itemsize
    mine, times = actions(args)[rank], {}

    def key(flat):
        return next(iter(flat.range))  # its first parameter

    flats = {key(flat): flat for flat in optimizer.flats}
    units = {
        stage: [[key(flat) for flat in unit] for unit in optimizer.units[part]]
        for stage, part in zip(my_stages(args, rank), optimizer.stages)
    }
    for stage, rows in units.items():
        for name in sum(rows, []):
            times.setdefault(name, pp.completions(mine, stage))
    passes = [(a.stage, a.kind == "F") for a in mine if a.kind != "W"]
    places, costs = placement(args, flats), {}
    for cut, same in dict.fromkeys(places.values()):
        n = size.get(cut, 1)
        lengths = {k: flat.length for k, flat in flats.items() if places[k] == (cut, same)}
        over_cut = zero.sent(
            args.zero, lengths, units, n, weight, gradient, times, passes, zero.reduces_by()
        )
        shards = [length // n * gradient for length in lengths.values()]
        for by, cost in [
            *(((cut, collective), cost) for collective, cost in over_cut.items()),
            *(((axis, "all_reduce"), dp.sent(shards, size[axis])) for axis in same),
        ]:
            costs[by] = add(costs.get(by), cost)
    return costs


def add(cost, more):
    """Two (calls, bytes) as one; the first may be None."""
    return tuple(map(sum, zip(cost or (0, 0), more)))


def stage_kinds(args, rank):
    """{stage: what each of its layers recomputes} for the stages of this rank of the pipeline."""
    counts = layers_by_stage(args)
    first = {stage: sum(counts[:stage]) for stage in my_stages(args, rank)}
    return {
        stage: [memory.kind_of(args.recompute, i) for i in range(start, start + counts[stage])]
        for stage, start in first.items()
    }


def activations_sent(args, rank):
    """Calls and bytes for one micro-batch, forward and backward: attention over cp, matrices over
    tp, and over tp, too, the largest numbers that FP8 scales are made of."""
    c, dtype, B, costs = MODELS[args.model], DTYPES[args.dtype], args.micro_batch, {}
    heads = c.heads // args.tp, max(c.kv_heads // args.tp, 1), c.head_dim
    last = args.pp * chunks_a_rank(args) - 1
    for stage, kinds in stage_kinds(args, rank).items():
        ends = dict(first=stage == 0, last=stage == last)
        rows = []
        if args.tp > 1:
            T = args.seq // args.cp
            rows.append(("tp", tp.sent(c, B, T, dtype, args.tp, kinds=kinds, **ends)))
        for kind in kinds:
            forwards = 2 if kind == "full" else 1
            if args.cp > 1:
                shape = B, args.seq, *heads, args.cp, dtype
                rows.append(("cp", cp.sent(args.cp_kind, *shape, forwards=forwards)))
            if has_experts(args) and args.cp * args.tp > 1:  # loads, for the auxiliary loss
                cost = dp.sent([8 * B * c.experts] * forwards, args.cp * args.tp)
                rows.append(("cp·tp", {"all_reduce": cost}))
            if args.fp8 == "tensor":
                scaled = fp8.sent(fp8.RECIPES["tensor"], linears(c), args.tp, 1, forwards)
                rows.append(("tp", scaled))
        for axis, row in rows:
            for collective, cost in row.items():
                costs[axis, collective] = add(costs.get((axis, collective)), cost)
    return costs


def linears(c):
    """Of a layer, those whose FP8 scales have a past or are shared (08): not the experts."""
    if hasattr(c, "experts"):
        return 4 + 3 * (c.shared > 0)
    return 7


def experts_sent(args, group, loads, rank):
    """Calls and bytes to the experts and back in a step, of this rank's loads."""
    c, n, m = MODELS[args.model], dist.get_world_size(group), count_micro_batches(args)
    mine, me, cost = torch.stack(loads), dist.get_rank(group), (0, 0)
    table = mine.expand(n, *mine.shape)  # of all ranks: (ep, layers, E)
    if n > 1 and dist.get_backend() != "fake":
        table = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(table, mine, group=group)
    kinds = sum(stage_kinds(args, rank).values(), [])
    for i, kind in enumerate(kinds):
        pairs = torch.stack([rows[i].view(n, -1).sum(1) for rows in table])  # (ep from, ep to)
        out, into = (int(x.sum() - pairs[me, me]) for x in (pairs[me], pairs[:, me]))
        calls, size = ep.sent(c, 0, DTYPES[args.dtype], n, kind, out, into)
        more = ep.sent_counts(c, n, kind)
        cost = add(cost, (m * (calls + more[0]), size + m * more[1]))
    return cost


def wire_table(wire, args, optimizer, groups, loads):
    """Print what a step sent beside the formulas; returns the failures."""
    formulas, rows, failures = sent(args, optimizer, groups, loads), [], []
    for key in dict.fromkeys([*formulas, *wire.calls]):  # also what no formula knows of
        if key[1] == "barrier":
            continue  # a group's first meeting, without a byte
        calls, size = formulas.get(key, (0, 0))
        if size or wire.bytes[key]:  # not of a group of one
            rows.append([*key, wire.calls[key], calls, wire.bytes[key], size])
        if (wire.calls[key], wire.bytes[key]) != (calls, size):
            found = f"{wire.calls[key]} calls, {wire.bytes[key]} bytes"
            failures.append(f"{' '.join(key)}: sent {found}, by formula {calls} and {size}")
    dp.table(["sent in a step", "by", "calls", "formula", "bytes", "formula"], rows)
    return failures


# --- 6. The proof: one device, written without any of it -------------------------------------


class PlainMoE(torch.nn.Module):
    """A mixture of experts by definition: every expert computes every token, most for nothing."""

    def __init__(self, c):
        super().__init__()
        self.config, self.router = c, memory.Linear(c.dim, c.experts)
        self.router.register_buffer("bias", torch.zeros(c.experts, dtype=torch.float32))
        self.experts = torch.nn.Module()
        up, down = (c.experts, c.ffn, c.dim), (c.experts, c.dim, c.ffn)
        for name, shape in [("gate_proj", up), ("up_proj", up), ("down_proj", down)]:
            setattr(self.experts, name, torch.nn.Parameter(torch.empty(shape)))
        if c.shared:
            self.shared_expert = memory.SwiGLU(replace(c, ffn=c.shared * c.ffn))

    def forward(self, x):  # (B, T, D)
        c, m, wide = self.config, self.experts, memory.at_least_fp32(x.dtype)
        logits = x.to(wide) @ self.router.weight.to(wide).T  # (B, T, E)
        scores = logits.softmax(-1) if c.score == "softmax" else logits.sigmoid()
        best = (scores + self.router.bias).sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(scores).scatter(-1, best[..., : c.top_k], 1)
        weights = scores * chosen
        if c.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared_expert(x) if c.shared else 0
        for e in range(c.experts):
            h = torch.nn.functional.silu(x @ m.gate_proj[e].T) * (x @ m.up_proj[e].T)
            out = out + (c.scale * weights[..., e, None]).to(x.dtype) * (h @ m.down_proj[e].T)
        counts = chosen.sum(1, keepdim=True)  # (B, 1, E)
        f = c.experts * counts / (c.top_k * x.shape[1])
        loss = c.balance * (f * scores / scores.sum(-1, keepdim=True)).sum()
        self.loss = loss + c.z * logits.logsumexp(-1).square().sum()
        self.load = counts.sum((0, 1))
        return out


def plain_model(args, dtype, device):
    """01's model; if it has experts, with the layer above."""
    c = MODELS[args.model]
    if not hasattr(c, "experts"):
        return memory.build(c, args.seed, dtype, device), []
    model = memory.build(replace(c, ffn=0), args.seed, dtype, device)
    for number, block in model.layers.items():
        block.mlp = PlainMoE(c).to(device)
        for name, p in block.mlp.named_parameters():
            value = memory.initial(f"layers.{number}.mlp.{name}", p.shape, args.seed)
            p.data = value.to(device, dtype)
            p.grad_dtype = memory.at_least_fp32(dtype)
    return model, [block.mlp for block in model.layers.values()]


def reference(args, sample, steps, dtype, device, make=None, prepare=None):
    """The same training on one device: the whole batch at once, plain backward, torch's optimizer.

    Uses the model of 01 and nothing of the chapters after it. Returns {"loss", "norm",
    "gradient", "clipped", "weight"}: dicts of tensors by step, by parameter and step, by parameter.
    make(args, matrices, vectors) gives another optimizer; prepare(model) changes the model and
    gives what to call after each step.
    """
    start, _ = plain_model(args, DTYPES[args.dtype], device)
    model, experts = plain_model(args, dtype, device)
    model.load_state_dict(start.state_dict())  # if dtype is wider, start from the rounded weights
    weights = dict(model.named_parameters())
    masters = list(weights.values())
    if dtype == torch.bfloat16:
        masters = [w.detach().float().requires_grad_() for w in masters]
    matrices = [w for w in masters if w.dim() > 1]
    make, after_step = make or torch_optimizer, prepare and prepare(model)
    optimizer = make(args, matrices, [w for w in masters if w.dim() <= 1])
    result = {"loss": {}, "norm": {}, "gradient": {}, "clipped": {}}
    for step in range(steps):
        pairs = [sample(i) for i in range(step * args.batch, (step + 1) * args.batch)]
        tokens, labels = (torch.stack(column).to(device) for column in zip(*pairs))
        N = (labels >= 0).sum()
        loss = model.loss(model(tokens), labels) / N
        auxiliary = sum(moe.loss for moe in experts) / N
        (loss + auxiliary).backward()
        for (name, w), master in zip(weights.items(), masters):
            result["gradient"][f"{name}, step {step + 1}"] = w.grad.clone()
            master.grad = w.grad
        norm = torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        for name, master in zip(weights, masters):
            result["clipped"][f"{name}, step {step + 1}"] = master.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        with torch.no_grad():
            for w, master in zip(weights.values(), masters):
                w.copy_(master)
                w.grad = master.grad = None
            for moe in experts:
                rate = moe.config.bias_rate
                moe.router.bias += rate * (moe.load.mean() - moe.load).sign()
        if after_step:
            after_step()
        result["loss"][f"step {step + 1}"] = loss.detach()
        if experts:
            result["loss"][f"auxiliary, step {step + 1}"] = auxiliary.detach()
        result["norm"][f"step {step + 1}"] = norm
    buffers = dict(model.named_buffers())
    return {**result, "weight": {n: w.detach() for n, w in (weights | buffers).items()}}


class Check:
    """Compares the first K steps of a run with one device."""

    BOUND = {  # relative errors that rounding explains and a mistake does not
        torch.float64: {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-11, "clipped": 1e-11,
                        "weight": 1e-10},
        torch.float32: {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4, "clipped": 1e-4,
                        "weight": 1e-4},
    }

    def __init__(self, args, sample, device):
        self.steps, self.dtype = min(args.check, args.steps), DTYPES[args.dtype]
        self.in_fp8 = bool(args.fp8 or args.fp8_optimizer)
        if self.in_fp8:  # after that, rounding has led two runs to different weights
            self.steps = min(self.steps, 2)
        # Rank 0 alone, as ranks may share cores. The others wait for it, however long it takes.
        self.active = self.steps > 0 and dist.get_rank() == 0
        self.ours = {"loss": {}, "norm": {}, "gradient": {}, "clipped": {}, "weight": {}}
        self.rounded = self.dtype not in self.BOUND or self.in_fp8
        if self.active:
            make = fp8_optimizer if args.fp8_optimizer else None
            prepare = args.fp8 and (lambda model: fp8.use(model, args.fp8).end_step)
            run = args, sample, self.steps
            self.expected = reference(*run, self.dtype, device, make, prepare)
            if self.rounded:
                self.exact = reference(*run, torch.float64, device)
        if self.steps:
            dist.barrier(dist.new_group(timeout=timedelta(days=1), group_desc="check"))

    def note(self, step, loss, norm, auxiliary, gradients, weights):
        """Keep what step `step` computed; returns the loss of one device."""
        key = f"step {step + 1}"
        self.ours["loss"][key] = torch.tensor(loss, dtype=torch.float64)
        if f"auxiliary, {key}" in self.expected["loss"]:
            self.ours["loss"][f"auxiliary, {key}"] = torch.tensor(auxiliary, dtype=torch.float64)
        self.ours["norm"][key] = torch.tensor(norm, dtype=torch.float64)
        for kind, tensors in zip(("gradient", "clipped"), gradients):
            self.ours[kind].update({f"{name}, {key}": g for name, g in tensors.items()})
        if weights is not None:  # after the last step that is compared
            self.ours["weight"] = {name: p.detach().clone() for name, p in weights.items()}
            if self.rounded:  # the bias of an expert moves by the sign of a small difference
                for name in [n for n in self.ours["weight"] if n.endswith("router.bias")]:
                    for one in (self.ours, self.expected, self.exact):
                        del one["weight"][name]
        return self.expected["loss"][key].item()

    def error_and_bound(self, kind):
        if not self.rounded:
            error = dp.worst_error(self.ours[kind], self.expected[kind])
            return error, self.BOUND[self.dtype][kind]
        # bf16 and FP8 round every product, and another layout rounds in another order. The bound is
        # 1.5 times the error of one device that does so, both against float64. Single numbers can
        # be right by luck on one device, so the norm's is that of all gradients as one vector, and
        # the loss's is 2⁻⁸, the spacing of bf16; in FP8 at least that.
        error = dp.worst_error(self.ours[kind], self.exact[kind])
        if kind == "norm":
            return error, 1.5 * self.whole_gradient_error()
        bound = 1.5 * dp.worst_error(self.expected[kind], self.exact[kind])[0]
        if kind == "loss":
            bound = max(bound, 2**-8) if self.in_fp8 else 2**-8
        return error, bound

    def whole_gradient_error(self):
        """One device's relative error of all gradients of a step as one vector; the worst step."""
        worst = 0.0
        for step in range(self.steps):
            names = [n for n in self.exact["gradient"] if n.endswith(f", step {step + 1}")]
            right = [self.exact["gradient"][n].double() for n in names]
            rounded = [self.expected["gradient"][n].double() for n in names]
            gap = torch.stack([(a - b).square().sum() for a, b in zip(rounded, right)]).sum()
            size = torch.stack([b.square().sum() for b in right]).sum()
            worst = max(worst, (gap / size).sqrt().item())
        return worst

    def report(self):
        """Print the table; returns the failures, gradients first."""
        rows, failures = [], []
        for kind in ("gradient", "clipped", "weight", "norm", "loss") if self.active else ():
            (error, where), bound = self.error_and_bound(kind)
            rows.append([kind, len(self.ours[kind]), f"{error:.1e}", f"{bound:.1e}", where])
            if not error <= bound:
                failures.append(f"{where}, {kind}: relative error {error:.3g} above {bound:.1g}")
        if rows:
            dp.table([f"steps 1-{self.steps}", "compared", "error", "bound", "worst"], rows)
        if failures and self.rounded and "auxiliary, step 1" in self.expected["loss"]:
            dp.log("rounding turns a near tie between experts either way: --dtype float64 decides")
        return failures


@cache
def whole_shapes(config):
    """{name: shape} of the parameters as one device has them."""
    experts = isinstance(config, ep.Config)
    with torch.device("meta"):
        whole = memory.Llama(replace(config, ffn=0) if experts else config)
        for block in whole.layers.values() if experts else ():
            block.mlp = ep.MoE(config)
    return {name: tuple(p.shape) for name, p in whole.named_parameters()}


def boxes(args, groups):
    """What this rank has of each parameter: {name: (shape of the whole tensor, box)}."""
    c, rank, result = MODELS[args.model], dist.get_rank(groups["tp"]), {}
    for name, shape in whole_shapes(c).items():
        box = tp.box(name, shape, rank, args.tp, c.kv_heads)
        if ep.is_expert(name):
            own, first = c.experts // args.ep, dist.get_rank(groups["ep"]) * c.experts // args.ep
            box[0] = (first, first + own)
        result[name] = shape, tuple(box)
    return result


def whole_tensors(args, tensors, groups):
    """The tensors by name as one device has them, of the stages of this rank."""
    heads, shapes, whole = MODELS[args.model].kv_heads, boxes(args, groups), {}
    for name, t in tensors.items():
        if ep.is_expert(name):
            parts = [torch.empty_like(t) for _ in range(args.ep)]
            dist.all_gather(parts, t.contiguous(), group=groups["ep"])
            whole[name] = torch.cat(parts)
        elif name in shapes:
            whole[name] = tp.whole_tensor(name, t, shapes[name][0], groups["tp"], heads)
        else:
            whole[name] = t  # a buffer
    return whole


def as_one_device(args, tensors, groups):
    """The tensors by name as one device has them: on rank 0 all, elsewhere those of its stages."""
    return from_all_stages(whole_tensors(args, tensors, groups), groups)


def from_all_stages(tensors, groups):
    """On rank 0, the tensors by name of its whole pipeline."""
    ranks = dist.get_process_group_ranks(groups["pp"])
    if len(ranks) == 1 or ranks[0] != 0:
        return tensors
    everyone = [None] * len(ranks) if dist.get_rank() == 0 else None
    mine = {name: t.detach().cpu() for name, t in tensors.items()}
    dist.gather_object(mine, everyone, 0, groups["pp"])
    if not everyone:
        return tensors
    device = next(iter(tensors.values())).device
    return {name: t.to(device) for part in everyone for name, t in part.items()}


def replicas_differ(weights, boxes):
    """The names of weights that are not bit for bit the same on all ranks that hold this part."""
    mine = {
        (name, boxes.get(name)): zlib.crc32(w.detach().cpu().contiguous().view(torch.uint8).numpy())
        for name, w in weights.items()
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    sums = {}
    for key, crc in (item for rank in everyone for item in rank.items()):
        sums.setdefault(key, set()).add(crc)
    return sorted({name for (name, _), different in sums.items() if len(different) > 1})


def own_weights(args, job):
    """Weights and buffers by name: the model's own, or, where ZeRO-3 cut them, gathered."""
    weights = dict(job.model.named_parameters())
    if args.zero == 3:
        weights = job.optimizer.gathered([flat.shard for flat in job.optimizer.flats])
    return weights | dict(saved_buffers(job.model))


def saved_buffers(model):
    """(name, tensor) of what the model learns without a gradient: the bias of the experts (06)."""
    for name, tensor in model.named_buffers():
        if name.endswith("router.bias"):
            yield name, tensor


def buffer_pieces(job, groups):
    """The same, and FP8's past (08), as pieces of a checkpoint; one rank of a stage writes them."""
    owned = dist.get_rank(groups["dp·cp·tp"]) == 0
    scales = job.scales.tensors() if job.scales else {}
    for kind, tensors in (("buffer", dict(saved_buffers(job.model))), ("amax", scales)):
        for name, t in tensors.items():
            yield zero.Piece(name, kind, (len(t),), ((0, len(t)),), 0, len(t), t, owned)


# --- 7. Training -----------------------------------------------------------------------------


class Timeline(dp.Trace):
    """What this rank did when, by host clock: the pipeline's actions, and "wait", blocked in them.

    Every wait for a collective or a transfer, torch's own included, goes through Work.wait, so it
    is taken over while the run lasts. NCCL's wait only queues: the times are those of CPU ranks.
    """

    ACTIONS = {"forward": "F", "input_grad": "I", "weight_grads": "W", "backward": "B"}

    def __init__(self, group, pipeline):
        super().__init__(group)
        self.wait = dist.Work.wait
        for method, letter in self.ACTIONS.items():
            setattr(pipeline, method, partial(self.act, getattr(pipeline, method), letter))

    def act(self, method, letter, stage, micro_batch):
        with self.span(f"{letter}{micro_batch}", lane=f"stage {stage}"):
            method(stage, micro_batch)

    def __enter__(self):
        def wait(work, *timeout):
            with self.span("wait", lane="waiting"):
                return self.wait(work, *timeout)

        dist.Work.wait = wait
        return self

    def __exit__(self, *_):
        dist.Work.wait = self.wait

    def share(self, name, begin):
        """Of the time since `begin`, how much was spent in spans of this name."""
        spent = sum(e - max(b, begin) for _, n, b, e in self.spans if n == name and e > begin)
        return spent / (self.now() - begin)


def mfu(args, device, tokens_per_second):
    """Share of the peak spent on useful FLOPs, per rank; None where the peak is not known."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else "cpu"
    peaks = [p for (gpu, dtype), p in memory.PEAKS.items() if gpu in name and dtype == "bf16"]
    count = ep.moe_flops_per_token if has_experts(args) else memory.flops_per_token
    useful = count(MODELS[args.model], args.seq) * tokens_per_second / dist.get_world_size()
    known = peaks and args.dtype == "bfloat16" and not args.fp8
    return memory.utilisation(useful, 1, peaks[0]) if known else None


def facts(args, tokens):
    """What must be the same for a resumed run to be the run that was interrupted.

    Not the layout, and not --steps: a run may be made longer, its learning rate follows.
    """
    names = ("model", "seed", "batch", "seq", "dtype", "optimizer", "lr", "fp8", "fp8_optimizer")
    return {name: getattr(args, name) for name in names} | {"data": dp.fingerprint(tokens)}


def resume(args, job, groups, run):
    """Load the newest good checkpoint; returns how many steps were done, 0 if there is none."""
    folder = zero.newest(args.ckpt, groups["control"], dp.log)
    if folder is None:
        dp.log(f"no checkpoint in {args.ckpt}: starting from the beginning\n")
        return 0
    saved = zero.read_index(folder)["facts"]
    if other := [f"{k} {run[k]}, not {saved.get(k)}" for k in run if run[k] != saved.get(k)]:
        raise zero.CheckpointError(f"{folder} is of another run: {', '.join(other)}")
    more, control = buffer_pieces(job, groups), groups["control"]
    index = zero.restore(folder, job.optimizer, control, dp.log, boxes(args, groups), more)
    if job.scales:
        job.scales.filled()
    step = index["step"]
    dp.log(f"resumed from {folder}: {step} steps done\n")
    return step


def save(args, step, job, groups, run):
    """Write a checkpoint of `step` steps. If that fails, training goes on; returns the failures."""
    begin = time.perf_counter()
    try:
        weights = job.optimizer.state(boxes(args, groups))
        pieces = itertools.chain(weights, buffer_pieces(job, groups))
        size = zero.save(args.ckpt, step, pieces, run, groups["control"])
    except zero.CheckpointError as error:
        dp.log(f"checkpoint of step {step} not written ({error}); the one before it stands")
        return [f"checkpoint of step {step}: {error}"]
    dp.log(f"checkpoint of step {step}: {size:,} bytes in {time.perf_counter() - begin:.2f} s")
    return []


def train(args):
    """The whole job of one rank; returns the exit code."""
    stopping = []  # after SIGTERM; the ranks agree on the step in train_step
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    device, sizes = dp.device(), layout(args)
    groups = make_groups(args, sizes)
    tokens = dp.open_tokens(args.data)
    dp.agree(dp.fingerprint(tokens), "the training data", groups["control"])
    sample = dp.Samples(tokens, args.seq, args.seed)
    job = compose(args, groups, device)
    describe(args, sizes)
    check = Check(args, sample, device)
    run, unsaved, skipped, first = facts(args, tokens), [], 0, 0
    if args.resume:
        try:
            first = resume(args, job, groups, run)
        except zero.CheckpointError as error:  # the same on all ranks
            return dp.verdict("09_combined_5d", [str(error)])
    wire, csv = dp.Wire(), Csv(args.csv, first)
    positions, loads = my_positions(args, groups, device), []
    timeline, traced = Timeline(groups["control"], job.pipeline), []
    show_step = Columns(args, device)
    for step in range(first, args.steps):
        begin, lr = timeline.now(), learning_rate(step, args)
        gradients = [] if step < check.steps else None
        with timeline, wire if step == first else contextlib.nullcontext():
            with timeline.span("data", "data"):
                batches = my_batches(args, groups, sample, step, device)
            stats = train_step(job, groups, batches, positions, lr, gradients,
                               loads if step == first else None, bool(stopping))  # fmt: skip
            # The one look at values, for the line below.
            loss, norm, auxiliary, stop, own = stats.tolist()
        seconds = timeline.now() - begin
        waits = [timeline.share(name, begin) for name in ("wait", "data")]
        traced += timeline.spans if args.trace and step < first + TRACED else []
        timeline.spans.clear()
        expected = "-"
        if step < check.steps:  # whole tensors take all ranks
            gradients = [as_one_device(args, job.optimizer.gathered(g), groups) for g in gradients]
            weights = None
            if step + 1 == check.steps:
                weights = as_one_device(args, own_weights(args, job), groups)
            if check.active:
                expected = f"{check.note(step, loss, norm, auxiliary, gradients, weights):.6f}"
        show_step(step, loss, expected, auxiliary, norm, lr, seconds, waits)
        csv.write(step + 1, loss, norm, lr, seconds, *waits)
        done = step + 1
        # The numbers are the same on all ranks, so all take the same way here.
        if not math.isfinite(loss + norm + auxiliary):
            words = f"step {done}: loss {loss}, gradient norm {norm}, "
            words += f"auxiliary loss {auxiliary}, " * has_experts(args)
            words += "no weight was changed; "
            words += first_not_finite(args, own, job.optimizer, groups)
            if args.on_nonfinite == "stop":
                return dp.verdict("09_combined_5d", [words])
            dp.log(f"skipped: {words}")
            skipped += 1
            if job.scales and first == 0 and skipped == done:
                job.scales.fresh = True  # still without a past (08)
        last = stop or done == args.steps
        if args.ckpt and (last or args.save_every and done % args.save_every == 0):
            unsaved = save(args, done, job, groups, run)
        if stop and done < args.steps:
            unsafe = "" if args.ckpt else ", nothing saved: no --ckpt"
            dp.log(f"SIGTERM: stopped after step {done}{unsafe}")
            break

    if args.trace:
        timeline.spans = traced
        everyone = timeline.everyone()
        if dist.get_rank() == 0:
            dp.write_trace(args.trace, everyone)
    failures, stopped = [], first < args.steps and done < args.steps
    if first < args.steps:
        failures = report(args, job, groups, wire, loads, check, done)
    if skipped:
        dp.log(f"{skipped} of {done - first} steps skipped: loss or gradient not finite")
    if not stopped:
        show_text(args, job.pipeline, groups, tokens, device)
    return dp.verdict("09_combined_5d", failures + unsaved + csv.failures)


def first_not_finite(args, own, optimizer, groups):
    """Where a loss or gradient that is not finite was seen first: rank, stage, parameter.

    Backward spreads it from later layers to earlier ones, so a gradient's fault arose at the last
    that has it. Gradients are summed already: the rank is the first that holds the sum.
    """
    order, stages = [*boxes(args, groups)], my_stages(args, dist.get_rank(groups["pp"]))
    bad = [  # (is it a loss? place in the model, parameter, stage), the largest arose first
        (False, order.index(name), name, stages[optimizer.lane_of[flat]])
        for flat in optimizer.order
        for name, (_, _, gradient) in flat.pieces(flat.grad).items()
        if not gradient.isfinite().all()
    ]
    bad += [(True, 0, "", stages[-1])] * (not math.isfinite(own))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, max(bad, default=None))
    found = [(seen, -rank) for rank, seen in enumerate(everyone) if seen]
    if not found:
        return "every value is finite, only their squares are not"
    (loss, _, name, stage), rank = max(found)
    what = "its loss" if loss else f"the gradient of {name}"
    return f"first on rank {-rank}, stage {stage}: {what}"


def held_table(held):
    rows = [[kind, len(ts), sum(t.nbytes for t in ts)] for kind, ts in held.items() if ts]
    dp.table(["held between steps", "tensors", "bytes"], rows)


def describe(args, sizes):
    world = dist.get_world_size()
    axes = " · ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "1"
    dp.header("09 combined 5D", f"world {world} = {axes}")
    count = ep.moe_parameters if has_experts(args) else memory.parameter_count
    dp.log(f"{args.model}   {args.dtype}   {count(MODELS[args.model]):,} parameters  "
           f" {args.batch} x {args.seq} tokens"
           f" = dp {args.dp} x {count_micro_batches(args)} x {args.micro_batch}")  # fmt: skip
    if args.pp > 1:
        layers = " ".join(map(str, layers_by_stage(args)))
        dp.log(f"pipeline {args.schedule}, layers by stage {layers}")
    if has_experts(args):
        c = MODELS[args.model]
        dp.log(f"{c.experts} experts a layer over ep {args.ep} ranks, {c.top_k} for each token")
    if args.fp8 or args.fp8_optimizer:
        what = [f"products {args.fp8}"] * bool(args.fp8) + ["moments"] * args.fp8_optimizer
        dp.log(f"FP8: {', '.join(what)}")
    dp.log()


class Columns:
    """The line of a step. wait and data are the shares of the step that rank 0 stood still for
    communication and spent on making its batch."""

    def __init__(self, args, device):
        self.args, self.device = args, device
        self.cpu, self.moe = device.type == "cpu", has_experts(args)
        dp.log(" step     loss  one device" + "   auxiliary" * self.moe + "   norm       lr"
               "  tokens/s  a rank" + ("  wait  data" if self.cpu else "    MFU"))  # fmt: skip

    def __call__(self, step, loss, expected, auxiliary, norm, lr, seconds, waits):
        speed = self.args.batch * self.args.seq / seconds
        line = f"{step + 1:5} {loss:8.6f}  {expected:>10}" + f"    {auxiliary:8.6f}" * self.moe
        line += f" {norm:6.3f} {lr:8.1e} {speed:9,.0f} {speed / dist.get_world_size():7,.0f}"
        used = mfu(self.args, self.device, speed)
        if self.cpu:
            line += "".join(f"  {wait:4.0%}" for wait in waits)
        else:
            line += f"  {used:5.1%}" if used else "   none"
        dp.log(line)


class Csv:
    """A line for each step, in full precision, on rank 0 if a file is named."""

    HEAD = "step,loss,grad_norm,lr,seconds,wait,data\n"

    def __init__(self, path, first):
        """Keep what the file says of the first steps, if they were done by an earlier run."""
        self.path, self.file, self.failures = path, None, []
        if path is not None and dist.get_rank() == 0:
            old = Path(path).read_text(errors="replace") if first and os.path.isfile(path) else ""
            rows = re.finditer(r"^(\d+),.*\n", old, re.M)  # the last line may be torn
            kept = [row[0] for row in rows if int(row[1]) <= first]
            self.attempt(self.open, [self.HEAD, *kept])

    @classmethod
    def is_ours(cls, path):
        with open(path, errors="replace") as file:
            return file.readline(200).split(",")[:2] in (["step", "loss"], [""])

    def open(self, lines):
        aside = f"{self.path}.tmp" if lines[1:] else self.path  # a kill here shall not lose them
        self.file = open(aside, "w", buffering=1)
        self.file.writelines(lines)
        if aside != self.path:
            os.replace(aside, self.path)

    def write(self, *row):
        if self.file:
            self.attempt(self.file.write, ",".join(map(repr, row)) + "\n")

    def attempt(self, act, what):
        """A full disk does not stop the training; the verdict tells of it."""
        try:
            act(what)
        except OSError as error:
            self.file, self.failures = None, [f"--csv {self.path}: {error}"]
            dp.log(f"{self.failures[0]}; no further lines")


def report(args, job, groups, wire, loads, check, done):
    """Bytes beside formulas, errors beside bounds; returns the failures."""
    dp.log()
    held_table(job.optimizer.tensors())
    dp.log()
    failures = wire_table(wire, args, job.optimizer, groups, loads)
    if args.check:
        dp.log()
        if done < check.steps:
            dp.log(f"stopped before the {check.steps} steps of --check: nothing was compared")
        else:
            failures = check.report() + failures  # parameters first: they say more
        differing = replicas_differ(own_weights(args, job), boxes(args, groups))
        dp.log(f"replicas: {len(differing)} weights differ between ranks")
        failures += [f"{name} differs between ranks" for name in differing]
    return failures


@torch.no_grad()
def show_text(args, pipeline, groups, tokens, device, length=160, seconds=5.0):
    """At most `length` tokens from the trained model, as many as take about `seconds`."""
    # One replica writes; where weights or experts lie on more ranks, all do.
    replica = dist.get_rank(groups["dp"]) == dist.get_rank(groups["cp"]) == 0
    writes, begin = args.zero == 3 or args.ep > 1 or replica, time.perf_counter()
    for stage in pipeline.stages.values():
        for layer in stage.layers.values():
            layer.self_attn.attend = memory.attend  # the whole sequence on every rank
    generator = torch.Generator(device).manual_seed(args.seed)
    ids = torch.from_numpy(tokens[:16].astype("int64")).to(device)[None]  # (1, T)
    if writes:
        next_logits(args, pipeline, groups, ids)  # how long does one take?
    count = torch.tensor(int(seconds / (time.perf_counter() - begin)), device=device)
    dist.broadcast(count, 0, group=groups["control"])
    for _ in range(min(length, count.item()) if writes else 0):
        logits = next_logits(args, pipeline, groups, ids[:, -args.seq :])
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, drawn[None]), 1)
    ids = ids[0].tolist()
    text = " ".join(map(str, ids))
    if tokens.dtype.itemsize == 1:
        text = "".join(chr(i) if 32 <= i < 127 or i == 10 else "?" for i in ids)
    lines = [line[:76] for line in text.splitlines() if line.strip()]
    dp.log("\nthe model writes\n  | " + "\n  | ".join(lines[:8]) + "\n")


def next_logits(args, pipeline, groups, ids):
    """The logits (V,) of what follows ids (1, T), on every rank of a replica."""
    # The sequence is padded to what tp divides; causal attention looks at nothing behind T.
    c, T = MODELS[args.model], ids.shape[1]
    x = torch.nn.functional.pad(ids, (0, -T % args.tp))
    positions, width = torch.arange(x.shape[1], device=x.device), x.shape[1] // args.tp
    owners = pp.ranks_of_stages(schedule(args), args.pp, chunks_a_rank(args))
    for stage, owner in enumerate(owners):  # one after the other; each tells all the result
        if stage in pipeline.stages:
            x = pipeline.stages[stage](x, positions)
        elif stage < len(owners) - 1:
            x = torch.empty(1, width, c.dim, dtype=DTYPES[args.dtype], device=ids.device)
        else:
            shape = 1, x.shape[1] * args.tp, -(-c.vocab // args.tp)
            x = torch.empty(shape, dtype=DTYPES[args.dtype], device=ids.device)
        source = dist.get_global_rank(groups["pp"], owner)
        x = x.contiguous()
        dist.broadcast(x, source, group=groups["pp"])
    logits = x[0, T - 1].float()
    return tp.whole_tensor("lm_head.weight", logits, (c.vocab,), groups["tp"], c.kv_heads)


# --- 8. A dry run ----------------------------------------------------------------------------


def even_load(args):
    """How many of a micro-batch's (token, expert) pairs each expert gets, if all get the same."""
    c, n = MODELS[args.model], args.micro_batch * args.seq // args.cp // args.tp
    each, more = divmod(n * c.top_k, c.experts)
    return [each + (e < more) for e in range(c.experts)]


def even_splits(args, rank, counts):
    """What 06's `splits` gives then, for a rank of ep: rows for and from each rank's experts."""
    load, size = even_load(args), MODELS[args.model].experts // args.ep
    give = [load[i : i + size] for i in range(0, len(load), size)]
    return [give, [give[rank]] * args.ep]


def dry_step(args, world):
    """One real step of one rank of any world, on tensors without contents: what it holds and does.

    held         {kind: tensors} between two steps
    activations  bytes kept for backward when most are: after the forward pass after which most live
    peak         the most bytes that lived at once, with all that a step needs for a moment
    flops        (of matmuls, of attention)
    wire         what was sent
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=world)
    groups, loads = make_groups(args, layout(args)), []
    even = partial(even_splits, args, dist.get_rank(groups["ep"])) if has_experts(args) else None
    with FakeTensorMode(), mock.patch.object(ep, "splits", even):
        job = compose(args, groups, "cpu")
        pipeline = job.pipeline
        empty = torch.zeros(args.seq, dtype=torch.int64)
        batches = my_batches(args, groups, lambda i: (empty, empty), 0, "cpu")
        positions = my_positions(args, groups, "cpu")
        live, most = memory.Live(held=lambda: everything_held(job, batches, positions)), [0]
        pipeline.forward = partial(_note_activations, pipeline, pipeline.forward, live, most)
        with live, dp.Wire() as wire, memory.Flops() as flops:
            train_step(job, groups, batches, positions, args.lr)
        held = job.optimizer.tensors()
    if has_experts(args):
        load = torch.tensor(even_load(args)) * count_micro_batches(args)
        loads = [load] * len(ep.moe_layers(job.model))
    return SimpleNamespace(held=held, activations=most[0], peak=live.peak, wire=wire,
                           flops=(flops.matmuls, flops.attention),
                           optimizer=job.optimizer, groups=groups, loads=loads)  # fmt: skip


def everything_held(job, batches, positions):
    """All tensors that live whatever the schedule does: states, sums on their way, the batch."""
    optimizer, flats = job.optimizer, job.optimizer.flats
    states = [t for f in flats for t in (f.whole, f.shard, f.master, f.grad, f.full)]
    states += [t for state in optimizer.inner.state.values() for t in state.values()]
    states += [*job.model.buffers(), *(t for batch in batches for t in batch), positions]
    return [t for t in states if t is not None]


def _note_activations(pipeline, forward, live, most, stage, number):
    forward(stage, number)
    # Not what is between two stages: it waits for its transfer, and may wait for several others.
    moving = [t for _, t in pipeline.sending] + [get() for get in pipeline.values.values()]
    moving = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in moving}
    most[0] = max(most[0], live.bytes()["activations"] - sum(moving.values()))


def dry_run(args, world):
    step, sizes = dry_step(args, world), layout(args)
    axes = " · ".join(f"{axis} {n}" for axis, n in sizes.items())
    print(f"09 dry run   rank {args.rank} of {world} = {axes}   {args.model}   {args.dtype}\n")
    held_table(step.held)
    print(f"\nkept for backward: {step.activations:,} bytes; the fullest moment: {step.peak:,}")
    print(f"FLOPs: {step.flops[0]:,} in matmuls, {step.flops[1]:,} in attention")
    if has_experts(args):
        print("every expert is taken to get as many tokens as every other")
    print()
    failures = wire_table(step.wire, args, step.optimizer, step.groups, step.loads)
    print(f"09_combined_5d FAIL: {failures[0]}" if failures else "09_combined_5d OK")
    return 1 if failures else 0


def main(argv=None):
    args = parse(argv)
    need = math.prod(layout(args).values())
    world = int(os.environ.get("WORLD_SIZE", need))
    if args.dry_run:
        world = args.world or need
    if wrong := violations(args, world):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each machine: files may differ
            print("\n".join(f"09_combined_5d: {rule}" for rule in wrong), file=sys.stderr)
        return 2
    if args.dry_run:
        return dry_run(args, world)
    return max(dp.launch(train, world, args, timeout=args.timeout))


if __name__ == "__main__":
    raise SystemExit(main())
