"""04 and parallelize_module with loss_parallel: gradients of a step. The rows are in bench.py.

Theirs is the same Llama from nn.Linear, nn.RMSNorm and scaled_dot_product_attention (the classes
that parallelize_module cuts), with torch's plan for sequence parallelism.
"""

import warnings
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

memory = import_module("01_memory")
dp = import_module("02_dp")
tp = import_module("04_tp_sp")

CONFIG = memory.Config(vocab=4096, dim=256, layers=4, heads=8, kv_heads=4, ffn=768)
B, T = 2, 128


def tokens_and_labels():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocab, (2, B, T), generator=generator).unbind()


# --- Theirs -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            setattr(self, f"{name}_proj", nn.Linear(c.dim, heads * c.head_dim, bias=False))
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x, rope):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = memory.rotate(q, *rope), memory.rotate(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FFN(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.dim, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.dim, c.norm_eps)
        self.mlp = FFN(c)

    def forward(self, x, rope):
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """01's Llama from torch's own modules, with the same names."""

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.layers)})
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, tokens):
        rope = memory.rope_angles(self.config, torch.arange(tokens.shape[1]), torch.float32)
        x = self.embed_tokens(tokens)
        for block in self.layers.values():
            x = block(x, rope)
        return self.lm_head(self.norm(x))


def plan():
    """Torch's plan for tensor and sequence parallelism of a Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    split, whole = Shard(1), Replicate()
    rules = {
        "embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
        "layers.*.input_layernorm": SequenceParallel(),
        "layers.*.post_attention_layernorm": SequenceParallel(),
        "layers.*.self_attn": PrepareModuleInput(
            input_layouts=(split, None), desired_input_layouts=(whole, None)
        ),
        "layers.*.mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
                 "mlp.up_proj"):  # fmt: skip
        rules[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        rules[f"layers.*.{name}"] = RowwiseParallel(output_layouts=split)
    return rules


def parallelized(group):
    from torch.distributed.tensor.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    model = Llama(CONFIG)
    model.load_state_dict(memory.build(CONFIG).state_dict())
    return parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan())


def torch_tp(group):
    from torch.distributed.tensor.parallel import loss_parallel

    warnings.filterwarnings("ignore")
    model, (tokens, labels) = parallelized(group), tokens_and_labels()

    def step():
        model.zero_grad()
        with loss_parallel():
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / (B * T)
            loss.backward()
        # The norms' gradients are partial sums, as ours: an optimizer on DTensors would reduce them
        # where it uses them. We ask for it here, since ours are reduced here.
        for p in model.parameters():
            p.grad = p.grad.redistribute(placements=p.placements)

    return step, lambda: {name: p.grad.to_local() for name, p in model.named_parameters()}


# --- Ours -------------------------------------------------------------------------------------


def tp_sp(group):
    model, (tokens, labels) = memory.build(CONFIG), tokens_and_labels()
    tp.cut(model, group)

    def step():
        model.zero_grad()
        (model.loss(model(tokens), labels) / (B * T)).backward()
        tp.sum_partial_gradients(model, group)

    return step, lambda: dp.gradients(model)
