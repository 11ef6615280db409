"""
01 · The Llama on one device

Idea      A language model is a short list of matrix products. Everything the later chapters do
          (cutting weights, moving activations, delaying gradients, computing in FP8) is done to
          this model from outside, at a few named places, its seams. It knows nothing of them.
Picture   tokens (B, T) ─ embed ─┬─ norm ─ q k v ─ rope ─ attend ─ o ─┬─ norm ─ gate up ─ down ─┬─ …
                                 └────────────────────────────────────┴─────────────────────────┘
          … ─ norm ─ head ─ logits (B, T, V) ─ loss (a sum over tokens)
Cost      parameters  V·D (twice if untied) + L·(2·D·H·h + 2·D·K·h + 3·D·F + 2·D) + D
          useful FLOPs per trained token  6·(parameters of the matmuls) + 6·L·H·h·T (causal)
Run       python 01_memory.py
Read      Llama 3 (2407.21783), RoPE (2104.09864), GQA (2305.13245), SwiGLU (2002.05202)

Letters   B micro-batch   T sequence   D width   H query heads   K key/value heads   h head size
          F FFN width     V vocabulary L layers
There is no dropout anywhere. Parameter names are those of Hugging Face's LlamaForCausalLM without
the leading "model.", so a real checkpoint loads with
model.load_state_dict({name.removeprefix("model."): w for name, w in checkpoint.items()}).
"""

import argparse
import math
import zlib
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


# --- 1. The shape of a model -----------------------------------------------------------------


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
    "llama3-70b": Config(128256, 8192, 80, 64, 8, 28672, rope_theta=5e5, rope_scaling=RopeScaling()),
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
    weights = parameter_count(c) - c.vocab * c.dim * (0 if c.tied else 1) - (2 * c.layers + 1) * c.dim
    return 6 * weights + 6 * c.layers * c.heads * c.head_dim * T


def at_least_fp32(dtype):
    """The dtype for sums of `dtype`: fp32, or float64 if that is what the run is in."""
    return torch.promote_types(dtype, torch.float32)


# --- 2. The linear layer: three products and three seams ---------------------------------------
#
# forward      y  = x wᵀ        (…, in) -> (…, out)
# input grad   dx = dy w        (…, out) -> (…, in)
# weight grad  dw = dyᵀ x       sum over all tokens -> (out, in)
#
# autograd knows these already. We write them out because three chapters each change one thing:
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
    """What: x itself. save(x) is what stays alive until backward, load makes x of it again."""

    @staticmethod
    def save(x):
        return x

    @staticmethod
    def load(kept):
        return kept


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
    @staticmethod
    def forward(ctx, x, w, how, what, when):
        # w stays on ctx as the Parameter it is: a saved tensor would come back as an alias under
        # recomputation, and a deferred gradient added to an alias is lost.
        ctx.w, ctx.how, ctx.what, ctx.when = w, how, what, when
        ctx.save_for_backward(what.save(x))
        return how.forward(x, w)

    @staticmethod
    def backward(ctx, dy):
        kept = ctx.saved_tensors[0].detach()  # detached, or a waiting job keeps the graph alive
        w, how, what = ctx.w, ctx.how, ctx.what
        dx = how.input_grad(dy, w) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = ctx.when(w, lambda: how.weight_grad(dy, what.load(kept)))
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


# --- 3. Norm, rotation, attention, FFN ---------------------------------------------------------


def identity(x):
    return x


class NormFunction(torch.autograd.Function):
    """x / rms(x) · w, computed in at least fp32, keeping nothing but x and one number a token.

    F.rms_norm on CPU also keeps the normalised x, and two fp32 copies of it if x is bf16.
    """

    @staticmethod
    def forward(ctx, x, w, eps):
        wide = x.to(at_least_fp32(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (B, T, 1)
        ctx.save_for_backward(x, w, scale)
        return (wide * scale).to(x.dtype) * w

    @staticmethod
    def backward(ctx, dy):
        x, w, scale = ctx.saved_tensors
        normed = x * scale  # (B, T, D) in at least fp32, as everything below
        dn = dy * w.to(scale.dtype)
        dx = scale * (dn - normed * (dn * normed).mean(-1, keepdim=True))
        dw = (dy * normed).flatten(0, -2).sum(0)
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
    frequency = 1.0 / c.rope_theta ** (pair / c.head_dim)  # (h/2,), rounded as Llama's own code does
    if s := c.rope_scaling:
        turns = s.original * frequency / (2 * math.pi)  # how often it turned in the old context
        keep = ((turns - s.low) / (s.high - s.low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / s.factor
    angle = positions[..., None].to(wide) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """Turn the pairs (x[i], x[i + h/2]) by their angles. x (B, H, T, h), cos and sin (…, T, h/2)."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # one for all heads
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


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
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)


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


# --- 4. The Llama ------------------------------------------------------------------------------


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


def summed_cross_entropy(logits, labels):
    """Σ over the tokens of -log softmax(logits)[label]; labels of -100 count nothing.

    A sum, not a mean: divided by the number of valid tokens of the *global* batch it makes every
    later reduction of a gradient, over any axis, a plain sum.
    """
    logits = logits.to(at_least_fp32(logits.dtype))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


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
        p.grad_dtype = at_least_fp32(dtype)
    return model


# --- 5. Run ------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="the presets: parameters and FLOPs")
    parser.add_argument("--seq", type=int, default=8192, help="T, for the FLOPs of attention")
    args = parser.parse_args()
    print(f"01 the Llama on one device   torch {torch.__version__}\n")
    print(f"{'model':14}{'parameters':>18}{'by formula':>18}{'GFLOPs/token':>15}")
    wrong = []
    for name, c in PRESETS.items():
        with torch.device("meta"):  # shapes without memory
            count = sum(p.numel() for p in Llama(c).parameters())
        if count != parameter_count(c):
            wrong.append(name)
        gflops = flops_per_token(c, args.seq) / 1e9
        print(f"{name:14}{count:18,}{parameter_count(c):18,}{gflops:15,.1f}")
    print("\n01_memory FAIL: parameters of " + ", ".join(wrong) if wrong else "\n01_memory OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
