"""
01 · Where the bytes, FLOPs and hours of a training step go

Idea      Training holds four things for every parameter (the weight, its gradient, its exact copy,
          two moments) and, for every token, what each function of the forward pass keeps for its
          backward pass. Both can be counted before a byte is allocated: the formulas here equal
          what is alive, to the byte. What is kept can be made again instead, for more FLOPs.
Picture   tokens (B, T) ─ embed ─┬─ norm ─ q k v ─ rope ─ attend ─ o ─┬─ norm ─ gate up ─ down ─┬─ …
                                 └────────────────────────────────────┴─────────────────────────┘
          … ─ norm ─ head ─ logits (B, T, V) ─ loss (a sum over tokens)

          elements a token keeps in a block   none                   selective    full
          input, and it after attention       2·D                    2·D          D
          outputs of the two norms            2·D                    made again   made again
          q, k, v, attention's output         2·(H + K)·h            the same     made again
          gate, up                            2·F                    the same     made again
          silu(gate) · up                     F                      made again   made again
          and in fp32                         2 + H (1/rms, lse)     the same     made again
Cost      parameters  N = V·D (twice if untied) + L·(2·D·H·h + 2·D·K·h + 3·D·F + 2·D) + D
          bf16 training  2 (weight) + 4 (gradient) + 4 (fp32 master) + 8 (moments) = 18 bytes each
          useful FLOPs per trained token  6·(parameters of the matmuls) + 6·L·H·h·T (causal)
          full recomputation adds a forward pass of the blocks: 4/3 of the blocks' matmuls
Pays      selective: whenever memory matters, it adds no matmul (DeepSeek-V3 does the same).
          full: when that is not enough, for as few layers as fit (full:K). Every layer when some
          would do costs FLOPs for nothing: see smollm-1.7b in what this prints. What does not fit
          even so goes to more devices: 03 cuts the optimizer, 04 and 07 cut what tokens keep.
Forget    the fp32 master copy. A step is smaller than bf16 can add to a weight: without the copy
          layers.0.input_layernorm.weight never moves, error 1.00 against fp32 training, while the
          loss after 4 steps is within 0.01 of it. It is also the line that memory sums leave out,
          4 bytes a parameter, 32 GB of llama3-8b (--model llama3-8b).
Run       python 01_memory.py
          python 01_memory.py --model llama3-70b --seq 8192 --micro-batch 1 --recompute selective
Copy      Plain, KeepInput, now, LinearFunction, linear: a linear layer and its seams (section 2).
          at_least_fp32, NormFunction, CrossEntropyFunction, summed_cross_entropy: functions that
          keep less than autograd's own. Live: the bytes that are alive while any code runs.
          Imports: time, weakref, TorchDispatchMode, tree_leaves.
Read      Llama 3 (2407.21783), RoPE (2104.09864), GQA (2305.13245), SwiGLU (2002.05202);
          recomputation (1604.06174, 2205.05198), mixed precision (1710.03740), AdamW (1711.05101),
          FLOPs and tokens (2001.08361, 2203.15556), MFU (2204.02311), DeepSeek-V3 (2412.19437)

Letters   B micro-batch   T sequence   D width   H query heads   K key/value heads   h head size
          F FFN width     V vocabulary L layers
There is no dropout anywhere. Parameter names are those of Hugging Face's LlamaForCausalLM without
the leading "model.", so a real checkpoint loads with
model.load_state_dict({name.removeprefix("model."): w for name, w in checkpoint.items()}).
"""

import argparse
import itertools
import math
import re
import time
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry


# --- 1. The shape of a model --------------------------------------------------------------------


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary wavelengths, from 8,192 positions to 131,072."""

    factor: float = 8.0  # wavelengths longer than original / low are stretched by this
    low: float = 1.0
    high: float = 4.0  # wavelengths shorter than original / high are left alone
    original: int = 8192


@dataclass(frozen=True)
class Config:
    vocab: int  # V
    dim: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K, divides H
    ffn: int  # F
    head_dim: int = 0  # h; 0 means D / H
    tied: bool = False  # is the head's weight the embedding's?
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs")


PRESETS = {
    "tiny": Config(vocab=256, dim=128, layers=4, heads=8, kv_heads=4, ffn=384),
    "smollm-1.7b": Config(49152, 2048, 24, 32, 32, 8192, tied=True),
    "llama3-8b": Config(128256, 4096, 32, 32, 8, 14336, rope_theta=5e5),
    "llama3-70b": Config(
        128256, 8192, 80, 64, 8, 28672, rope_theta=5e5, rope_scaling=RopeScaling()
    ),
    "llama3-405b": Config(
        128256, 16384, 126, 128, 8, 53248, rope_theta=5e5, rope_scaling=RopeScaling()
    ),
}


def parameter_count(c):
    """Parameters of the model `c` describes, each tensor once (a tied head is the embedding)."""
    block = 2 * c.dim * (c.heads + c.kv_heads) * c.head_dim + 3 * c.dim * c.ffn + 2 * c.dim
    return c.vocab * c.dim * (1 if c.tied else 2) + c.layers * block + c.dim


def flops_per_token(c, T):
    """Useful FLOPs to train on one token of a sequence of T: forward 2 per weight, backward 4.

    The embedding is a lookup and costs none, the head is a matmul whether tied or not, the norms
    are left out. A query of a causal model meets T / 2 keys on average, in two products.
    """
    norms = (2 * c.layers + 1) * c.dim
    weights = parameter_count(c) - c.vocab * c.dim * (0 if c.tied else 1) - norms
    return 6 * weights + 6 * c.layers * c.heads * c.head_dim * T


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


# --- 2. The linear layer: three products and three seams ----------------------------------------
#
# forward      y  = x wᵀ        (…, in) -> (…, out)
# input grad   dx = dy w        (…, out) -> (…, in)
# weight grad  dw = dyᵀ x       sum over all tokens -> (out, in)
#
# autograd knows these already. We write them out because later chapters change one thing each:
#   how    a product is computed           08 computes it in FP8; 06 for stacked experts
#   what   is kept of x until backward     04 keeps the sequence shard and gathers it again
#   when   the weight gradient is computed 05 fills pipeline bubbles with it
# They combine because none of them touches what another one changes.


class Plain:
    """How: ordinary matmuls."""

    @staticmethod
    def forward(x, w):
        return F.linear(x, w)

    @staticmethod
    def input_grad(dy, w):
        return dy @ w

    @staticmethod
    def weight_grad(dy, x):
        return dy.flatten(0, -2).T @ x.flatten(0, -2)


class KeepInput:
    """What: x itself. save(x) are the tensors that stay until backward, load makes x of them."""

    @staticmethod
    def save(x):
        return (x,)

    @staticmethod
    def load(x):
        return x


def now(w, weight_grad):
    """When: at once. Returns dw, which autograd then adds to w.grad."""
    return weight_grad()


class Later:
    """When: not before run() is called. Between the two, w.grad is not finished."""

    def __init__(self):
        self.jobs = deque()

    def __call__(self, w, weight_grad):
        w.waiting = getattr(w, "waiting", 0) + 1
        self.jobs.append((w, weight_grad))

    def run(self):
        """Compute the oldest deferred weight gradient, in place of autograd's accumulation."""
        w, weight_grad = self.jobs.popleft()
        dw = weight_grad()
        if w.grad is None:
            w.grad = dw.to(w.grad_dtype or w.dtype)
        else:
            w.grad += dw
        w.waiting -= 1
        finished(w)


