"""
04 · Tensor and sequence parallelism

Idea      Cut the first of two matrices by its outputs and the second by its inputs: each rank
          computes with its own slice from x to y, attention heads and all, and one sum over the
          ranks completes y. Between two such pairs nothing mixes tokens, so there each rank keeps
          T/tp of the sequence; the sum is then left scattered and gathered where it is needed.
Picture                  TP                              TP + SP
          norm           every token   (B, T, D)         its own tokens    (B, T/tp, D)
          enter          nothing       ↑ all-reduce      all-gather        ↑ reduce-scatter
          q k v          its own heads (B, T, H/tp, h)   the same
          attend         every token   (B, H/tp, T, h)   the same
          o              partial sums  (B, T, D)         the same
          leave          all-reduce    ↑ nothing         reduce-scatter    ↑ all-gather
          + residual     every token   (B, T, D)         its own tokens    (B, T/tp, D)
          ↑ what the same place sends backward. The FFN: the same with gate up ─ silu · ─ down.
          All ranks of tp are given the same tokens and labels: weights and vocabulary are cut,
          not the text.
Cost      held: matrices / tp, norms whole. TP keeps norms and residuals of every token on every
          rank; with SP all that a block keeps is divided by tp. Sent per block, forward: TP 2
          all-reduce, SP 2 all-gather + 2 reduce-scatter of B·T·D elements, the same bytes, as an
          all-reduce is one of each; backward as much. For the weight gradients SP gathers its
          shards again: in all 5/4 of TP's bytes, and no block keeps the two whole (B, T, D) that
          entered.
Pays      while transfers are faster than the products between them; a larger batch doesn't
          help, as both grow with it (section 7). On a link of 450 GB/s that goes well to tp 8, on
          the 50 GB/s between nodes it doesn't: tp stays inside the node. Measured by others, tp 8
          on one node to 16 on two: 50 to 76 % fewer tokens a second (Ultra-Scale Playbook).
Forget    with SP, the gradients of the norms. Each rank has those of its own tokens only; without a
          sum over tp the loss is right in step 1, and nine gradients are not: a norm's weight
          is off by a relative error 0.424 in this demo.
Run       torchrun --nproc-per-node 4 04_tp_sp.py      (or python 04_tp_sp.py)
Copy      at_least_fp32, unchanged, all_reduced, gathered, scattered, Conjugate, enter, leave,
          column_parallel, row_parallel: pairs of matrices over several ranks, TP or SP. IGNORE,
          lookup_own, vocab_parallel_cross_entropy, VocabParallelCrossEntropy: the vocabulary too.
Read      Megatron-LM (1909.08053), sequence parallelism (2205.05198), overlap by decomposition
          (ASPLOS 2023, 10.1145/3567955.3567959); megatron/core/tensor_parallel

Letters as in 01; tp is the number of ranks that share the matrices.
"""

import argparse
import re
import time
from fractions import Fraction
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F

memory = import_module("01_memory")  # for the demo
dp = import_module("02_dp")

IGNORE = -100  # a label that counts nothing


# --- 1. One pair of conjugate operations, in two forms ----------------------------------------
#
# What is copied forward is summed backward, and what is summed forward is copied backward: `leave`
# is `enter` with the directions exchanged.
#
#               forward                                  backward
#   TP   enter  nothing                                  all-reduce
#        leave  all-reduce                               nothing
#   SP   enter  all-gather (B, T/tp, D) -> (B, T, D)     reduce-scatter
#        leave  reduce-scatter (B, T, D) -> (B, T/tp, D)  all-gather


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


def unchanged(x, group):
    return x.view_as(x)


def all_reduced(x, group):
    """The sum of all ranks' x, as a new tensor: what autograd may have saved stays as it is."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gathered(x, group):
    """The shards of all ranks along the sequence: (B, T/tp, D) -> (B, T, D), contiguous.

    If it weren't, the products of q, k and v would each make and keep a copy that is.
    """
    # torch 2.13 has given the function a new name
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    parts = x.new_empty(group.size(), *x.shape)
    single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, 1).flatten(1, 2)  # for one sequence a view, otherwise a copy


def scattered(x, group):
    """This rank's shard of the sum of all x along the sequence: (B, T, D) -> (B, T/tp, D)."""
    parts = x.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()  # (tp, B, T/tp, D)
    mine = torch.empty_like(parts[0])
    single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    single(mine, parts.flatten(0, 1), group=group)  # the form with a list is slower on gloo
    return mine


