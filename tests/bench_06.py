"""06 against a loop over the experts, and against an all-gather MoE. The rows are in bench.py.

The loop is the usual one: each expert finds its tokens by a mask, and adds to the output. The
all-gather MoE gathers every rank's tokens, computes what concerns its own experts with the same
loop, and reduce-scatters the sums.
"""

from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F

tp = import_module("04_tp_sp")
ep = import_module("06_ep")

CONFIG = ep.Config(vocab=64, dim=256, layers=1, heads=4, kv_heads=4, ffn=512, experts=16)
B, T = 1, 512  # of each rank


def layer_and_input():
    moe = ep.build_moe(CONFIG).layers["0"].mlp
    generator = torch.Generator().manual_seed(dist.get_rank())
    return moe, torch.randn(B, T, CONFIG.dim, generator=generator).requires_grad_()


def loop(x, weights, experts, stack, first):
    """What the experts of `stack`, the first of them number `first`, add to every token."""
    out = torch.zeros_like(x)
    for e in range(len(stack.gate_proj)):
        token, place = torch.where(experts == first + e)
        rows = x[token]
        h = F.silu(rows @ stack.gate_proj[e].T) * (rows @ stack.up_proj[e].T)
        y = (h @ stack.down_proj[e].T) * weights[token, place, None]
        out.index_add_(0, token, y)
    return out


def step(forward, moe, x):
    out = None

    def run():
        moe.zero_grad()
        x.grad = None
        nonlocal out
        out = forward(x)
        out.square().sum().backward()

    def results():
        grads = {name: p.grad.clone() for name, p in moe.named_parameters()}
        dist.all_reduce(grads["router.weight"])
        return grads | {"x": x.grad, "out": out.detach()}

    return run, results


def ours(group):
    moe, x = layer_and_input()
    ep.cut_experts(moe, group)
    return step(moe, moe, x)


def theirs(group):
    moe, x = layer_and_input()
    ep.cut_experts(moe, group)

    def forward(x):
        x = tp.enter(x, group) if group.size() > 1 else x  # (B, ep·T, D)
        flat = x.flatten(0, 1)
        weights, experts, _ = ep.route(moe.router(flat), moe.router.bias, CONFIG)
        first = group.rank() * len(moe.experts.gate_proj)
        out = loop(flat, weights, experts, moe.experts, first).view_as(x)
        return tp.leave(out, group) if group.size() > 1 else out

    return step(forward, moe, x)