def on_finished(p, hook):
    """Call hook(p) whenever p's gradient of a backward pass is complete; 02 and 03 reduce on it.

    Autograd's own word, the post-accumulate hook, comes too early for a deferred weight gradient
    (p.grad is still missing, or old). So while jobs of p wait we keep silent, and the last says it.
    """
    if not hasattr(p, "finished_hooks"):
        p.finished_hooks = []
        p.register_post_accumulate_grad_hook(finished)
    p.finished_hooks.append(hook)


def finished(p):
    if not getattr(p, "waiting", 0):
        for hook in getattr(p, "finished_hooks", ()):
            hook(p)


class LinearFunction(torch.autograd.Function):
    """The three products, each by its seam: x (…, in), w (out, in) -> (…, out)."""

    @staticmethod
    def forward(ctx, x, w, how, what, when):
        # w stays on ctx as the Parameter it is: a saved tensor would come back as an alias under
        # recomputation, and a deferred gradient added to an alias is lost.
        ctx.w, ctx.how, ctx.what, ctx.when = w, how, what, when
        ctx.save_for_backward(*what.save(x))
        return how.forward(x, w)

    @staticmethod
    def backward(ctx, dy):
        kept = [t.detach() for t in ctx.saved_tensors]  # or a waiting job keeps the graph alive
        w, how, what = ctx.w, ctx.how, ctx.what
        dx = how.input_grad(dy, w) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = ctx.when(w, lambda: how.weight_grad(dy, what.load(*kept)))
        return dx, dw, None, None, None


def linear(x, w, how=Plain, what=KeepInput, when=now):
    """y = x wᵀ. x (…, in), w (out, in) -> (…, out)."""
    return LinearFunction.apply(x, w, how, what, when)


class Linear(nn.Module):
    """A weight (out, in) without bias, and its three seams."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.how, self.what, self.when = Plain, KeepInput, now

    def forward(self, x):
        return linear(x, self.weight, self.how, self.what, self.when)


# --- 3. Norm, rotation, attention, FFN ----------------------------------------------------------


def identity(x):
    return x


class NormFunction(torch.autograd.Function):
    """x / rms(x) · w, computed in at least fp32, keeping nothing but x and one number a token.

    F.rms_norm on CPU also keeps the normalised x, and two fp32 copies of it if x is bf16.
    """

    @staticmethod
    def forward(ctx, x, w, eps):
        mean = x.to(at_least_fp32(x.dtype)).square().mean(-1, keepdim=True)
        scale = torch.rsqrt(mean + eps)  # (B, T, 1)
        ctx.save_for_backward(x, w, scale)
        return NormFunction.again(x, w, scale)

    @staticmethod
    def again(x, w, scale):
        """The output, from what is saved."""
        return (x * scale).to(x.dtype) * w

    @staticmethod
    def backward(ctx, dy):
        x, w, scale = ctx.saved_tensors
        normed = x * scale  # (B, T, D) in at least fp32, as everything below
        dw = (dy * normed).flatten(0, -2).sum(0)
        dn = dy * w.to(scale.dtype)
        mean = (dn * normed).mean(-1, keepdim=True)
        dx = dn.sub_(normed.mul_(mean)).mul_(scale)  # scale · (dn - normed · mean)
        return dx.to(x.dtype), dw.to(w.dtype), None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        return NormFunction.apply(x, self.weight, self.eps)


def rope_angles(c, positions, dtype):
    """cos and sin of every (position, frequency): positions (T,) or (B, T) -> twice (…, T, h/2)."""
    wide = at_least_fp32(dtype)
    pair = torch.arange(0, c.head_dim, 2, device=positions.device, dtype=wide)
    frequency = 1.0 / c.rope_theta ** (pair / c.head_dim)  # (h/2,), rounded as Llama's own code
    if s := c.rope_scaling:
        turns = s.original * frequency / (2 * math.pi)  # how often it turned in the old context
        keep = ((turns - s.low) / (s.high - s.low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / s.factor
    angle = positions[..., None].to(wide) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """Turn the pairs (x[i], x[i + h/2]) by their angles. x (B, H, T, h), cos and sin (…, T, h/2).

    In memory T stays before H, as the projection left it: attention's output takes its layout from
    q, and o_proj can then keep that output itself and not a transposed copy.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one for all heads
    a, b = x.transpose(1, 2).chunk(2, -1)  # (B, T, H, h/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(1, 2)


