"""
05 · Pipeline parallelism: schedules as data

Idea      Cut the model into stages of whole layers, one stage a rank, and send hidden states down
          and their gradients back up. A rank then waits for others (the bubble) unless several
          micro-batches are on their way. *When* each rank does what is a schedule: a list for each
          rank. It decides idle time and memory and nothing else; every schedule has the same
          gradients. So schedules here are data, with one executor for all of them.
Picture   four ranks, four micro-batches, F forward and B backward (twice as long), digits number
          the micro-batches. AFAB first does all forwards; 1F1B has as much idle time, and rank r
          holds 4 - r micro-batches instead of all:
            rank 0  F0F1F2F3                  B0  B1  B2  B3
            rank 1    F0F1F2F3            B0  B1  B2  B3
            rank 2      F0F1F2F3      B0  B1  B2  B3
            rank 3        F0F1F2F3B0  B1  B2  B3              AFAB
            rank 3        F0B0  F1B1  F2B2  F3B3              1F1B
Cost      p ranks, v chunks of layers on each, m micro-batches; F, I, W the times of a micro-batch's
          forward, input gradient and weight gradient on a rank (a backward is I + W)
                         idle / work                 micro-batches held     sent (1F1B = 1)
            afab         (p-1)/m                     m                      1
            1f1b         (p-1)/m                     p - rank               1
            interleaved  (p-1)/(v·m)                 p + (p-1-2·rank)/v     v
            zb-h1        (p-1)·(F+I-W)/m/(F+I+W)     p                      1
            zb-v         (p-1)·F/2/m/(F+I+W)         p                      2
            DualPipe     (p/2-1)·(F+2I-W)/m/(F+I+W)  p + 1, 2x the weights  2
          (bubble and in_flight have the exact numbers, also for few micro-batches; DualPipe is
          here as a formula only)
Pays      when a model's weights do not fit and the link between nodes is slow: what is sent is
          B·T·D a micro-batch, not weights. Needs m of several times p, and stages of equal time.
          With ZeRO 0 and 1 a stage's gradients are summed once, after its last backward. ZeRO-2
          and 3 reduce them for each micro-batch, m times the bytes, and 3 gathers its weights as
          often: with a pipeline take 1.
Forget    a tied embedding lives on the first *and* the last stage, and each sees one part of its
          gradient. Without the sum of both nothing crashes, and the copies drift apart (relative
          error 0.638 in this demo).
Run       torchrun --nproc-per-node 4 05_pp_1f1b.py      (or python 05_pp_1f1b.py)
          python 05_pp_1f1b.py --svg pipeline.svg        (the schedules as a picture)
Copy      Action, afab, one_f_one_b, alternate, Value, Transfer, needs, makes, find_stages, lower,
          check: schedules with their transfers, and the proof that none waits for ever.
          at_least_fp32, Left, Pipeline: the executor, for stages of any kind. Imports: NamedTuple,
          deque, groupby, partial.
Read      GPipe (1811.06965), PipeDream-Flush (2006.09503), Megatron-LM's interleaving (2104.04473),
          zero bubble (2401.10241), V schedules (2405.15362), DeepSeek-V3's DualPipe (2412.19437)

Letters as in 01; p ranks of the pipeline, v chunks on each, m micro-batches.
"""

import argparse
import copy
import html
from collections import Counter, deque
from datetime import timedelta
from fractions import Fraction
from functools import partial
from importlib import import_module
from itertools import groupby
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

memory = import_module("01_memory")  # for the demo
dp = import_module("02_dp")


# --- 1. Schedules: for each rank, what it does in which order -------------------------------------
#
# Stages are numbered through the model, 0 to p·v - 1. With one chunk a rank, rank r has stage r.
# A schedule is a list of Actions for each rank, and nothing else: which rank has a stage follows
# from who acts on it. Write your own, `lower` it, and `check` says what is wrong with it.


class Action(NamedTuple):
    kind: str  # F forward, B backward; or its halves: I input gradient, W weight gradients
    stage: int
    micro_batch: int


def afab(p, m):
    """All forwards, then all backwards (GPipe)."""
    return [[Action(kind, r, i) for kind in "FB" for i in range(m)] for r in range(p)]


def one_f_one_b(p, m):
    """Start just as many as it takes until the first comes back; then finish one, start one.

    Rank r is p - 1 - r stages above the last: so many forwards (or all m, if there are fewer) go
    before its first backward has to follow.
    """
    ranks = []
    for r in range(p):
        forwards, backwards = ([Action(kind, r, i) for i in range(m)] for kind in "FB")
        ranks.append(alternate(forwards, backwards, min(m, p - 1 - r)))
    return ranks


def alternate(forwards, backwards, warmup):
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    ready = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards):
        ready += pair
    return ready + backwards[len(forwards) - warmup :]


