"""
06 · Mixture of experts, on one device and over many

Idea      Instead of one FFN a block has E experts and a router that sends each token to k of them:
          parameters grow with E, FLOPs with k. Over ep ranks each holds E/ep experts, and tokens
          travel to their experts and back. All else is data parallel: every rank has own tokens.
Picture   x (n, D) ─ router ─ k experts a token ─ sort the n·k pairs by expert ─┐
          ┌─ dispatch: all-to-all of rows, as many to each rank as it has work ─┘
          └─ own experts: grouped SwiGLU (R, D) ─ combine: all-to-all back ─┐
          out (n, D) = Σ over a token's k rows of weight · row ─────────────┘
          backward   the same path: dispatch and combine change places
Cost      held: experts / ep; of activations k·(D + 3·F) and more a token, wherever it was sent.
          Sent per layer: dispatch and combine, forward and backward, 4·n·k·(ep-1)/ep·D elements if
          the load is even. One rank with all the work receives ep times its even share.
Pays      when experts don't fit one device, or FLOPs are what is short; and while transfers are
          short beside the experts' products: both grow with k, the ratio falls with F (section 8).
Forget    the sum of the experts' gradients over edp, the ranks that hold the same expert. Rows of
          the other ep ranks came by the all-to-all, those of other replicas did not: routing, loss
          and all other gradients are right, an expert's is off (relative error 0.949 in the demo).
Run       torchrun --nproc-per-node 4 06_ep.py      (or python 06_ep.py)
Copy      largest, within_nodes, route: the router's choice. Pick, Place, count, splits, Trip, plan,
          AllToAll, exchanged, dispatch, combine: rows to experts of any kind, and back. Imports:
          math, dataclass.
Read      GShard (2006.16668), Switch (2101.03961), ST-MoE (2202.08906), Mixtral (2401.04088),
          DeepSeek-V3 (2412.19437), bias instead of a loss (2408.15664), MegaBlocks (2211.15841)

Letters as in 01; E experts, k of them for a token, n tokens of a rank, R rows that came to a rank's
experts; ep ranks share the experts of a layer, edp ranks hold the same.
"""

import argparse
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

memory = import_module("01_memory")
dp = import_module("02_dp")


@dataclass(frozen=True)
class Config(memory.Config):
    """A Llama in which each block's FFN is a mixture of experts; ffn is the F of one expert."""

    experts: int = 8  # E
    top_k: int = 2  # k
    shared: int = 0  # experts that take every token, as one FFN of width shared·F
    score: str = "softmax"  # over the experts (Mixtral), or "sigmoid" of each (DeepSeek-V3)
    # Do a token's k weights sum to 1? With top_k 1 say False: a weight of always 1 tells the router
    # nothing (Switch takes the probability itself).
    renormalise: bool = True
    scale: float = 1.0  # of the weights, after that
    balance: float = 0.0  # coefficient of the load-balance loss
    z: float = 0.0  # coefficient of the z-loss
    bias_rate: float = 0.0  # by how much a step moves each expert's bias
    capacity: float = 0.0  # 0: dropless; else rows an expert takes, in units of an even share
    nodes: int = 1  # the experts lie on so many nodes, in order,
    most_nodes: int = 0  # and a token goes to at most so many of them; 0: to any

    def __post_init__(self):
        super().__post_init__()
        reach = self.experts // self.nodes * (self.most_nodes or self.nodes)
        if self.experts % self.nodes or not 1 <= self.top_k <= reach:
            raise ValueError(
                f"top_k {self.top_k} of {self.experts} experts on {self.nodes} nodes: nodes divides"
                f" experts, and a token needs top_k experts within reach ({reach})"
            )


PRESETS = {
    "tiny-moe": Config(vocab=256, dim=128, layers=4, heads=8, kv_heads=4, ffn=192),
    "mixtral-8x7b": Config(32000, 4096, 32, 32, 8, 14336, rope_theta=1e6),
}


# --- 1. The router ------------------------------------------------------------------------------
#
# Which experts a token goes to is a choice among scores that may lie close together. In bf16 many
# would be equal, so scores are computed in at least fp32; and equal scores go to the lowest
# number on every device, which topk doesn't promise and a stable sort does.


class Wide:
    """How (01's seam): a product in at least fp32, from a weight and an input that may be less."""

    @staticmethod
    def forward(x, w):
        wide = memory.at_least_fp32(x.dtype)
        return F.linear(x.to(wide), w.to(wide))

    @staticmethod
    def input_grad(dy, w):
        return (dy @ w.to(dy.dtype)).to(w.dtype)

    @staticmethod
    def weight_grad(dy, x):
        return dy.flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)