def attend(q, k, v, positions, documents=None):
    """Causal attention. q (B, H, T, h), k and v (B, K, T, h) -> (B, H, T, h).

    positions (T,) or (B, T) are in order here; 07 is where they are not. With documents (B, T),
    a token sees only tokens of its own document.
    """
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    same = documents[:, :, None] == documents[:, None, :]  # (B, T, T)
    mask = same.tril()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.dim, c.heads * c.head_dim)
        self.k_proj = Linear(c.dim, c.kv_heads * c.head_dim)
        self.v_proj = Linear(c.dim, c.kv_heads * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.dim)
        self.enter, self.leave = identity, identity  # seams
        self.attend = attend  # seam

    def forward(self, x, rope, positions, documents):
        x = self.enter(x)  # (B, T, D)
        # The number of heads is whatever the weight gives: a cut weight needs no other change.
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or K, T, h)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        out = self.attend(rotate(q, *rope), rotate(k, *rope), v, positions, documents)
        out = out.transpose(1, 2).flatten(2)  # (B, T, H·h)
        return self.leave(self.o_proj(out))  # (B, T, D)


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) · up, keeping gate and up. Plain autograd would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return SwiGLUFunction.again(gate, up)

    @staticmethod
    def again(gate, up):
        """The output, from what is saved."""
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


class SwiGLU(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c.dim, c.ffn)
        self.up_proj = Linear(c.dim, c.ffn)
        self.down_proj = Linear(c.ffn, c.dim)
        self.enter, self.leave = identity, identity  # seams

    def forward(self, x):
        x = self.enter(x)  # (B, T, D)
        h = SwiGLUFunction.apply(self.gate_proj(x), self.up_proj(x))  # (B, T, F)
        return self.leave(self.down_proj(h))  # (B, T, D)


# --- 4. The Llama -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = SwiGLU(c)  # seam: 06 puts experts here

    def forward(self, x, rope, positions, documents):
        x = x + self.self_attn(self.input_layernorm(x), rope, positions, documents)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocab, c.dim))
        self.lookup, self.leave = F.embedding, identity  # seams

    def forward(self, tokens):
        return self.leave(self.lookup(tokens, self.weight))  # (B, T) -> (B, T, D)


class Head(Linear):
    def __init__(self, c):
        super().__init__(c.dim, c.vocab)
        self.enter = identity  # seam

    def forward(self, x):
        return super().forward(self.enter(x))  # (B, T, D) -> (B, T, V)


class CrossEntropyFunction(torch.autograd.Function):
    """Keeps the logits as they are and lse = log Σ exp(logits), one number a token.

    Plain autograd keeps the log-softmax, in at least fp32, and makes two more tensors of that size
    in backward. Here everything wide exists for ROWS tokens at a time.
    """

    ROWS = 1024

    @staticmethod
    def forward(ctx, logits, labels):  # (n, V), (n,)
        rows = logits.split(CrossEntropyFunction.ROWS)
        lse = torch.cat([r.to(at_least_fp32(r.dtype)).logsumexp(-1) for r in rows])  # (n,)
        ctx.save_for_backward(logits, labels, lse)
        label_logits = logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        return torch.where(labels == -100, 0, lse - label_logits).sum()

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        dloss = torch.where(labels == -100, 0, dloss)[:, None]  # (n, 1)
        for start in range(0, len(logits), CrossEntropyFunction.ROWS):
            rows = slice(start, start + CrossEntropyFunction.ROWS)
            d = CrossEntropyFunction.gradient(logits[rows], labels[rows], lse[rows])
            dlogits[rows] = d.mul_(dloss[rows])
            del d  # before the next one is made
        return dlogits, None

    @staticmethod
    def gradient(logits, labels, lse):
        """softmax - one-hot, in at least fp32."""
        d = (logits - lse[:, None]).exp_()
        label = labels[:, None].clamp(min=0)
        return d.scatter_add_(-1, label, d.new_full((1, 1), -1).expand_as(label))


def summed_cross_entropy(logits, labels):
    """Σ over the tokens of -log softmax(logits)[label]; labels of -100 count nothing.

    A sum, not a mean: divided by the number of valid tokens of the *global* batch it makes every
    later reduction of a gradient, over any axis, a plain sum.
    """
    return CrossEntropyFunction.apply(logits.flatten(0, -2), labels.flatten())


class Llama(nn.Module):
    """tokens (B, T) -> logits (B, T, V).

    The layers sit under their global number. A pipeline stage (05) is a Llama in which
    embed_tokens, some layers, or norm and lm_head are None or missing: it then takes and returns
    hidden states (B, T, D), and has to be told the positions.
    """

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = Embedding(c)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.layers)})
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = Head(c)
        if c.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.loss = summed_cross_entropy  # seam

    def forward(self, x, positions=None, documents=None):
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        rope = rope_angles(self.config, positions, x.dtype)
        for block in self.layers.values():
            x = block(x, rope, positions, documents)
        if self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def initial(name, shape, seed):
    """The value a parameter starts from: whole, fp32, on the CPU, by its full name and the seed.

    It depends on nothing else, so every layout of every chapter starts from the same model and
    cuts what it needs. (zlib.crc32 takes the seed as its starting value.)
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
    return torch.randn(shape, generator=generator) * 0.02


@torch.no_grad()
def build(c, seed=0, dtype=torch.float32, device="cpu"):
    """The whole Llama of config `c`, initialised.

    Gradients of weights below fp32 are accumulated in fp32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Llama(c)
    finally:
        torch.set_default_dtype(before)
    for name, p in model.named_parameters():
        p.copy_(initial(name, p.shape, seed))
        p.grad_dtype = at_least_fp32(dtype)  # torch's: the dtype in which autograd adds up p.grad
    return model


# --- 5. Recomputation ---------------------------------------------------------------------------


