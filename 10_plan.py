"""
10 · Which layout, on which cluster, how fast

Idea      Chapters 01 to 07 say, as functions, what each axis makes a rank hold, compute and send.
          Add what the hardware does in a second, say what hides behind what, and every layout of a
          model on a cluster has a price before anybody rents it. Then try them all.
Picture   a layout ─┬─ bytes held (01, 03-07) ─────────────── fits in a GPU, or not
                    ├─ FLOPs, bytes moved in memory ────────┐
                    ├─ bytes sent a micro-batch, if exposed ┴ sum ┬ the slower, m times ─────┐
                    ├─ launches by the host ──────────────────────┘                          │
                    ├─ stages, schedule ──────────── pipeline fill ──────────────────────────┼─ step
                    └─ gradients, weights, optimizer, once a step ───────────────────────────┘
Cost      of a collective: hops · latency + bytes a rank sends / rate of its slowest link (α–β). A
          ring that spans nodes leaves each through as many network cards as it has ranks there;
          to all others, or to a neighbour alone, a rank sends through its own card.
          of a step: m · slowest stage + fill + what of dp is not hidden + optimizer
Pays      always, before a run: it takes seconds. How far to believe it: tests/validate.py holds it
          against published runs. Fitted to the runs of one model it foretells those of another
          with a median error of about 4 %, where six constants on FLOPs and bytes are 18 % off,
          and its first choice was at worst 8 % slower than the fastest that was measured. On other
          people's software and hardware it is about 10 % off. What 09 holds, computes and sends
          section 8 knows to the byte, held to its dry run; the estimates (section 4) add what a
          production stack and the allocator need beyond that.
Forget    the host. One that launches operation by operation is slower than a GPU with little to
          do: without that line of the estimate the error above is not 4 but 12 %.
Run       python 10_plan.py
          python 10_plan.py --model llama3-70b --dp 8 --tp 8 --pp 4 --zero 1 --seq 8192
          python 10_plan.py --model llama3-70b --gpus 512 --gpu h100 --seq 8192 --batch-tokens 4M
          python 10_plan.py --gpus 8-4096         (the best layout for each power of two)
          python 10_plan.py --dry-run --model llama3-8b --dp 4 --tp 8 --pp 4 --batch 16 --rank 77
          python 10_plan.py --calibrate mine.json                    (then: --hardware mine.json)
Copy      Hardware, HARDWARE, MEASURED, COLUMN, HOP, interpolate, link, transfer: the seconds of a
          collective on a cluster. Imports: math, dataclass, replace, lru_cache.
Read      Megatron-LM (2104.04473), Llama 3 (2407.21783) section 3.3, the Ultra-Scale Playbook,
          hierarchical all-reduce (1807.11205), rooflines (Williams, Waterman, Patterson 2009)
"""

import argparse
import difflib
import json
import math
import re
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from types import SimpleNamespace
from typing import NamedTuple

import torch

memory = import_module("01_memory")
dp = import_module("02_dp")
tp = import_module("04_tp_sp")
pp = import_module("05_pp_1f1b")
ep = import_module("06_ep")
cp = import_module("07_cp_ring")
combined = import_module("09_combined_5d")

MODELS, divisors = combined.MODELS, combined.divisors
BF16, E, WIDE = torch.bfloat16, 2, 4  # computed in; bytes of a number of it, and of one of fp32


# --- 1. Hardware, as data -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: caches are keyed by it
class Hardware:
    """A GPU and its links. Rates are what one GPU sends, in one direction, in bytes/s."""

    peak: float  # dense bf16 FLOP/s
    fp8: float  # dense fp8 FLOP/s; 0: none
    sustained: float  # share of the peak that large products reach, at the clock its power allows
    memory: float  # bytes, as the driver reports them
    hbm: float  # bytes/s to its own memory
    node: int  # GPUs that share the fast link
    inside: float  # NVLink, Infinity Fabric
    cards: int  # network cards of a node
    card: float  # bytes/s of one
    price: float  # dollars for a GPU-hour, a round number of 2025
    # Assumed, of the size that benchmarks of collectives show; `curve` replaces `reached`.
    reached: float = 0.8  # share of a link's rate that a large collective reaches
    hop: float = 12e-6  # seconds until the next node has a first byte; inside it HOP
    curve: tuple = ()  # measured rates: ((nodes, all_reduce, all_gather, reduce_scatter), …)

    @property
    def across(self):
        """A GPU's share of the node's cards."""
        return self.cards * self.card / self.node


# From the makers' data sheets; `sustained`, rounded, from public benchmarks of their libraries.
HARDWARE = {  # peak, fp8, sustained, memory, hbm, node, inside, cards, card, price
    "a100": Hardware(312e12, 0, 0.87, 85.9e9, 2.04e12, 8, 300e9, 8, 25e9, 1.5),
    "h100": Hardware(989.4e12, 1979e12, 0.70, 85.5e9, 3.35e12, 8, 450e9, 8, 50e9, 2.5),
    "h200": Hardware(989.4e12, 1979e12, 0.70, 150.7e9, 4.8e12, 8, 450e9, 8, 50e9, 3.0),
    "b200": Hardware(2250e12, 4500e12, 0.75, 192e9, 8e12, 8, 900e9, 8, 50e9, 5.0),
    "gb200": Hardware(2450e12, 4900e12, 0.75, 199e9, 8e12, 72, 900e9, 72, 50e9, 6.0),
    "mi300x": Hardware(1307e12, 2615e12, 0.50, 206e9, 5.3e12, 8, 448e9, 8, 50e9, 2.5),
}
# The playbook's cluster: H100s, 32 cards of 100 Gbit/s a node (AWS). What its collectives of 256 MB
# reached, in 1e9 bytes/s, by the number of nodes that took part; the means of many runs. A hop is
# what each of a block's 10 calls took longer with tp 16 than with tp 8, at small micro-batches.
MEASURED = [
    (1, 436.0, 249.8, 249.7), (2, 361.7, 184.6, 181.6), (4, 160.1, 119.0, 115.8),
    (8, 99.6, 69.0, 68.6), (16, 84.7, 55.0, 54.5), (32, 64.9, 28.0, 27.9), (64, 32.9, 11.0, 11.1),
]  # fmt: skip
HARDWARE["h100-efa"] = replace(
    HARDWARE["h100"],
    cards=32,
    card=12.5e9,
    hop=3.4e-4,
    curve=tuple((n, *(1e9 * rate for rate in rates)) for n, *rates in MEASURED),
)
COLUMN = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 3}
HOP = 3e-6  # seconds until a neighbour in the node has a first byte; assumed


def interpolate(table, x, column):
    """Between the rows of a table that lie around x, on logarithmic axes; flat beyond its ends."""
    x = min(max(x, table[0][0]), table[-1][0])
    for low, high in zip(table, table[1:]):
        if x <= high[0]:
            t = math.log(x / low[0]) / math.log(high[0] / low[0])
            return low[column] ** (1 - t) * high[column] ** t
    return table[0][column]