class Router(memory.Linear):
    """x (…, D) -> logits (…, E). The bias takes part in the choice only, see section 6."""

    def __init__(self, c):
        super().__init__(c.dim, c.experts)
        self.how = Wide
        self.register_buffer("bias", torch.zeros(c.experts, dtype=torch.float32))


def largest(scores, k):
    """The places of the k largest, the lowest place first among equals: (…, E) -> (…, k)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def within_nodes(scores, nodes, most, k):
    """The scores, -inf on all but `most` nodes: those whose k / most best add up to most."""
    by_node = scores.unflatten(-1, (nodes, -1))  # (…, nodes, E/nodes)
    best = by_node.sort(-1, descending=True).values[..., : max(1, k // most)].sum(-1)
    chosen = torch.zeros_like(best).scatter_(-1, largest(best, most), 1)
    return torch.where(chosen[..., None] > 0, by_node, -math.inf).flatten(-2)


def route(logits, bias, c):
    """logits (…, E) -> weights (…, k), experts (…, k), probabilities (…, E).

    The order: scores of all experts first, then the choice. Renormalised, that is the same as a
    softmax over the chosen logits; without, a token's weights sum to less than 1.
    """
    if c.score == "softmax":
        scores = probabilities = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    choice = scores.detach() + bias
    if c.most_nodes:
        choice = within_nodes(choice, c.nodes, c.most_nodes, c.top_k)
    experts = largest(choice, c.top_k)
    weights = scores.gather(-1, experts)
    if c.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * c.scale, experts, probabilities


# --- 2. The experts -----------------------------------------------------------------------------


class Grouped:
    """How (01's seam): each row meets the matrix of its own expert, in all three products.

    rows (R, in) are sorted by expert, sizes[e] of them for expert e, which may be none; offsets
    (E,) are where each expert's end. w (E, out, in).
    """

    def __init__(self, sizes, offsets):
        self.sizes, self.offsets = sizes, offsets

    def forward(self, x, w):
        if in_one_kernel(x, w):
            return F.grouped_mm(x, w.mT, offs=self.offsets)
        return torch.cat([rows @ m.T for rows, m in zip(x.split(self.sizes), w)])

    def input_grad(self, dy, w):
        if in_one_kernel(dy, w):
            return F.grouped_mm(dy, w, offs=self.offsets)
        return torch.cat([rows @ m for rows, m in zip(dy.split(self.sizes), w)])

    def weight_grad(self, dy, x):
        """Zeros, not nothing, for an expert without rows."""
        if in_one_kernel(dy, x):
            return F.grouped_mm(dy.T, x, offs=self.offsets)
        pieces = zip(dy.split(self.sizes), x.split(self.sizes))
        return torch.stack([d.T @ rows for d, rows in pieces])


def in_one_kernel(*matrices):
    """Does torch have one kernel for it? In bf16, if a row's bytes are a multiple of 16."""
    return hasattr(F, "grouped_mm") and all(
        m.dtype == torch.bfloat16 and m.shape[-1] % 8 == 0 for m in matrices
    )


class Experts(nn.Module):
    """The SwiGLUs of the experts on this rank: rows (R, D) sorted by expert -> (R, D)."""

    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(c.experts, c.ffn, c.dim))
        self.up_proj = nn.Parameter(torch.empty(c.experts, c.ffn, c.dim))
        self.down_proj = nn.Parameter(torch.empty(c.experts, c.dim, c.ffn))
        self.how, self.when = Grouped, memory.now  # seams, as a Linear has
        self.what_down = memory.KeepInput

    def forward(self, rows, sizes, offsets):
        how, when, keep = self.how(sizes, offsets), self.when, memory.KeepInput
        gate = memory.linear(rows, self.gate_proj, how, keep, when)  # (R, F)
        up = memory.linear(rows, self.up_proj, how, keep, when)
        h = memory.SwiGLUFunction.apply(gate, up)
        return memory.linear(h, self.down_proj, how, self.what_down, when)  # (R, D)


# --- 3. From tokens to rows and back ------------------------------------------------------------
#
# A pair is a token and one of its experts: pair i is token i // k. `order` lists the pairs by
# expert, in the order of the tokens for each. Pick and Place are conjugate: what one does forward
# the other does backward. All sizes come from shapes and from `splits`, never from a mask.