class Remake:
    """What: not x, but the tensors that the function which made x keeps anyway; x is made again.

    Only for functions that do so in a few elementwise operations, without a matmul.
    """

    def __init__(self, function):
        self.function = function

    def save(self, x):
        maker = x.grad_fn  # the ctx of the function that made x, and so what it saved
        return maker.saved_tensors if isinstance(maker, self.function._backward_cls) else (x,)

    def load(self, *kept):
        return kept[0] if len(kept) == 1 else self.function.again(*kept)


MADE_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), NormFunction),
    "down_proj": SwiGLUFunction,
}


def kind_of(mode, layer):
    """none, selective or full: what the layer of this global number does under `mode`."""
    if not re.fullmatch(r"none|selective|full(:\d+)?", mode):
        raise ValueError(f"recompute {mode!r}: none, selective, full or full:K (first K layers)")
    kind, _, first = mode.partition(":")
    return "none" if first and layer >= int(first) else kind


def recompute(model, mode):
    """Set what the blocks of `model` make again in backward instead of keeping it.

    none       nothing
    selective  the outputs of the two norms and silu(gate) · up. What is kept: x before and after
               attention, q and k (rotated), v, the attention's output and lse, gate, up
    full       everything but the block's input, by a second forward pass
    full:K     the same in the first K layers (by global number), none in the others
    """
    for number, block in model.layers.items():
        kind = kind_of(mode, int(number))
        vars(block).pop("forward", None)  # an earlier call's
        if kind == "full":
            # Parameters' and modules' names, hooks on the block: all stay as they are.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        for name, part in block.named_modules():
            maker = MADE_BY.get(name.rpartition(".")[2])
            if maker and isinstance(part, Linear):
                if part.what is KeepInput or isinstance(part.what, Remake):
                    part.what = Remake(maker) if kind == "selective" else KeepInput
                elif kind == "selective":
                    raise ValueError(f"layers.{number}.{name}: call recompute before changing what")


# --- 6. Bytes that depend on the model alone: parameters, gradients, optimizer ------------------


@dataclass(frozen=True)
class Recipe:
    """The dtypes of what a training run holds for each parameter."""

    weights: torch.dtype
    grads: torch.dtype
    master: torch.dtype | None  # the copy that the optimizer adds its step to
    moments: torch.dtype


FP32, BF16 = torch.float32, torch.bfloat16
RECIPES = {
    "fp32": Recipe(FP32, FP32, None, FP32),  # 4 + 4 + 8 = 16 bytes a parameter
    "bf16": Recipe(BF16, FP32, FP32, FP32),  # 2 + 4 + 4 + 8 = 18, what this repository trains with
    "bf16-grads": Recipe(BF16, BF16, FP32, FP32),  # 2 + 2 + 4 + 8 = 16
    "no-master": Recipe(BF16, BF16, None, FP32),  # 2 + 2 + 8 = 12, often quoted, see Forget
}


def state_bytes(c, recipe):
    N = parameter_count(c)
    return {
        "parameters": N * recipe.weights.itemsize,
        "gradients": N * recipe.grads.itemsize,
        "master copy": N * recipe.master.itemsize if recipe.master else 0,
        "moments": 2 * N * recipe.moments.itemsize,
    }


class AdamW:
    """AdamW with its bytes in sight. The moments appear in the first step, not before."""

    def __init__(self, params, recipe, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1):
        self.params, self.recipe = list(params), recipe
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.steps, self.moments, self.master = 0, {}, {}
        exact = recipe.master
        self.master = {p: p.detach().to(exact) for p in self.params if exact}  # forget

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for p in self.params:
            self.update(p)

    def update(self, p):
        b1, b2 = self.betas
        grad = p.grad.to(self.recipe.moments)
        if p not in self.moments:
            self.moments[p] = torch.zeros_like(grad), torch.zeros_like(grad)
        m, v = self.moments[p]
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        root = (v / (1 - b2**self.steps)).sqrt_().add_(self.eps)
        # A step is about lr in size. Less than |w| / 512 is rounded away if w is bf16.
        w = self.master.get(p, p)
        w.mul_(1 - self.lr * self.decay)
        w.addcdiv_(m, root, value=-self.lr / (1 - b1**self.steps))
        if w is not p:
            p.copy_(w)


# --- 7. Bytes that depend on the batch: activations and temporaries -----------------------------
#
# e is the size of an element, w of one in at least fp32, n = B·T the tokens. Not counted: the
# batch itself (tokens and labels, 16 bytes a token), and what a kernel allocates inside itself.
# On CUDA, by reading and not measured here: the flash kernel keeps two more numbers, its random
# state, and pads a head size that is no multiple of 8; the allocator rounds up to 512 bytes; where
# no fused kernel takes the dtype (fp32 and fp64 with GQA) attention keeps T x T scores.


def block_bytes(c, n, dtype, kind):
    """What one block keeps of n tokens from its forward pass to its backward pass."""
    e, w = dtype.itemsize, at_least_fp32(dtype).itemsize
    if kind == "full":
        return n * c.dim * e  # the block's input
    elements = 2 * c.dim  # the input; the same plus attention's output
    elements += 2 * (c.heads + c.kv_heads) * c.head_dim  # q and k rotated, v, attention's output
    elements += 2 * c.ffn  # gate, up
    if kind == "none":
        elements += 2 * c.dim + c.ffn  # the two norms' outputs, silu(gate) · up
    return n * (elements * e + (2 + c.heads) * w)  # 1 / rms of both norms; lse of each head