def interleaved(p, m, v):
    """1F1B with v chunks on each rank: chunk c of rank r is stage c·p + r, and a chunk is 1/v long.

    Filling the pipeline takes p - 1 chunks instead of p - 1 whole stages. Micro-batches pass in
    rounds of p: a round goes through the first chunk of all ranks, then through the second, …
    """
    if m % p:
        near = " or ".join(str(n) for n in (m // p * p, m // p * p + p) if n)
        raise ValueError(f"interleaved: {m} micro-batches are no multiple of {p} ranks; the"
                         f" nearest are {near}")  # fmt: skip
    turns = [(c, i + k) for i in range(0, m, p) for c in range(v) for k in range(p)]
    ranks = []
    for r in range(p):
        forwards = [Action("F", c * p + r, i) for c, i in turns]
        backwards = [Action("B", (v - 1 - c) * p + r, i) for c, i in turns]
        # Until the first micro-batch is back from the last chunk: v - 1 rounds, and twice the
        # way to the last rank, as between two backwards of one chunk a forward fits.
        warmup = (v - 1) * p + 2 * (p - 1 - r)
        ranks.append(alternate(forwards, backwards, min(v * m, warmup)))
    return ranks


def zb_h1(p, m):
    """1F1B with its backward in halves. The stage above waits for I only, nobody for W.

    Rank r lets r of its W wait. Those of the last rank fill the time in which it has nothing else
    to do at the end, and all ranks now hold as many micro-batches as 1F1B's first: p.
    """
    ranks = []
    for r, actions in enumerate(one_f_one_b(p, m)):
        halves = []
        for kind, stage, i in actions:
            halves.append(Action("I" if kind == "B" else "F", stage, i))
            if kind == "B" and i >= r:
                halves.append(Action("W", stage, i - r))
        ranks.append(halves + [Action("W", r, i) for i in range(max(0, m - r), m)])
    return ranks


def zb_v(p, m):
    """Two chunks a rank, placed as a V: down the ranks and up again, rank r has r and 2p - 1 - r.

    The first rank is also the last, so every rank can begin its backwards at about the same time,
    and with W to fill the gaps nobody waits but at the start. Written for m ≥ 2p - 1; for fewer we
    leave out what does not exist.
    """
    ranks = []
    for r in range(p):
        actions, count = [], Counter()

        def add(*names):
            for kind, stage in names:
                actions.append(Action(kind, stage, count[kind, stage]))
                count[kind, stage] += 1

        F0, I0, W0 = ((kind, r) for kind in "FIW")
        F1, I1, W1 = ((kind, 2 * p - 1 - r) for kind in "FIW")
        add(*[F0] * (2 * (p - r) - 1))  # the way down and up again takes so long
        add(*[F1, F0] * r)
        add(*[F1, I1, W1] * (p - r))
        n = max(m, 2 * p - 1)
        for _ in range(n - p):
            if count[F0] < n:
                add(F0)
            add(I0, W0, F1, I1, W1)
        add(*[I0, I1] * r)
        add(*[I0, W0] * (p - r))
        add(*[W1] * r, *[W0] * r)
        ranks.append([a for a in actions if a.micro_batch < m])
    return ranks


# --- 2. Lowering: who sends what when -------------------------------------------------------------


class Value(NamedTuple):
    """A tensor that one stage makes and another uses: x, the input of `stage`, or dy, the gradient
    of its output."""

    what: str
    stage: int
    micro_batch: int


class Transfer(NamedTuple):
    way: str  # send, receive
    value: Value
    peer: int  # a rank


def needs(action, last):
    """The value an action takes from another stage, or None. `last` is the last stage."""
    kind, stage, i = action
    if kind == "F" and stage > 0:
        return Value("x", stage, i)
    if kind in "BI" and stage < last:
        return Value("dy", stage, i)


def makes(action, last):
    """The value that another stage takes from an action, or None."""
    kind, stage, i = action
    if kind == "F" and stage < last:
        return Value("x", stage + 1, i)
    if kind in "BI" and stage > 0:
        return Value("dy", stage - 1, i)


def find_stages(ranks):
    """{stage: its rank}"""
    return {a.stage: r for r, actions in enumerate(ranks) for a in actions if isinstance(a, Action)}


def lower(ranks):
    """The schedule with its transfers: in each rank's list, Actions and Transfers.

    All ranks act in rounds. When an action is done whose result another rank needs, the send is
    appended to the one list and the receive to the other *at the same moment*. So the lists are
    cuts of one global order, and nobody can wait in a circle, even if transfers block. (Receive
    before use, send after, each rank by itself, can: two neighbours in 1F1B would both send.)
    """
    rank_of = find_stages(ranks)
    last, queues = max(rank_of), [deque(actions) for actions in ranks]
    lowered, there = [[] for _ in ranks], {None}
    while any(queues):
        ready = [r for r, queue in enumerate(queues) if queue and needs(queue[0], last) in there]
        if not ready:
            raise ValueError(f"no rank can go on: {[queue[0] for queue in queues if queue]}")
        made = []
        for r in ready:
            lowered[r].append(queues[r].popleft())
            made.append((r, makes(lowered[r][-1], last)))
        for r, value in made:
            there.add(value)
            to = r if value is None else rank_of[value.stage]
            if to != r:
                lowered[r].append(Transfer("send", value, to))
                lowered[to].append(Transfer("receive", value, r))
    return lowered


def check(lowered):
    """Run the lists without tensors, on a transport that blocks; raises ValueError if they fail.

    Each transfer waits until its peer has come to the same one. Every action happens once, after
    what it needs; every value is made, sent, received and used once.
    """
    rank_of, queues = find_stages(lowered), [deque(items) for items in lowered]
    last, done, at_hand = max(rank_of), set(), [set() for _ in lowered]

    def take(r, value):
        if value not in at_hand[r]:
            raise ValueError(f"rank {r} needs {value} and does not have it")
        at_hand[r].remove(value)

    def act(r, a):
        if a in done or rank_of[a.stage] != r:
            raise ValueError(f"rank {r}: {a} a second time")
        if a.kind != "F" and Action("I" if a.kind == "W" else "F", *a[1:]) not in done:
            raise ValueError(f"rank {r}: {a} too early")
        if value := needs(a, last):
            take(r, value)
        if value := makes(a, last):
            at_hand[r].add(value)
        done.add(a)

    while any(queues):
        length = sum(map(len, queues))
        for r, queue in enumerate(queues):
            while queue and isinstance(queue[0], Action):
                act(r, queue.popleft())
            if queue and queue[0].way == "send":
                _, value, to = queue[0]
                if queues[to] and queues[to][0] == Transfer("receive", value, r):
                    queue.popleft(), queues[to].popleft()
                    take(r, value)
                    at_hand[to].add(value)
        if sum(map(len, queues)) == length:
            waiting = "; ".join(f"rank {r} at {q[0]}" for r, q in enumerate(queues) if q)
            raise ValueError(f"deadlock: {waiting}")
    for stage in range(last + 1):
        for i in range(1 + max(a.micro_batch for a in done)):
            kinds = {kind for kind in "FBIW" if Action(kind, stage, i) in done}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                raise ValueError(f"stage {stage}, micro-batch {i}: only {sorted(kinds)}")
    if any(at_hand):
        raise ValueError(f"received and not used: {set.union(*at_hand)}")


# --- 3. What a schedule costs: simulated, and by formula ------------------------------------------


def simulate(lowered, cost, hop=0):
    """Run the lists on a clock. cost(action) is its time; a transfer takes `hop` once both post it.

    Transfers go on beside the actions. -> time; idle: each rank's share of it; spans: for each
    rank [(action, begin, end)].
    """
    rank_of, queues = find_stages(lowered), [deque(items) for items in lowered]
    last = max(rank_of)
    clock, spans = [0] * len(lowered), [[] for _ in lowered]
    posted, made = {}, {None: 0}  # when a transfer is posted, by way and value; when a value exists

    def begin(r, a):
        """When rank r can begin with a, or None if that is not known yet."""
        value = needs(a, last)
        if value in made:
            return max(clock[r], made[value])
        both = [posted.get((way, value)) for way in ("send", "receive")]
        return None if None in both else max(clock[r], max(both) + hop)

    while any(queues):
        length = sum(map(len, queues))
        for r, queue in enumerate(queues):
            while queue:
                if isinstance(queue[0], Transfer):
                    posted[queue[0][:2]] = clock[r]
                elif (start := begin(r, queue[0])) is None:
                    break
                else:
                    clock[r] = start + cost(queue[0])
                    spans[r].append((queue[0], start, clock[r]))
                    value = makes(queue[0], last)
                    if value and rank_of[value.stage] == r:
                        made[value] = clock[r]
                queue.popleft()
        if sum(map(len, queues)) == length:
            raise ValueError("deadlock")
    time = max(clock)
    idle = [1 - Fraction(sum(end - begin for _, begin, end in rank)) / time for rank in spans]
    return SimpleNamespace(time=time, idle=idle, spans=spans)


def times(F=1, I=1, W=1):  # noqa: E741
    """The cost of an action, the same for all stages."""
    return lambda action: {"F": F, "I": I, "W": W, "B": I + W}[action.kind]


def peaks(actions, kept=lambda stage: 0, deferred=lambda stage: 0):
    """Of one rank: the most micro-batches in flight at once, and the most bytes.

    In flight is what has had its forward and not all of its backward, counted once for each chunk.
    kept(stage) bytes stay from F to B or I; for the weight gradients deferred(stage), from I to W.
    """
    flying = most = size = largest = 0
    for a in actions:
        if isinstance(a, Action):
            flying += {"F": 1, "I": 0, "B": -1, "W": -1}[a.kind]
            whole, rest = kept(a.stage), deferred(a.stage)
            size += {"F": whole, "I": rest - whole, "B": -whole, "W": -rest}[a.kind]
            most, largest = max(most, flying), max(largest, size)
    return most, largest


def draw(spans, p, unit=1, width=2):
    """A line of text for each rank. Chunks beyond the first have lower-case letters."""
    lines = []
    for r, rank in enumerate(spans):
        line = ""
        for action, begin, end in rank:
            name = f"{action.kind if action.stage < p else action.kind.lower()}{action.micro_batch}"
            begin, end = int(begin / unit * width), int(end / unit * width)
            line = line.ljust(begin) + name.ljust(end - begin)
        lines.append(f"rank {r}  {line}".rstrip())
    return lines


def svg(pictures, unit=12):
    """Schedules as an SVG image. pictures: {title: (spans, p)}"""
    colour = {"F": "#8ecae6", "B": "#ffb703", "I": "#ffb703", "W": "#90be6d"}
    shapes, y, right = [], 0, 0
    for title, (spans, p) in pictures.items():
        shapes.append(f'<text x="0" y="{y + 14}" font-weight="bold">{html.escape(title)}</text>')
        for r, rank in enumerate(spans):
            for action, begin, end in rank:
                x, w = float(begin * unit), float((end - begin) * unit)
                top, right = y + 20 + r * 18, max(right, x + w)
                light = 0.5 if action.stage >= p else 1  # a later chunk
                shapes.append(f'<rect x="{x}" y="{top}" width="{w}" height="16" stroke="white"'
                              f' fill="{colour[action.kind]}" fill-opacity="{light}"/>'
                              f'<text x="{x + w / 2}" y="{top + 12}" text-anchor="middle">'
                              f"{action.micro_batch}</text>")  # fmt: skip
        y += 20 + len(spans) * 18 + 12
    paper = f'<path d="M0 0H{right}V{y}H0z" fill="white"/>'  # or a dark page would hide the titles
    body = paper + "".join(shapes)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{y}"'
            f' font-family="sans-serif" font-size="10">{body}</svg>\n')  # fmt: skip


class Schedule(NamedTuple):
    make: object  # make(p, m) -> for each rank a list of Actions
    v: int = 1  # chunks a rank


def schedules(v=2):
    """The schedules by name, interleaving with v chunks."""
    return {
        "afab": Schedule(afab),
        "1f1b": Schedule(one_f_one_b),
        "interleaved": Schedule(partial(interleaved, v=v), v),
        "zb-h1": Schedule(zb_h1),
        "zb-v": Schedule(zb_v, 2),
    }


def bubble(name, p, m, v=1, F=1, I=1, W=1):  # noqa: E741
    """Idle time of the whole / working time of a rank, for equal stages and no time to send.

    F, I, W: times of a micro-batch on a rank, all its chunks. afab, 1f1b and interleaved hold for
    any times and any m; zb-h1 for W ≤ F, zb-v for F = I = W and m ≥ 2p - 1. Elsewhere, with unequal
    stages, or when transfers take time, simulate. The share of wall time is r / (1 + r).
    """
    idle = {
        "afab": (p - 1) * (F + I + W),
        "1f1b": (p - 1) * (F + I + W),
        "interleaved": Fraction((p - 1) * (F + I + W), v),
        # As 1F1B, whose last backward has p - 1 ranks to go; but only its I is waited for, and in
        # that time rank 0 does W that it has put off: as many as there are micro-batches, less one.
        "zb-h1": (p - 1) * (F + I) - (min(m, p) - 1) * W,
        "zb-v": Fraction(p - 1, 2) * F,
        # From DeepSeek-V3's report; F + B overlapped takes F + B here. Two copies of the weights.
        "dualpipe": Fraction(p - 2, 2) * (F + 2 * (I + W) - 3 * W),
    }
    return Fraction(idle[name]) / (m * (F + I + W))


def in_flight(name, p, m, v, rank):
    """The most micro-batches whose activations a rank holds, counted for each chunk."""
    return {
        "afab": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1),
        "zb-h1": min(m, p),
        "zb-v": min(2 * p, 2 * m, m + rank + 1),
    }[name]


