"""07's kinds of attention over a cut sequence, forward and backward. The rows are in bench.py."""

from importlib import import_module

import torch

cp = import_module("07_cp_ring")

B, H, K, C, h = 1, 8, 2, 1024, 64  # C tokens a rank


def attention(kind, zigzag, group):
    """One layer's attention. Which tokens a rank holds differs, so the results are of all T."""
    rank, n = group.rank(), group.size()
    torch.manual_seed(0)
    qkv = [
        cp.part(torch.randn(B, heads, n * C, h), 2, rank, n, zigzag).requires_grad_()
        for heads in (H, K, K)
    ]
    out = None

    def step():
        nonlocal out
        for x in qkv:
            x.grad = None
        out = cp.KINDS[kind](*qkv, None, group=group, zigzag=zigzag)
        out.backward(torch.ones_like(out))

    def results():
        parts = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *(x.grad for x in qkv))))
        return {name: cp.whole(cp.from_all(x, group), 2, zigzag) for name, x in parts.items()}

    return step, results