def kept_bytes(c, B, T, dtype, mode="none", layers=None, last=True, documents=False):
    """What the forward pass of a micro-batch leaves for its backward pass, line by line.

    A pipeline stage says which `layers` it has and whether it is the last, with norm, head, loss.
    With document masks every attention keeps its own, of T x T.
    """
    e, w, n = dtype.itemsize, at_least_fp32(dtype).itemsize, B * T
    kinds = [kind_of(mode, i) for i in (range(c.layers) if layers is None else layers)]
    lines = {
        "rope angles": T * c.head_dim * e,  # cos and sin, one for all layers
        "positions": 8 * T if "full" in kinds else 0,  # to call a block again
        "blocks": sum(block_bytes(c, n, dtype, kind) for kind in kinds),
    }
    if documents:
        lines["document masks"] = B * T * T * e * sum(kind != "full" for kind in kinds)
    if last:
        lines |= {
            "final norm": n * (2 * c.dim * e + w),  # its input, its output, 1 / rms
            "logits": n * c.vocab * e,  # plain autograd: n·V·w, and 3 such copies in backward
            "loss": n * w + w,  # lse, and the loss itself
        }
    return lines


def loss_temporaries(c, n, dtype):
    """The most that the loss's backward pass adds: dlogits, and ROWS of it in at least fp32."""
    e, w, rows = dtype.itemsize, at_least_fp32(dtype).itemsize, min(n, CrossEntropyFunction.ROWS)
    return n * c.vocab * e + rows * (c.vocab * w + 8) + n * w + 2 * w


def peak_bytes(c, B, T, recipe, mode="none"):
    """Bytes at the instants that can be the fullest of a step, from the second step on.

    Exact where V is larger than F and H·h, as in real models; otherwise the making of a weight
    gradient in a block, which is not listed, may be fuller. In the first step the moments appear
    only in the optimizer: "step 1 fits, step 2 does not".
    """
    state, kept = state_bytes(c, recipe), kept_bytes(c, B, T, recipe.weights, mode)
    e, w, g = recipe.weights.itemsize, at_least_fp32(recipe.weights).itemsize, recipe.grads.itemsize
    n, x = B * T, B * T * c.dim * e
    table, ffn = c.vocab * c.dim, c.dim * c.ffn
    layer = (parameter_count(c) - table * (1 if c.tied else 2) - c.dim) // c.layers
    cast = e if g != e else 0  # a weight gradient is computed in e, then accumulated in g

    optimizer = state["parameters"] + state["master copy"] + state["moments"]
    at = {"loss": optimizer + sum(kept.values()) + loss_temporaries(c, n, recipe.weights)}
    done = optimizer + kept["rope angles"] + kept["positions"] + 2 * w  # the loss and its gradient
    below = kept["blocks"]  # of the layers whose backward pass is still to come
    at["head"] = done + below + kept["final norm"] + n * c.vocab * e + x + table * e
    done += table * g  # the head's gradient
    at["head's gradient"] = done + below + kept["final norm"] + table * cast
    # A norm: its input and 1 / rms, the gradient that comes, three wide tensors, a mean, dw.
    norm = 2 * x + 2 * n * w + 3 * n * c.dim * w + c.dim * w
    at["final norm"] = done + below + norm
    done += c.dim * g
    for i in reversed(range(c.layers)):
        # Layer i goes backward: the layers above are gradients, those below are whole. Here
        # everything is there (made again if it has to be) that no later function has consumed.
        kind = kind_of(mode, i)
        below -= block_bytes(c, n, recipe.weights, kind)
        here = block_bytes(c, n, recipe.weights, "selective" if kind == "selective" else "none")
        here -= n * c.ffn * e if kind != "selective" else 0  # down_proj is through
        flowing = x + 3 * n * c.ffn * e  # gradients of the block's output, gate · up, gate, up
        at[f"ffn of layer {i}"] = done + ffn * g + below + here + flowing
        here -= 2 * n * c.ffn * e + (x if kind != "selective" else 0)  # gate_proj, up_proj too
        here -= x + n * w  # what `norm` counts, with a second gradient that passes it by: + x
        at[f"second norm of layer {i}"] = done + 3 * ffn * g + below + here + norm + x
        heads = c.heads * c.head_dim
        grads = (3 * ffn + c.dim + heads * c.dim) * g
        flowing = x + 2 * n * (heads + c.kv_heads * c.head_dim) * e  # of its output, q, k, v
        at[f"attention of layer {i}"] = done + grads + below + here + flowing
        done += layer * g
        at[f"first norm of layer {i}"] = done - c.dim * g + below + norm + x
        if i == 0 and kind != "full":
            at[f"first norm of layer {i}"] -= kept["rope angles"]
    # A tied table's two gradients and their sum exist together.
    last = 2 * table * g if c.tied else x + table * cast
    at["embedding"] = optimizer + state["gradients"] + 2 * w + last
    copies = 1 if recipe.grads == recipe.moments else 2
    largest = max(table, ffn, c.dim * c.heads * c.head_dim)
    at["optimizer"] = sum(state.values()) + copies * largest * recipe.moments.itemsize
    return at


def layers_to_recompute(c, B, T, recipe, budget):
    """The smallest K for which full:K fits into `budget` bytes; None if none does."""
    for K in range(c.layers + 1):
        if max(peak_bytes(c, B, T, recipe, f"full:{K}").values()) <= budget:
            return K


# --- 8. Measuring -------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, from their first tensor to their last.

    It sees every operation below autograd, so also what autograd, a recomputation cache or a hook
    holds, and it works on fake tensors, which have sizes but no memory. `owners` names functions
    that return the tensors of a category; what nobody owns is an activation or a temporary.
    """

    def __init__(self, **owners):
        super().__init__()
        self.owners, self.sizes = owners, {}
        self.total = self.peak = 0
        self.samples = None  # a list: take a sample whenever the total has changed
        self.phase = ""
        for tensors in owners.values():
            for t in tensors():
                self.add(t)

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # we never compile; True would import the compiler in every rank (1.6 s)

    def add(self, t):
        storage = t.untyped_storage()
        key = storage._cdata  # the address of the storage itself, not of its memory
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self.freed, key)

    def freed(self, key):
        self.total -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.add(t)
        self.peak = max(self.peak, self.total)
        if self.samples is not None and self.total != before:
            self.samples.append((self.phase, self.bytes()))
        return out

    def bytes(self):
        """{category: bytes now}; a storage with two owners counts for the first."""
        parts, seen = {}, set()
        for name, tensors in self.owners.items():
            keys = {t.untyped_storage()._cdata for t in tensors()} - seen
            parts[name] = sum(self.sizes[key] for key in keys)
            seen |= keys
        return parts | {"activations": self.total - sum(parts.values())}

    def settled(self):
        """The bytes alive once other threads, as gloo's, have let go of what they sent."""
        before = -1
        while self.total != before:
            before = self.total
            time.sleep(0.1)
        return before