@lru_cache(None)
def link(hw, n, stride, nodes, collective):
    """(seconds before the last rank has a first byte, bytes/s) for a group of n ranks.

    stride: how far apart in rank neighbours of the group are, so how many of them share a node.
    """
    together = max(1, min(n, hw.node // stride))  # of the group, in a node
    spans = -(-n // together)  # nodes
    borders = min(spans - 1, 1) if hw.curve else spans - 1  # a curve has the others' in it
    hops = (together - 1) * HOP + borders * hw.hop
    rate = hw.inside * hw.reached
    if spans > 1:
        # A ring's bytes leave a node once, through the cards of all its ranks of the group. To a
        # neighbour alone a rank sends through its own card; so do all to all what leaves the node.
        cards = {"send": 1, "all_to_all": (n - 1) / (n - together)}.get(collective, together)
        rate = min(rate, hw.across * cards * hw.reached)
    if hw.curve and collective in COLUMN:
        # The curve is by nodes. Neighbours meet at the first switch, so theirs are the group's
        # own; ranks farther apart share the higher switches with the whole job.
        reach = spans if stride == 1 else nodes if spans > 1 else 1
        measured = interpolate(hw.curve, reach, COLUMN[collective])
        rate = min(measured, hw.across * together) if spans > 1 else measured
    return hops, rate


def transfer(hw, calls, nbytes, n, stride, nodes, collective):
    """Seconds in which every rank of a group sends so many bytes in so many calls."""
    hops, rate = link(hw, n, stride, nodes, collective)
    return calls * hops + float(nbytes) / rate


# --- 2. The software, as data ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stack:
    """What no data sheet says: how well the software uses the hardware."""

    # Fitted by tests/validate.py, which prints the fits: for `eager` the first eight, to the
    # playbook's runs; for `fused` matmul, passes and attention, to published_perf.csv, the others
    # being assumed.
    matmul: float  # share of the sustained rate that a large product of a run reaches
    passes: float  # bytes that elementwise operations move, over those that `touched` counts
    host: float  # seconds in which the host launches a layer, forward and backward
    tp_exposed: float  # share of tp's transfers behind which no product hides
    step: float  # seconds a step, whatever its layout: clipping, logging, the next batch
    spread: float = 0.0  # by so much for each node of the job the slowest of its hosts is slower
    crossing: float = 0.0  # seconds a layer and tp rank, once a pipeline with tp spans nodes
    unbucketed: float = 0.0  # seconds a dp rank, for ZeRO-0's gradients in a pipeline
    attention: float = 0.5  # as matmul, for a fused attention kernel; for `eager` assumed
    # Not fitted.
    fp8: bool = False  # products of the blocks in FP8
    behind: float = 0.25  # share of the work behind which gradients and weights travel; assumed
    # Bytes beyond what 01 to 07 keep: for `eager` the copies that its operations one by one leave.
    wide: float = 0.0  # for each token and unit of width of a block: copies of its norms in fp32
    gathered: float = 0.0  # inputs of tp's column-parallel products that a block keeps whole
    logit: float = 0.0  # for each logit: copies of the loss in fp32
    gradient: float = 0.0  # for each parameter: bf16 gradients beside those in fp32
    reserve: float = 5e9  # of the GPU's memory: context, buffers of NCCL, holes


STACKS = {
    # Plain PyTorch launched operation by operation (nanotron).
    "eager": Stack(
        matmul=0.69, passes=0.68, host=4.45e-3, tp_exposed=0.48, step=0.06, spread=1.9e-3,
        crossing=2.05e-3, unbucketed=5e-3, wide=12, gathered=2, logit=6, gradient=2,
    ),
    # Compiled or fused kernels, as in Megatron-LM or torchtitan.
    "fused": Stack(matmul=0.895, passes=0.946, host=1e-3, tp_exposed=0.48, step=0.02, behind=0.5,
                   attention=0.36),
}  # fmt: skip


# --- 3. A layout ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A model, and what 09 is told to do with it; the names are those of 09's flags."""

    model: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    recompute: str = "none"
    seq: int = 4096
    micro_batch: int = 1
    batch: int = 1  # global, in sequences
    schedule: str = "1f1b"
    chunks: int = 2  # if interleaved
    cp_kind: str = "ring"
    hybrid: int = 0
    dtype: str = "bfloat16"
    fp8: str | None = None  # (08) the closed forms of section 8 are for none; see Stack.fp8

    @property
    def world(self):
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stage_ranks(self):
        """Ranks that hold the same stage of the pipeline."""
        return self.dp * self.cp * self.tp

    @property
    def m(self):
        """Micro-batches a step."""
        return combined.count_micro_batches(self)

    @property
    def v(self):
        """Chunks of layers on each rank of the pipeline."""
        if self.pp == 1:
            return 1
        return {"interleaved": self.chunks, "zb-v": 2}.get(self.schedule, 1)

    def __str__(self):
        axes = [f"{a}{getattr(self, a)}" for a in ("dp", "cp", "tp", "pp", "ep")]
        parts = [a for a in axes if a[2:] != "1"] or ["dp1"]
        parts += [f"z{self.zero}", f"{self.m}x{self.micro_batch}"]
        parts += [self.recompute.replace("selective", "sel")] * (self.recompute != "none")
        way = f"v{self.chunks}" if self.schedule == "interleaved" else self.schedule
        return " ".join(parts + [way] * (self.pp > 1 and way != "1f1b"))


def is_mixture(c):
    return isinstance(c, ep.Config)


@lru_cache(None)
def met_by_a_token(c):
    """The dense model with as wide an FFN as a token's experts together."""
    if not is_mixture(c):
        return c
    dense = {f.name: getattr(c, f.name) for f in fields(memory.Config)}
    return memory.Config(**dense | {"ffn": c.ffn * (c.top_k + c.shared)})


def useful_flops(c, T):
    return memory.flops_per_token(met_by_a_token(c), T)


class Part(NamedTuple):
    """What a rank of the pipeline has of the model."""

    layers: int
    first: bool  # has the embedding
    last: bool  # has head and loss
    full: int  # of its layers, so many are computed again in backward, whole

    def kinds(self, recompute):
        """[(none, selective or full; how many of its layers)]"""
        rest = "selective" if recompute == "selective" else "none"
        return [(rest, self.layers - self.full), ("full", self.full)]


@lru_cache(None)
def stages(c, p, v, T, recompute="none", schedule="1f1b"):
    """The part of each rank of the pipeline."""
    counts = [c.layers]
    if p > 1:
        head = pp.head_flops(c) / pp.block_flops(met_by_a_token(c), T)
        filled = min(p * v, c.layers + 1)  # others have run with stages that are empty; 09 does not
        counts = pp.split(c.layers, filled, head)
        counts[-1:-1] = [0] * (p * v - filled)
    layers = iter(memory.kind_of(recompute, i) for i in range(c.layers))
    full = [list(islice(layers, n)).count("full") for n in counts]
    owners = pp.ranks_of_stages(schedule, p, v)
    parts = []
    for rank in range(p):
        mine = [stage for stage, owner in enumerate(owners) if owner == rank]
        own, again = (sum(numbers[stage] for stage in mine) for numbers in (counts, full))
        parts.append(Part(own, mine[0] == 0, mine[-1] == p * v - 1, again))
    return parts


# --- 4. What a rank holds -------------------------------------------------------------------------


@lru_cache(None)
def sizes_on_rank(c, tp_, ep_, layers, first=False, last=False):
    """Numbers on a rank: (of experts, which edp shares, and of all else, which dp·cp shares)."""
    K = max(c.kv_heads // tp_, 1)  # with fewer heads than ranks, several hold the same
    block = 2 * c.dim * (c.heads // tp_ + K) * c.head_dim + 2 * c.dim
    experts = 0
    if is_mixture(c):
        block += c.dim * c.experts + 3 * c.dim * c.ffn * c.shared
        experts = 3 * c.dim * c.ffn * c.experts // ep_
    else:
        block += 3 * c.dim * c.ffn // tp_
    table = -(-c.vocab // tp_) * c.dim
    ends = first * table + last * (c.dim + table * (not (c.tied and first)))
    return layers * experts, layers * block + ends


def shared_by(lay, part):
    """[(parameters on a rank, how many ranks have the same, how far apart)]: experts; all else."""
    sizes = sizes_on_rank(MODELS[lay.model], lay.tp, lay.ep, part.layers, part.first, part.last)
    everyone = lay.stage_ranks
    return [(sizes[0], everyone // lay.ep, lay.ep), (sizes[1], everyone // lay.tp, lay.tp)]


@lru_cache(None)
def block_kept(c, st, B, T, tp_, ep_, kind):
    """Bytes a block keeps of a micro-batch (T: of this rank's part of the sequence)."""
    if is_mixture(c):  # under tp every rank routes its own part of the sequence
        kept = ep.held(c, B, T // tp_, BF16, ep_, kind)
    else:
        kept = tp.held(replace(c, layers=1), B, T, BF16, tp_, kinds=[kind])["blocks"]
    if kind == "full":
        return kept
    return kept + B * T * c.dim * (st.wide / tp_ + st.gathered * E * (1 - 1 / tp_))


def held(st, lay, rank=0):
    """Bytes by kind on a rank of the pipeline at the fullest moment of a step."""
    c = MODELS[lay.model]
    part = stages(c, lay.pp, lay.v, lay.seq, lay.recompute, lay.schedule)[rank]
    shared = shared_by(lay, part)
    cut = {s: sum(P / (n if lay.zero >= s else 1) for P, n, _ in shared) for s in (1, 2, 3)}
    T = lay.seq // lay.cp
    blocks = sum(
        count * block_kept(c, st, lay.micro_batch, T, lay.tp, lay.ep, kind)
        for kind, count in part.kinds(lay.recompute)
    )
    flying = pp.in_flight(lay.schedule, lay.pp, lay.m, lay.v, rank) / lay.v
    logits = lay.micro_batch * T * -(-c.vocab // lay.tp) * (2 * E + st.logit)  # with their gradient
    one = sum(sizes_on_rank(c, lay.tp, lay.ep, 1))  # a block: two are gathered, or summed, at once
    return {
        "parameters": cut[3] * E + (2 * one * E if lay.zero == 3 else 0),
        "gradients": cut[2] * (WIDE + st.gradient) + (2 * one * WIDE if lay.zero > 1 else 0),
        "master copy": cut[1] * WIDE,
        "moments": cut[1] * 2 * WIDE,
        "activations": flying * blocks,
        "logits and loss": logits if part.last else 0,
    }


def peak(st, lay):
    """(bytes of the fullest rank of the pipeline, which one)"""
    ranks = range(lay.pp)
    if lay.schedule in ("1f1b", "interleaved") and ":" not in lay.recompute:
        ranks = {0, lay.pp - 1}  # most micro-batches in flight, or the logits
    return max((sum(held(st, lay, rank).values()), rank) for rank in ranks)


def room(hw, st):
    return hw.memory - st.reserve


# --- 5. What a micro-batch takes ------------------------------------------------------------------


def matmul_seconds(hw, st, n, k, m, weights=1, fp8=False):
    """Seconds of (n, k) x (k, m): arithmetic, then the traffic that makes thin matrices slow."""
    rate = (hw.fp8 if fp8 else hw.peak) * hw.sustained * st.matmul
    return 2 * n * k * m / rate + E * (n * k + weights * k * m + n * m) / hw.hbm


@lru_cache(None)
def block_seconds(c, hw, st, B, T, cp_, tp_, ep_):
    """Seconds of a block's forward pass on a GPU by kind of work; nothing else computed."""
    n, H, K = B * T // cp_, c.heads // tp_, max(c.kv_heads // tp_, 1)
    shapes = [(n, c.dim, (H + 2 * K) * c.head_dim), (n, H * c.head_dim, c.dim)]
    if is_mixture(c):
        rows, own = n // tp_ * c.top_k, c.experts // ep_  # the load is taken to be even
        shapes += [(rows, c.dim, 2 * c.ffn, own), (rows, c.ffn, c.dim, own)]
        shapes += [(n // tp_, c.dim, 2 * c.ffn * c.shared), (n // tp_, c.ffn * c.shared, c.dim)]
        shapes += [(n // tp_, c.dim, c.experts)]  # the router
        ffn = 2 * c.ffn * (c.top_k + c.shared) / tp_
    else:
        shapes += [(n, c.dim, 2 * c.ffn // tp_), (n, c.ffn // tp_, c.dim)]
        ffn = 2 * c.ffn / tp_
    pairs = B * T * T / cp_ / 2  # causal, zigzag
    # Numbers read or written for a token: two norms and two sums, the rotation, SwiGLU.
    touched = 14 * c.dim / tp_ + 6 * (H + K) * c.head_dim + 1.5 * ffn
    return {
        "products": sum(matmul_seconds(hw, st, *shape, fp8=st.fp8) for shape in shapes),
        "attention": 4 * pairs * H * c.head_dim / (hw.peak * hw.sustained * st.attention),
        "elementwise": st.passes * E * n * touched / hw.hbm,
    }


@lru_cache(None)
def head_seconds(c, hw, st, n, tp_):
    """Forward and backward of head and loss."""
    V = -(-c.vocab // tp_)
    return 3 * matmul_seconds(hw, st, n, c.dim, V) + st.passes * 50 * n * V / hw.hbm


@lru_cache(None)
def tp_sent(c, B, T, tp_, kind):
    """[(collective, calls, bytes)] of a block over tp; "first": the embedding, "last": the head."""
    ends = {"first": kind == "first", "last": kind == "last"}
    costs = tp.sent(c, B, T, BF16, tp_, kinds=[] if any(ends.values()) else [kind], **ends)
    return [(collective, calls, float(size)) for collective, (calls, size) in costs.items()]


BACKWARD = {"products": 2, "attention": 2.5, "elementwise": 2}  # times the forward pass


def micro_batch(hw, st, lay, part, nodes):
    """Seconds of a micro-batch, forward and backward, on a rank of the pipeline, line by line."""
    c, (layers, first, last, full) = MODELS[lay.model], part
    n, T = lay.micro_batch * lay.seq // lay.cp, lay.seq // lay.cp
    block = block_seconds(c, hw, st, lay.micro_batch, lay.seq, lay.cp, lay.tp, lay.ep)
    lines = {kind: layers * t * (1 + BACKWARD[kind]) for kind, t in block.items()}
    lines["recomputed"] = full * sum(block.values())
    lines["recomputed"] += (lay.recompute == "selective") * layers * block["elementwise"] / 2
    lines["head and loss"] = last * head_seconds(c, hw, st, n, lay.tp)
    send, again = partial(transfer, hw, nodes=nodes), part.kinds("none")  # selective sends no more
    waits = 0.0  # until calls have reached all ranks: the host cannot launch what comes after them
    if lay.tp > 1:
        lines["tp"] = 0.0
        for kind, count in [*again, ("first", first), ("last", last)]:
            for collective, calls, size in tp_sent(c, lay.micro_batch, T, lay.tp, kind):
                hops, rate = link(hw, lay.tp, 1, nodes, collective)
                lines["tp"] += st.tp_exposed * count * size / rate
                waits += count * calls * hops
    if lay.cp > 1:
        heads = c.heads // lay.tp, max(c.kv_heads // lay.tp, 1), c.head_dim
        lines["cp"] = 0.0
        for kind, count in again:
            forwards = 2 if kind == "full" else 1
            costs = cp.sent(
                lay.cp_kind, lay.micro_batch, lay.seq, *heads, lay.cp, BF16, forwards=forwards
            )
            t = sum(send(*cost, lay.cp, lay.tp, collective=name) for name, cost in costs.items())
            work = (forwards + BACKWARD["attention"]) * block["attention"]
            lines["cp"] += count * max(t - work * (lay.cp_kind == "ring"), 0.1 * t)
    if lay.ep > 1:
        lines["ep"] = sum(
            count * send(*ep.sent(c, n // lay.tp, BF16, lay.ep, kind), lay.ep, 1,
                         collective="all_to_all")
            for kind, count in again
        )  # fmt: skip
    lines |= sharded(hw, st, lay, part, nodes, sum(lines.values()))
    host = layers * st.host * (1 + full / max(layers, 1) / 3)
    if lay.tp > 1 and lay.pp > 1 and nodes > 1:
        host += layers * st.crossing * lay.tp
    host = host * (1 + st.spread * nodes) + waits
    lines["waiting for the host"] = max(0.0, host - sum(lines.values()))
    return lines


def over_dp(hw, lay, part, nodes, collective, size, calls=1):
    """Seconds in which a rank sends `size` bytes a parameter to those that have the same."""
    return sum(
        transfer(hw, calls, size * P * (n - 1) / n, n, stride, nodes, collective)
        for P, n, stride in shared_by(lay, part)
        if P and n > 1
    )


def sharded(hw, st, lay, part, nodes, busy):
    """What ZeRO-2 and 3 send for every micro-batch, beyond what `busy` seconds of work hide."""
    send, lines, layers = partial(over_dp, hw, lay, part, nodes), {}, part.layers
    if lay.zero >= 2 and lay.m > 1 and (t := send("reduce_scatter", WIDE, layers)):
        lines["gradients, each time"] = max(t - st.behind * busy * 2 / 3, 0.1 * t)
    if lay.zero == 3 and (t := send("all_gather", 2 * E, 2 * layers)):
        lines["weights gathered"] = max(t - st.behind * busy, 0.1 * t)
    return lines


# --- 6. What a step takes -------------------------------------------------------------------------


def once(hw, st, lay, part, nodes, backward):
    """What happens once a step: gradients summed, optimizer, weights spread."""
    own = sum(P / (n if lay.zero else 1) for P, n, _ in shared_by(lay, part))
    lines = {"optimizer": own * (8 * WIDE + E) / hw.hbm}
    send = partial(over_dp, hw, lay, part, nodes)
    t = send("reduce_scatter", WIDE) if lay.zero else send("all_reduce", 2 * WIDE)
    if not t:
        return lines
    if lay.zero in (1, 2):
        lines["weights spread"] = send("all_gather", E)
    if lay.zero == 0 and lay.pp > 1 and st.unbucketed:
        lines["gradients"] = t + st.unbucketed * (lay.dp * lay.cp - 1)
    elif lay.zero < 2 or lay.m == 1:  # else each time, see `sharded`
        lines["gradients"] = max(t - st.behind * backward, 0.2 * t)
    return lines


@lru_cache(None)
def idle_ratio(schedule, p, m, v):
    return float(pp.bubble(schedule, p, m, v))


@dataclass
class Estimate:
    layout: Layout
    lines: dict  # seconds of a step by what they are spent on
    peak: float  # bytes of the fullest rank
    rank: int  # of the pipeline, that rank
    fits: bool

    @property
    def seconds(self):
        return sum(self.lines.values())

    @property
    def speed(self):
        """Tokens a second and GPU."""
        return self.layout.batch * self.layout.seq / self.layout.world / self.seconds

    def mfu(self, hw):
        return useful_flops(MODELS[self.layout.model], self.layout.seq) * self.speed / hw.peak


def estimate(hw, st, lay):
    """Where time and bytes of a step of this layout go."""
    c, nodes = MODELS[lay.model], -(-lay.world // hw.node)
    parts = stages(c, lay.pp, lay.v, lay.seq, lay.recompute, lay.schedule)
    micro = {part: micro_batch(hw, st, lay, part, nodes) for part in set(parts)}
    total = {part: sum(lines.values()) for part, lines in micro.items()}
    slowest = max(total, key=total.get)
    lines = {name: lay.m * t for name, t in micro[slowest].items()}
    if lay.pp > 1:
        # 05's bubble is for equal stages. The slowest one waits for the others' first micro-batch.
        others = (sum(total[part] for part in parts) - total[slowest]) / (lay.pp - 1)
        lines["pipeline fill"] = others * lay.m * idle_ratio(lay.schedule, lay.pp, lay.m, lay.v)
        hidden = lay.micro_batch * lay.seq // lay.cp // lay.tp * c.dim * E
        hop = transfer(hw, 1, hidden, 2, lay.stage_ranks, nodes, "send")
        lines["pipeline transfers"] = 2 * hop * (lay.pp - 1)
    last = max(
        (once(hw, st, lay, part, nodes, total[part] * 2 / 3) for part in set(parts)),
        key=lambda lines: sum(lines.values()),
    )
    most, rank = peak(st, lay)
    return Estimate(lay, lines | last | {"other": st.step}, most, rank, most <= room(hw, st))


# --- 7. The search --------------------------------------------------------------------------------


TRIED = {"schedule": ("1f1b", "interleaved"), "recompute": ("none", "selective", "full")}


def degrees(c, hw, gpus, batch, seq, fixed):
    """(dp, cp, tp, pp, ep) that the model, the cluster and the batch allow."""

    def allowed(axis, values):
        return [n for n in values if fixed.get(axis, n) == n]

    for t in allowed("tp", [n for n in divisors(min(gpus, 2 * hw.node)) if gpus % n == 0]):
        if tp.misfits(c, t):
            continue
        for p in allowed("pp", divisors(gpus // t)):
            if p > c.layers + 1:
                break
            for k in allowed("cp", [n for n in divisors(gpus // t // p) if seq % (2 * n * t) == 0]):
                if k > 1 and (k & (k - 1) or seq // k < 4096 and "cp" not in fixed):
                    continue  # shorter parts than that are slow, and never needed for memory
                d = gpus // t // p // k
                if batch % d or fixed.get("dp", d) != d:
                    continue
                experts = divisors(c.experts) if is_mixture(c) else [1]
                for e in allowed("ep", [n for n in experts if d * k * t % n == 0]):
                    yield d, k, t, p, e


def search(hw, st, model, gpus, batch, seq, fixed=None):
    """(estimates of the layouts that fit, the fastest first; how many were looked at)

    Tried are all degrees that divide, tp up to two nodes, cp as powers of two with 4,096 tokens a
    rank, ZeRO 0 to 3, micro-batches of 1 to 16, 1F1B and two interleaved chunks, ring attention,
    and the least recomputation that fits. Not: zero-bubble schedules, hybrid ZeRO, other cp kinds.
    fixed: {name of a field of Layout: the only value to try}.
    """
    c, found, seen, fixed = MODELS[model], [], 0, fixed or {}
    for d, k, t, p, e in degrees(c, hw, gpus, batch, seq, fixed):
        mine = batch // d
        for z in (0, 1, 2, 3) if d * k > 1 else (0,):
            for size in [n for n in (1, 2, 4, 8, 16) if mine % n == 0]:
                for schedule in TRIED["schedule"] if p > 1 else ("1f1b",):
                    if schedule == "interleaved" and (mine // size % p or 2 * p > c.layers + 1):
                        continue
                    for recompute in TRIED["recompute"]:  # each slower than the last
                        lay = Layout(model, d, k, t, p, e, z, recompute, seq, size, batch, schedule)
                        if any(getattr(lay, name) != value for name, value in fixed.items()):
                            continue
                        seen += 1
                        if peak(st, lay)[0] <= room(hw, st):
                            found.append(estimate(hw, st, lay))
                            break
    return sorted(found, key=lambda e: -e.speed), seen


# --- 8. To the byte: what 09's dry run of a rank finds --------------------------------------------
#
# Section 4 is quick, for thousands of layouts, and has what a stack needs beyond our code. This
# is our code, exactly, for one rank; tests hold the two together. Not for FP8; and of zero-bubble
# schedules not the bytes kept for backward, as inputs then wait for the weight gradients.


@lru_cache(None)
def block_shapes(c):
    """{name: whole shape} of the parameters of a block, in the order in which modules have them."""
    with torch.device("meta"):
        block = memory.Block(replace(c, ffn=0) if is_mixture(c) else c)
        if is_mixture(c):
            block.mlp = ep.MoE(c)
    return {name: tuple(p.shape) for name, p in block.named_parameters()}


def elements(c, lay, name, shape):
    """Numbers of a parameter on a rank: tp cuts one dimension of it (04), ep the experts (06)."""
    dim, total = tp.cut_dimension(name), math.prod(shape)
    if dim is not None:
        total = total // shape[dim] * -(-shape[dim] // tp.parts(name, lay.tp, c.kv_heads))
    return total // (lay.ep if ep.is_expert(name) else 1)


def group_sizes(lay):
    """Ranks of each of 09's groups."""
    n, everyone = lay.dp * lay.cp, lay.stage_ranks
    axes = {axis: getattr(lay, axis) for axis in ("dp", "cp", "tp", "pp", "ep")}
    more = {"dp·cp": n, "tokens": n, "cp·tp": lay.cp * lay.tp, "dp·cp·tp": everyone}
    more |= {"edp": everyone // lay.ep, "control": lay.world}
    more |= {"sharing": combined.sharing_ranks(lay), "ends": combined.table_copies(lay)}
    return axes | more


def flats(lay, place):
    """The flat buffers of 03 on a rank of the pipeline, as in 09's optimizer but without tensors.

    .flats and .units hold objects with .range {name: (start, stop)}, .used, .length; .stages slices
    the units of each pipeline stage.
    """
    c, sizes = MODELS[lay.model], group_sizes(lay)
    counts, home = combined.layers_by_stage(lay), {}
    units, bounds, last = [], [0], len(counts) - 1
    table, block = (c.vocab, c.dim), block_shapes(c)
    for stage in combined.my_stages(lay, place):
        first = sum(counts[:stage])
        names = [{"embed_tokens.weight": table}] if stage == 0 else []
        for i in range(first, first + counts[stage]):
            names.append({f"layers.{i}.{name}": shape for name, shape in block.items()})
        if stage == last:
            head = "embed_tokens.weight" if c.tied else "lm_head.weight"
            names.append({"norm.weight": (c.dim,), head: table})
        for unit in names:
            places, rows = combined.placement(lay, unit), {}
            for name in unit:
                if name not in home:
                    rows.setdefault(places[name], []).append(name)
            for (cut, _), row in rows.items():
                flat, at = SimpleNamespace(range={}, n=sizes.get(cut, 1), cut=cut), 0
                for name in row:
                    size = elements(c, lay, name, unit[name])
                    flat.range[name] = at, at + size
                    home[name], at = flat, at + size
                flat.used, flat.length = at, -(-at // flat.n) * flat.n
            found = {id(home[name]): home[name] for name in unit}
            units.append(list(found.values()))
        bounds.append(len(units))
    distinct = {id(flat): flat for flat in home.values()}
    stages = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    return SimpleNamespace(flats=list(distinct.values()), units=units, stages=stages)


def states(lay, rank):
    """Bytes by kind that a global rank holds between two steps (03)."""
    place, inside = divmod(rank, lay.stage_ranks)
    e = combined.DTYPES[lay.dtype].itemsize
    wide = memory.at_least_fp32(combined.DTYPES[lay.dtype]).itemsize
    total = dict.fromkeys(("parameters", "gradients", "master copy", "moments"), 0)
    for flat in flats(lay, place).flats:
        part = flat.length // flat.n
        index = {"dp·cp": inside // lay.tp, "edp": inside // lay.ep}.get(flat.cut, 0)
        mine = min(max(flat.used - index * part, 0), part)  # without the padding at the end
        total["parameters"] += e * (part if lay.zero == 3 else flat.length)
        total["gradients"] += wide * (part if lay.zero >= 2 else flat.length)
        total["master copy"] += wide * part if e < wide else 0
        total["moments"] += 2 * wide * mine
    return total


def activations(lay, place):
    """Bytes of a micro-batch between forward and backward: {pipeline stage of this rank: bytes}"""
    c, dtype = MODELS[lay.model], combined.DTYPES[lay.dtype]
    e, wide = dtype.itemsize, memory.at_least_fp32(dtype).itemsize
    B, T, last = lay.micro_batch, lay.seq // lay.cp, lay.pp * lay.v - 1
    result = {}
    for stage, row in combined.stage_kinds(lay, place).items():
        one = tp.held(replace(met_by_a_token(c), layers=1), B, T, dtype, lay.tp, kinds=["none"])
        kept = one["rope angles"] if row else 0
        kept += sum(kept_by_block(lay, kind) for kind in row)
        if stage == 0 and lay.tp > 1:
            kept += one["embedding"]
        if stage == last:
            kept += one["final norm"] + one["logits"] + one["loss"]
        else:
            kept += e  # what stands for its output in autograd's graph
        result[stage] = kept
    return result


def kept_by_block(lay, kind):
    """What a block keeps of a micro-batch on a rank, whatever cuts it: 01, 04, 06, 07 together."""
    c, dtype, B = MODELS[lay.model], combined.DTYPES[lay.dtype], lay.micro_batch
    T, e = lay.seq // lay.cp, dtype.itemsize
    H, K = c.heads // lay.tp, max(c.kv_heads // lay.tp, 1)
    more = 0
    if lay.cp > 1 and kind != "full":
        kept, _ = cp.held(lay.cp_kind, B, lay.seq, H, K, c.head_dim, lay.cp, dtype)
        ring, _ = cp.held("ring", B, lay.seq, H, K, c.head_dim, lay.cp, dtype)
        more = kept - ring
    if not is_mixture(c):
        return tp.held(replace(c, layers=1), B, T, dtype, lay.tp, kinds=[kind])["blocks"] + more
    n = B * T // lay.tp
    load = combined.even_load(lay)
    own = load[: c.experts // lay.ep]
    if kind != "full":  # a kv head that several ranks hold, they all keep
        more += 2 * (K - c.kv_heads / lay.tp) * c.head_dim * B * T * e
    return ep.held(c, B, T // lay.tp, dtype, lay.ep, kind, rows=sum(own) * lay.ep) + int(more)


def kept_at_most(lay, rank):
    """Bytes a global rank keeps for backward, after the forward pass when these are most (05)."""
    c, place = MODELS[lay.model], rank // lay.stage_ranks
    kept, wide = activations(lay, place), memory.at_least_fp32(combined.DTYPES[lay.dtype]).itemsize
    layers = {stage: len(row) for stage, row in combined.stage_kinds(lay, place).items()}
    flying = most = 0
    summed = {}  # the auxiliary losses up to now, one for each layer that has had a backward pass
    for action in combined.actions(lay)[place]:
        if action.kind == "F":
            flying += kept[action.stage]
            most = max(most, flying + sum(summed.values()))
        else:
            flying -= kept[action.stage]
            summed[action.stage] = wide * layers[action.stage] if is_mixture(c) else 0
    return most + 8 + wide  # the valid tokens of the batch, the loss up to now


def temporaries(lay, rank):
    """{instant: bytes beyond states and activations} for the instants that can be the fullest.

    A weight gradient is computed in the weight's dtype, then accumulated in fp32; from ZeRO-2 on it
    then goes into the buffer of its flat, while that of the flat before may still travel.
    """
    c, dtype, place = MODELS[lay.model], combined.DTYPES[lay.dtype], rank // lay.stage_ranks
    e, wide = dtype.itemsize, memory.at_least_fp32(dtype).itemsize
    n = lay.micro_batch * lay.seq // lay.cp
    hidden, made, V = n * c.dim * e, e + wide * (e < wide), -(-c.vocab // lay.tp)
    entered = 2 * hidden if lay.tp > 1 else 0  # x gathered again, and its gradient before the sum
    moving = pp.Pipeline.IN_THE_AIR * hidden // lay.tp if lay.pp > 1 else 0
    if is_mixture(c):
        own = c.experts // lay.ep
        rows = sum(combined.even_load(lay)[:own]) * lay.ep
        part, weight = rows * c.ffn * e, own * c.dim * c.ffn
    else:
        part, weight = n * c.ffn // lay.tp * e, c.dim * c.ffn // lay.tp

    # What travels while a flat is filled? The flat before; the last of a backward pass until the
    # next pass begins to reduce, so activations pile up beside it. With afab these are fewer then.
    layout, left, before = flats(lay, place), 0, {}
    if lay.zero >= 2 and lay.m * len(layout.stages) > 1:
        firsts = [layout.units[units][0][0] for units in layout.stages]
        left = wide * max((flat.length for flat in firsts if flat.n > 1), default=0)
        if lay.schedule == "afab":
            left = max(0, left - max(activations(lay, place).values()))
    for units in map(layout.units.__getitem__, layout.stages):
        row = list({id(flat): flat for unit in units for flat in unit}.values())
        travelling = [wide * flat.length * (flat.n > 1) for flat in row[1:]]
        before |= dict(zip(map(id, row), [*travelling, left]))

    def buffers(unit):
        """Bytes of the largest flat of a unit, and of what travels then."""
        if lay.zero < 2:
            return 0
        sizes = [wide * flat.length + before[id(flat)] for flat in unit if flat.n > 1]
        return max(sizes, default=0)

    def large(unit, beside):
        """A gradient of V·D: being accumulated, or, with less beside it, going into its buffer."""
        return max(V * c.dim * made + beside, V * c.dim * wide + buffers(unit) + hidden)

    at, last = {}, lay.pp * lay.v - 1
    for (stage, row), units in zip(combined.stage_kinds(lay, place).items(), layout.stages):
        units = layout.units[units]
        gone = 0  # of this micro-batch's activations
        if stage == last:
            logits, few = n * V * e, min(n, memory.CrossEntropyFunction.ROWS)
            at["loss"] = logits + few * V * wide + moving + left
            at["head"] = large(units[-1], max(entered, hidden)) - logits + moving
            gone = activations(lay, place)[stage] - sum(kept_by_block(lay, kind) for kind in row)
        blocks = units[stage == 0 :][: len(row)]
        for kind, unit in reversed(list(zip(row, blocks))):
            again = kept_by_block(lay, "none") - kept_by_block(lay, "full") if kind == "full" else 0
            used = 0 if kind == "selective" else part  # silu(gate) · up
            flowing = 2 * part + entered + hidden // lay.tp
            most = again + flowing - used + weight * made + buffers(unit) + moving - gone
            at[f"ffn, recomputing {kind}"] = max(at.get(f"ffn, recomputing {kind}", most), most)
            gone += kept_by_block(lay, kind)
        if stage == 0:
            at["embedding"] = large(units[0], hidden) - gone + moving
    return at


def fullest(lay, rank):
    """(the most bytes that live at once on a global rank, about; when that is; what of it a meter
    does not see that sees only new tensors: storage that ZeRO lets go and takes again)"""
    at, dtype = temporaries(lay, rank), combined.DTYPES[lay.dtype]
    instant = max(at, key=at.get)
    layout = flats(lay, rank // lay.stage_ranks)
    most, unseen = sum(states(lay, rank).values()) + kept_at_most(lay, rank) + at[instant], 0
    if lay.zero >= 2:
        cut = [flat.length // flat.n for flat in layout.flats if flat.n > 1]
        unseen += sum(cut) * memory.at_least_fp32(dtype).itemsize
    if lay.zero == 3:  # the weights of two units
        sizes = [sum(f.length for f in unit if f.n > 1) for unit in layout.units] + [0]
        gathered = max(map(sum, zip(sizes, sizes[1:]))) * dtype.itemsize
        most, unseen = most + gathered, unseen + gathered
    return most, instant, unseen


def executed(lay, rank):
    """(FLOPs in matmuls, in attention) of a step of a global rank."""
    c, place = MODELS[lay.model], rank // lay.stage_ranks
    n, last = lay.micro_batch * lay.seq // lay.cp, lay.pp * lay.v - 1
    H, K = c.heads // lay.tp, max(c.kv_heads // lay.tp, 1)
    weights = 2 * n * c.dim * (H + K) * c.head_dim
    if is_mixture(c):
        own = combined.even_load(lay)[: c.experts // lay.ep]
        weights += n // lay.tp * c.dim * (c.experts + 3 * c.ffn * c.shared)
        weights += sum(own) * lay.ep * 3 * c.dim * c.ffn
    else:
        weights += n * 3 * c.dim * c.ffn // lay.tp
    product = lay.micro_batch * H * c.head_dim * lay.seq * lay.seq // lay.cp  # causal: half of 2
    matmuls = attention = 0
    for stage, row in combined.stage_kinds(lay, place).items():
        again = row.count("full")
        matmuls += 2 * (3 * len(row) + again) * weights
        attention += product * (7 * len(row) + 2 * again)
        if stage == last:
            matmuls += 6 * n * -(-c.vocab // lay.tp) * c.dim
    return lay.m * matmuls, lay.m * attention


def sent(lay, rank):
    """Calls and bytes that a global rank sends in a step: {(group, collective): (calls, bytes)}"""
    c, place, sizes = MODELS[lay.model], rank // lay.stage_ranks, group_sizes(lay)
    costs = combined.weights_sent(lay, flats(lay, place), sizes, place)
    for key, (calls, size) in combined.activations_sent(lay, place).items():
        costs[key] = combined.add(costs.get(key), (lay.m * calls, lay.m * size))
    if is_mixture(c):
        load, size = combined.even_load(lay), c.experts // lay.ep
        me = rank % lay.stage_ranks % lay.ep
        own = sum(load[me * size : (me + 1) * size])
        kinds = sum(combined.stage_kinds(lay, place).values(), [])
        cost, dtype = (0, 0), combined.DTYPES[lay.dtype]
        for kind in kinds:
            rows = ep.sent(c, 0, dtype, lay.ep, kind, sum(load) - own, (lay.ep - 1) * own)
            for calls, size in (rows, ep.sent_counts(c, lay.ep, kind)):
                cost = combined.add(cost, (lay.m * calls, lay.m * size))
        costs["ep", "all_to_all"] = cost
        if kinds:
            loads = dp.sent([8 * len(kinds) * c.experts], sizes["dp·cp·tp"])
            costs["dp·cp·tp", "all_reduce"] = loads
    if lay.pp > 1:
        hidden = lay.micro_batch * lay.seq // lay.cp // lay.tp * c.dim
        shape = lay.pp, lay.m, lay.v, place, hidden * combined.DTYPES[lay.dtype].itemsize
        costs["pp", "send"] = pp.sent(lay.schedule, *shape)
    costs["tokens", "all_reduce"] = dp.sent([8], sizes["tokens"])
    costs["control", "all_reduce"] = dp.sent([32], sizes["control"])
    return {key: cost for key, cost in costs.items() if cost[1]}


# --- 9. Advice beside the ranking -----------------------------------------------------------------

def alone(lay):
    return sum(n > 1 for n in (lay.dp * lay.cp, lay.tp, lay.pp)) <= 1


# (who says so, what, in which case, does a layout obey?). The playbook's decision tree, then the
# five steps that are often quoted from it. A case: hw, gpus, found (the ranking), best (its first),
# N parameters, experts or not.
RULES = [
    ("playbook", "under 10B parameters: one technique alone", lambda case: case.N < 10e9,
     lambda hw, lay: alone(lay)),
    ("playbook", "10B to 100B: tp 8 with pp or ZeRO-3, or ZeRO-3 alone",
     lambda case: 10e9 <= case.N <= 100e9,
     lambda hw, lay: lay.tp == 8 and (lay.pp > 1 or lay.zero == 3) or alone(lay) and lay.zero == 3),
    ("playbook", "512 GPUs: dp not alone", lambda case: case.gpus >= 512,
     lambda hw, lay: lay.tp * lay.pp > 1),
    ("playbook", "1,024 GPUs: tp 8, pp and ZeRO-2", lambda case: case.gpus >= 1024,
     lambda hw, lay: lay.tp == 8 and lay.pp > 1 and lay.zero == 2),
    ("playbook", "experts: ep", lambda case: case.experts, lambda hw, lay: lay.ep > 1),
    ("playbook", "tp first, as far as the node goes", lambda case: case.gpus >= case.hw.node,
     lambda hw, lay: lay.tp == min(hw.node, 8)),
    ("playbook", "tp never leaves the node", lambda case: True, lambda hw, lay: lay.tp <= hw.node),
    ("often said", "a model beyond one node: pp",  # 18 bytes a parameter (01)
     lambda case: 18 * case.N > case.hw.node * case.hw.memory, lambda hw, lay: lay.pp > 1),
    ("often said", "short of memory: recompute, and sequence parallelism",
     lambda case: all(e.layout.recompute != "none" for e in case.found),
     lambda hw, lay: lay.recompute != "none" and lay.tp > 1),
    ("often said", "memory to spare: larger micro-batches, dp",
     lambda case: case.best.peak < case.hw.memory / 2,
     lambda hw, lay: lay.micro_batch > 1 and lay.tp * lay.pp * lay.cp == 1),
    ("often said", "the GPU idles: accumulate gradients",
     lambda case: case.best.lines.get("pipeline fill", 0) > 0.1 * case.best.seconds,
     lambda hw, lay: lay.m > 2 * lay.pp),
]  # fmt: skip
NAMED = {  # layouts that are often named for a model
    "llama3-70b": ("TP8 PP4", dict(tp=8, pp=4, cp=1)),
    "smollm-1.7b": ("TP2", dict(tp=2, pp=1, cp=1)),
}


def advice(hw, model, gpus, found):
    """[(who, rule, the best layout that obeys or None, by how much it is slower)]"""
    c, result = MODELS[model], []
    case = SimpleNamespace(
        hw=hw, gpus=gpus, found=found, best=found[0], N=memory.parameter_count(c),
        experts=is_mixture(c),
    )  # fmt: skip
    for who, rule, applies, obeys in RULES:
        if applies(case):
            best = next((e for e in found if obeys(hw, e.layout)), None)
            result.append((who, rule, best, best and found[0].speed / best.speed - 1))
    return result


def pitfalls(hw, st, found):
    """[(mistake, what it costs)], beside the best layout found."""
    best, lay = found[0], found[0].layout
    rows = []

    def slower(name, other):
        cost = other and f"{best.speed / other.speed - 1:+.1%} time"
        rows.append((name, cost or "nothing of the kind fits"))

    def first(chosen):
        return next((e for e in found if chosen(e.layout)), None)

    slower("tp over two nodes", first(lambda x: x.tp > hw.node))
    slower("fewer micro-batches than stages", first(lambda x: x.pp > x.m))
    exposed = replace(st, behind=0.0)
    slower("gradients and gathers not behind other work", estimate(hw, exposed, lay))
    slower("every layer recomputed", estimate(hw, st, replace(lay, recompute="full")))
    small = estimate(hw, st, replace(lay, micro_batch=1))
    slower("micro-batch of 1" + " (as it is)" * (lay.micro_batch == 1), small)
    large = replace(lay, micro_batch=2 * lay.micro_batch, batch=2 * lay.batch)
    most = peak(st, large)[0]
    size = f"{most / 1e9:.0f} GB" + " does not fit" * (most > room(hw, st))
    rows.append((f"micro-batch of {large.micro_batch}", size))
    kinds = held(st, lay, best.rank)
    exact = (kinds["master copy"] + kinds["moments"]) / 1e9  # 12 bytes a parameter
    rows.append(("optimizer all in fp32", f"{exact:.1f} GB, {exact / 2:.1f} if all in bf16"))
    return rows


# --- 10. What a reader sees -----------------------------------------------------------------------

CUT_BY = {
    "parameters": "tp, pp, ep; dp·cp with ZeRO-3",
    "gradients": "tp, pp, ep; dp·cp from ZeRO-2 on",
    "master copy": "tp, pp, ep; dp·cp from ZeRO-1 on",
    "moments": "tp, pp, ep; dp·cp from ZeRO-1 on",
    "activations": "tp, cp; not pp: several are kept",
    "logits and loss": "tp, cp; on the last stage alone",
}
WHY = {
    "products": "FLOPs / their rate, and traffic",
    "attention": "its FLOPs / the rate of its kernel",
    "elementwise": "bytes / memory bandwidth",
    "recomputed": "forward passes again",
    "head and loss": "on the slowest rank of the pipeline",
    "tp": "what no product hides",
    "cp": "what attention does not hide",
    "ep": "nothing hides it",
    "waiting for the host": "launches take longer than the work",
    "gradients, each time": "ZeRO-2 and 3 sum them every micro-batch",
    "weights gathered": "ZeRO-3, twice a micro-batch",
    "pipeline fill": "idle until all stages have work",
    "pipeline transfers": "down to the last stage, and back",
    "gradients": "what the last backward does not hide",
    "weights spread": "after the step, from those who own them",
    "optimizer": "bytes / memory bandwidth",
    "other": "clipping, logging, the next batch",
}


def show_layout(hw, st, lay, gpu):
    """All lines of the estimate of one layout."""
    e, c = estimate(hw, st, lay), MODELS[lay.model]
    print(f"10 plan   {lay.model}   {lay.world:,} x {gpu}   {lay}")
    print(f"batch {lay.batch:,} x {lay.seq:,} = {lay.batch * lay.seq / 2**20:.3g}M tokens\n")
    rows = [[k, f"{t:.3f}", f"{t / e.seconds:.1%}", WHY[k]] for k, t in e.lines.items() if t > 5e-4]
    dp.table(["a step, slowest rank", "seconds", "", ""], rows)
    print(f"{'sum':22}{e.seconds:.3f}   {e.speed:,.0f} tokens/s/GPU   MFU {e.mfu(hw):.1%}\n")
    kinds = held(st, lay, e.rank)
    lines = [[kind, f"{size / 1e9:.2f}", CUT_BY[kind]] for kind, size in kinds.items()]
    dp.table([f"memory, pipeline rank {e.rank}", "GB", "cut by"], lines)
    fits = "fits" if e.fits else "does NOT fit"
    print(f"sum {e.peak / 1e9:.1f} of {room(hw, st) / 1e9:.1f} GB: {fits}\n")
    rank = e.rank * lay.stage_ranks
    moved = {key: cost for key, cost in sent(lay, rank).items() if cost[1] > 1e5}
    sizes = group_sizes(lay)
    dp.table(["sent in a step", "by", "ranks", "calls", "GB"],
             [[*key, sizes[key[0]], int(calls), f"{float(size) / 1e9:.2f}"]
              for key, (calls, size) in moved.items()])  # fmt: skip
    return e


def row_of(hw, e, name=""):
    cells = f"{e.speed:,.0f}", f"{e.mfu(hw):.1%}", f"{e.peak / 1e9:.0f}", f"{e.seconds:.2f}"
    return [name, str(e.layout), *cells]


HEAD = ["", "layout", "tok/s/GPU", "MFU", "GB", "step, s"]


def whole_run(model, e, tokens, price):
    tokens = tokens or 20 * memory.parameter_count(met_by_a_token(MODELS[model]))
    hours = tokens / e.speed / 3600
    days = hours / e.layout.world / 24
    return (f"{tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} GPU-hours,"
            f" ${hours * price:,.0f} at ${price} an hour")  # fmt: skip


def show_search(hw, st, args, gpus, batch):
    """The ranking for one cluster; -> the estimates"""
    begin = time.perf_counter()
    found, seen = search(hw, st, args.model, gpus, batch, args.seq, args.fixed)
    took = time.perf_counter() - begin
    print(f"10 plan   {args.model}   {gpus:,} x {args.gpu}   batch {batch:,} x {args.seq:,} ="
          f" {batch * args.seq / 2**20:.3g}M tokens\n{seen:,} layouts, {len(found):,} fit in"
          f" {room(hw, st) / 1e9:.1f} GB, {took:.1f} s; stack {args.stack}\n")  # fmt: skip
    if not found:
        return found
    rows = [row_of(hw, e, str(i)) for i, e in enumerate(found[: args.top], 1)]
    if args.model in NAMED:
        title, degrees_ = NAMED[args.model]
        fit = (e for e in found if all(getattr(e.layout, a) == n for a, n in degrees_.items()))
        if e := next(fit, None):
            rows.append(row_of(hw, e, f"{found.index(e) + 1} {title}"))
    dp.table(HEAD, rows)
    print()
    table = []
    for who, rule, best, cost in advice(hw, args.model, gpus, found):
        said = best and ("agrees" if cost < 0.02 else f"+{cost:.0%} time")
        table.append([who, rule, said or "none fits"])
    dp.table(["rule of", "", "ranking"], table)
    print()
    dp.table(["a mistake", "beside the best"], [list(row) for row in pitfalls(hw, st, found)])
    print("\n" + whole_run(args.model, found[0], args.tokens, args.price or hw.price))
    return found


def show_sweep(hw, st, args, asked, low, high):
    """The best layout for every power of two of GPUs, for a batch of at least `asked`."""
    print(f"10 plan   {args.model}   {low:,} to {high:,} x {args.gpu}   stack {args.stack}\n"
          f"batch {asked:,} x {args.seq:,}, or a sequence for each 16 GPUs\n")  # fmt: skip
    rows, gpus = [], low
    while gpus <= high:
        batch = max(asked, gpus // 16)
        found, _ = search(hw, st, args.model, gpus, batch, args.seq, args.fixed)
        empty = [f"{gpus:,}", "none fits", *4 * "-"]
        rows.append(row_of(hw, found[0], f"{gpus:,}") if found else empty)
        gpus *= 2
    dp.table(["GPUs", *HEAD[1:]], rows)
    return rows


# --- 11. Calibration ------------------------------------------------------------------------------


def seconds_of(work, device, rounds=5):
    """The best of several, after one to warm up."""

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    times = []
    for _ in range(rounds):
        begin = now()
        work()
        times.append(now() - begin)
    return min(times)


def all_reduce_rate(megabytes):
    """A rank's part in measuring the link: bytes a second that a rank sends."""
    device = dp.device()
    x = torch.zeros(megabytes * 2**18, device=device)
    seconds = seconds_of(lambda: torch.distributed.all_reduce(x), device)
    _, size = dp.sent([x.numel() * 4], torch.distributed.get_world_size())
    return float(size) / seconds


def calibrate(path, ranks):
    """Measure this machine and write it as an entry of HARDWARE.

    One machine does not know the network between several: those numbers are to be edited in the
    file, for a cluster of your own.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device).lower() if cuda else "cpu"
    # gh200 is not h200, and gb200 not b200: the name has to begin a word.
    known = HARDWARE.get(next((k for k in HARDWARE if re.search(rf"\b{k}", name)), None))
    n, dtype = (8192, BF16) if cuda else (768, torch.float32)
    x = torch.randn(n, n, device=device, dtype=dtype)
    rate = 2 * n**3 / seconds_of(lambda: x @ x, device)
    big = torch.zeros(2**28 if cuda else 2**24, device=device, dtype=torch.uint8)
    hbm = 2 * len(big) / seconds_of(big.clone, device)
    entry = known or Hardware(rate, 0, 1.0, 8e9, hbm, ranks, 1e9, 1, 1e9, 0.0)
    entry = replace(entry, sustained=rate / entry.peak, hbm=hbm)
    if cuda:
        entry = replace(entry, memory=float(torch.cuda.get_device_properties(device).total_memory))
        ranks = torch.cuda.device_count()
    if ranks > 1:
        inside = min(dp.launch(all_reduce_rate, ranks, 64 if cuda else 4))
        cards = max(1, entry.cards * ranks // entry.node)
        entry = replace(entry, node=ranks, cards=cards, inside=inside / entry.reached)
    c = replace(memory.PRESETS["tiny"], layers=8)
    model = memory.build(c, dtype=dtype, device=device)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def step():
        model.loss(model(tokens), tokens).backward()

    host = seconds_of(step, device) / c.layers  # so little work that launching is all there is
    link_ = f"{entry.inside * entry.reached / 1e9:.3g} GB/s, {ranks} ranks"
    with open(path, "w") as file:
        json.dump({"hardware": asdict(entry), "stack": {"host": host}}, file, indent=1)
    print(f"10 calibrate   {name}   torch {torch.__version__}\n")
    dp.table(["measured", ""], [
        [f"products of {n} x {n}, {str(dtype)[6:]}", f"{rate / 1e12:.3g} TFLOP/s"],
        ["share of the peak", f"{entry.sustained:.1%}" if known else "peak not known: taken as it"],
        ["own memory", f"{hbm / 1e9:.3g} GB/s"],
        ["link", link_ if ranks > 1 else "not measured: one GPU"],
        ["host", f"{host * 1e3:.2f} ms a layer, forward and backward"],
    ])  # fmt: skip
    print(f"\nwritten to {path}; use it with --hardware {path}")
    print("assumed: the network between machines (cards, card, hop), and the price; edit the file")


def read_hardware(path):
    with open(path) as file:
        saved = json.load(file)
    known = saved["hardware"]
    known["curve"] = tuple(map(tuple, known["curve"]))
    return Hardware(**known), saved.get("stack", {})


# --- 12. Run --------------------------------------------------------------------------------------

AXES = ("dp", "cp", "tp", "pp", "ep", "zero", "recompute", "micro_batch", "schedule")


def tokens_of_a_batch(text):
    """4M, 512k: K and M are powers of two, as batches are."""
    match = re.fullmatch(r"([\d.]+)([kKmM]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: a number such as 4M")
    return float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def tokens_of_a_run(text):
    """15T, 300B, 1e12."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)([bBtT]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: a number such as 15T")
    return float(match[1]) * {"": 1, "b": 1e9, "t": 1e12}[match[2].lower()]


def cluster(text):
    """"512" or "8-4096"."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or not 0 < int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of GPUs such as 512, or 8-4096")
    return int(match[1]), int(match[2] or match[1])


def read_arguments(argv=None):
    p = argparse.ArgumentParser(description="which layout to use on a cluster; see the docstring")
    p.add_argument("--model", default="llama3-70b", help=", ".join(MODELS))
    for axis in ("dp", "cp", "tp", "pp", "ep", "zero", "micro-batch"):
        p.add_argument(f"--{axis}", type=int, help="fix it (as in 09)")
    p.add_argument("--recompute", help="none, selective, full, full:K")
    p.add_argument("--schedule", help="1f1b, interleaved, …")
    p.add_argument("--seq", type=int, default=8192)
    p.add_argument("--batch", type=int, help="global, in sequences")
    p.add_argument("--batch-tokens", type=tokens_of_a_batch, default=4 * 2**20,
                   help="instead; M is 2^20")  # fmt: skip
    p.add_argument("--gpus", type=cluster, help="search the layouts for so many; 8-4096: for each"
                   " power of two")  # fmt: skip
    p.add_argument("--gpu", default="h100", help=", ".join(HARDWARE))
    p.add_argument("--hardware", metavar="FILE", help="an entry that --calibrate wrote")
    p.add_argument("--stack", default="fused", help=", ".join(STACKS))
    p.add_argument("--fp8", action="store_true", help="products in FP8")
    p.add_argument("--tokens", type=tokens_of_a_run,
                   help="of the whole run (default: 20 an active parameter)")  # fmt: skip
    p.add_argument("--price", type=float, help="dollars for a GPU-hour")
    p.add_argument("--top", type=int, default=8, help="rows of the ranking")
    p.add_argument("--dry-run", action="store_true", help="09's dry run of the layout, in seconds")
    p.add_argument("--rank", type=int, default=0, help="of the dry run")
    p.add_argument("--calibrate", metavar="FILE", help="measure this machine, write its entry")
    args = p.parse_args(argv)
    args.fixed = {axis: value for axis in AXES if (value := getattr(args, axis)) is not None}
    return args


def unknown(flag, value, choices):
    near = difflib.get_close_matches(str(value), choices, 1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(choices)}"
    return [] if value in choices else [f"{flag} {value}: {hint}"]


def one_layout(args):
    """The layout that the flags describe; what they leave open is as small as can be."""
    lay = Layout(args.model, **args.fixed, seq=args.seq)
    unit = lay.dp * lay.micro_batch
    batch = args.batch or max(round(args.batch_tokens / args.seq / unit), 1) * unit
    return replace(lay, batch=batch)


def arguments_of_09(lay, rank=0):
    """The same for 09, which checks them."""
    theirs = combined.parse([])
    for f in fields(lay):
        setattr(theirs, f.name, getattr(lay, f.name))
    theirs.dry_run, theirs.world, theirs.rank = True, lay.world, rank
    return theirs


def show_dry_run(hw, st, lay, rank):
    """09's dry run, and what its counts take; -> what is wrong"""
    theirs = arguments_of_09(lay, rank)
    code = combined.dry_run(theirs, lay.world)
    e = estimate(hw, st, lay)
    matmuls, attention = executed(lay, rank)
    least = (matmuls / st.matmul + attention / st.attention) / (hw.peak * hw.sustained)
    print(f"\n{least:.3f} s for these FLOPs at what products and attention reach;"
          f" the whole step {e.seconds:.3f} s")  # fmt: skip
    return ["the dry run differs from 09's formulas"] * code


def wrong_arguments(args):
    wrong = unknown("--model", args.model, list(MODELS))
    if not args.hardware:
        wrong += unknown("--gpu", args.gpu, list(HARDWARE))
    wrong += unknown("--stack", args.stack, list(STACKS))
    for name in ("seq", "batch", "top", "dp", "cp", "tp", "pp", "ep", "micro_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            wrong.append(f"--{name.replace('_', '-')} {value}: at least 1")
    if args.recompute and not re.fullmatch(r"none|selective|full(:\d+)?", args.recompute):
        wrong += unknown("--recompute", args.recompute, ["none", "selective", "full"])
    if args.schedule:
        wrong += unknown("--schedule", args.schedule, list(pp.schedules()))
    for name, tried in TRIED.items() if args.gpus and not wrong else ():
        if getattr(args, name) not in (None, *tried):
            tries = f"a search (--gpus) tries {', '.join(tried)}"
            wrong.append(f"--{name} {getattr(args, name)}: {tries}")
    if not wrong and not args.gpus and args.fixed:
        lay = one_layout(args)
        wrong = combined.violations(arguments_of_09(lay, args.rank), lay.world)
    return wrong


def nothing_fits(hw, st, args, gpus, batch):
    """Why, with the smallest number of GPUs that would do."""
    more = gpus
    while more < 2**17:
        more *= 2
        found, _ = search(hw, st, args.model, more, max(batch, more // 64), args.seq, args.fixed)
        if found:
            return f"no layout of {args.model} fits on {gpus} x {args.gpu}: --gpus {more} would do"
    return f"no layout of {args.model} fits on {gpus} x {args.gpu}, nor on more with these flags"


def tour(hw, st, args, batch):
    """Without a layout or a cluster: a plan for 512 GPUs, all lines of the estimate of its first,
    and the closed forms beside a dry run, of a model small enough for that."""
    args.top = 4
    if not (found := show_search(hw, st, args, 512, batch)):
        return [nothing_fits(hw, st, args, 512, batch)]
    print()
    show_layout(hw, st, found[0].layout, args.gpu)
    return check_dry_run(Layout("tiny", dp=2, tp=2, pp=2, zero=1, seq=32, batch=4), rank=6)


def check_dry_run(lay, rank):
    """Are the closed forms those of the real step? -> what is wrong"""
    found = combined.dry_step(arguments_of_09(lay, rank), lay.world)
    size = {kind: sum(t.numel() * t.element_size() for t in ts) for kind, ts in found.held.items()}
    wire = {key: (found.wire.calls[key], n) for key, n in found.wire.bytes.items() if n}
    pairs = {kind: (states(lay, rank)[kind], n) for kind, n in size.items()}
    pairs["kept for backward"] = kept_at_most(lay, rank), found.activations
    pairs["FLOPs"] = sum(executed(lay, rank)), sum(found.flops)
    total = sum(n for _, n in sent(lay, rank).values())
    pairs["sent, all axes"] = total, sum(found.wire.bytes.values())
    torch.distributed.destroy_process_group()
    print(f"\nfor {lay.model}, {lay}, rank {rank}")
    dp.table(["", "by formula", "in a dry run of 09"], [[k, *pair] for k, pair in pairs.items()])
    wrong = [kind for kind, (ours, theirs) in pairs.items() if ours != theirs]
    most, instant, unseen = fullest(lay, rank)
    off = found.peak / (most - unseen) - 1
    print(f"fullest: {instant}, {most:,} by formula, {off:+.1%} measured;")
    print("temporaries: " + ", ".join(f"{k} {n:,}" for k, n in temporaries(lay, rank).items()))
    return wrong + ["calls"] * (sent(lay, rank) != wire)


def main(argv=None):
    args = read_arguments(argv)
    torch.set_num_threads(1)
    if args.calibrate:
        calibrate(args.calibrate, 2)
        print("10_plan OK")
        return 0
    if wrong := wrong_arguments(args):
        print("\n".join(f"10_plan: {rule}" for rule in wrong), file=sys.stderr)
        return 2
    hw, st, wrong = HARDWARE.get(args.gpu), STACKS[args.stack], []
    if args.hardware:
        hw, more = read_hardware(args.hardware)
        st, args.gpu = replace(st, **more), args.hardware
    if args.fp8 and not hw.fp8:
        print(f"10_plan: --fp8: {args.gpu} has no products in FP8", file=sys.stderr)
        return 2
    if args.fp8:
        st = replace(st, fp8=True)
    batch = args.batch or round(args.batch_tokens / args.seq)
    if args.dry_run:
        wrong = show_dry_run(hw, st, one_layout(args), args.rank)
    elif args.gpus and args.gpus[0] != args.gpus[1]:
        show_sweep(hw, st, args, batch, *args.gpus)
    elif args.gpus:
        if not show_search(hw, st, args, args.gpus[0], batch):
            print("10_plan: " + nothing_fits(hw, st, args, args.gpus[0], batch), file=sys.stderr)
            return 2
    elif args.fixed:
        lay = one_layout(args)
        e = show_layout(hw, st, lay, args.gpu)
        print("\n" + whole_run(lay.model, e, args.tokens, args.price or hw.price))
    else:
        wrong = tour(hw, st, args, batch)
    print("\n10_plan FAIL: " + "; ".join(wrong) if wrong else "\n10_plan OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
