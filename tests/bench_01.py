"""One device: 01's Llama, and the same Llama as nanoGPT writes its GPT. The rows are in bench.py.

Theirs is one short file of plain torch: nn.Linear, one projection for q, k and v, F.rms_norm,
scaled_dot_product_attention, F.cross_entropy, and autograd for all of it; no seams. Both take whole
training steps: clipping, fused AdamW.
"""

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

memory = import_module("01_memory")

CONFIG = memory.Config(vocab=2048, dim=512, layers=3, heads=8, kv_heads=4, ffn=1536)
B, T, LR = 4, 128, 1e-4


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
        self.head_dim = c.head_dim
        self.c_attn = nn.Linear(c.dim, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in self.c_attn(x).split(self.sizes, dim=-1)
        )
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.RMSNorm(c.dim, c.norm_eps), nn.RMSNorm(c.dim, c.norm_eps)
        self.attn = Attention(c)
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(x), cos, sin)
        h = self.ln_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Nano(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.dim)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = nn.RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab, bias=False)
        angles = memory.rope_angles(c, torch.arange(T), torch.float32)
        for name, angle in zip(("cos", "sin"), angles):
            self.register_buffer(name, torch.cat((angle, angle), -1))  # (T, h)

    def forward(self, tokens, labels):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def pairs(model):
    """[(ours, theirs)]: parameter names; theirs has q, k and v in one matrix, as rows."""
    names = {"embed_tokens.weight": "wte.weight", "norm.weight": "ln_f.weight",
             "lm_head.weight": "lm_head.weight"}  # fmt: skip
    for i in range(len(model.h)):
        here, there = f"layers.{i}.", f"h.{i}."
        names[f"{here}input_layernorm.weight"] = f"{there}ln_1.weight"
        names[f"{here}post_attention_layernorm.weight"] = f"{there}ln_2.weight"
        names[f"{here}self_attn.o_proj.weight"] = f"{there}attn.o_proj.weight"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names[f"{here}mlp.{part}.weight"] = f"{there}{part}.weight"
    return names


def by_our_names(model, tensors):
    """Theirs, tensors by their parameter names, under ours."""
    result = {ours: tensors[theirs] for ours, theirs in pairs(model).items()}
    for i, block in enumerate(model.h):
        parts = tensors[f"h.{i}.attn.c_attn.weight"].split(block.attn.sizes)
        for name, part in zip("qkv", parts):
            result[f"layers.{i}.self_attn.{name}_proj.weight"] = part
    return result


def nano():
    """Theirs, with the weights of ours."""
    model = Nano(CONFIG)
    with torch.no_grad():
        ours = dict(memory.build(CONFIG).named_parameters())
        for name, place in by_our_names(model, dict(model.named_parameters())).items():
            place.copy_(ours[name])
    return model


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocab, (2, B, T), generator=generator).unbind()


def training(model, loss_of):
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)

    def step():
        optimizer.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def ours(group):
    model, (tokens, labels) = memory.build(CONFIG), batch()
    step = training(model, lambda: model.loss(model(tokens), labels) / labels.numel())
    return step, lambda: {name: p.grad for name, p in model.named_parameters()}


def theirs(compiled, group):
    model, (tokens, labels) = nano(), batch()
    forward = model
    if compiled:
        torch._inductor.config.compile_threads = 1  # a forked rank may not fork
        forward = torch.compile(model)
    step = training(model, lambda: forward(tokens, labels))
    grads = lambda: {name: p.grad for name, p in model.named_parameters()}  # noqa: E731
    return step, lambda: by_our_names(model, grads())