# --- 4. Stages -----------------------------------------------------------------------------------


def block_flops(c, T):
    """Forward FLOPs of one block for a token of a sequence of T; of the head, see below."""
    weights = 2 * c.dim * (c.heads + c.kv_heads) * c.head_dim + 3 * c.dim * c.ffn
    return 2 * weights + 2 * c.heads * c.head_dim * T


def head_flops(c):
    return 2 * c.vocab * c.dim


def split(layers, n, head=0.0):
    """How many layers each of n stages gets, so that the slowest is as fast as can be.

    head is the head's time in layers (a vocabulary of 128k: 2 to 5 of them); the embedding is a
    lookup. Each layer in turn goes to the stage that has least to do.
    """
    if layers < n - 1:
        raise ValueError(f"{n} stages need at least {n - 1} layers, not {layers}: every stage"
                         " one, the last has the head")  # fmt: skip
    load, counts = [0.0] * (n - 1) + [head], [0] * n
    for _ in range(layers):
        stage = load.index(min(load))
        load[stage] += 1
        counts[stage] += 1
    return counts


def cut_stages(model, counts, mine):
    """{stage: model of its layers alone} for the stages `mine`, counts[s] layers in stage s.

    A stage is the model with parts missing. Parameters keep their names and global numbers, and
    one that two stages of a rank share (a tied table, when they lie as a V) stays one. (Here the
    whole model is made first and what is not ours let go; at scale, on the meta device.)
    """
    stages, last = {}, len(counts) - 1
    for s in mine:
        stages[s] = stage = copy.copy(model)
        stage._modules = dict(model._modules)
        start = sum(counts[:s])
        names = [str(i) for i in range(start, start + counts[s])]
        stage.layers = torch.nn.ModuleDict({name: model.layers[name] for name in names})
        if s > 0:
            stage.embed_tokens = None
        if s < last:
            stage.norm = stage.lm_head = None
    return stages