class Pick(torch.autograd.Function):
    """The row of each pair in order: (n, D) -> (R, D). Backward adds a token's k rows up."""

    @staticmethod
    def forward(ctx, x, order, k):
        ctx.save_for_backward(order)
        ctx.n, ctx.k = len(x), k
        return x[order // k]

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        pairs = dy.new_zeros(ctx.n * ctx.k, dy.shape[-1]).index_copy_(0, order, dy)
        return pairs.view(ctx.n, ctx.k, dy.shape[-1]).sum(1), None, None


class Place(torch.autograd.Function):
    """Each row to its pair's place: (R, D) -> (pairs, D), zeros where none came."""

    @staticmethod
    def forward(ctx, rows, order, pairs):
        ctx.save_for_backward(order)
        return rows.new_zeros(pairs, rows.shape[-1]).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return dy[order], None, None


def count(experts, E):
    """How many pairs there are for each expert: (…, m) -> (…, E) int64."""
    zeros = torch.zeros(*experts.shape[:-1], E, dtype=torch.int64, device=experts.device)
    return zeros.scatter_add_(-1, experts, torch.ones_like(experts))


def within_capacity(experts, E, most):
    """experts (pairs,), E (nowhere) in place of those after the first `most` of each expert.

    A dropped pair gives its token nothing, and its other weights stay as they are: what is left is
    the token's other experts, the shared expert and the residual. The first are counted among the
    tokens of this rank and micro-batch, so what is dropped depends on the layout.
    """
    order = experts.argsort(stable=True)
    counts = count(experts, E + 1)
    start = counts.cumsum(0) - counts  # of each expert in order
    place = torch.arange(len(order), device=order.device) - start[experts[order]]
    place = torch.empty_like(place).scatter_(0, order, place)  # a pair's place at its expert
    return torch.where(place < most, experts, E)


# --- 4. Dispatch and combine --------------------------------------------------------------------


def splits(counts):
    """The counts as numbers: the one place of a step that looks at a value and waits for it."""
    return counts.tolist()


@dataclass
class Trip:
    """The way of a rank's rows to their experts and back."""

    give: list  # rows to each rank
    take: list  # rows from each rank
    sizes: list  # rows for each of this rank's experts
    offsets: torch.Tensor  # where they end, (E/ep,) int32
    order: torch.Tensor | None  # of the rows that came, by expert; None without a group


def plan(counts, group):
    """counts (E,): this rank's rows for each expert."""
    ep = group.size() if group else 1
    given = counts.view(ep, -1)  # (ep, E/ep), by rank and its expert
    taken = given
    if group:
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given.contiguous(), group=group)
    give, take = splits(torch.stack((given, taken)))
    sizes = [sum(rows) for rows in zip(*take)]
    offsets, order = taken.sum(0).cumsum(0).int(), None
    if group:  # rows arrive by rank, and by expert within a rank
        i = torch.arange(sum(sizes), device=counts.device)
        block = torch.searchsorted(taken.flatten().cumsum(0), i, right=True)
        order = (block % given.shape[1]).argsort(stable=True)
    return Trip([sum(rows) for rows in give], [sum(rows) for rows in take], sizes, offsets, order)


class AllToAll(torch.autograd.Function):
    """give[r] rows to rank r, take[r] from it: (Σ give, D) -> (Σ take, D). Backward: the reverse.

    wire = (encode, decode) changes what travels forward: encode gives one tensor, row by row (08
    sends FP8 so; gradients, which need more range, go as they are).
    """

    @staticmethod
    def forward(ctx, x, give, take, group, wire):
        ctx.give, ctx.take, ctx.group = give, take, group
        if wire is None:
            return exchanged(x, give, take, group)
        encode, decode = wire
        return decode(exchanged(encode(x), give, take, group))

    @staticmethod
    def backward(ctx, dy):
        return exchanged(dy, ctx.take, ctx.give, ctx.group), None, None, None, None


def exchanged(x, give, take, group):
    out = x.new_empty(sum(take), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), take, give, group=group)
    return out


def dispatch(rows, trip, group, wire=None):
    """Rows sorted by expert, from here to the experts of all ranks: (pairs, D) -> (R, D)."""
    if not group:
        return rows
    return Pick.apply(AllToAll.apply(rows, trip.give, trip.take, group, wire), trip.order, 1)


def combine(rows, trip, group):
    """The way back: (R, D) -> (pairs, D)."""
    if not group:
        return rows
    rows = Place.apply(rows, trip.order, len(rows))
    return AllToAll.apply(rows, trip.take, trip.give, group, None)


# --- 5. The layer -------------------------------------------------------------------------------