def train(model, B, T, recipe, mode="none", steps=2, sample=False):
    """Run `steps` steps under the meter. -> the meter; for each step what is held when

    Under FakeTensorMode, model included, a model of any size runs without its memory.
    """
    c = model.config
    for p in model.parameters():
        p.grad_dtype = recipe.grads
    recompute(model, mode)
    device = next(model.parameters()).device
    tokens, labels = torch.randint(c.vocab, (2, B, T), device=device).clone().unbind()
    optimizer = AdamW(model.parameters(), recipe)
    live = Live(
        batch=lambda: [tokens, labels],
        parameters=model.parameters,
        gradients=lambda: [p.grad for p in model.parameters() if p.grad is not None],
        **{"master copy": optimizer.master.values},
        moments=lambda: itertools.chain.from_iterable(optimizer.moments.values()),
    )
    live.samples = [] if sample else None
    held = []
    with live:
        for step in range(1, steps + 1):
            now, live.peak = {}, live.total
            live.phase = f"step {step} forward"
            loss = model.loss(model(tokens), labels)
            now["forward"] = live.bytes()
            live.phase = f"step {step} backward"
            loss.backward()
            del loss
            now["backward"], now["peak of both"] = live.bytes(), live.peak
            live.phase, live.peak = f"step {step} optimizer", live.total
            optimizer.step()
            now["optimizer"], now["peak of optimizer"] = live.bytes(), live.peak
            for p in model.parameters():
                p.grad = None
            held.append(now)
    return live, held


# --- 9. FLOPs and hours -------------------------------------------------------------------------


def executed_flops(c, B, T, mode="none"):
    """(matmuls, attention): FLOPs that a step executes on B sequences.

    A matmul: forward 2 per weight and token, backward 4. Attention: two products forward; five
    backward, as the fused kernel computes the scores again; each over the half of the T x T square
    that is not masked. Recomputing a block adds its forward pass; `selective` adds none of these.
    """
    again = [kind_of(mode, i) for i in range(c.layers)].count("full")
    block = 2 * c.dim * (c.heads + c.kv_heads) * c.head_dim + 3 * c.dim * c.ffn
    matmul = 2 * B * T * ((3 * c.layers + again) * block + 3 * c.vocab * c.dim)
    product = B * c.heads * c.head_dim * T * T
    return matmul, product * (7 * c.layers + 2 * again)


CONVENTIONS = {  # FLOPs per token as others count them; N counts every parameter once
    "6·N  (Kaplan, Chinchilla, Llama 3)": lambda c, T: 6 * parameter_count(c),
    "6·N + 12·L·H·h·T  (PaLM, nanoGPT, the playbook)": lambda c, T: (
        6 * parameter_count(c) + 12 * c.layers * c.heads * c.head_dim * T
    ),
    "6·(N - V·D) + 12·L·H·h·T  (torchtitan)": lambda c, T: (
        6 * (parameter_count(c) - (0 if c.tied else c.vocab * c.dim))
        + 12 * c.layers * c.heads * c.head_dim * T
    ),
    "the same, attention halved  (Megatron-Bridge, here)": flops_per_token,
}

# Dense peaks from the vendor's data sheets. A run that computes some products in FP8 and others in
# bf16 has no single peak, so FP8 is not in the table.
PEAKS = {
    ("a100", "bf16"): 312e12,
    ("h100", "bf16"): 989.4e12,
    ("h200", "bf16"): 989.4e12,
    ("b200", "bf16"): 2250e12,
}


def utilisation(flops, seconds, peak):
    """MFU for useful FLOPs, HFU for executed ones; None if the peak is not known."""
    return flops / seconds / peak if peak else None


def gpu_hours(flops, peak, mfu):
    return flops / (peak * mfu) / 3600 if peak else None


class Flops(TorchDispatchMode):
    """Counts FLOPs by torch's own rules, told of what these do not know.

    (torch's FlopCounterMode also keeps track of modules, by hooks that hold on to activations.)
    """

    def __init__(self):
        super().__init__()
        self.matmuls = self.attention = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out, aten, packet = op(*args, **(kwargs or {})), torch.ops.aten, op._overloadpacket
        if packet is aten._scaled_dot_product_flash_attention_for_cpu:  # scores, and what they pick
            (q, k), causal = args[:2], args[4:5] == (True,)  # defaults are left out
            self.attention += 2 * 2 * q.numel() * k.shape[2] // (2 if causal else 1)
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:  # scores again
            (q, k), causal = args[1:3], args[7]
            self.attention += 5 * 2 * q.numel() * k.shape[2] // (2 if causal else 1)
        elif packet is aten._grouped_mm:  # 06: rows by the matrix of their own expert
            self.matmuls += 2 * args[0].numel() * args[1].shape[-1]
        elif packet in flop_registry:
            self.matmuls += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def counted_flops(run):
    """executed_flops as `run` executes them: (of matmuls, of attention)."""
    with Flops() as counted:
        run()
    return counted.matmuls, counted.attention


# --- 10. Run ------------------------------------------------------------------------------------

CUT_BY = {  # the chapters that make a line of the table smaller
    "parameters": "03 ZeRO-3, 04, 05, 06",
    "gradients": "03 ZeRO-2, 04, 05, 06",
    "master copy": "03 ZeRO-1, 04-06, 08",
    "moments": "03 ZeRO-1, 04-06, 08",
    "rope angles": "07",
    "positions": "07",
    "blocks": "recompute, 04, 07",
    "final norm": "04 (SP), 07",
    "logits": "04 (loss), 07",
    "loss": "07",
}