def keep_stages(model, counts, mine):
    """Let go of the layers that belong to none of the stages `mine`.

    The head of a tied model brings its table, which keeps its one name, embed_tokens.weight.
    """
    last, names = len(counts) - 1, set()
    for s in mine:
        start = sum(counts[:s])
        names.update(str(i) for i in range(start, start + counts[s]))
    for name in model.layers.keys() - names:
        del model.layers[name]
    if 0 not in mine and not (model.config.tied and last in mine):
        model.embed_tokens = None
    if last not in mine:
        model.norm = model.lm_head = None


def parameters(stages):
    """{name: parameter} of a rank's stages, one with two names once, under its first."""
    named = {}
    for stage in stages.values():
        for name, p in stage.named_parameters():
            if not any(p is other for other in named.values()):
                named[name] = p
    return named


def sum_tied(stages, last, group):
    """Sum the gradient of a tied table over the two ranks that have it: the embedding's part and
    the head's. Both must start equal, and count once in the gradient norm.

    group: these two ranks. Where one rank has both stages it is one tensor already.
    """
    if (0 in stages) != (last in stages):
        table = stages[0].embed_tokens if 0 in stages else stages[last].lm_head
        dist.all_reduce(table.weight.grad, group=group)  # forget


# --- 5. The executor -----------------------------------------------------------------------------