class MoE(nn.Module):
    """In the place of a block's FFN: (B, T, D) -> (B, T, D)."""

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.router, self.experts = Router(c), Experts(c)
        self.shared_expert = memory.SwiGLU(replace(c, ffn=c.shared * c.ffn)) if c.shared else None
        self.group = None  # the ranks that share the experts
        self.sequence_group = None  # the ranks that hold parts of the same sequences (04, 07)
        self.wire = None
        self.N = self.valid = None  # see begin_step
        self.register_buffer("load", torch.zeros(c.experts, dtype=torch.int64), persistent=False)
        self.loss = 0.0

    def forward(self, x):
        c, (B, T, D) = self.config, x.shape
        logits = self.router(x)  # (B, T, E)
        weights, experts, probabilities = route(logits, self.router.bias, c)  # (B, T, k)
        if self.valid is not None:  # padding goes nowhere: to expert E, which nobody has
            experts = torch.where(self.valid[..., None], experts, c.experts)
        pairs = experts.flatten()  # (B·T·k,)
        if c.capacity:
            most = math.ceil(c.capacity * len(pairs) / c.experts)
            pairs = within_capacity(pairs, c.experts, most)
        trip = plan(count(pairs, c.experts + 1)[:-1], self.group)
        order = pairs.argsort(stable=True)[: sum(trip.give)]

        rows = Pick.apply(x.flatten(0, 1), order, c.top_k)  # (pairs, D)
        rows = dispatch(rows, trip, self.group, self.wire)  # (R, D)
        rows = self.experts(rows, trip.sizes, trip.offsets)
        rows = combine(rows, trip, self.group)  # (pairs, D)
        rows = Place.apply(rows, order, len(pairs)).view(B, T, c.top_k, D)
        out = (weights.to(x.dtype)[..., None] * rows).sum(2)  # (B, T, D)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return self.attach(out, logits, probabilities, experts)

    def attach(self, out, logits, probabilities, experts):
        demand = count(experts.flatten(1), self.config.experts + 1)[:, :-1]  # (B, E)
        loss = auxiliary_loss(self, logits, probabilities, demand)
        return Attach.apply(out, loss, demand.sum(0), self)


def by_definition(moe, x):
    """The layer without a dispatch: all experts compute all tokens, most of it for nothing."""
    weights, experts, _ = route(moe.router(x), moe.router.bias, moe.config)
    out = 0 if moe.shared_expert is None else moe.shared_expert(x)
    m = moe.experts
    for e in range(moe.config.experts):
        y = (F.silu(x @ m.gate_proj[e].T) * (x @ m.up_proj[e].T)) @ m.down_proj[e].T
        out = out + ((experts == e) * weights).sum(-1, keepdim=True).to(x.dtype) * y
    return out


# --- 6. Load balance ----------------------------------------------------------------------------
#
# A router left alone sends most tokens to a few experts: who gets more learns more. Two remedies,
# a loss whose gradient spreads the probabilities, and a bias that only the choice sees.
#
# A sequence s of T_s tokens adds coefficient/N · Σ_e f_e Σ_t p_te, with f_e = E·count_e / (k·T_s) a
# constant. Spread evenly it is coefficient · T_s/N, whatever k. It depends on whole sequences and
# on N, the valid tokens of the global batch, so no split of the batch changes it.


def auxiliary_loss(moe, logits, probabilities, demand):
    """This rank's addend of the load-balance loss and the z-loss, coefficient/N · Σ lse²."""
    c = moe.config
    if not (c.balance or c.z) or not torch.is_grad_enabled():
        return logits.new_zeros(())
    if moe.N is None:
        raise RuntimeError("auxiliary losses need begin_step(model, N) before a forward pass")
    if moe.sequence_group:
        demand = demand.clone()
        dist.all_reduce(demand, group=moe.sequence_group)
    total = demand.sum(-1, keepdim=True).clamp(min=1)  # k·T_s
    f = (c.experts * demand.to(logits.dtype) / total)[:, None]  # (B, 1, E)
    per_token = c.balance * (f * probabilities).sum(-1)  # (B, T)
    if c.z:
        per_token = per_token + c.z * logits.logsumexp(-1).square()
    if moe.valid is not None:
        per_token = per_token * moe.valid
    return per_token.sum() / moe.N


class Attach(torch.autograd.Function):
    """out as it is; backward sends the loss its gradient, 1, and notes the load.

    So a pipeline's middle stage needs no path to the loss at the end. And as recomputation repeats
    the forward pass but not the backward pass, nothing is counted twice.
    """

    @staticmethod
    def forward(ctx, out, loss, demand, moe):
        ctx.moe, ctx.demand, ctx.loss = moe, demand, loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):
        ctx.moe.load += ctx.demand
        ctx.moe.loss = ctx.moe.loss + ctx.loss
        return dout, torch.ones_like(ctx.loss), None, None


def moe_layers(model):
    return [part for part in model.modules() if isinstance(part, MoE)]


def begin_step(model, N, valid=None):
    """N: valid tokens of the global batch. valid (B, T): which tokens are not padding."""
    for moe in moe_layers(model):
        moe.N, moe.valid = N, valid