class Conjugate(torch.autograd.Function):
    """there(x) forward, back(dy) backward."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(dy, ctx.group), None, None, None


def enter(x, group, sequence=True):
    """Before matrices that are cut by outputs: every rank needs the whole x."""
    there, back = (gathered, scattered) if sequence else (unchanged, all_reduced)
    return Conjugate.apply(x, group, there, back)


def leave(x, group, sequence=True):
    """After a matrix that is cut by inputs: x is this rank's addend."""
    there, back = (scattered, gathered) if sequence else (all_reduced, unchanged)
    return Conjugate.apply(x, group, there, back)


def column_parallel(x, w, bias, group, sequence=True):
    """w (out/tp, in) and bias (out/tp,) are cut by outputs: (…, in) -> (…, out/tp)."""
    return F.linear(enter(x, group, sequence), w, bias)


def row_parallel(x, w, bias, group, sequence=True):
    """w (out, in/tp) is cut by inputs, bias (out,) is whole: (…, in/tp) -> (…, out).

    The bias comes after the sum, or tp of it would be in the result. With SP each rank adds it to
    its own tokens, so its gradient is partial, as the norms' are.
    """
    y = leave(F.linear(x, w), group, sequence)
    return y if bias is None else y + bias


# --- 2. Which weight is cut along which dimension ---------------------------------------------
#
# A Linear's weight is (out, in). The Llama of 01 needs no other classes: heads are counted from
# what a projection gives, names stay, and `enter` and `leave` are seams of its modules.

CUTS = [  # parameter, dimension that is cut; None: every rank has all of it
    (r"(embed_tokens|lm_head)\.weight", 0),  # by vocabulary, padded where tp does not divide V
    (r"layers\.\d+\.self_attn\.(q|k|v)_proj\.weight", 0),  # by heads
    (r"layers\.\d+\.mlp\.(gate|up)_proj\.weight", 0),
    (r"layers\.\d+\.self_attn\.o_proj\.weight", 1),
    (r"layers\.\d+\.mlp\.down_proj\.weight", 1),
    (r"(norm|layers\.\d+\.(input|post_attention)_layernorm)\.weight", None),
    (r"layers\.\d+\.mlp\.(router|experts|shared_expert)\..*", None),  # 06 cuts these
]
KV = r"layers\.\d+\.self_attn\.(k|v)_proj\.weight"


def cut_dimension(name):
    for pattern, dim in CUTS:
        if re.fullmatch(pattern, name):
            return dim
    raise ValueError(f"{name} is in no row of the table of cuts")


def parts(name, tp, kv_heads):
    """Into how many parts a parameter is cut: tp, but with fewer kv heads than ranks one a head."""
    return min(tp, kv_heads) if re.fullmatch(KV, name) else tp


