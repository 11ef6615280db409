"""
03 · ZeRO: data parallelism that keeps only a part of everything

Idea      N data-parallel ranks hold N equal copies of weights, gradients and optimizer state. Let
          each keep one N-th of it, and fetch the rest from the others when it is needed.
Picture   parameters of a block, end to end, padded and cut into N shards; a rank's gradient,
          master copy and moments are those of its shard:
            whole    | q_proj | k_proj | v_proj |  o_proj  |  gate_proj  |  …  | padding |
            shards   |     rank 0     |     rank 1     |     rank 2     |     rank 3     |
          stage      parameters       gradients        optimizer        sent per step
          0 (02)     whole            whole            whole            2Ψ   (all-reduce)
          1          whole            whole            shard            2Ψ   (Ψ reduce, Ψ gather)
          2          whole            shard, 2 units   shard            (m + 1)Ψ
          3          shard, 2 units   shard, 2 units   shard            3Ψ·m, less m last units
          Ψ is (N-1)/N of the model's bytes, m the micro-batches of a step.
Cost      held(...) and sent(...) below, by stage. Activations are not cut: 04, 05 and 07 do that.
Pays      stage 1 always: it sends what 02 sends. Stage 2 when the gradients are too many: it keeps
          a shard of them, so each micro-batch's has to be reduced before the next one's comes,
          m times the bytes of stage 1's one reduction. Stage 3 when the model doesn't fit
          otherwise, and a block computes for longer than its neighbour travels.
Forget    the sum of the squared norms over the ranks. Each rank then clips its shard by that
          shard's own norm: gradients that were right before are wrong after (relative
          error 4.78 in this demo, at stage 3).
Run       torchrun --nproc-per-node 4 03_zero.py      (or python 03_zero.py)
Copy      at_least_fp32, reduce_scatter, reduces_by, all_gather, padded, Flat, Piece, Optimizer,
          Window, clip_factor: stages 1 to 3 for any model made of units. Imports: itertools, math,
          partial, NamedTuple.
Read      ZeRO (1910.02054), PyTorch FSDP (2304.11277)

Letters as in 01 and 02. A unit is what stage 3 gathers at once: embedding, a block, norm and head.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import tempfile
import time
import zlib
from contextlib import ExitStack
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

memory = import_module("01_memory")  # for the demo
dp = import_module("02_dp")


# --- 1. Two collectives ------------------------------------------------------------------------
#
# all-reduce is reduce-scatter followed by all-gather. ZeRO puts the optimizer between the two.


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


def reduce_scatter(shard, whole, group):
    """Start: shard = this rank's part of the sum of all `whole`. Returns what waits for the end.

    shard may be that very part of whole.
    """
    if reduces_by(group) == "reduce_scatter":
        # torch 2.13 has given the function a new name
        single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return single(shard, whole, group=group, async_op=True).wait
    n, rank, jobs = dist.get_world_size(group), dist.get_rank(group), []
    parts = whole.view(n, -1)  # (n, S): everyone gets its own, and adds what comes
    arrived = parts.new_empty(n - 1, parts.shape[1])
    for i, part in enumerate(arrived, 1):
        to, source = (rank + i) % n, (rank - i) % n
        jobs.append(dist.P2POp(dist.isend, parts[to], group=group, group_peer=to))
        jobs.append(dist.P2POp(dist.irecv, part, group=group, group_peer=source))
    works = dist.batch_isend_irecv(jobs)

    def add():
        for work in works:
            work.wait()
        total = parts[rank]
        for part in arrived:
            total = torch.add(total, part, out=shard)

    return add


def reduces_by(group=None):
    """The collective inside reduce_scatter, under the name that 02's meter has for it.

    There are two for speed alone: gloo's own reduce-scatter is an all-reduce of a copy, of which it
    keeps a part. Everyone sending the others their parts and adding what comes moves no more than a
    reduce-scatter should, (N-1)/N of the whole, and holds as much meanwhile.
    """
    if not dist.is_initialized() or dist.get_backend(group) in ("nccl", "fake"):  # fake: a dry run
        return "reduce_scatter"
    return "send"


def all_gather(whole, shard, group, wire=None):
    """Start: whole = the shards of all ranks, end to end. Returns what waits for the end.

    wire = (encode, decode) changes what travels: encode(shard) gives a flat tensor, equally long
    on all ranks, and decode makes a shard of it again.
    """
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if wire is None:
        return single(whole, shard, group=group, async_op=True).wait
    encode, decode = wire
    n, packed = dist.get_world_size(group), encode(shard)
    arrived = packed.new_empty(n * packed.numel())
    wait = single(arrived, packed, group=group, async_op=True).wait

    def unpack():
        wait()
        for part, packed in zip(whole.chunk(n), arrived.chunk(n)):
            part.copy_(decode(packed))

    return unpack


# --- 2. The flat shard -------------------------------------------------------------------------


def padded(elements, n):
    """The next multiple of n."""
    return elements + -elements % n


class Flat:
    """Parameters of one dtype and one pair of groups, end to end in one buffer cut into n shards.

    The cut falls anywhere, also inside a parameter. There is one rule for what belongs to a rank,
    `mine`, and parameter, gradient, master copy and moments all follow it.

    whole   (n·S,)  what the model's parameters are views of. At stage 3 its storage comes and goes
    shard   (S,)    this rank's part of it; a tensor of its own at stage 3
    master  (S,)    the shard in at least fp32; the same tensor if the shard is that already
    full    (n·S,)  the gradients of this rank's tokens, in at least fp32; from stage 2 on it comes
                    and goes
    grad    (S,)    this rank's part of their sum; from stage 2 on its memory is there from the
                    first reduction to the step, and not while activations pile up in forward
    """

    @torch.no_grad()
    def __init__(self, parameters, group=None, same=(), stage=1, wire=None):
        self.parameters, self.group, self.same, self.wire = parameters, group, same, wire
        n, rank = 1, 0
        if group is not None:
            n, rank = dist.get_world_size(group), dist.get_rank(group)
        self.range, self.used = {}, 0
        for name, p in parameters.items():
            self.range[name] = (self.used, self.used + p.numel())
            self.used += p.numel()
        self.length = padded(self.used, n)
        self.n, self.stage = n, stage if n > 1 and self.length else 0  # is there anything to cut?
        self.mine = slice(rank * self.length // n, (rank + 1) * self.length // n)

        first = next(iter(parameters.values()))
        wide = at_least_fp32(first.dtype)
        self.trainable = first.requires_grad
        self.whole = first.new_zeros(self.length)
        for name, view in self.views(self.whole).items():
            parameters[name].data = view.copy_(parameters[name])
        self.filled = True  # is `whole` there, or has it been asked for?
        self.gathering = self.reducing = None  # what waits for a collective that is under way
        self.shard = self.whole[self.mine]
        if self.stage == 3:
            self.shard = self.shard.clone()
            self.free()
        self.master = self.shard
        # What has been through a lossy wire is for computing only: the step needs the exact one.
        if self.trainable and (first.dtype != wide or (wire and self.stage in (1, 2))):
            self.master = self.shard.to(wide, copy=True)
        self.full = self.grad = None
        if self.trainable:
            length = self.length if self.stage < 2 else self.length // n
            self.grad = first.new_zeros(length, dtype=wide)
            if self.stage < 2:
                self.full, self.grad = self.grad, self.grad[self.mine]

    def views(self, whole):
        """{name: the parameter's place in a buffer such as `whole`, in the parameter's shape}"""
        return {
            name: whole[start:stop].view(self.parameters[name].shape)
            for name, (start, stop) in self.range.items()
        }

    def pieces(self, shard):
        """What of each parameter lies in a buffer such as `shard`: {name: (start, stop, slice)}.

        [start, stop) counts in the parameter, flattened. Who has nothing of it isn't listed.
        """
        pieces, (low, high) = {}, (self.mine.start, self.mine.stop)
        for name, (first, last) in self.range.items():
            start, stop = max(first, low), min(last, high)
            if start < stop:
                pieces[name] = (start - first, stop - first, shard[start - low : stop - low])
        return pieces

    # Parameters: gathered before use, at stage 3 freed after it.

    def gather(self):
        """Start to fill `whole`, unless it is filled or about to be."""
        if not self.filled:
            if self.stage == 3:
                self.whole.untyped_storage().resize_(self.length * self.whole.element_size())
            self.gathering = all_gather(self.whole, self.shard, self.group, self.wire)
            self.filled = True

    def arrive(self):
        """Wait until it is filled."""
        if self.gathering:
            self.gathering()
            self.gathering = None

    def free(self):
        """Give the memory back; the parameters keep their shapes and their view of this storage."""
        if self.stage == 3 and self.filled:
            self.arrive()
            self.whole.untyped_storage().resize_(0)
            self.filled = False

    # Gradients: collected as they are finished, then reduced to the shard.

    def restart(self):
        """Before the first backward of a step."""
        self.missing, self.passes = set(self.parameters), 0  # in this pass; passes complete
        self.fresh = set(self.parameters)  # whose place in `full` has nothing of this step yet
        self.ready = False  # are all gradients of a pass here, and not reduced yet?
        self.reduced = False
        if self.trainable:
            if self.stage < 2:
                self.full[self.used :].zero_()
            else:
                self.grad.untyped_storage().resize_(0)

    def collect(self, name, p):
        """Add p's finished gradient to `full`. Returns True if it was the last one of this pass."""
        if self.stage == 1 and self.reduced:
            raise RuntimeError(f"{name}: more backward passes than begin(passes) was told")
        if self.full is None:
            self.full = torch.zeros(self.length, dtype=self.grad.dtype, device=self.grad.device)
            self.fresh = set(self.parameters)
        start, stop = self.range[name]
        place = self.full[start:stop].view(p.shape)
        if name in self.fresh:  # overwrites what the last step has left there
            place.copy_(p.grad)
        else:
            place.add_(p.grad)
        p.grad = None
        self.fresh.discard(name)
        self.missing.discard(name)
        if self.missing:
            return False
        self.missing, self.passes = set(self.parameters), self.passes + 1
        return True

    def reduce(self):
        """Start to sum `full` over the ranks; each gets its part, in its place in `full`."""
        self.ready, self.reduced = False, True
        if self.stage > 0:
            self.reducing = reduce_scatter(self.full[self.mine], self.full, self.group)

    def unreduced(self):
        return self.full is not None and not (self.reduced and self.stage < 2)

    def reduce_done(self):
        if self.reducing:
            self.reducing()
            self.reducing = None
        if self.stage > 1:
            if self.grad.untyped_storage().nbytes():
                self.grad += self.full[self.mine]
            else:  # of this step's first pass
                self.grad.untyped_storage().resize_(self.grad.nbytes)
                self.grad.copy_(self.full[self.mine])
            self.full = None