@torch.no_grad()
def end_step(model, group=None, skip=0):
    """Move each expert's bias towards an even load, once a step, after all backward passes.

    `group` is the ranks that together see every token once. Returns the load (layers, E) of the
    step and this rank's share of the auxiliary losses, and starts new sums. The bias stays where
    it is if `skip`, a number or a tensor, is 1.
    """
    layers = moe_layers(model)
    if not layers:  # a stage without experts: the ranks of its group have none, either
        return None, 0.0
    load = torch.stack([moe.load for moe in layers])
    if group:
        dist.all_reduce(load, group=group)
    loss = sum(moe.loss for moe in layers)
    for moe, own in zip(layers, load.double()):
        # In place, or a checkpoint would go on saving the old tensor.
        moe.router.bias += (own.mean() - own).sign() * moe.config.bias_rate * (1 - skip)
        moe.load.zero_()
        moe.loss = 0.0
    return load, loss


# --- 7. Into the model, and over the ranks ------------------------------------------------------


@torch.no_grad()
def build_moe(c, seed=0, dtype=torch.float32, device="cpu", group=None):
    """01's Llama with a MoE in every block; with a group, this rank's experts only.

    A stack of experts is drawn whole and then cut, so every layout starts from the same model.
    """
    model = memory.build(replace(c, ffn=0), seed, dtype, device)
    model.config = c
    for number, block in model.layers.items():
        with torch.device(device):
            block.mlp = MoE(c)
        for name, p in block.mlp.named_parameters():
            value = memory.initial(f"layers.{number}.mlp.{name}", p.shape, seed)
            p.data = value.to(device, dtype)
            p.grad_dtype = memory.at_least_fp32(dtype)
        if group:
            cut_experts(block.mlp, group)
    return model


def own_experts(stacked, rank, ep):
    """A copy of the rank's part of a stack: (E, …) -> (E/ep, …)."""
    return stacked.chunk(ep)[rank].clone()


def cut_experts(moe, group):
    """Cut a finished layer in place: it keeps the experts of this rank, by their number."""
    ep, E = group.size(), moe.config.experts
    if E % ep:
        near = [n for n in range(1, E + 1) if E % n == 0]
        raise ValueError(f"ep {ep} does not divide {E} experts: one of {near} would")
    moe.group = group if ep > 1 else None
    for p in moe.experts.parameters():
        p.data = own_experts(p.data, group.rank(), ep)


def recompute_moe(model, mode):
    """01's recompute; selective makes the router's input and silu(gate) · up again, too."""
    memory.recompute(model, mode)
    for number, block in model.layers.items():
        if isinstance(block.mlp, MoE):
            keep = memory.KeepInput, memory.KeepInput
            if memory.kind_of(mode, int(number)) == "selective":
                functions = memory.NormFunction, memory.SwiGLUFunction
                keep = tuple(memory.Remake(function) for function in functions)
            block.mlp.router.what, block.mlp.experts.what_down = keep


def is_expert(name):
    return ".mlp.experts." in name


def sum_moe_gradients(model, everyone, edp):
    """Add up the gradients: of experts over edp, of all else over every rank.

    The rows of all ep ranks have come to an expert, so its gradient lacks other replicas' alone.
    There is no factor: each loss was divided by the N of the global batch before.
    """
    named = list(model.named_parameters())
    dp.sum_gradients([(name, p) for name, p in named if not is_expert(name)], everyone)
    dp.sum_gradients([(name, p) for name, p in named if is_expert(name)], edp)  # forget


# --- 8. Parameters, FLOPs, bytes ----------------------------------------------------------------


def moe_parameters(c, experts=None):
    """Parameters of the whole model, with so many experts a layer (all); k: the active ones."""
    experts = c.experts if experts is None else experts
    expert = 3 * c.dim * c.ffn
    layer = c.dim * c.experts + (experts + c.shared) * expert
    return memory.parameter_count(replace(c, ffn=0)) + c.layers * layer


def moe_flops_per_token(c, T):
    """Useful FLOPs to train on a token: as 01's, with the k experts that it meets."""
    layer = c.dim * c.experts + 3 * c.dim * c.ffn * (c.top_k + c.shared)
    return memory.flops_per_token(replace(c, ffn=0), T) + 6 * c.layers * layer