class Left(torch.autograd.Function):
    """Stands for an output that leaves this stage: a number whose backward is the gradient that
    comes back, in the list `returned`.

    Nothing in the graph holds the output itself. Its memory is free once it has been sent; keeping
    it for torch.autograd.backward(y, dy) would cost B·T·D for each micro-batch in flight.
    """

    @staticmethod
    def forward(ctx, y, returned):
        ctx.returned = returned
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.returned.pop(), None


class Pipeline:
    """Runs one rank's lowered list on its stages.

    stages   {number: module}. The first takes tokens; the last also has loss(logits, labels), a sum
    lowered  of all ranks
    group    the ranks of the pipeline, in the order of the schedule's
    later    makes a queue for weight gradients (01's Later), if the schedule has W
    shape    shape(tokens) of the hidden states between stages: (B, T, D)
    """

    IN_THE_AIR = 4  # sends we do not wait for at once

    def __init__(self, stages, lowered, group, shape, later=None):
        self.stages, self.group, self.shape = stages, group, shape
        self.items, self.last = lowered[dist.get_rank(group)], max(find_stages(lowered))
        some = next(iter(next(iter(stages.values())).parameters()))
        self.dtype, self.device = some.dtype, some.device
        # gloo cannot send from a GPU; then the bytes go by way of the CPU.
        staged = self.device.type == "cuda" and dist.get_backend(group) == "gloo"
        self.wire_device = torch.device("cpu") if staged else self.device
        self.queues = {}
        if any(item[0] == "W" for item in self.items):
            self.queues = {s: later() for s in stages}
        for s, queue in self.queues.items():
            for part in stages[s].modules():
                if hasattr(part, "when"):
                    part.when = queue
        # NCCL connects a group's ranks at its first call, and if that is a transfer of only some,
        # it waits for the others.
        dist.barrier(group)

    def step(self, batches, N, positions=None):
        """Forward and backward of all micro-batches, a list of (tokens, labels) by their number.

        Every rank of the pipeline has the same list, so a label belongs to its tokens wherever they
        are, and a shape is known before the tensor comes. Returns the loss, a sum over tokens / N,
        on the rank that has the last stage; on others 0.
        """
        self.batches, self.N, self.positions = batches, N, positions
        self.values, self.graphs, self.waiting, self.sending = {}, {}, {}, deque()
        self.loss = torch.zeros((), dtype=at_least_fp32(self.dtype), device=self.device)
        act = {"F": self.forward, "I": self.input_grad, "W": self.weight_grads, "B": self.backward}
        for kind, items in groupby(self.items, type):
            if kind is Transfer:
                self.transfer(list(items))
            else:
                for name, s, i in items:
                    act[name](s, i)
        self.wait_for_sends(0)
        return self.loss

    def forward(self, s, i):
        tokens, labels = self.batches[i]
        x = tokens if s == 0 else self.take(Value("x", s, i)).requires_grad_()  # (B, T, D)
        positions = self.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        y = self.stages[s](x, positions)
        if s == self.last:
            out = self.stages[s].loss(y, labels) / self.N
            self.loss += out.detach()
            self.graphs[s, i] = x, out, None
        else:
            returned = []
            self.graphs[s, i] = x, Left.apply(y, returned), returned
            self.values[Value("x", s + 1, i)] = y.detach

    def input_grad(self, s, i):
        """Backward of everything but the weights of linears, if these may wait."""
        x, out, returned = self.graphs.pop((s, i))
        if s < self.last:
            returned.append(self.take(Value("dy", s, i)))
        if out.requires_grad:  # not if all of the first stage is frozen
            out.backward()
        if s > 0:
            dx = x.grad
            self.values[Value("dy", s - 1, i)] = lambda: dx
        if s in self.queues:  # what waits now is of this micro-batch
            self.waiting[s, i], self.queues[s].jobs = self.queues[s].jobs, deque()

    def weight_grads(self, s, i):
        queue = self.queues[s]
        queue.jobs = self.waiting.pop((s, i))
        while queue.jobs:
            queue.run()

    def backward(self, s, i):
        self.input_grad(s, i)
        if s in self.queues:
            self.weight_grads(s, i)

    def take(self, value):
        """A value's tensor, now; waits if it is still on its way. It is handed out once."""
        return self.values.pop(value)()

    def transfer(self, items):
        """Post neighbouring transfers as one batch. Receives are waited for where they are used."""
        jobs = []
        for way, value, peer in items:
            if way == "send":
                tensor = self.take(value).to(self.wire_device)
            else:
                shape = self.shape(self.batches[value.micro_batch][0])
                tensor = torch.empty(shape, dtype=self.dtype, device=self.wire_device)
            call = dist.isend if way == "send" else dist.irecv
            peer = dist.get_global_rank(self.group, peer)
            jobs.append(dist.P2POp(call, tensor, peer, self.group))
        works = dist.batch_isend_irecv(jobs)
        works *= 1 if len(works) == len(jobs) else len(jobs)  # NCCL has one for the whole batch
        for (way, value, _), job, work in zip(items, jobs, works):
            if way == "send":
                self.sending.append((work, job.tensor))  # holds it until the send is over
            else:
                self.values[value] = partial(self.arrive, work, job.tensor)
        self.wait_for_sends(self.IN_THE_AIR)

    def arrive(self, work, tensor):
        work.wait()
        return tensor.to(self.device)

    def wait_for_sends(self, most):
        """Let go of the oldest. Lists that stand a transport that blocks stand this wait, too."""
        while len(self.sending) > most:
            work, _ = self.sending.popleft()
            work.wait()


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


