"""
07 · Context parallelism: ring attention, and its two rivals

Idea      A sequence too long for one device is cut over n ranks, for the whole model. Norms,
          projections, FFN and loss work token by token and notice nothing. Only attention has to
          see the keys and values of the others, and it can take them block by block.
Picture   The sequence in 2n chunks. A rank holds one from the front and one from the back, so that
          all have the same work ("zigzag"). n = 4:
            chunk   0 1 2 3 4 5 6 7
            rank    0 1 2 3 3 2 1 0         keys and values pass rank 0 → 1 → 2 → 3 → 0
          own keys: causal      ◣    source < rank: all queries, the first half of the keys    ▌
          (the chunks' order)        source > rank: second half of the queries, all keys       ▄
Cost      Held: what attention keeps of T tokens, divided by n. Sent per rank and layer, forward:
          (n-1)·2·B·K·h·T/n elements; backward: that again, and as many gradients in at least fp32.
          The ring and the all-gather send the same bytes. The ring holds the keys and values of
          at most 2 other ranks at a time where the all-gather holds those of all, and it computes
          while it sends. Ulysses sends 2·(n-1)/n·B·h·T/n·(2H + 2K') elements forward and backward
          (K' is K, repeated until n divides it), which falls with n, but n has to divide H.
          Weights are whole on every rank and see its tokens only: their gradients are summed over
          the n ranks too, as over dp (02).
Pays      when the activations of one sequence do not fit one device. The ring's forward transfers
          are hidden if a rank has T/n ≥ e·(K/H)·F/W tokens (F FLOP/s, W bytes/s, e bytes an
          element): 9,890 tokens at 989 TFLOP/s, 50 GB/s, K/H = 1/4 in bf16. With fewer take the
          all-gather if its buffers fit (few kv heads), or Ulysses if the heads allow it.
Forget    the positions. A rank's tokens are not the first T/n of the sequence; without their
          positions RoPE turns each rank's keys as if they were. Nothing crashes, the gradients
          are wrong (relative error 0.865 in this demo).
Run       torchrun --nproc-per-node 4 07_cp_ring.py      (or python 07_cp_ring.py)
Copy      chunks, nearest_lengths, part, whole: a sequence in parts. aten, at_least_fp32, merge,
          written_out, plain_block, plain_block_backward, on_flash, as_bias, block, block_backward,
          blocks, in_view, forward_blocks, backward_blocks, nothing_yet, pass_on, around, from_all,
          RingFunction, ring: attention over it. Imports: math.
Read      Ring Attention (2310.01889), Llama 3 (2407.21783) section 3.3.2, Ulysses (2309.14509),
          FlashAttention-2 (2307.08691)

Letters as in 01. n is the number of ranks that share a sequence, C = T/n their tokens.
Context parallelism is not "sequence parallelism": that cuts the sequence between the matmuls of
tensor parallelism only (04), and every rank of it still computes attention over all T tokens.
"""

import argparse
import math
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F

memory = import_module("01_memory")
dp = import_module("02_dp")

aten = torch.ops.aten


# --- 1. Which part of the sequence a rank holds ------------------------------------------------
#
# The first tokens of a causal model see few keys, the last see all. Cut into n equal pieces
# ("plain"), the last rank has 2n - 1 times the work of the first, and a step of the ring takes as
# long as its slowest rank. A chunk from the front and one from the back make it even.