def held_experts(c, ep):
    """Parameters on a rank: E/ep experts of each layer, and all else."""
    return moe_parameters(c, c.experts // ep)


def held(c, B, T, dtype, ep=1, kind="none", rows=None):
    """Bytes one block keeps of a micro-batch; 01's block_bytes for attention and norms.

    rows came to this rank's experts: B·T·k if the load is even, at worst ep times as many.
    kind is what is recomputed: none, selective or full (01).
    """
    e, w, n = dtype.itemsize, memory.at_least_fp32(dtype).itemsize, B * T
    pairs = n * c.top_k
    rows = pairs if rows is None else rows
    always = 8 * c.experts + w + 4 * c.experts // ep  # the load, the loss; offsets of experts
    attention = memory.block_bytes(replace(c, ffn=0), n, dtype, kind)
    if kind == "full":
        return attention + always
    router = n * c.experts * w + pairs * 8  # probabilities; which experts
    router += pairs * (w if e == w and c.scale == 1 else e)  # the weights, as they are applied
    if c.renormalise:
        router += pairs * w + n * w  # the same before, and their sum
    indices = 8 * pairs + (8 * rows if ep > 1 else 0)  # order here, order there
    ffn = 3 if kind == "none" else 2  # gate, up, and their product
    experts = rows * (c.dim + ffn * c.ffn) * e  # what came
    outputs = pairs * c.dim * e  # what came back: the weights' gradient needs it
    shared = ffn * n * c.shared * c.ffn * e
    auxiliary = (B * c.experts if c.balance else 0) + (n * (c.experts + 1) if c.z else 0)
    return attention + always + router + indices + experts + outputs + shared + auxiliary * w


def sent(c, n, dtype, ep, kind="none", out=None, into=None):
    """(calls, bytes) of the rows a rank sends for a layer and micro-batch of n tokens.

    out rows leave it and into come; both n·k·(ep-1)/ep if the load is even. At worst one rank has
    all experts that are asked for: into is (ep-1)·n·k there, out n·k elsewhere. Full
    recomputation goes the whole way forward again.
    """
    if ep == 1:
        return 0, 0
    even = Fraction(n * c.top_k * (ep - 1), ep)
    out, into = (even if rows is None else rows for rows in (out, into))
    trips = 3 if kind == "full" else 2
    return 2 * trips, trips * (out + into) * c.dim * dtype.itemsize


def sent_counts(c, ep, kind="none"):
    """(calls, bytes) of the counts that go ahead of the rows."""
    trips = 0 if ep == 1 else 2 if kind == "full" else 1
    return trips, Fraction(trips * 8 * c.experts * (ep - 1), ep)


def dispatch_to_compute(c, ep, flops, bandwidth, element):
    """Time to dispatch rows / time of their expert: above 1 it can't hide, whatever the batch.

    A row takes D·element·(ep-1)/ep / bandwidth, and 6·D·F / flops; how many there are cancels.
    """
    return (ep - 1) * element * flops / (ep * 6 * c.ffn * bandwidth)


def copies_to_nodes(experts, c, home):
    """Rows that leave node `home`: (one for each pair, one for each token and node).

    Our dispatch is one hop and sends the first. With a second hop inside the node a token crosses
    once for all its experts there; then most_nodes bounds what crosses, however large k is.
    """
    visits = count(experts // (c.experts // c.nodes), c.nodes)  # (n, nodes)
    visits[:, home] = 0
    return int(visits.sum()), int((visits > 0).sum())


# --- 9. Check and measure -----------------------------------------------------------------------


def make_ep_groups(ep):
    """This rank's groups: all ranks, the ep neighbours, and those with the same experts."""
    world, mine = dist.get_world_size(), {}
    grid = torch.arange(world).view(-1, ep)
    for name, rows in (("all", grid.view(1, -1)), ("ep", grid), ("edp", grid.T)):
        for ranks in rows.tolist():
            group = dist.new_group(ranks, group_desc=name)
            if dist.get_rank() in ranks:
                mine[name] = group
    return mine


def journeys(experts, c, ep, rank):
    """(rows that leave `rank`, rows that come, rows of its experts) in one layer.

    experts (ranks, …): those of every rank's tokens.
    """
    first = rank // ep * ep
    owner = experts[first : first + ep].flatten(1) // (c.experts // ep)
    table, me = count(owner, ep), rank - first  # (ep from, ep to)
    rows, stay = int(table[:, me].sum()), int(table[me, me])
    return int(table[me].sum()) - stay, rows - stay, rows


def one_device(c, prepare, tokens, labels):
    """Loss, gradients and the routing (layers, B, T, k) of the whole batch, by definition."""
    model, routing = build_moe(c, dtype=torch.float64, device=tokens.device), []
    prepare(model)

    def noting(moe, x):
        routing.append(route(moe.router(x), moe.router.bias, c)[1])
        return by_definition(moe, x)

    for moe in moe_layers(model):
        moe.forward = lambda x, moe=moe: noting(moe, x)
    loss = model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()
    loss.backward()
    return loss.detach(), dp.gradients(model), torch.stack(routing)


def compare_layout(form, c, ep, mode, prepare, batch, reference):
    """A row of the table, and what is wrong with it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    (tokens, labels), (loss, expected, routing) = batch, reference
    groups = make_ep_groups(ep)
    mine = [x.chunk(world)[rank].clone() for x in batch]
    model = build_moe(c, dtype=torch.float64, device=tokens.device, group=groups["ep"])
    prepare(model)
    recompute_moe(model, mode)
    N = (labels != dp.IGNORE).sum()
    live = memory.Live(batch=lambda: mine, parameters=model.parameters, buffers=model.buffers)
    with dp.Wire() as wire, live:
        share = model.loss(model(mine[0]), mine[1]) / N
        live.settled()
        kept = live.bytes()["activations"]
        share.backward()
    sum_moe_gradients(model, groups["all"], groups["edp"])
    total = share.detach().clone()
    dist.all_reduce(total)
    expected = {
        name: own_experts(g, groups["ep"].rank(), ep) if is_expert(name) else g
        for name, g in expected.items()
    }
    error, name = dp.worst_error(dp.gradients(model), expected)

    B, T = mine[0].shape
    trips = [journeys(layer.unflatten(0, (world, -1)), c, ep, rank) for layer in routing]
    costs = [sent(c, B * T, torch.float64, ep, mode, out, into) for out, into, _ in trips]
    costs += [sent_counts(c, ep, mode)] * c.layers
    blocks = sum(held(c, B, T, torch.float64, ep, mode, rows) for *_, rows in trips)
    dense = memory.kept_bytes(c, B, T, torch.float64, mode) | {"blocks": blocks}
    measured = [live.bytes()["parameters"] // 8, kept, wire.calls["ep", "all_to_all"],
                wire.bytes["ep", "all_to_all"]]  # fmt: skip
    formula = [held_experts(c, ep), sum(dense.values()), *map(sum, zip(*costs))]
    failures = []
    if not error < 1e-11:
        failures.append(f"{name} gradient relative error {error:.3g} ({form})")
    if measured != formula:
        failures.append(f"{form}: measured {measured}, by formula {formula}")
    if not abs(total - loss) < 1e-11:
        failures.append(f"{form}: loss {total}, on one device {loss}")
    cells = [measured[0], formula[0], measured[1], formula[1], measured[3], formula[3]]
    return [form, *cells, f"{error:.0e}"], failures


def unprepared(model):
    """As it is drawn: experts are chosen more or less at random."""


def crowd(model):
    """All tokens to the first k experts."""
    for moe in moe_layers(model):
        moe.router.bias[: moe.config.top_k] += 10


@torch.no_grad()
def skew(model, tokens, logit=8.0):
    """Bend every router so that the average token prefers the first two experts."""
    hooks = [moe.register_forward_pre_hook(bend(logit)) for moe in moe_layers(model)]
    model(tokens)
    for hook in hooks:
        hook.remove()


def bend(logit):
    def hook(moe, inputs):
        mean = inputs[0].flatten(0, 1).mean(0)
        moe.router.weight[:2] += logit * mean / mean.square().sum()

    return hook


def train_skewed(c, steps, batch, T, seed=0):
    """Train on one device, from a skewed router; -> loads (steps, layers, E) and losses (steps,)"""
    sample = dp.Samples(dp.open_tokens(), T, seed)
    model = build_moe(c, seed)
    skew(model, dp.micro_batches(sample, range(8), 8, "cpu")[0][0])
    optimizer = memory.AdamW(model.parameters(), memory.RECIPES["fp32"], lr=3e-3)
    loads, losses = [], []
    for step in range(steps):
        numbers = dp.my_samples(step, batch, 0, 1)
        ((tokens, labels),) = dp.micro_batches(sample, numbers, batch, "cpu")
        begin_step(model, batch * T)
        loss = model.loss(model(tokens), labels) / (batch * T)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        loads.append(end_step(model)[0])
        losses.append(loss.detach())
    return torch.stack(loads).double(), torch.stack(losses)


def imbalance(loads):
    """Largest load over the mean, of the layer where it is worst: (steps, layers, E) -> number."""
    total = loads.sum(0)
    return (total.amax(-1) / total.mean(-1)).max().item()


def show_node_limit(c, tokens, nodes=4, limits=(0, 2, 1)):
    """Rows that leave node 0, if experts are chosen freely and on a few nodes only."""
    rows, x = [], torch.randn(tokens, c.dim, generator=torch.Generator().manual_seed(0))
    weight = memory.initial("router.weight", (c.experts, c.dim), 0)
    for most in limits:
        limited = replace(c, nodes=nodes, most_nodes=most)
        experts = route(F.linear(x, weight), torch.zeros(c.experts), limited)[1]
        counts = copies_to_nodes(experts, limited, home=0)
        rows.append([f"at most {most}" if most else "any", *(n * c.dim * 2 for n in counts)])
    dp.log(f"\n{c.top_k} of {c.experts} experts on {nodes} nodes, {tokens} tokens of one of them")
    dp.table(["nodes", "bytes, a row each", "bytes, once a node"], rows)


def bars(shares):
    """A picture of loads, a character an expert; ▄ is the mean."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, round(3 * share))] for share in shares)


def show_remedies(steps=100):
    """Train from a skewed router without a remedy, with the loss, with the bias: each on a rank."""
    c = replace(PRESETS["tiny-moe"], dim=32, layers=1, heads=4, kv_heads=2, ffn=32)
    remedies = {"none": {}, "loss": dict(balance=0.05), "bias": dict(bias_rate=0.01)}
    rank, world, last, mine = dist.get_rank(), dist.get_world_size(), steps // 4, {}
    for name in [*remedies][rank::world]:
        loads, losses = train_skewed(replace(c, **remedies[name]), steps, 8, 32)
        even = loads[-last:].sum(0)[0] / loads[-last:].sum(0)[0].mean()
        shown = bars(even.tolist()) + "  " + " ".join(f"{share:.1f}" for share in even.tolist())
        before, after = imbalance(loads[:5]), imbalance(loads[-last:])
        mine[name] = [name, before, after, shown, losses[-last:].mean().item()]
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    rows = {name: row for part in everyone for name, row in part.items()}
    dp.log(f"\nlargest load / mean, first 5 and last {last} of {steps} steps from a skewed router")
    dp.table(["remedy", "first", "last", "load of each expert", "loss"],
             [rows[name] for name in remedies])  # fmt: skip
    return [
        f"router.weight: remedy {name}, largest load / mean {row[2]:.2f}"
        for name, row in rows.items()
        if (row[2] > 2) != (name == "none")
    ]


def demo(args):
    world = dist.get_world_size()
    # gloo can't do all of this on a GPU
    here = dp.device() if dist.get_backend() == "nccl" else torch.device("cpu")
    c, B, T = replace(PRESETS["tiny-moe"], layers=2, ffn=64, shared=1), 2 * world, 16
    dp.header("06 mixture of experts", f"world {world} = edp · ep")
    dp.log(f"llama {moe_parameters(c):,} parameters, {moe_parameters(c, c.top_k):,} active  "
           f" {c.top_k} of {c.experts} experts   {B} x {T} tokens\n")  # fmt: skip
    sample = dp.uneven(dp.Samples(dp.open_tokens(), T, seed=0), T)
    batch = dp.micro_batches(sample, range(B), B, here)[0]
    rows, failures = [], []
    degrees = [n for n in range(1, world + 1) if world % n == 0 and c.experts % n == 0]
    forms = [(f"ep {n}", n, "none", unprepared) for n in degrees]
    forms += [("  one owner", degrees[-1], "none", crowd)]
    forms += [(f"  {mode}", degrees[-1], mode, unprepared) for mode in ("selective", "full")]
    references = {prepare: one_device(c, prepare, *batch) for prepare in (unprepared, crowd)}
    for form, ep, mode, prepare in forms:
        row, wrong = compare_layout(form, c, ep, mode, prepare, batch, references[prepare])
        rows.append(row)
        failures += wrong
    dp.table(["", "weights", "formula", "kept", "formula", "sent", "formula", "error"], rows)
    dp.log("error: worst gradient, in float64; sent: rows and counts, by rank 0")
    show_node_limit(replace(c, experts=64, top_k=8), 512)
    ratios = [
        f"{name} {dispatch_to_compute(PRESETS['mixtral-8x7b'], 8, 989e12, bandwidth, 2):.2g}"
        for name, bandwidth in (("450 GB/s", 450e9), ("50 GB/s", 50e9))
    ]
    dp.log(f"\ndispatch / experts, mixtral-8x7b, ep 8, H100s, bf16: {', '.join(ratios)}")
    failures += show_remedies()
    return dp.verdict("06_ep", failures)


def main():
    parser = argparse.ArgumentParser(description="mixture of experts over several ranks")
    parser.add_argument("--ep", type=int, default=4, help="ranks, when started as plain python")
    args = parser.parse_args()
    import torch._dynamo  # noqa: F401  recomputation would, 1.3 s in every forked rank: once here

    return dp.launch(demo, args.ep, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