# --- 6. Costs ------------------------------------------------------------------------------------


def deferred_bytes(c, n, dtype, layers, last):
    """What n tokens of a stage keep from I to W: its linears' inputs and output gradients."""
    heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    block = 2 * c.dim + heads + c.ffn  # into q, k, v; into gate, up; into o; into down
    block += heads + 2 * kv + c.dim + 2 * c.ffn + c.dim  # out of q; k, v; o; gate, up; down
    return n * (layers * block + (c.dim + c.vocab) * last) * dtype.itemsize


def held(lowered, rank, kept, deferred):
    """The most bytes a rank keeps for backward. kept {stage: bytes of a micro-batch from F to B or
    I}, deferred {stage: bytes from I to W}. Not counted: up to IN_THE_AIR hidden states that are
    sent, and what has arrived early.
    """
    return peaks(lowered[rank], kept.get, deferred.get)[1]


def completions(actions, stage):
    """How often in a rank's list the gradients of a stage are complete: when no W of it waits."""
    waiting = times = 0
    for kind, s, _ in actions:
        if s == stage:
            waiting += {"I": 1, "W": -1}.get(kind, 0)
            times += kind in "BW" and not waiting
    return times


def ranks_of_stages(name, p, v):
    """The rank of each stage: round and round, or down and up again."""
    return [*range(p), *reversed(range(p))] if name == "zb-v" else [*range(p)] * v