def chunks(rank, n, zigzag=True):
    """The two of the sequence's 2n chunks that a rank holds."""
    return (rank, 2 * n - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def nearest_lengths(T, n):
    """The valid lengths next to T: multiples of 2n."""
    below = T // (2 * n) * (2 * n)
    return [length for length in (below, below + 2 * n) if length > 0]


def part(x, dim, rank, n, zigzag=True):
    """A rank's part of anything that has one entry a token. (…, T, …) -> (…, T/n, …).

    Tokens, labels, positions and documents all go through here, so they cannot get out of step.
    Labels are shifted before (02's Samples): a part's last token has its successor in another part.
    """
    T = x.shape[dim]
    if n == 1:
        return x
    if T % (2 * n):
        near = " or ".join(map(str, nearest_lengths(T, n)))
        raise ValueError(f"{T} tokens do not make 2 x {n} equal chunks; the nearest are {near}")
    return torch.cat([x.chunk(2 * n, dim)[c] for c in chunks(rank, n, zigzag)], dim)


def whole(parts, dim, zigzag=True):
    """The sequence again, in order, from the parts of ranks 0 to n - 1."""
    n, by_chunk = len(parts), {}
    if n == 1:
        return parts[0]
    for rank, x in enumerate(parts):
        by_chunk |= zip(chunks(rank, n, zigzag), x.chunk(2, dim))
    return torch.cat([by_chunk[c] for c in range(2 * n)], dim)


# --- 2. Attention by blocks --------------------------------------------------------------------
#
# Of a set of keys a query needs only two things, from which any two sets can be made one:
#   lse = log Σ exp(s)      over the set, s = q·k / √h
#   out = Σ exp(s - lse)·v  their values, weighted as if there were no other keys
# Backward is by blocks too. Given the lse over *all* keys, each block finds its weights again,
# p = exp(s - lse), and its gradients do not depend on any other block:
#   dv = pᵀ·dout      ds = p · (dout·vᵀ - Σ dout·out)      dq = ds·k / √h      dk = dsᵀ·q / √h


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


def merge(out, lse, more_out, more_lse):
    """Attention to two sets of keys, from attention to each.

    Textbook:  lse_ab = log(exp(lse_a) + exp(lse_b))
               out_ab = (exp(lse_a)·out_a + exp(lse_b)·out_b) / exp(lse_ab)
    exp overflows at 89 in fp32, and scores differ by hundreds. So we subtract the larger lse first:
    then one weight is exactly 1 and the other is between 0 and 1. A set without a visible key has
    lse -inf and weight 0; if both are, top stays finite (-inf - -inf would be NaN).
    """
    top = torch.maximum(lse, more_lse).clamp(min=torch.finfo(lse.dtype).min)
    a, b = (lse - top).exp(), (more_lse - top).exp()  # (B, H, C)
    total = a + b  # from 1 to 2, or 0
    a, b = a / total.clamp(min=1), b / total.clamp(min=1)
    return out * a[..., None] + more_out * b[..., None], top + total.log()


def written_out(q, k, causal, visible):
    """The scores of a block, in at least fp32: (B, K, H/K, Tq, Tk), -inf where not visible."""
    q, k = q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)  # H/K queries share a key
    s = (q.to(at_least_fp32(q.dtype)) @ k.to(at_least_fp32(k.dtype)).mT) / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones_like(s[0, 0, 0], dtype=torch.bool).triu(1), -math.inf)
    return s if visible is None else s.masked_fill(~visible[:, None], -math.inf)


def plain_block(q, k, v, causal, visible=None):
    """The formulas above as they stand, with all Tq x Tk scores in memory."""
    s = written_out(q, k, causal, visible)
    lse = s.logsumexp(-1)
    p = (s - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
    out = p @ v.unsqueeze(2).to(p.dtype)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def plain_block_backward(dout, q, k, v, out, lse, causal, visible=None):
    p = (written_out(q, k, causal, visible) - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()
    q, k, v, dout, out = (x.to(p.dtype) for x in (q, k, v, dout, out))
    correction = (dout * out).sum(-1, keepdim=True)  # (B, H, Tq, 1)
    q, dout, correction = (x.unflatten(1, (k.shape[1], -1)) for x in (q, dout, correction))
    ds = p * (dout @ v.unsqueeze(2).mT - correction) / math.sqrt(q.shape[-1])
    dq = (ds @ k.unsqueeze(2)).flatten(1, 2)
    return dq, (ds.mT @ q).sum(2), (p.mT @ dout).sum(2)  # a key's gradient: over its H/K queries


# The fused kernels compute the same and never hold the scores. On CUDA the flash kernel takes
# 16-bit numbers and no mask; anything else we write out (production would call another kernel).


def on_flash(q, visible):
    return q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and visible is None


def as_bias(visible, dtype):
    """What to add to the scores: 0 where visible, otherwise -inf."""
    if visible is not None:
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -math.inf)


def block(q, k, v, causal, visible=None):
    """Attention of these queries to these keys, and its lse.

    q (B, H, Tq, h), k and v (B, K, Tk, h), visible (B, 1, Tq, Tk) or None
    -> out (B, H, Tq, h), lse (B, H, Tq) in at least fp32. causal needs Tq = Tk.
    """
    if q.is_cpu:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=as_bias(visible, q.dtype)
        )
        if visible is not None:  # this kernel says lse 0 of a query that sees no key
            lse = lse.masked_fill(~visible.any(-1), -math.inf)
        return out, lse
    if on_flash(q, visible):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return plain_block(q, k, v, causal, visible)