# --- 3. The optimizer on shards ----------------------------------------------------------------


class Piece(NamedTuple):
    """Elements [start, stop) of a box of a tensor of the model, flattened, and where they are."""

    name: str
    kind: str  # weight, or a state of the optimizer
    shape: tuple  # of the whole tensor, as one device has it
    box: tuple  # ((from, to), …) by dimension: what tensor or expert parallelism left on this rank
    start: int  # of what ZeRO left of that
    stop: int
    tensor: torch.Tensor
    owned: bool  # does this rank write it, of those that have the same?


class Optimizer:
    """One torch optimizer on this rank's shards, and the gradients' way there.

        every step:  optimizer.begin(M); M times loss.backward(); optimizer.sum_gradients()
                     optimizer.scale(clip_factor(optimizer, 1.0, world)); optimizer.step(lr)

    units    lists of modules in the order of the forward pass, together the whole model. Each is
             laid out, gathered and reduced at once. At stage 3 the first module of a list has to
             be called first and the last one last, with one tensor as its result
    groups   {name: (shard, same)}: the group that ZeRO cuts this parameter over (None: not cut)
             and a tuple of groups whose ranks hold the same shard. Its gradient is summed over
             both. Stage 0 is all of it in `same`; hybrid ZeRO cuts inside a node, and has the
             other nodes in `same`
    make     make(matrices, vectors) gives a fused torch optimizer for these lists of tensors. What
             decays is decided by whole parameters here: a piece of a matrix is a flat tensor too
    on_finished(p, hook) calls hook(p) when p's gradient is complete
    counts   how many of the units each pipeline stage of this rank has, if it has several (05):
             each of them is a forward and a backward pass by itself
    """

    def __init__(
        self,
        model,
        units,
        groups,
        stage,
        make,
        on_finished=torch.Tensor.register_post_accumulate_grad_hook,
        wire=None,
        counts=None,
    ):
        names, home = {p: name for name, p in model.named_parameters()}, {}
        self.units = []  # lists of flats; a tied table is in the list of each unit that uses it
        for modules in units:
            here = dict.fromkeys(p for module in modules for p in module.parameters())
            rows = {}
            for p in here:
                row = (*groups[names[p]], p.dtype, p.requires_grad)
                if p not in home:
                    rows.setdefault(row, {})[names[p]] = p
            for (shard, same, *_), parameters in rows.items():
                flat = Flat(parameters, shard, same, stage, wire)
                home.update(dict.fromkeys(parameters.values(), flat))
            self.units.append(list(dict.fromkeys(home[p] for p in here)))
        if left := names.keys() - home.keys():
            raise ValueError(f"in no unit: {', '.join(sorted(names[p] for p in left))}")

        self.flats = list(dict.fromkeys(home.values()))
        # The order of reductions, the same on every rank whatever the order of arrival. A lane is
        # the flats of one pipeline stage; a rank's stages take turns as the schedule says.
        self.order = [flat for flat in reversed(self.flats) if flat.trainable]
        ends = list(itertools.accumulate(counts or [len(units)]))
        self.stages = [slice(a, b) for a, b in zip([0, *ends], ends)]  # of self.units
        self.lanes, self.lane_of = [[] for _ in self.stages], {}
        for lane, stage_units in enumerate(self.stages):
            for flat in itertools.chain(*self.units[stage_units]):
                self.lane_of.setdefault(flat, lane)
        for flat in self.order:
            if flat.stage:
                self.lanes[self.lane_of[flat]].append(flat)
        self.weights = {}
        for flat in self.order:
            for name, p in flat.parameters.items():
                on_finished(p, partial(self.gradient_finished, flat, name))
            gradients = flat.pieces(flat.grad)
            for name, (_, _, weight) in flat.pieces(flat.master).items():
                self.weights[name] = weight.detach()
                self.weights[name].grad = gradients[name][2]
        matrices = {name for p, name in names.items() if p.dim() > 1}
        self.inner = make(
            [w for name, w in self.weights.items() if name in matrices],
            [w for name, w in self.weights.items() if name not in matrices],
        )
        device = self.flats[0].shard.device
        self._step(0.0, torch.ones((), device=device))  # a skipped step: torch makes its state
        if stage == 3:
            self.windows = [Window(units[part], self.units[part]) for part in self.stages]
        self.in_flight = []
        self.begin()

    def begin(self, passes=1):
        """Before the forward passes of a step: how many there will be, if that is known.

        Until then the last step's gradients stay where they are, for who wants to look at them.
        """
        self.passes, self.turns, self.done = passes, [0] * len(self.lanes), False
        for flat in self.order:
            flat.restart()

    def gradient_finished(self, flat, name, p):
        """A gradient is complete. Stage 1 reduces in the last pass, 2 and 3 in every one."""
        if self.done:
            self.begin()
        if flat in self.in_flight:  # its buffer is still travelling
            self.finish_reduces()
        if not (flat.collect(name, p) and flat.stage):
            return
        flat.ready = flat.stage > 1 or flat.passes == self.passes
        lane = self.lane_of[flat]
        order = self.lanes[lane]
        while order[self.turns[lane]].ready:
            self.start_reduce(order[self.turns[lane]])
            self.turns[lane] = (self.turns[lane] + 1) % len(order)

    def start_reduce(self, flat):
        """It travels while the next unit computes. From stage 2 on, one at a time: two units'
        gradients exist then, the one that travels and the one that is made. The last of a pass
        travels through the next forward pass, so its buffer lies beside all activations then."""
        if flat.stage > 1:
            self.finish_reduces()
        flat.reduce()
        self.in_flight.append(flat)

    def finish_reduces(self):
        for flat in self.in_flight:
            flat.reduce_done()
        self.in_flight.clear()

    def sum_gradients(self):
        """After the last backward of a step: finish all sums over `shard`, then sum over `same`."""
        if self.done:
            self.begin()
        for flat in self.flats:
            for name, p in flat.parameters.items():
                if p.requires_grad != flat.trainable:
                    raise RuntimeError(f"{name} was frozen or freed after the shards were laid out")
                if flat.trainable and name in flat.missing and not flat.passes:
                    raise RuntimeError(f"{name} has no gradient on rank {dist.get_rank()}")
        self.finish_reduces()
        for flat in self.order:
            if flat.unreduced():
                self.start_reduce(flat)
        self.finish_reduces()
        for flat in self.order:
            for group in flat.same:
                dist.all_reduce(flat.grad, group=group)

    def squares(self):
        """This rank's share of the squared norm; over all ranks, each element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.flats[0].shard.device)
        for flat in self.order:
            copies = math.prod(dist.get_world_size(group) for group in flat.same)
            total += torch.linalg.vector_norm(flat.grad, dtype=torch.float64).square() / copies
        return total

    def scale(self, factor):
        for flat in self.order:
            flat.grad.mul_(factor)

    def step(self, lr, skip=None):
        """One step with learning rate lr; nothing changes where skip, a tensor, is not 0."""
        self._step(lr, skip)
        self.spread()
        self.done = True

    def _step(self, lr, skip):
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.grad_scale, self.inner.found_inf = None, skip  # read by the fused kernels
        self.inner.step()

    @torch.no_grad()
    def spread(self, frozen=False):
        """From the masters to the weights the model computes with; frozen ones only if told."""
        for flat in self.flats:
            flat.free()  # a forward without a backward has left its last unit
            if flat.master is not flat.shard:
                flat.shard.copy_(flat.master)
            if flat.stage in (1, 2) and (flat.trainable or frozen):
                flat.filled = False
                flat.gather()
        for flat in self.flats:
            flat.arrive()

    def tensors(self):
        """All that a rank holds when it takes a step, by kind."""
        trained = self.order
        return {
            "parameters": [f.shard if f.stage == 3 else f.whole for f in self.flats],
            "gradients": [f.grad if f.full is None else f.full for f in trained],
            "master copy": [f.master for f in trained if f.master is not f.shard],
            "moments": [
                t for state in self.inner.state.values() for t in state.values() if t.dim()
            ],
        }

    def gathered(self, shards):
        """{name: whole tensor} on every rank, from a list with a shard (or None) for each flat.

        For looking at [flat.shard …] or [flat.grad …]; training never holds all of it.
        """
        result = {}
        for flat, shard in zip(self.flats, shards):
            if shard is not None:
                whole = shard.clone()
                if flat.stage > 0:
                    whole = shard.new_empty(flat.length)
                    all_gather(whole, shard, flat.group)()
                result.update(flat.views(whole))
        return result

    def state(self, boxes=None):
        """Everything this rank keeps, as pieces of the model's tensors: what a checkpoint holds.

        boxes {name: (shape of the whole tensor, box)} for what was cut before ZeRO came. What this
        rank has beyond its box is padding (04's vocabulary), and in no checkpoint.
        """
        for flat in self.flats:
            first_copy = all(dist.get_rank(group) == 0 for group in flat.same)
            for name, (start, stop, weight) in flat.pieces(flat.master).items():
                shape = tuple(flat.parameters[name].shape)
                shape, box = (boxes or {}).get(name, (shape, tuple((0, size) for size in shape)))
                stop = max(min(stop, math.prod(high - low for low, high in box)), start)
                weight = weight[: stop - start]
                yield Piece(name, "weight", shape, box, start, stop, weight, first_copy)
                for kind, t in self.inner.state.get(self.weights.get(name), {}).items():
                    if t.dim():
                        moment = t[: stop - start]
                        yield Piece(name, kind, shape, box, start, stop, moment, first_copy)
                    else:  # one number for the parameter, as AdamW's count of steps
                        owned = first_copy and start == 0 and all(low == 0 for low, _ in box)
                        yield Piece(name, kind, (), (), 0, 1, t.reshape(1), owned)


def clip_factor(optimizer, max_norm, world):
    """What to multiply gradients by so that the norm of all of them, of all ranks, is max_norm."""
    squares = optimizer.squares()
    dist.all_reduce(squares, group=world)  # forget
    return (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)


# --- 4. Stage 3: parameters that are there when needed -------------------------------------------


class Window:
    """Gathers each unit before it computes and frees it after, in forward and in backward.

    forward     gather 0 ─ compute 0 ─ free 0 ─ compute 1 ─ free 1 ─ compute 2
                gather 1 ┘           gather 2 ┘
    backward    compute 2 ─ free 2 ─ compute 1 ─ free 1 ─ compute 0 ─ free 0
                gather 1 ┘         gather 0 ┘

    Two neighbours are whole at a time, the one that computes and the one that travels. The last
    unit isn't freed in between, as backward begins with it. Recomputation calls a unit once more,
    from inside backward: it is whole then, and must stay so; therefore the hooks do nothing in
    backward.
    """

    def __init__(self, modules, flats):
        self.flats, self.turn, self.in_backward = flats, 0, False
        self.differentiable = [False] * len(flats)
        for i, unit in enumerate(modules):
            unit[0].register_forward_pre_hook(lambda module, x, i=i: self.before_forward(i))
            unit[-1].register_forward_hook(lambda module, x, y, i=i: self.after_forward(i, y))

    def whole(self, i):
        for flat in self.flats[i]:
            flat.gather()
        for flat in self.flats[i]:
            flat.arrive()

    def prefetch(self, i):
        for flat in self.flats[i]:
            flat.gather()

    def free(self, i):
        for flat in self.flats[i]:
            flat.free()

    def before_forward(self, i):
        if self.in_backward:
            return
        if i != self.turn:  # a gather takes all ranks: they must make the same ones, in one order
            raise RuntimeError(f"unit {i} is called, but it is the turn of unit {self.turn}")
        self.whole(i)
        if i + 1 < len(self.flats):
            self.prefetch(i + 1)

    def after_forward(self, i, y):
        if self.in_backward:
            return
        self.turn = (i + 1) % len(self.flats)
        self.differentiable[i] = y.requires_grad
        if y.requires_grad:
            y.register_hook(lambda dy: self.before_backward(i))  # when dy is known
        if self.turn or not y.requires_grad:
            self.free(i)

    def before_backward(self, i):
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        if i + 1 < len(self.flats):
            self.free(i + 1)
        self.whole(i)
        if i and self.differentiable[i - 1]:  # a frozen beginning has no backward
            self.prefetch(i - 1)

    def after_backward(self):
        self.in_backward = False
        for i in range(len(self.flats)):
            self.free(i)


def llama_units(model):
    """The units of 01's Llama, or of a stage of it: the embedding, each block, norm and head."""
    units = [[model.embed_tokens], *([block] for block in model.layers.values())]
    units.append([model.norm, model.lm_head])
    return [unit for unit in units if unit[0] is not None]


def merged(units, n):
    """The same modules as n units, about as many in each: fewer and larger transfers, of which less
    hides behind other work. At stage 3 that much more is whole at a time."""
    size = len(units)
    return [sum(units[i * size // n : (i + 1) * size // n], []) for i in range(n)]


# --- 5. What a stage costs ---------------------------------------------------------------------
#
# flats {key: elements, padded} in the order of the layout, units [[key, …], …]: which flats each
# unit uses. Without tied weights unit i is flat i. The other numbers are bytes per element.


def held(stage, flats, units, n, weight=4, gradient=4, master=0, moments=8):
    """Bytes a rank holds when it takes its step, by kind, and how many more before it at the most.

    From stage 2 on, `begin` frees the gradients until backward makes new ones.
    """
    total = sum(flats.values())
    cut = [total // n if stage >= s else total for s in (1, 2, 3)]
    two_units = max(sum(flats[k] for k in {*a, *b}) for a, b in zip(units, units[1:] or units))
    sizes = list(flats.values())
    two_flats = max(a + b for a, b in zip(sizes, sizes[1:] or [0]))
    return {
        "parameters": cut[2] * weight,
        "gradients": cut[1] * gradient,
        "master copy": cut[0] * master,
        "moments": cut[0] * moments,
        "gathered": two_units * weight if stage == 3 and n > 1 else 0,
        "unreduced": two_flats * gradient if stage >= 2 and n > 1 else 0,
    }


def gathers(passes, stages):
    """The flats that stage 3 gathers in a step, in order, each as often as it does.

    passes  [(pipeline stage, is it forward?), …] in the order in which this rank runs them
    stages  {pipeline stage: its units}; without a pipeline there is one
    """
    whole, gathered = set(), []

    def gather(unit):
        gathered.extend(key for key in unit if key not in whole)
        whole.update(unit)

    for stage, forward in passes:
        units = stages[stage] if forward else stages[stage][::-1]
        for i, unit in enumerate(units):
            if i and not forward:
                whole.difference_update(units[i - 1])
            for near in units[i : i + 2]:  # this one and the next
                gather(near)
            if forward and i + 1 < len(units):  # the last is needed again at once
                whole.difference_update(unit)
        if not forward:
            whole.difference_update(*units)
    return gathered


def sent(
    stage, flats, units, n, weight=4, gradient=4, m=1, passes=None, reduction="reduce_scatter"
):
    """{collective: (calls, bytes)} a rank sends over `shard` in a step of m micro-batches.

    With a pipeline: units is {stage: units}, passes as in `gathers`, and m {flat: how often its
    gradient is complete}. (05: with deferred weight gradients that may be less often.) reduction is
    what reduces_by says.
    """
    if stage == 0 or n == 1:
        return {}
    if passes is None:
        passes, units, m = [(0, True), (0, False)] * m, {0: units}, dict.fromkeys(flats, m)
    gathered, reduced = list(flats.values()), list(flats.values())
    if stage > 1:
        reduced = [size for k, size in flats.items() for _ in range(m[k])]
    if stage == 3:
        gathered = [flats[k] for k in gathers(passes, units) if k in flats]
    calls = len(reduced) * (n - 1 if reduction == "send" else 1)
    return {
        "all_gather": (len(gathered), Fraction((n - 1) * sum(gathered) * weight, n)),
        reduction: (calls, Fraction((n - 1) * sum(reduced) * gradient, n)),
    }


# --- 6. Checkpoints that fit any layout ----------------------------------------------------------
#
# step-000123/index.json, and one file of raw little-endian numbers for each rank. The index says
# of every tensor, under the name and in the shape that one device has, which piece is where. A
# reader takes what it needs, whatever layout it has itself. Nothing is executed to read it.

BLOCK = 1 << 22  # bytes in hand at a time


class CheckpointError(Exception):
    """A checkpoint could not be written or read; raised on all ranks alike."""


def together(work, group):
    """work() on every rank, and the list of results; if it fails on one rank, all raise."""
    try:
        mine = work(), None
    except (OSError, ValueError, KeyError, TypeError) as error:
        mine = None, f"rank {dist.get_rank(group)}: {type(error).__name__} {error}"
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if wrong := [error for _, error in everyone if error]:
        raise CheckpointError(wrong[0])
    return [result for result, _ in everyone]


def save(directory, step, pieces, facts, group):
    """Write a checkpoint of `step` finished steps, all ranks together; returns its size in bytes.

    It is written aside and appears under its name when everything is on the disk, or not at all.
    """
    aside = Path(directory, f"step-{step:06d}.tmp")
    rank, file = dist.get_rank(group), f"rank-{dist.get_rank(group):05d}.bin"

    def prepare():
        if rank == 0:
            for left in Path(directory).glob("step-*.tmp"):  # by a run that was killed meanwhile
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)

    def publish():
        if rank == 0:
            write_index(aside / "index.json", step, facts, written)
            sync(aside)
            final, old = aside.with_suffix(""), aside.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            if final.exists():  # damaged, or why would it be written again
                final.rename(old)
            aside.rename(final)
            sync(directory)
            shutil.rmtree(old, ignore_errors=True)

    together(prepare, group)
    written = together(lambda: write_pieces(aside / file, pieces), group)
    together(publish, group)
    return sum(size for _, size, _ in written)


def sync(path):
    """Return when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pieces(path, pieces):
    """Returns the entries for the index, and the file's size and checksum."""
    entries, offset, checksum = [], 0, 0
    with open(path, "wb") as file:
        for piece in pieces:
            if piece.owned:
                data = piece.tensor.detach().cpu().view(torch.uint8).numpy()
                file.write(data)
                entry = piece._asdict() | {"dtype": str(piece.tensor.dtype).removeprefix("torch.")}
                entry |= {"file": path.name, "offset": offset}
                entries.append({k: v for k, v in entry.items() if k not in ("tensor", "owned")})
                checksum, offset = zlib.crc32(data, checksum), offset + len(data)
    sync(path)
    return entries, offset, checksum


def write_index(path, step, facts, written):
    tensors = {}
    for entries, _, _ in written:
        for entry in entries:
            head = {k: entry.pop(k) for k in ("name", "kind", "shape", "dtype")}
            tensors.setdefault((head["name"], head["kind"]), {**head, "pieces": []})
            tensors[head["name"], head["kind"]]["pieces"].append(entry)
    files = {f"rank-{i:05d}.bin": [size, crc] for i, (_, size, crc) in enumerate(written)}
    index = {"step": step, "facts": facts, "files": files, "tensors": list(tensors.values())}
    text = json.dumps(index)
    path.write_text(f'{{"checksum": {zlib.crc32(text.encode())}, "index": {text}}}\n')
    sync(path)


def read_index(folder):
    """The index of a checkpoint; ValueError if it isn't what was written."""
    content = json.loads(Path(folder, "index.json").read_bytes())
    if zlib.crc32(json.dumps(content["index"]).encode()) != content["checksum"]:
        raise ValueError("index.json: wrong checksum")
    return content["index"]


def verify(folder, part, parts):
    """Raise ValueError unless this part of the files is as it was written."""
    for name, (size, expected) in list(read_index(folder)["files"].items())[part::parts]:
        checksum = 0
        with open(Path(folder, name), "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise ValueError(f"{name}: {os.fstat(file.fileno()).st_size} bytes, not {size}")
            while data := file.read(BLOCK):
                checksum = zlib.crc32(data, checksum)
        if checksum != expected:
            raise ValueError(f"{name}: wrong checksum")


def newest(directory, group, log=print):
    """The newest good checkpoint in a directory, or None if there is none at all.

    Says of each damaged one that it is; all damaged is an error, for starting over would be worse.
    """

    def look():
        names = os.listdir(directory) if os.path.isdir(directory) else []
        steps = [int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name))]
        return sorted(steps, reverse=True)

    steps = together(look, group)[0]  # what rank 0 sees
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for step in steps:
        folder = Path(directory, f"step-{step:06d}")
        try:
            together(lambda: verify(folder, rank, world), group)
            return folder
        except CheckpointError as error:
            log(f"checkpoint {folder} is damaged ({error}); taking the one before")
    if steps:
        raise CheckpointError(f"no checkpoint in {directory} is good")


def runs(shape, box, start, stop):
    """Elements [start, stop) of a box, flattened, as runs that are contiguous in the whole tensor.

    Yields (place in the whole tensor, place in [start, stop), length), in the order of both.
    """
    sizes = [high - low for low, high in box]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    length = math.prod(sizes[cut:])  # whole after dimension `cut`, so contiguous
    corner = sum(low * stride for (low, _), stride in zip(box, strides))
    position = start
    while position < stop:
        row, inside = divmod(position, length)
        count, place = min(length - inside, stop - position), corner + inside
        for d in reversed(range(cut)):
            row, i = divmod(row, sizes[d])
            place += i * strides[d]
        yield place, position - start, count
        position += count


def overlaps(ours, theirs):
    """Where two sequences of runs meet: (place in ours, place in theirs, length)."""
    a, b = next(ours, None), next(theirs, None)
    while a and b:
        low, high = max(a[0], b[0]), min(a[0] + a[2], b[0] + b[2])
        if low < high:
            yield low - a[0] + a[1], low - b[0] + b[1], high - low
        if a[0] + a[2] == high:
            a = next(ours, None)
        else:
            b = next(theirs, None)


@torch.no_grad()
def load(folder, pieces):
    """Fill every piece's tensor, reading only its bytes. Returns the names found without state.

    Those were frozen when the checkpoint was written: their moments stay as they are, fresh.
    """
    tensors = {(t["name"], t["kind"]): t for t in read_index(folder)["tensors"]}
    trained, fresh = {name for name, kind in tensors if kind != "weight"}, set()
    with ExitStack() as stack:
        files = {}
        for piece in pieces:
            if (piece.name, piece.kind) not in tensors:
                if piece.kind == "weight" or piece.name in trained:
                    raise ValueError(f"there is no {piece.kind} of {piece.name}")
                fresh.add(piece.name)
                continue
            saved = tensors[piece.name, piece.kind]
            if tuple(saved["shape"]) != piece.shape:
                raise ValueError(f"{piece.name} is {saved['shape']}, not {list(piece.shape)}")
            found = 0
            for source in saved["pieces"]:
                name = source["file"]
                if name not in files:
                    files[name] = stack.enter_context(open(Path(folder, name), "rb"))
                found += read_piece(piece, source, getattr(torch, saved["dtype"]), files[name])
            if found != piece.tensor.numel():
                raise ValueError(f"{piece.name}: {found} of {piece.tensor.numel()} elements")
    return sorted(fresh)


def read_piece(piece, source, dtype, file):
    """Copy what a piece of the file has of ours; returns how many elements that were."""
    ours = runs(piece.shape, piece.box, piece.start, piece.stop)
    theirs = runs(piece.shape, source["box"], source["start"], source["stop"])
    found, most = 0, BLOCK // dtype.itemsize
    for to, at, count in overlaps(ours, theirs):
        for i in range(0, count, most):
            file.seek(source["offset"] + (at + i) * dtype.itemsize)
            data = bytearray(min(most, count - i) * dtype.itemsize)
            if file.readinto(data) < len(data):
                raise ValueError(f"{file.name} is too short")
            values = torch.frombuffer(data, dtype=dtype)
            piece.tensor[to + i : to + i + len(values)] = values.to(piece.tensor.device)
        found += count
    return found


def restore(folder, optimizer, group, log=print, boxes=None, more=()):
    """Load a checkpoint into the optimizer's model, and into the pieces `more` beside it, all ranks
    together; returns its index."""
    pieces = itertools.chain(optimizer.state(boxes), more)
    fresh = together(lambda: load(folder, pieces), group)
    if names := sorted(set().union(*fresh)):
        log(f"fresh optimizer state for {len(names)} parameters that had none: {names[0]} …")
    optimizer.spread(frozen=True)
    return read_index(folder)


# --- 7. Check and measure ------------------------------------------------------------------------

MAX_NORM, LR, STEPS, MICRO_BATCHES = 1.0, 1e-3, 3, 2


def adamw(matrices, vectors):
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def build(stage, config, group):
    """The model and its optimizer, everything cut over one group."""
    model = memory.build(config, dtype=torch.float64, device=dp.device())
    cut = (group, ()) if stage else (None, (group,))
    groups = {name: cut for name, _ in model.named_parameters()}
    units = llama_units(model)
    return model, Optimizer(model, units, groups, stage, adamw, memory.on_finished)


def train_step(model, optimizer, sample, step, group):
    """One step on this rank's part of the batch.

    Returns what the rank held before it took it, in bytes by kind; and the clipped gradients, of
    the first step only.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    numbers = dp.my_samples(step, MICRO_BATCHES * world, rank, world)
    batches = dp.micro_batches(sample, numbers, 1, dp.device())
    N = dp.count_valid(batches, dist.group.WORLD)
    optimizer.begin(len(batches))
    dp.accumulate_gradients(model, batches, N)
    optimizer.sum_gradients()
    optimizer.scale(clip_factor(optimizer, MAX_NORM, dist.group.WORLD))
    clipped = None
    if step == 0:
        clipped = optimizer.gathered([flat.grad for flat in optimizer.flats])
    sizes = {kind: bytes_of(tensors) for kind, tensors in optimizer.tensors().items()}
    optimizer.step(LR)
    return sizes, clipped


def weights(optimizer):
    return optimizer.gathered([flat.shard for flat in optimizer.flats])


def dense_run(config, sample, batch):
    """The same on one device: gradients of the first step, clipped; weights after the last."""
    model = memory.build(config, dtype=torch.float64, device=dp.device())
    parameters = list(model.parameters())
    vectors = [p for p in parameters if p.dim() < 2]
    optimizer = adamw([p for p in parameters if p.dim() > 1], vectors)
    for step in range(STEPS):
        numbers = range(step * batch, (step + 1) * batch)
        tokens, labels = dp.micro_batches(sample, numbers, batch, dp.device())[0]
        (model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"gradient": first, "weight": {n: p.detach() for n, p in model.named_parameters()}}


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(stage, config, sample, expected, group):
    """Train with one stage; returns table rows of bytes held and sent, and failures."""
    world = dist.get_world_size()
    model, optimizer = build(stage, config, group)
    _, clipped = train_step(model, optimizer, sample, 0, group)
    with dp.Wire() as wire:
        sizes, _ = train_step(model, optimizer, sample, 1, group)
    train_step(model, optimizer, sample, 2, group)

    flats, units = llama_layout(config, world if stage else 1)
    holds = held(stage, flats, units, world, 8, 8, 0, 16)
    measured, formula = sum(sizes.values()), sum(holds[kind] for kind in sizes)
    shown = [sizes[kind] for kind in ("parameters", "gradients", "moments")]  # fp64: no master copy
    held_row = [stage, *shown, measured, formula]
    sent_rows = []
    costs = sent(stage, flats, units, world, 8, 8, MICRO_BATCHES, reduction=reduces_by(group))
    for name, (calls, size) in costs.items():
        sent_rows.append([stage, name, wire.calls["dp", name], calls, wire.bytes["dp", name], size])

    failures = []
    ours = {"gradient": clipped, "weight": weights(optimizer)}
    for kind, dense in expected.items():
        error, name = dp.worst_error(ours[kind], dense)
        if not error < 1e-10:
            failures.append(f"{name} {kind} at stage {stage}, relative error {error:.3g}")
        held_row.append(f"{error:.0e}")
    if measured != formula:
        failures.append(f"stage {stage} holds other bytes than the formula says")
    if any(row[2] != row[3] or row[4] != row[5] for row in sent_rows):
        failures.append(f"stage {stage} sends other bytes than the formula says")
    return held_row, sent_rows, failures


def llama_layout(config, n):
    """The flats and units of 01's Llama for held(...) and sent(...), without building it."""
    block = memory.parameter_count(config) - config.vocab * config.dim * (1 if config.tied else 2)
    flats = {"embed": padded(config.vocab * config.dim, n)}
    for i in range(config.layers):
        flats[f"layers.{i}"] = padded((block - config.dim) // config.layers, n)
    flats["head"] = padded(config.dim * (1 if config.tied else 1 + config.vocab), n)
    units = [[name] for name in flats]
    return flats, units[:-1] + [["head", "embed"] if config.tied else ["head"]]


def resume(config, sample, group):
    """Train two steps at stage 3, save, load at stage 1, do the third with both: are they equal?"""
    model, optimizer = build(3, config, group)
    for step in range(2):
        train_step(model, optimizer, sample, step, group)
    directory = together(lambda: dist.get_rank() or tempfile.mkdtemp(), dist.group.WORLD)[0]
    begin = time.perf_counter()
    written = save(directory, 2, optimizer.state(), {}, dist.group.WORLD)
    seconds = time.perf_counter() - begin
    other_model, other = build(1, config, group)
    step = restore(newest(directory, dist.group.WORLD, dp.log), other, dist.group.WORLD)["step"]
    train_step(model, optimizer, sample, step, group)
    train_step(other_model, other, sample, step, group)
    error, name = dp.worst_error(weights(other), weights(optimizer))
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dp.log(
        f"\ncheckpoint  {written:,} bytes in {seconds:.2f} s, saved at stage 3, read at stage 1:\n"
        f"            after the next step weights differ by {error:.0e} at most"
    )
    return [] if error < 1e-12 else [f"{name} weight after resuming, relative error {error:.3g}"]


def demo(args):
    world = dist.get_world_size()
    group = dist.new_group(range(world), group_desc="dp")
    dp.header("03 ZeRO", f"world {world} = dp {world}", "   float64")
    config, T = memory.PRESETS["tiny"], 32
    sample = dp.uneven(dp.Samples(dp.open_tokens(), T, seed=0), T)
    batch = MICRO_BATCHES * world
    dp.log(
        f"llama {memory.parameter_count(config):,} parameters   batch {batch} x {T} tokens in"
        f" {MICRO_BATCHES} micro-batches   {STEPS} steps\n"
    )
    # Rank 0 alone compares, as ranks may share cores; the others wait in their next collective.
    expected = dense_run(config, sample, batch) if dist.get_rank() == 0 else {}
    stages = [measure(stage, config, sample, expected, group) for stage in range(4)]
    if expected:
        head = ["stage", "parameters", "gradients", "moments", "held", "formula"]
        dp.table(head + ["g err", "w err"], [row for row, _, _ in stages])
        dp.log()
        head = ["stage", "sent over dp", "calls", "formula", "bytes", "formula"]
        dp.table(head, [row for _, rows, _ in stages for row in rows])
        if reduces_by(group) == "send":
            dp.log("send: reduce-scatter without NCCL, the sum is made where parts arrive")
    failures = [failure for *_, wrong in reversed(stages) for failure in wrong]
    return dp.verdict("03_zero", failures + resume(config, sample, group))


def main():
    parser = argparse.ArgumentParser(description="ZeRO-1, 2 and 3 against one device")
    parser.add_argument("--dp", type=int, default=4, help="ranks, when started as plain python")
    args = parser.parse_args()
    adamw([torch.zeros(1)], [])  # torch.optim imports much at its first use: once, before the fork
    return dp.launch(demo, args.dp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