def sent(name, p, m, v, rank, hidden):
    """(calls, bytes) a rank sends in a step; hidden: bytes of a micro-batch between two stages.

    Down goes an activation and up its gradient, wherever neighbouring stages lie on two ranks.
    """
    where = ranks_of_stages(name, p, v)
    ends = [end for pair in zip(where, where[1:]) if pair[0] != pair[1] for end in pair]
    return m * ends.count(rank), m * ends.count(rank) * hidden


# --- 7. Check and measure ------------------------------------------------------------------------


class Metered(Pipeline):
    """Notes the most bytes alive at the end of an action, without those on their way."""

    def watch(self, live):
        self.live, self.start, self.most = live, live.bytes()["activations"], 0

    def note(self):
        travelling = {t.untyped_storage()._cdata: t for _, t in self.sending}
        for value, get in self.values.items():
            t = get.args[1] if isinstance(get, partial) else get()
            travelling[t.untyped_storage()._cdata] = t
        on_the_way = sum(t.untyped_storage().nbytes() for t in travelling.values())
        apart = self.start + on_the_way + self.loss.element_size()
        size = self.live.bytes()["activations"] - apart
        self.most = max(self.most, size)

    def forward(self, s, i):
        super().forward(s, i)
        self.note()

    def input_grad(self, s, i):
        super().input_grad(s, i)
        self.note()


def stage_bytes(c, B, T, dtype, counts):
    """(kept, deferred) of every stage, for `held`."""
    kept, deferred, last = {}, {}, len(counts) - 1
    for s, layers in enumerate(counts):
        mine = range(sum(counts[:s]), sum(counts[: s + 1]))
        kept[s] = sum(memory.kept_bytes(c, B, T, dtype, layers=mine, last=s == last).values())
        kept[s] += dtype.itemsize * (s < last)  # what stands for the output
        deferred[s] = deferred_bytes(c, B * T, dtype, layers, s == last)
    return kept, deferred


def run_schedule(name, schedule, c, batches, N, group, ends):
    """One step: (loss, gradients by name, the wire meter, bytes held and by formula)."""
    p, rank, m = dist.get_world_size(group), dist.get_rank(group), len(batches)
    (B, T), here = batches[0][0].shape, batches[0][0].device
    lowered = lower(schedule.make(p, m))
    check(lowered)
    counts = split(c.layers, p * schedule.v, head_flops(c) / block_flops(c, T))
    mine = [s for s, r in enumerate(ranks_of_stages(name, p, schedule.v)) if r == rank]
    stages = cut_stages(memory.build(c, dtype=torch.float64, device=here), counts, mine)
    pipe = Metered(stages, lowered, group, lambda tokens: (*tokens.shape, c.dim), memory.Later)
    named, positions = parameters(stages), torch.arange(T, device=here)
    live = memory.Live(
        batch=lambda: [positions, *(t for batch in batches for t in batch)],
        parameters=named.values,
        gradients=lambda: [p.grad for p in named.values() if p.grad is not None],
    )
    with dp.Wire() as wire, live:
        pipe.watch(live)
        loss = pipe.step(batches, N, positions)
    sum_tied(stages, len(counts) - 1, ends)
    dist.all_reduce(loss, group=group)
    tied = {"lm_head.weight": "embed_tokens.weight"} if c.tied else {}
    grads = {tied.get(name, name): p.grad for name, p in named.items()}
    kept = held(lowered, rank, *stage_bytes(c, B, T, torch.float64, counts))
    return loss, grads, wire, (pipe.most, kept)