def block_backward(dout, q, k, v, out, lse, causal, visible=None):
    """dq, dk, dv of this block. out and lse are those over *all* keys, not only the block's."""
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=as_bias(visible, q.dtype)
        )
    if on_flash(q, visible):
        # None: the borders of packed sequences. seed: the state of dropout, which we have none of.
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        sizes = None, None, q.shape[2], k.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, seed, seed
        )
    return plain_block_backward(dout, q, k, v, out, lse, causal, visible)


# --- 3. Who sees whom --------------------------------------------------------------------------


def blocks(rank, source, C, zigzag=True):
    """Which of rank's C queries see which of source's C keys: a list of (queries, keys, causal).

    With zigzag rank holds chunks (r, 2n-1-r) and source (s, 2n-1-s). If s < r, chunk s lies before
    both of ours and chunk 2n-1-s behind both. If s > r, both lie behind our first chunk and before
    our second. No step needs a mask, and each but the own has C·C/2 pairs.
    """
    every, first, second = slice(0, C), slice(0, C // 2), slice(C // 2, C)
    if source == rank:
        return [(every, every, True)]  # a rank's tokens are in order, whatever lies between
    if source < rank:
        return [(every, first if zigzag else every, False)]
    return [(second, every, False)] if zigzag else []


def pairs(rank, n, C, zigzag=True):
    """How many (query, key) pairs rank computes of a sequence."""

    def count(queries, keys, causal):
        size = (queries.stop - queries.start) * (keys.stop - keys.start)
        return (size + C) // 2 if causal else size

    return sum(count(*b) for source in range(n) for b in blocks(rank, source, C, zigzag))


def in_view(rank, source, q, kv, zigzag, documents):
    """The blocks of this pair of ranks: (queries, keys, what `block` needs beyond q and the lse).

    documents, by rank, (B, C) each, or None: a query sees the keys of its own document only.
    """
    for queries, keys, causal in blocks(rank, source, q.shape[2], zigzag):
        visible = None
        if documents:
            mine, theirs = documents[rank][:, queries], documents[source][:, keys]
            visible = mine[:, None, :, None] == theirs[:, None, None, :]  # (B, 1, Tq, Tk)
        k, v = kv[:, :, :, keys]
        yield queries, keys, k, v, causal, visible


def forward_blocks(out, lse, rank, source, q, kv, zigzag, documents):
    """Merge attention to source's keys into out and lse, in place. kv is (2, B, K, C, h)."""
    for queries, _, k, v, causal, visible in in_view(rank, source, q, kv, zigzag, documents):
        more = block(q[:, :, queries], k, v, causal, visible)
        merged = merge(out[:, :, queries], lse[:, :, queries], *more)
        out[:, :, queries], lse[:, :, queries] = merged


def backward_blocks(dq, dout, out, lse, rank, source, q, kv, zigzag, documents):
    """Add to dq, in place, what comes from source's keys; return the gradient of these."""
    dkv = torch.zeros_like(kv, dtype=lse.dtype)
    for queries, keys, k, v, causal, visible in in_view(rank, source, q, kv, zigzag, documents):
        ours = (x[:, :, queries] for x in (dout, q, out, lse))
        dout_part, q_part, out_part, lse_part = ours
        dqkv = block_backward(dout_part, q_part, k, v, out_part, lse_part, causal, visible)
        dq[:, :, queries] += dqkv[0]
        dkv[0][:, :, keys] += dqkv[1]
        dkv[1][:, :, keys] += dqkv[2]
    return dkv


def nothing_yet(q):
    """The attention to no keys at all: where the merging starts. In at least fp32."""
    out = torch.zeros_like(q, dtype=at_least_fp32(q.dtype))
    return out, torch.full_like(out[..., 0], -math.inf)


# --- 4. The ring -------------------------------------------------------------------------------


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


def from_all(x, group):
    """The x of every rank, as a list."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


class RingFunction(torch.autograd.Function):
    """q (B, H, T/n, h), k and v (B, K, T/n, h) -> out (B, H, T/n, h)."""

    @staticmethod
    def forward(ctx, q, k, v, documents, group, zigzag):
        rank = dist.get_rank(group)
        documents = () if documents is None else from_all(documents, group)
        own = torch.stack((k, v))  # (2, B, K, T/n, h): they travel together, heads unrepeated
        out, lse = nothing_yet(q)
        for source, kv in around(own, group):
            forward_blocks(out, lse, rank, source, q, kv, zigzag, documents)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse, *documents)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        """dk and dv of a rank's keys are a sum over the ranks. It travels one step behind them.

        The first to add to it is the next rank, the last its owner: n - 1 transfers.
        """
        q, own, out, lse, *documents = ctx.saved_tensors
        rank = dist.get_rank(ctx.group)
        dq, arrived = torch.zeros_like(q, dtype=lse.dtype), None
        for source, kv in around(own, ctx.group):
            dkv = backward_blocks(dq, dout, out, lse, rank, source, q, kv, ctx.zigzag, documents)
            if source == rank:
                own_dkv = dkv
                continue
            if arrived:
                dkv += arrived()  # from the ranks that had these keys before us
            arrived = pass_on(dkv, ctx.group)
        if arrived:
            own_dkv += arrived()
        return dq.to(q.dtype), *own_dkv.to(q.dtype), None, None, None


def ring(q, k, v, positions, documents=None, *, group, zigzag=True):
    """Causal attention over the sequence that the ranks of `group` share; 01's `attend`.

    Every argument is this rank's part of the sequence. positions have done their work, they turned
    q and k; who sees whom follows from how the sequence is cut. documents (B, T/n): the number of
    each token's document; only equal numbers see each other.
    """
    return RingFunction.apply(q, k, v, documents, group, zigzag)


# --- 5. The rivals -----------------------------------------------------------------------------


class AllGatherFunction(torch.autograd.Function):
    """As the ring, but with everybody's keys and values at hand at once.

    Llama 3 was trained like this: with GQA they are small, and one collective before the
    computation leaves the order of the blocks free. (It puts the keys in order and calls one
    kernel for each of its two chunks; we take the ring's blocks.) Nothing hides the transfer.
    """

    @staticmethod
    def forward(ctx, q, k, v, documents, group, zigzag):
        rank = dist.get_rank(group)
        documents = () if documents is None else from_all(documents, group)
        own = torch.stack((k, v))
        out, lse = nothing_yet(q)
        for source, kv in enumerate(from_all(own, group)):
            forward_blocks(out, lse, rank, source, q, kv, zigzag, documents)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse, *documents)  # what was gathered is let go
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        q, own, out, lse, *documents = ctx.saved_tensors
        rank, dq = dist.get_rank(ctx.group), torch.zeros_like(q, dtype=lse.dtype)
        dkv = [
            backward_blocks(dq, dout, out, lse, rank, source, q, kv, ctx.zigzag, documents)
            for source, kv in enumerate(from_all(own, ctx.group))
        ]
        own_dkv = torch.empty_like(dkv[rank])
        dist.reduce_scatter(own_dkv, dkv, group=ctx.group)
        return dq.to(q.dtype), *own_dkv.to(q.dtype), None, None, None


def allgather(q, k, v, positions, documents=None, *, group, zigzag=True):
    """The same as `ring`, with keys and values gathered first."""
    return AllGatherFunction.apply(q, k, v, documents, group, zigzag)


class SwapFunction(torch.autograd.Function):
    """x (n, …): slice i goes to rank i. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx, dy):
        return SwapFunction.forward(ctx, dy, ctx.group), None


def ulysses(q, k, v, positions, documents=None, *, group, zigzag=True):
    """The same as `ring`: trade a part of the sequence for a part of the heads, and back.

    Between the two all-to-alls a rank has all T tokens of H/n heads, and attention is the ordinary
    one. If n does not divide K, heads of k and v are repeated until it does; autograd sums their
    gradients.
    """
    n, H, K = dist.get_world_size(group), q.shape[1], k.shape[1]
    if H % n:
        raise ValueError(f"ulysses gives each of {n} ranks H/{n} heads, but H is {H}")
    if K % n:
        k, v = (x.repeat_interleave(math.lcm(K, n) // K, 1) for x in (k, v))
    heads = [x.shape[1] // n for x in (q, k, v)]
    # One all-to-all for all three, as every rank gets H/n of q's heads and K'/n of k's and v's.
    qkv = torch.cat([x.unflatten(1, (n, -1)).transpose(0, 1) for x in (q, k, v)], 2)
    qkv = SwapFunction.apply(qkv, group)  # (n, B, (H + 2K')/n, T/n, h)
    qkv = whole(qkv.unbind(), 2, zigzag)  # (B, (H + 2K')/n, T, h)
    if documents is None:
        visible = None
    else:
        documents = whole(from_all(documents, group), 1, zigzag)
        visible = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    out = F.scaled_dot_product_attention(
        *qkv.split(heads, 1), attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )  # (B, H/n, T, h)
    out = torch.stack([part(out, 2, rank, n, zigzag) for rank in range(n)])
    return SwapFunction.apply(out, group).transpose(0, 1).flatten(1, 2)  # (B, H, T/n, h)


KINDS = {"ring": ring, "allgather": allgather, "ulysses": ulysses}


def use(model, group, kind="ring", zigzag=True):
    """Let the attention of every layer of 01's model reach over the ranks of `group`.

    From now on the model takes parts of sequences, with their positions. The barrier warms the
    group up: NCCL connects its ranks at the first call, and if that is a point-to-point call in
    which only some take part, it waits for the others.
    """
    dist.barrier(group)
    for layer in model.layers.values():
        layer.self_attn.attend = partial(KINDS[kind], group=group, zigzag=zigzag)


# --- 6. Costs ----------------------------------------------------------------------------------


def repeated_heads(kind, K, n):
    """K', the kv heads that travel: Ulysses repeats them until n divides their number."""
    return math.lcm(K, n) if kind == "ulysses" else K


def held(kind, B, T, H, K, h, n, dtype):
    """Bytes of one layer's attention on a rank: (kept until backward, buffers in forward).

    kept     q, k, v, the output, its lse: as on one device for T/n tokens. Ulysses also keeps the
             output as the projection behind it sees it, and k and v with their heads repeated.
    buffers  keys and values beside the own: the ring's double buffer, or all n parts; for Ulysses
             what the first all-to-all sends and receives
    """
    e, C, Kr = dtype.itemsize, T // n, repeated_heads(kind, K, n)
    kept = B * C * h * (2 * H + 2 * Kr) * e + B * C * H * at_least_fp32(dtype).itemsize
    kv = 2 * B * K * C * h * e
    if kind == "ulysses":
        return kept + B * C * H * h * e, 2 * B * C * h * (H + 2 * Kr) * e
    return kept, (min(n - 1, 2) if kind == "ring" else n) * kv


def sent(kind, B, T, H, K, h, n, dtype, documents=False, forwards=1):
    """What a rank sends for one layer, forward and backward: {collective: (calls, bytes)}.

    forwards is 2 if the layer is recomputed: then its forward pass communicates again.
    """
    e, C, Kr = dtype.itemsize, T // n, repeated_heads(kind, K, n)
    kv, dkv = (2 * B * K * C * h * size for size in (e, at_least_fp32(dtype).itemsize))
    passes = forwards + 1
    if kind == "ring":
        result = {"send": ((passes + 1) * (n - 1), (n - 1) * (passes * kv + dkv))} if n > 1 else {}
    elif kind == "allgather":
        result = {"all_gather": (passes, (n - 1) * passes * kv)}
        result["reduce_scatter"] = (1, (n - 1) * dkv)
    else:  # in each pass a slice for each other rank: of q, k, v there, of the output back
        slices = B * C * h * (2 * H + 2 * Kr) // n * e
        result = {"all_to_all": (2 * passes, (n - 1) * passes * slices)}
    if documents:
        calls, size = result.get("all_gather", (0, 0))
        result["all_gather"] = (calls + forwards, size + forwards * (n - 1) * B * C * 8)
    return result


def attention_flops(B, H, h, rank, n, C, zigzag=True):
    """Useful FLOPs of a rank in one layer, forward and backward: 2 products, then 4."""
    return 6 * 2 * B * H * h * pairs(rank, n, C, zigzag)


def exposed(H, K, C, itemsize, flops_per_s, bytes_per_s, zigzag=True):
    """Time to send a step's keys and values / time to compute it; hidden if at most 1.

    Forward: 2·B·K·C·h elements against 4·B·H·h FLOPs for each of C·C (zigzag: C·C/2) pairs.
    Backward sends 3 times as much in bf16 (dk, dv in fp32) for 2.5 times the FLOPs.
    """
    computed = 4 * H * C * C / (2 if zigzag else 1) / flops_per_s
    return 2 * K * C * itemsize / bytes_per_s / computed


# --- 7. Check and measure ----------------------------------------------------------------------


def picture(n, C):
    """Steps of the ring as text, plain beside zigzag, and each rank's share of the work."""
    sign = {(C, C, True): "◣", (C, C, False): "█", (C, C // 2, False): "▌", (C // 2, C, False): "▄"}
    lines = ["          plain" + " " * max(2, 2 * n - 2) + "work    zigzag"]
    for rank in range(n):
        line = f"  rank {rank:<3}"
        for zigzag in (False, True):
            for step in range(n):
                found = blocks(rank, (rank - step) % n, C, zigzag)
                line += " ·" if not found else ""
                for queries, keys, causal in found:
                    size = queries.stop - queries.start, keys.stop - keys.start
                    line += " " + sign[*size, causal]
            total = sum(pairs(r, n, C, zigzag) for r in range(n))
            line += f" {pairs(rank, n, C, zigzag) / total:6.1%}   "
        lines.append(line.rstrip())
    return lines


def attention_cost(kind, config, B, C, group):
    """Forward and backward of one attention, measured: bytes kept between them, the wire meter."""
    heads = config.heads, config.kv_heads, config.kv_heads
    leaves = [torch.randn(B, n, C, config.head_dim, device=dp.device()) for n in heads]
    with dp.Wire() as wire, memory.Live() as live:
        q, k, v = (x.requires_grad_().clone() for x in leaves)
        out = KINDS[kind](q, k, v, None, group=group)
        del q, k, v  # from here on, what is alive is alive for backward
        kept = live.settled()
        out.sum().backward()
    return kept, wire


def cost_rows(kinds, config, B, T, n, group):
    """Rows measured beside formula, and whether they agree."""
    rows, failures = [], []
    shape = B, T, config.heads, config.kv_heads, config.head_dim, n, torch.float32
    for kind in kinds:
        kept, wire = attention_cost(kind, config, B, T // n, group)
        measured = {name: (wire.calls[g, name], wire.bytes[g, name]) for g, name in wire.calls}
        formula, kept_formula = sent(kind, *shape), held(kind, *shape)[0]
        calls, size = ([sum(pair[i] for pair in side.values()) for side in (measured, formula)]
                       for i in (0, 1))  # fmt: skip
        rows.append([kind, *calls, *size, kept, kept_formula])
        if measured != formula or kept != kept_formula:
            failures.append(f"{kind} differs from its formulas: {measured}, {kept} bytes kept")
    return rows, failures


def train_on_part(kind, zigzag, config, tokens, labels, group):
    """Loss and gradients of a model that sees only its part of the sequence, summed over ranks."""
    n, rank, T = dist.get_world_size(group), dist.get_rank(group), tokens.shape[1]
    model = memory.build(config, dtype=torch.float64, device=tokens.device)
    use(model, group, kind, zigzag)
    inputs = {"x": part(tokens, 1, rank, n, zigzag)}
    inputs["positions"] = part(torch.arange(T, device=tokens.device), 0, rank, n, zigzag)  # forget
    loss = model.loss(model(**inputs), part(labels, 1, rank, n, zigzag)) / labels.numel()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    dp.sum_gradients(model.named_parameters(), group)
    return loss, dp.gradients(model)


def demo(args):
    n, here, T, B = dist.get_world_size(), dp.device(), 32 * dist.get_world_size(), 2
    group = dist.new_group(range(n), group_desc="cp")
    config = memory.PRESETS["tiny"]
    dp.header("07 context parallelism", f"world {n} = cp {n}", "   float64")
    dp.log(f"llama {memory.parameter_count(config):,} parameters   batch {B} x {T} tokens\n")
    dp.log("what each rank computes, step by step, and its share of the work")
    dp.log("\n".join(picture(n, T // n)))

    kinds = [kind for kind in KINDS if kind != "ulysses" or config.heads % n == 0]
    dp.log(f"\none layer's attention, float32   (H {config.heads}, K {config.kv_heads})")
    rows, failures = cost_rows(kinds, config, B, T, n, group)
    head = ["per rank", "calls", "formula", "sent", "formula", "kept", "formula"]
    dp.table(head, rows)
    if "ulysses" not in kinds:
        dp.log(f"ulysses is left out: {n} ranks do not divide {config.heads} heads")
    show_long_context(8)

    sample = dp.Samples(dp.open_tokens(), T, seed=0)
    tokens, labels = dp.micro_batches(sample, range(B), B, here)[0]
    dense = memory.build(config, dtype=torch.float64, device=here)
    dense_loss = dense.loss(dense(tokens), labels) / labels.numel()
    dense_loss.backward()
    dp.log(f"\nloss on one device {dense_loss:.6f}")
    rows, wrong = [], []
    for kind, zigzag in [(kind, True) for kind in kinds] + [("ring", False)]:
        loss, grads = train_on_part(kind, zigzag, config, tokens, labels, group)
        error, name = dp.worst_error(grads, dp.gradients(dense))
        label = kind if zigzag else f"{kind} (plain)"
        rows.append([label, f"{loss:.6f}", len(grads), f"{error:.1e}", name])
        if not error < 1e-11:
            wrong.append(f"{name} gradient relative error {error:.3g} ({label})")
    dp.table(["zigzag", "loss", "of", "error", "worst gradient"], rows)
    return dp.verdict("07_cp_ring", wrong + failures)


def show_long_context(n):
    """The three side by side where context parallelism is used: formulas only."""
    c, T, MiB = memory.PRESETS["llama3-8b"], 131_072, 2**20
    shape = 1, T, c.heads, c.kv_heads, c.head_dim, n, torch.bfloat16
    dp.log(f"\nby formula: llama3-8b, one layer, T {T:,}, cp {n}, bf16, in MiB a rank")
    rows = []
    for kind in KINDS:
        size = sum(b for _, b in sent(kind, *shape).values())
        rows.append([kind, *(round(x / MiB) for x in (size, *held(kind, *shape)))])
    dp.table(["", "sent", "kept", "buffers in forward"], rows)


def main():
    parser = argparse.ArgumentParser(description="ring attention, all-gather and Ulysses")
    parser.add_argument("--cp", type=int, default=4, help="ranks, when started as plain python")
    args = parser.parse_args()
    return dp.launch(demo, args.cp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