def byte_table(c, B, T, recipe, mode, held):
    """Print formula beside measurement; -> the lines in which they differ."""
    kept = kept_bytes(c, B, T, recipe.weights, mode)
    instants = peak_bytes(c, B, T, recipe, mode)
    fullest = max(instants, key=instants.get)
    rows = [(name, n, held["optimizer"][name]) for name, n in state_bytes(c, recipe).items()]
    rows += [("activations", sum(kept.values()), held["forward"]["activations"])]
    peak = max(held["peak of both"], held["peak of optimizer"]) - held["forward"]["batch"]
    rows += [("peak", instants[fullest], peak)]
    print(f"{'bytes':13}{'formula':>20}{'measured':>20}  cut by")
    for name, formula, measured in rows:
        print(f"{name:13}{formula:20,}{measured:20,}  {CUT_BY.get(name, '')}".rstrip())
        for part, n in kept.items() if name == "activations" else ():
            print(f"  {part:11}{n:20,}{'':20}  {CUT_BY.get(part, '')}".rstrip())
    part, extra = min(B * T, CrossEntropyFunction.ROWS), loss_temporaries(c, B * T, recipe.weights)
    print(f"Beside the logits lives their gradient, {part:,} rows also in fp32: {extra:,}.")
    print(f"The step is fullest at: {fullest}.")
    return [name for name, formula, measured in rows if formula != measured]