def box(name, shape, rank, tp, kv_heads):
    """The part of a parameter that a rank holds: a range (start, stop) for each dimension.

    With fewer kv heads than ranks, tp / kv_heads neighbours hold the same head. What a rank holds
    beyond `stop`, in the vocabulary's last parts, is padding.
    """
    ranges, dim = [(0, n) for n in shape], cut_dimension(name)
    if dim is not None:
        n = parts(name, tp, kv_heads)
        size, i = -(-shape[dim] // n), rank * n // tp
        ranges[dim] = min(i * size, shape[dim]), min((i + 1) * size, shape[dim])
    return ranges


def own_part(name, w, rank, tp, kv_heads):
    """A copy of the rank's part of w, the vocabulary padded with zeros."""
    dim = cut_dimension(name)
    if dim is None:
        return w
    start, stop = box(name, w.shape, rank, tp, kv_heads)[dim]
    size = -(-w.shape[dim] // parts(name, tp, kv_heads))
    piece = w.new_zeros(*w.shape[:dim], size, *w.shape[dim + 1 :])
    piece.narrow(dim, 0, stop - start).copy_(w.narrow(dim, start, stop - start))
    return piece


def cut_ffn(c):
    """The width of the FFN that is cut: none if it is a mixture of experts (06)."""
    return 0 if hasattr(c, "experts") else c.ffn


def misfits(c, tp):
    """Every rule about the model that the degree breaks, with the nearest degrees that fit."""

    def fits(n):
        return not (c.heads % n or cut_ffn(c) % n or (c.kv_heads % n and n % c.kv_heads))

    lower = max(n for n in range(1, tp + 1) if n == 1 or fits(n))
    upper = [n for n in range(tp, c.heads + 1) if fits(n)][:1]
    hint = f"the nearest that fit are {' and '.join(map(str, [lower, *upper]))}"
    wrong = [
        f"tp {tp} does not divide {what} {n}: {hint}"
        for what, n in (("heads", c.heads), ("ffn", cut_ffn(c)))
        if n % tp
    ]
    if c.kv_heads % tp and tp % c.kv_heads:
        wrong += [f"tp {tp} and kv_heads {c.kv_heads}: one has to divide the other: {hint}"]
    return wrong


@torch.no_grad()
def cut(model, group, sequence=True):
    """Cut a finished Llama in place: this rank's part of every parameter, and the seams set.

    It has to be whole, or a stage of it (05), with recomputation chosen (01) and no gradients yet.
    With `sequence` (SP) hidden states are (B, T/tp, D) between the pairs and at the stage's ends.
    """
    c, rank, tp = model.config, group.rank(), group.size()
    if wrong := misfits(c, tp):
        raise ValueError("; ".join(wrong))
    for name, p in model.named_parameters():
        p.data = own_part(name, p.data, rank, tp, c.kv_heads)  # the Parameter itself stays
    seams = dict(group=group, sequence=sequence)
    for block in model.layers.values():
        attn, mlp = block.self_attn, block.mlp
        set_enter(attn, [attn.q_proj, attn.k_proj, attn.v_proj], **seams)
        attn.leave = partial(leave, **seams)
        if cut_ffn(c):  # experts (06) take the sequence's shards as they are
            set_enter(mlp, [mlp.gate_proj, mlp.up_proj], **seams)
            mlp.leave = partial(leave, **seams)
    size = -(-c.vocab // tp)
    if model.embed_tokens is not None:
        model.embed_tokens.lookup = partial(lookup_own, first=rank * size)
        model.embed_tokens.leave = partial(leave, **seams)
    if model.lm_head is not None:
        set_enter(model.lm_head, [model.lm_head], **seams)
        columns = min(max(c.vocab - rank * size, 0), size)
        model.loss = partial(
            vocab_parallel_cross_entropy, first=rank * size, columns=columns, group=group
        )


def whole_tensor(name, mine, shape, group, kv_heads):
    """The tensor of this shape that own_part has cut, put together again on every rank."""
    dim = cut_dimension(name)
    if dim is None:
        return mine
    tensors = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(tensors, mine.contiguous(), group=group)
    alike = group.size() // parts(name, group.size(), kv_heads)
    return torch.cat(tensors[::alike], dim).narrow(dim, 0, shape[dim])  # without the padding


# --- 3. Keep the shard ------------------------------------------------------------------------
#
# q, k and v need the whole (B, T, D) input twice: forward, and backward for their weight gradients.
# Kept in between it would be the largest tensor of the block. Kept is the shard, which the norm
# has made; backward gathers it again, once for the three.


def set_enter(module, linears, group, sequence):
    """Set a module's `enter`, and what its first matrices keep of what has entered."""

    def enter_and_remember(x):
        y = enter(x, group, sequence)
        y.entered_from = x  # for `save` below; gone with y, when the forward products are done
        return y

    module.enter = enter_and_remember
    again = partial(gathered if sequence else unchanged, group=group)
    keep = KeepShard(again, linears, linears[0].what)
    for part in linears:
        part.what = keep


class KeepShard:
    """What (01's seam): not x but the shard; again(shard) makes x of it, once for all `linears`.

    `inner` says what stays of the shard: itself, or what its norm keeps (01's selective).
    """

    def __init__(self, again, linears, inner):
        self.again, self.linears, self.inner, self.made = again, linears, inner, {}

    def save(self, x):
        return self.inner.save(x.entered_from)

    def load(self, *kept):
        # These linears kept one storage, those of another micro-batch another one. The entry holds
        # it, so that its address can't become another tensor's while the entry lives.
        key = kept[0].untyped_storage()._cdata
        if key not in self.made:
            users = sum(part.weight.requires_grad for part in self.linears)
            self.made[key] = [users, self.again(self.inner.load(*kept)), kept[0]]
        entry = self.made[key]
        entry[0] -= 1
        if entry[0] == 0:
            del self.made[key]
        return entry[1]


# --- 4. The vocabulary: embedding and loss ----------------------------------------------------


def lookup_own(tokens, rows, first):
    """Rows of the table if they are on this rank, zeros if not: (B, T) -> (B, T, D), to be summed.

    rows (V/tp, D) are numbers first, first + 1, … of the table.
    """
    local = tokens - first
    mine = (local >= 0) & (local < len(rows))
    return torch.where(mine[..., None], F.embedding(local * mine, rows), 0)


def vocab_parallel_cross_entropy(logits, labels, first, columns, group):
    """Σ -log softmax(logits)[label] over all tokens, logits (B, T, V/tp), labels (B, T) whole.

    The first `columns` logits are those of the words first, first + 1, …; the rest is padding, and
    takes no part. Every rank returns the whole sum.
    """
    return VocabParallelCrossEntropy.apply(
        logits.flatten(0, -2), labels.flatten(), first, columns, group
    )


class VocabParallelCrossEntropy(torch.autograd.Function):
    """log Σ exp over the vocabulary = top + log Σ_ranks exp(lse_rank - top), top the largest lse.

    So three numbers a token travel: lse, exp(lse - top), the label's logit; logits never do.
    Everything wide exists for ROWS tokens at a time.
    """

    ROWS = 1024

    @staticmethod
    def forward(ctx, logits, labels, first, columns, group):  # (n, V/tp), (n,)
        wide = at_least_fp32(logits.dtype)
        rows = logits[:, :columns].split(VocabParallelCrossEntropy.ROWS)
        lse = torch.cat([r.to(wide).logsumexp(-1) for r in rows])  # (n,); -inf without columns
        top = lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        local = labels - first
        mine = (local >= 0) & (local < columns)  # IGNORE is nobody's
        label_logit = logits.gather(-1, (local * mine)[:, None]).squeeze(-1).to(wide)
        sums = torch.stack(((lse - top).exp(), torch.where(mine, label_logit, 0)))  # (2, n)
        dist.all_reduce(sums, group=group)
        lse = top + sums[0].log()
        ctx.first, ctx.columns = first, columns
        ctx.save_for_backward(logits, labels, lse)
        return torch.where(labels == IGNORE, 0, lse - sums[1]).sum()

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        dlogits[:, ctx.columns :] = 0
        dloss = torch.where(labels == IGNORE, 0, dloss)[:, None]  # (n, 1)
        local = labels - ctx.first
        mine = (local >= 0) & (local < ctx.columns)
        for start in range(0, len(logits) if ctx.columns else 0, VocabParallelCrossEntropy.ROWS):
            rows = slice(start, start + VocabParallelCrossEntropy.ROWS)
            d = (logits[rows, : ctx.columns] - lse[rows, None]).exp_()  # softmax
            label = (local * mine)[rows, None]
            d.scatter_add_(-1, label, -mine[rows, None].to(d.dtype))  # minus one-hot
            dlogits[rows, : ctx.columns] = d.mul_(dloss[rows])
            del d  # before the next one is made
        return dlogits, None, None, None, None


# --- 5. Gradients that are not finished -------------------------------------------------------


def sharing_group(group, kv_heads, make_group):
    """The ranks that hold the same kv head, if there are fewer heads than ranks; otherwise None.

    make_group(ranks) is dist.new_group or what adds a time-out to it. All ranks of the world call
    this with a `group` of all of them.
    """
    tp, mine = group.size(), None
    for i in range(0, tp, tp // kv_heads) if kv_heads < tp else ():
        ranks = [dist.get_global_rank(group, r) for r in range(i, i + tp // kv_heads)]
        made = make_group(ranks)
        mine = made if dist.get_rank() in ranks else mine
    return mine


def sum_partial_gradients(model, group, sharing=None, sequence=True):
    """Complete the gradients of parameters that several ranks hold, once, at the end of a step.

    Norms saw this rank's tokens only, if the sequence is scattered; without SP they saw all of
    them, and a sum would multiply by tp. A shared kv head saw this rank's query heads only.
    """
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    whole = [grad for name, grad in grads.items() if cut_dimension(name) is None]
    if whole and sequence:
        flat = torch.cat(whole)  # vectors, and few numbers: one call for all
        dist.all_reduce(flat, group=group)  # forget
        torch._foreach_copy_(whole, flat.split([len(grad) for grad in whole]))
    for name, grad in grads.items():
        if sharing is not None and re.fullmatch(KV, name):
            dist.all_reduce(grad, group=sharing)


# --- 6. Overlap: products while the pieces travel ---------------------------------------------
#
#   before   all-gather ────────────│ x[0] w │ x[1] w │ x[2] w │ x[3] w
#   now      x[0] w │ x[3] w │ x[2] w │ x[1] w        (rank 0; "async TP")
#            ─ x[3] ── x[2] ── x[1]                   a piece arrives while one is worked on
# The same turned round for matmul and reduce-scatter: the partial sum of a piece visits all ranks,
# and each computes its addend while the sum is on its way.
#
# `cut` doesn't use these two, as they replace seam and products at once: smaller products pay only
# where transfers run beside them. In a module of your own AsyncColumn.apply(group, x, *weights) is
# `enter` and the first matrices, AsyncRow.apply(group, x, w) the last and `leave`.


def pass_on(x, group):
    """Send x to the next rank of the ring, receive the previous rank's. Does not wait.

    Returns a function that waits and returns what arrived. Send and receive go out as one batch,
    posted by all ranks alike: no rank has to be even or odd, so any ring size works, and in a ring
    of two the messages of a pair are matched by their order.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (rank + i) % n) for i in (1, -1))
    # gloo cannot send from a GPU; then the bytes go by way of the CPU.
    sending = x.cpu() if x.is_cuda and dist.get_backend(group) == "gloo" else x
    arriving = torch.empty_like(sending)
    jobs = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, sending, after, group),
        dist.P2POp(dist.irecv, arriving, before, group),
    ])  # fmt: skip

    def arrived():
        for job in jobs:
            job.wait()
        return arriving.to(x.device)

    return arrived


def around(x, group):
    """Yield (source, that rank's x) for every rank of the ring, the own first.

    Before the caller computes with one, it has started on its way to the next rank.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in range(n):
        arrived = pass_on(x, group) if step < n - 1 else None
        yield (rank - step) % n, x
        if arrived:
            x = arrived()


def ring_scatter(addend, group):
    """Σ over the ranks of addend(this rank). addend(r) is computed while sums travel."""
    n, me, wait = group.size(), group.rank(), None
    for step in range(n):
        total = addend((me - 1 - step) % n).contiguous()
        total = total + wait() if wait else total
        wait = pass_on(total, group) if step < n - 1 else None
    return total


def piece_of(x, i, n):
    """Piece i of n along the sequence: (B, T, D) -> (B, T/n, D)."""
    return x.chunk(n, 1)[i]


def product(dy, x):
    """dyᵀ x over all tokens, a piece's addend to a weight gradient, in at least fp32."""
    return (dy.flatten(0, 1).T @ x.flatten(0, 1)).to(at_least_fp32(x.dtype))


class AsyncColumn(torch.autograd.Function):
    """Enter and then linear with each weight: (B, T/tp, in) -> (B, T, out/tp) for each."""

    @staticmethod
    def forward(ctx, group, x, *weights):
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        pieces = {r: [x @ w.T for w in weights] for r, x in around(x.contiguous(), group)}
        return tuple(torch.cat(ys, 1) for ys in zip(*(pieces[r] for r in range(group.size()))))

    @staticmethod
    def backward(ctx, *dys):
        (x, *weights), n = ctx.saved_tensors, ctx.group.size()
        dx = ring_scatter(
            lambda r: sum(piece_of(dy, r, n) @ w for dy, w in zip(dys, weights)), ctx.group
        )
        dws = [0 for _ in weights]
        for r, piece in around(x.contiguous(), ctx.group):
            for i, dy in enumerate(dys):
                dws[i] = dws[i] + product(piece_of(dy, r, n), piece)
        return None, dx, *(dw.to(x.dtype) for dw in dws)


class AsyncRow(torch.autograd.Function):
    """Linear and then leave: (B, T, in/tp) -> (B, T/tp, out)."""

    @staticmethod
    def forward(ctx, group, x, w):
        ctx.group = group
        ctx.save_for_backward(x, w)
        return ring_scatter(lambda r: piece_of(x, r, group.size()) @ w.T, group)

    @staticmethod
    def backward(ctx, dy):
        (x, w), n = ctx.saved_tensors, ctx.group.size()
        dx, dw = [None] * n, 0
        for r, piece in around(dy.contiguous(), ctx.group):
            dx[r] = piece @ w
            dw = dw + product(piece, piece_of(x, r, n))
        return None, torch.cat(dx, 1), dw.to(w.dtype)


# --- 7. Bytes, and when they can hide ---------------------------------------------------------


def held_parameters(c, tp):
    """How many numbers of the model's parameters a rank holds."""
    block = 2 * c.dim * (c.heads // tp + max(c.kv_heads // tp, 1)) * c.head_dim
    block += 3 * c.dim * c.ffn // tp + 2 * c.dim
    return -(-c.vocab // tp) * c.dim * (1 if c.tied else 2) + c.layers * block + c.dim


def held(c, B, T, dtype, tp, sequence=True, kinds=None):
    """Bytes that a rank keeps of a micro-batch until backward, line by line; 01 for tp = 1.

    kinds is what each layer recomputes: "none", "selective" or "full" (01). With SP a block keeps
    1/tp of what it keeps on one device; a kv head that several ranks hold, they all keep.
    """
    e, w, n = dtype.itemsize, at_least_fp32(dtype).itemsize, B * T
    kinds = kinds or ["none"] * c.layers
    tokens = n // tp if sequence else n  # where nothing mixes them
    K = max(c.kv_heads // tp, 1)
    cut_part = n * (2 * (c.heads // tp + K) * c.head_dim + 2 * c.ffn // tp) * e
    cut_part += n * c.heads // tp * w  # the lse of its heads
    block = {
        "full": tokens * c.dim * e,
        "selective": tokens * (2 * c.dim * e + 2 * w) + cut_part,
        "none": tokens * (4 * c.dim * e + 2 * w) + cut_part + n * c.ffn // tp * e,
    }
    return {
        "rope angles": T * c.head_dim * e,
        "positions": 8 * T if "full" in kinds else 0,
        "embedding": n * 9,  # which row (int64), and whether it is here: extra, for tp > 1
        "blocks": sum(block[kind] for kind in kinds),
        "final norm": tokens * (2 * c.dim * e + w),
        "logits": n * -(-c.vocab // tp) * e,
        "loss": n * w + w,
    }


def sent(c, B, T, dtype, tp, sequence=True, kinds=None, first=True, last=True):
    """What a rank sends over tp for a micro-batch: {collective: (calls, bytes)}.

    kinds is what each of its layers recomputes. Full recomputation enters both its pairs once more
    and leaves the first: the last sum isn't needed. In a pipeline (05) only the first stage has the
    embedding, which leaves, and only the last the head, which enters, and the loss.
    """
    e, w, n = dtype.itemsize, at_least_fp32(dtype).itemsize, B * T
    kinds = ["none"] * c.layers if kinds is None else kinds
    again, pairs = kinds.count("full"), len(kinds) * (2 if cut_ffn(c) else 1)
    x, loss = (Fraction((tp - 1) * size, tp) for size in (n * c.dim * e, 3 * n * w))
    if not sequence:
        calls = 2 * pairs + again + first + last
        return {"all_reduce": (calls + 2 * last, 2 * (calls * x + last * loss))}
    entered = again * (2 if cut_ffn(c) else 1)
    gathers = 3 * pairs + entered + first + 2 * last  # forward, backward, for the weight gradient
    scatters = 2 * pairs + again + first + last
    return {
        "all_gather": (gathers, gathers * x),
        "reduce_scatter": (scatters, scatters * x),
        "all_reduce": (2 * last, 2 * last * loss),
    }


def sent_partial(c, tp, sequence=True, grad=4):
    """(calls, bytes) of sum_partial_gradients over tp, and over the ranks that share a kv head."""
    norms = (2 * c.layers + 1) * c.dim if sequence else 0
    kv, share = 2 * c.layers if tp > c.kv_heads else 0, max(tp // c.kv_heads, 1)
    return (
        (min(norms, 1), Fraction(2 * (tp - 1) * norms * grad, tp)),
        (kv, Fraction(2 * (share - 1) * kv * c.dim * c.head_dim * grad, share)),
    )


def transfer_to_compute(outputs, tp, flops, bandwidth, element):
    """Time of gathering x / time of the products with it, whose weights have `outputs` in all.

    Gather (tp-1)/tp·n·D·element / bandwidth, products 2·n·D·(outputs/tp) / flops: tokens and D
    cancel. Above 1 it can't hide, whatever the batch. flops is what is reached, bandwidth what a
    rank sends a second. (The playbook's formula has outputs = D and leaves out `element`.)
    """
    return (tp - 1) * element * flops / (2 * outputs * bandwidth)


# --- 8. Check and measure ---------------------------------------------------------------------


def walk(block, x, positions, config):
    """What happens in a block's forward pass, in order: [where, shape in, shape out, collectives].

    The block is a throw-away one: its modules and seams are replaced by some that take notes.
    """
    rows = []

    def noting(name, function):
        def call(x, *more):
            before = wire.calls.copy()
            y = function(x, *more)
            shapes = [str(tuple(t.shape)) for t in (x, y)]
            rows.append([name, *shapes, " ".join(kind for _, kind in wire.calls - before)])
            return y

        return call

    for name, part in block.named_modules():
        for seam in ("enter", "attend", "leave"):
            if hasattr(part, seam):
                setattr(part, seam, noting(f"{name}.{seam}", getattr(part, seam)))
        if name and not list(part.children()):
            part.forward = noting(name, part.forward)
    with dp.Wire() as wire:
        block(x, memory.rope_angles(config, positions, x.dtype), positions, None)
    return rows


def cut_step(config, tokens, labels, groups, sequence, mode="none"):
    """Forward and backward on a model cut over the ranks.

    Returns loss, gradients, bytes of parameters and those kept by forward, the wire meter.
    """
    model = memory.build(config, dtype=torch.float64, device=tokens.device)
    memory.recompute(model, mode)
    cut(model, groups["tp"], sequence)
    live = memory.Live(batch=lambda: [tokens, labels], parameters=model.parameters)
    with dp.Wire() as wire, live:
        loss = model.loss(model(tokens), labels)
        live.settled()
        bytes_held = live.bytes()
        (loss / (labels != IGNORE).sum()).backward()
        sum_partial_gradients(model, groups["tp"], groups["sharing"], sequence)
    return loss.detach() / (labels != IGNORE).sum(), dp.gradients(model), bytes_held, wire


def own_parts(tensors, rank, tp, kv_heads):
    """This rank's parts of dense tensors by name."""
    return {name: own_part(name, w, rank, tp, kv_heads) for name, w in tensors.items()}


def totals(costs):
    calls, sizes = zip(*costs) if costs else ((0,), (0,))
    return sum(calls), sum(sizes)


def compare(form, sequence, mode, config, tokens, labels, dense, groups):
    """A row of the table, and what is wrong with it."""
    group, size = groups["tp"], dense["loss"].dtype.itemsize
    tp, kinds = group.size(), [memory.kind_of(mode, i) for i in range(config.layers)]
    loss, grads, bytes_held, wire = cut_step(config, tokens, labels, groups, sequence, mode)
    shape = config, *tokens.shape, torch.float64, tp, sequence, kinds
    expected = own_parts(dense["gradients"], group.rank(), tp, config.kv_heads)
    error, name = dp.worst_error(grads, expected)
    measured = [
        bytes_held["parameters"],
        bytes_held["activations"],
        *totals([(wire.calls[key], wire.bytes[key]) for key in wire.calls]),
    ]
    formula = [
        held_parameters(config, tp) * size,
        sum(held(*shape).values()),
        *totals([*sent(*shape).values(), *sent_partial(config, tp, sequence, size)]),
    ]
    failures = []
    if not error < 1e-11:
        failures.append(f"{name} gradient relative error {error:.3g} ({form})")
    if measured != formula:
        failures.append(f"{form}: measured {measured}, by formula {formula}")
    gap = abs(loss - dense["loss"]).item()
    if not gap < 1e-11:
        failures.append(f"{form}: loss {loss}, on one device {dense['loss']}")
    cells = [x for pair in zip(measured, formula) for x in pair][:4]
    return [form, *cells, *measured[2:], f"{error:.0e}"], failures


def blocked(x, group, work):
    """Seconds that `around` lets us wait, if work(piece) is done with every piece."""
    ring, waited = around(x, group), 0.0
    while True:
        begin = time.perf_counter()
        item = next(ring, None)
        waited += time.perf_counter() - begin
        if item is None:
            return waited
        work(item[1])


def show_overlap(group, here, rounds=5):
    """How much of a ring's transfers hides, and where it can."""
    x = torch.randn(4, 128, 256, device=here)  # (B, T/tp, D)
    works = (lambda piece: None), (lambda piece: time.sleep(0.02))  # a GPU's products need no core
    waits = [sum(blocked(x, group, work) for _ in range(rounds)) for work in works]
    waits = torch.tensor(waits, device=here)
    dist.all_reduce(waits, group=group)
    share = max(0.0, 1 - (waits[1] / waits[0]).item())  # ranks without a core of their own
    dp.log(f"\nasync: {share:.0%} of the wait for a gather hides behind 20 ms of work a piece.")
    dp.log("By formula, llama3-70b's gate and up on H100s, in bf16:")
    outputs, H100 = 2 * memory.PRESETS["llama3-70b"].ffn, dict(flops=989e12, element=2)
    rows = [
        [f"tp {tp}, {where}", transfer_to_compute(outputs, tp, bandwidth=bandwidth, **H100)]
        for tp, where, bandwidth in (
            (8, "450 GB/s, inside a node", 450e9),
            (16, "50 GB/s, between nodes", 50e9),
        )
    ]
    dp.table(["", "transfer / products"], rows)


def demo(args):
    n, B, T = dist.get_world_size(), 4, 16 * dist.get_world_size()
    # gloo can't do all of this on a GPU
    here = dp.device() if dist.get_backend() == "nccl" else torch.device("cpu")
    config = memory.PRESETS["tiny"]
    groups = {"tp": dist.new_group(range(n), group_desc="tp")}
    groups["sharing"] = sharing_group(
        groups["tp"], config.kv_heads, lambda ranks: dist.new_group(ranks, group_desc="sharing")
    )
    dp.header("04 TP and SP", f"world {n} = tp {n}", "   float64")
    dp.log(f"llama {memory.parameter_count(config):,} parameters   batch {B} x {T} tokens\n")

    model = memory.build(config, device=here)
    cut(model, groups["tp"])
    x = torch.zeros(B, T // n, config.dim, device=here)
    table = walk(model.layers["0"], x, torch.arange(T, device=here), config)
    dp.table(["one block forward (TP + SP)", "in", "out", "sent"], table)

    sample = dp.Samples(dp.open_tokens(), T, seed=0)
    batch = dp.micro_batches(dp.uneven(sample, T), range(B), B, here)[0]
    tokens, labels = (t.clone() for t in batch)  # the meter counts storages
    model = memory.build(config, dtype=torch.float64, device=here)
    loss = model.loss(model(tokens), labels) / (labels != IGNORE).sum()
    loss.backward()
    dense = {"loss": loss.detach(), "gradients": dp.gradients(model)}
    rows, failures = [], []
    for form, sequence, mode in [
        ("tp", False, "none"),
        ("tp+sp", True, "none"),
        ("selective", True, "selective"),
        ("full", True, "full"),
    ]:
        row, wrong = compare(form, sequence, mode, config, tokens, labels, dense, groups)
        rows.append(row)
        failures += wrong
    dp.log()
    dp.table(["", "parameters", "formula", "kept", "formula", "calls", "sent", "error"], rows)
    dp.log(f"error: worst of {len(dense['gradients'])} gradients; loss {loss:.6f} in all")
    show_overlap(groups["tp"], here)
    return dp.verdict("04_tp_sp", failures)


def main():
    parser = argparse.ArgumentParser(description="tensor and sequence parallelism")
    parser.add_argument("--tp", type=int, default=4, help="ranks, when started as plain python")
    args = parser.parse_args()
    import torch._dynamo  # noqa: F401  recomputation would, 1.3 s in every forked rank: once here

    return dp.launch(demo, args.tp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