def show_schedules(p, columns=80):
    """The pictures, and what is simulated beside the formulas; returns failures."""
    for name, schedule in schedules().items():
        spans = simulate(lower(schedule.make(p, p)), times()).spans
        lines = draw(spans, p)
        if max(map(len, lines)) <= columns:
            dp.log(f"{name}   (lower case: a rank's second chunk)" if schedule.v > 1 else name)
            dp.log("\n".join(lines))
    rows, failures, m = [], [], 2 * p
    for name, schedule in schedules().items():
        lowered = lower(schedule.make(p, m))
        work, result = 3 * m * schedule.v, simulate(lowered, times())
        counted = [peaks(items)[0] for items in lowered]
        shape = p, m, schedule.v
        found = [Fraction(result.time, work) - 1, counted]
        formula = [bubble(name, *shape), [in_flight(name, *shape, r) for r in range(p)]]
        shown = (f"{float(found[0]):.4f}", f"{float(formula[0]):.4f}")
        rows.append([name, *shown, *(" ".join(map(str, x)) for x in (counted, formula[1]))])
        failures += [f"{name}: simulated {found}, by formula {formula}"] * (found != formula)
    rows.append(["dualpipe", "", f"{float(bubble('dualpipe', p, m)):.4f}", "", f"{p + 1} on each"])
    dp.log()
    head = [f"{m} micro-batches", "idle/work", "formula", "in flight by rank", "formula"]
    dp.table(head, rows)
    return failures


def show_balance(c, n):
    """How uneven stages of equal layers would be."""
    head = head_flops(c) / block_flops(c, 8192)
    counts = split(c.layers, n, head)
    slowest, even = max(*counts, counts[-1] + head), c.layers / n
    dp.log(f"llama3-8b over {n} stages: its head takes the time of {head:.1f} layers. Layers by"
           f" stage\n  {' '.join(map(str, counts))}, the slowest {slowest:.1f} long;"
           f" {even:.0f} each would be {even + head:.1f}")  # fmt: skip


def demo(args):
    p, rank, T = dist.get_world_size(), dist.get_rank(), 16
    here, m = dp.device(), 2 * p
    group = dist.new_group(range(p), timedelta(seconds=60), group_desc="pp")
    ends = dist.new_group(sorted({0, p - 1}), timedelta(seconds=60), group_desc="tied")
    c = memory.Config(256, 64, layers=2 * p + 2, heads=4, kv_heads=2, ffn=192, tied=True)
    dp.header("05 pipeline parallelism", f"world {p} = pp {p}", "   float64")
    failures = show_schedules(p)
    dp.log()
    show_balance(memory.PRESETS["llama3-8b"], 8)

    sample = dp.Samples(dp.open_tokens(), T, seed=0)
    batches = dp.micro_batches(sample, range(m), 1, here)
    dense = memory.build(c, dtype=torch.float64, device=here)
    tokens, labels = dp.micro_batches(sample, range(m), m, here)[0]
    dense_loss = dense.loss(dense(tokens), labels) / labels.numel()
    dense_loss.backward()
    dp.log(f"\nllama {memory.parameter_count(c):,} parameters, tied   {m} x 1 x {T} tokens"
           f"   loss on one device {dense_loss:.6f}")  # fmt: skip
    rows, wrong = [], []
    for name, schedule in schedules().items():
        step = run_schedule(name, schedule, c, batches, labels.numel(), group, ends)
        loss, grads, wire, (most, kept) = step
        found = wire.calls["pp", "send"], wire.bytes["pp", "send"]
        formula = sent(name, p, m, schedule.v, rank, T * c.dim * 8)
        expected = {n: g for n, g in dp.gradients(dense).items() if n in grads}
        error, worst = dp.worst_error(grads, expected)
        if not dp.relative_error(loss, dense_loss) < 1e-12:
            wrong.append(f"loss {loss} ({name}), {dense_loss} on one device")
        everyone = [None] * p
        dist.all_gather_object(everyone, (error, len(grads)), group=group)
        all_errors, compared = max(e for e, _ in everyone), sum(n for _, n in everyone)
        rows.append([name, *(x for pair in zip(found, formula) for x in pair), most, kept,
                     compared, f"{all_errors:.0e}"])  # fmt: skip
        if not error < 1e-11:
            wrong.append(f"{worst} gradient relative error {error:.3g} ({name})")
        if found != formula or most != kept:
            failures.append(f"{name} sent {found}, by formula {formula}; held {most}, {kept}")
    dp.log("rank 0; error: the worst of so many gradients on all ranks")
    head = ["", "calls", "formula", "sent", "formula", "held", "formula", "of", "error"]
    dp.table(head, rows)
    if args.svg and rank == 0:
        write_svg(args.svg, 4, 8)
    return dp.verdict("05_pp_1f1b", wrong + failures)


def write_svg(path, p, m):
    pictures = {}
    for name, schedule in schedules().items():
        cost = times(*[Fraction(1, schedule.v)] * 3)
        pictures[name] = simulate(lower(schedule.make(p, m)), cost).spans, p
    with open(path, "w") as file:
        file.write(svg(pictures))


def main():
    parser = argparse.ArgumentParser(description="pipeline schedules against one device")
    parser.add_argument("--pp", type=int, default=4, help="ranks, when started as plain python")
    parser.add_argument("--svg", metavar="FILE", help="write the schedules as a picture")
    args = parser.parse_args()
    return dp.launch(demo, args.pp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