def chart(samples, width=46):
    """A line per moment, as long as what is alive: each letter a category."""
    letters = {"parameters": "w", "master copy": "M", "moments": "m", "gradients": "g"}
    letters["activations"] = "a"
    print("w weights  M master copy  m moments  g gradients  a activations, temporaries")
    most = max(sum(now.values()) for _, now in samples)
    for phase, group in itertools.groupby(samples, key=lambda sample: sample[0]):
        group = [now for _, now in group]
        lines = 1 if "optimizer" in phase else 4
        for i in range(lines):
            part = group[len(group) * i // lines : len(group) * (i + 1) // lines]
            now = max(part, key=lambda now: sum(now.values()))
            bar = "".join(x * round(now[name] * width / most) for name, x in letters.items())
            print(f"{phase * (i == 0):18} {bar:{width + 2}}{sum(now.values()) / 2**20:7.1f} MiB")


def compare_recomputation(c, B, T, rounds=4):
    """Print bytes, FLOPs and time of every mode beside those of none; -> what is wrong."""
    tokens, labels = torch.randint(c.vocab, (2, B, T)).unbind()

    def forward_backward(model):
        loss = model.loss(model(tokens), labels)
        loss.backward()
        return loss

    models, wrong = {}, []
    for mode in ("none", "selective", "full", f"full:{c.layers // 2}"):
        models[mode] = build(c)
        recompute(models[mode], mode)
    seconds = dict.fromkeys(models, math.inf)
    for mode, model in list(models.items()) * rounds:  # in turns, so that none has the cold cache
        start = time.process_time()
        forward_backward(model)
        seconds[mode] = min(seconds[mode], time.process_time() - start)
    print(f"{'recompute':11}{'kept':>12}{'of none':>9}{'FLOPs':>7}{'time':>6}  loss and gradients")
    for mode, model in models.items():
        model.zero_grad()
        result = []
        counted = counted_flops(lambda: result.append(forward_backward(model)))
        result += [p.grad for p in model.parameters()]
        kept, flops = sum(kept_bytes(c, B, T, FP32, mode).values()), executed_flops(c, B, T, mode)
        if mode == "none":
            right, none = result, (kept, sum(flops), seconds[mode])
        same = all(torch.equal(a, b) for a, b in zip(result, right))
        wrong += [f"FLOPs of {mode}"] * (counted != flops) + [f"gradients of {mode}"] * (not same)
        print(
            f"{mode:11}{kept:12,}{kept / none[0]:9.0%}{sum(flops) / none[1]:7.2f}"
            f"{seconds[mode] / none[2]:6.2f}  {'the same bits' if same else 'DIFFER'}"
        )
    return wrong


def movement(c, recipe, batches):
    """{parameter: how it has moved after a step on each batch}, starting from build(c)."""
    model = build(c, dtype=recipe.weights)
    start = {p: p.detach().clone() for p in model.parameters()}
    optimizer = AdamW(model.parameters(), recipe)
    for tokens in batches:
        model.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        model.zero_grad()
    now = {p: optimizer.master.get(p, p).detach() for p in start}
    return {name: now[p].float() - start[p].float() for name, p in model.named_parameters()}


def worst_movement(c):
    """Train in fp32 and in bf16 with a master copy. -> (the parameter that differs most, error)"""
    batches = torch.randint(c.vocab, (4, 2, 65), generator=torch.Generator().manual_seed(1))
    right, ours = (movement(c, RECIPES[name], batches) for name in ("fp32", "bf16"))
    error = {name: ((ours[name] - d).norm() / d.norm()).item() for name, d in right.items()}
    return max(error.items(), key=lambda item: item[1])


def print_large_models(T=8192):
    print(f"GiB, bf16, 1 x {T:,}     state   none  selective    full   80 GiB GPUs for state")
    for name in ("llama3-8b", "llama3-70b", "llama3-405b"):
        state = sum(state_bytes(PRESETS[name], RECIPES["bf16"]).values())
        kept = [
            sum(kept_bytes(PRESETS[name], 1, T, BF16, mode).values()) / 2**30
            for mode in ("none", "selective", "full")
        ]
        print(
            f"{name:18}{state / 2**30:12,.1f}{kept[0]:7.1f}{kept[1]:11.1f}{kept[2]:8.1f}"
            f"{math.ceil(state / (80 * 2**30)):9}"
        )

    # Over-checkpointing: recomputing every layer where some would do.
    c, B, recipe = PRESETS["smollm-1.7b"], 4, RECIPES["bf16"]
    K = layers_to_recompute(c, B, T, recipe, 72 * 2**30)
    print(f"\nsmollm-1.7b, {B} x {T:,}, to fit into 72 of 80 GiB (context, fragments)")
    for mode in ("none", "selective", f"full:{K}", "full"):
        peak = max(peak_bytes(c, B, T, recipe, mode).values()) / 2**30
        more = sum(executed_flops(c, B, T, mode)) / sum(executed_flops(c, B, T)) - 1
        print(f"  {mode:11} peak {peak:6.1f} GiB   {more:6.1%} more FLOPs")


def print_cost(c, B, T, mode, tokens, gpu, mfu, price):
    print(f"GFLOPs per token at T = {T:,}")
    for name, count in CONVENTIONS.items():
        print(f"  {count(c, T) / 1e9:12,.3f}  {name}")
    useful, attention = flops_per_token(c, T), 6 * c.layers * c.heads * c.head_dim * T
    executed = [n / (B * T) for n in executed_flops(c, B, T, mode)]
    print(f"{'':18}{'matmuls':>12}{'attention':>12}")
    print(f"  {'useful':16}{(useful - attention) / 1e9:12,.3f}{attention / 1e9:12,.3f}")
    print(f"  {'executed':16}{executed[0] / 1e9:12,.3f}{executed[1] / 1e9:12,.3f}", end="")
    print(f"   recompute {mode}: HFU = {sum(executed) / useful:.3f} MFU")
    hours = gpu_hours(flops_per_token(c, T) * tokens, PEAKS.get((gpu, "bf16")), mfu)
    if hours is None:
        return print(f"GPU-hours: none, the bf16 peak of {gpu!r} is not known")
    print(
        f"{tokens:.3g} tokens (20 a parameter: {20 * parameter_count(c):.3g}):"
        f" {hours:,.0f} {gpu} hours at MFU {mfu:.0%},\n${hours * price:,.0f} at ${price} an hour"
    )


def story():
    """The chapter, on a model small enough to measure. -> what is wrong"""
    c, B, T, recipe = PRESETS["tiny"], 8, 64, RECIPES["bf16"]
    print(f"01 bytes, FLOPs and hours of a training step   cpu   torch {torch.__version__}")
    shape = f"{c.layers} layers  dim {c.dim}  heads {c.heads}/{c.kv_heads}  ffn {c.ffn}"
    print(f"llama  {shape}  vocab {c.vocab}   batch {B} x {T}   bf16\n")
    model = build(c, dtype=recipe.weights)
    live, held = train(model, B, T, recipe, sample=True)
    wrong = byte_table(c, B, T, recipe, "none", held[1])
    more = held[1]["peak of both"] - held[0]["peak of both"]
    print(f"Step 2 is fuller than step 1 by {more:,} bytes: the moments.\n")
    if more != state_bytes(c, recipe)["moments"]:
        wrong += ["second step"]
    chart(live.samples)
    print()
    wrong += compare_recomputation(c, 4, 128)
    print("MFU and HFU here: none, a CPU's peak is not known.\n")
    print_large_models()
    print()
    print_cost(PRESETS["llama3-8b"], 1, 8192, "full", 15e12, "h100", 0.4, 2.0)
    name, error = worst_movement(c)
    print(f"\n4 steps in bf16 and in fp32: worst {name}, error {error:.2f}")
    return [f"{name} moves otherwise than in fp32, error {error:.2f}"] * (error > 0.2) + wrong


def report(args):
    """The tables of one model, measured on tensors without memory, or on a GPU. -> what is wrong"""
    c, recipe, B, T = PRESETS[args.model], RECIPES[args.recipe], args.micro_batch, args.seq
    print(f"01 {args.model}  {parameter_count(c):,} parameters  {B} x {T:,}  recipe {args.recipe}")
    print(f"recompute {args.recompute}   {args.device}   torch {torch.__version__}\n")
    if args.device == "cpu":
        with FakeTensorMode():
            model = build(c, dtype=recipe.weights)
            _, held = train(model, B, T, recipe, args.recompute)
    else:
        model = build(c, dtype=recipe.weights, device=args.device)
        torch.cuda.reset_peak_memory_stats()
        _, held = train(model, B, T, recipe, args.recompute)
        formula = max(peak_bytes(c, B, T, recipe, args.recompute).values())
        allocated = torch.cuda.max_memory_allocated()
        print(f"max_memory_allocated {allocated:,}, {allocated / formula - 1:+.2%} to the peak")
    wrong = byte_table(c, B, T, recipe, args.recompute, held[-1])
    print()
    tokens = args.tokens or 20 * parameter_count(c)
    print_cost(c, B, T, args.recompute, tokens, args.gpu, args.mfu, args.price)
    return wrong


def main():
    parser = argparse.ArgumentParser(description="bytes, FLOPs and hours of training on one device")
    parser.add_argument("--model", choices=PRESETS, help="its tables; without: the chapter's story")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences at a time")
    parser.add_argument("--recompute", default="none", help="none, selective, full or full:K")
    parser.add_argument("--recipe", choices=RECIPES, default="bf16", help="what dtypes are held in")
    parser.add_argument("--device", default="cpu", help="cuda: measure there, with memory")
    parser.add_argument("--tokens", type=float, help="to train on; 20 a parameter if not said")
    parser.add_argument("--gpu", default="h100", help="whose peak: a100, h100, h200, b200")
    parser.add_argument("--mfu", type=float, default=0.4, help="for the GPU-hours")
    parser.add_argument("--price", type=float, default=2.0, help="dollars for a GPU-hour")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        wrong = report(args) if args.model else story()
    except ValueError as error:
        parser.error(str(error))
    print("\n01_memory FAIL: " + "; ".join(wrong) if wrong else "\n01_memory OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
