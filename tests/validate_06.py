"""06's layer beside Mixtral's block in transformers, with the same weights, forward and backward.

By hand, where transformers is installed: python tests/validate_06.py
"""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
dp = import_module("02_dp")
ep = import_module("06_ep")


def compare(E, k, D=64, F=96):
    """The worst relative error of output and gradients, in fp32 (their router's precision)."""
    sizes = dict(hidden_size=D, intermediate_size=F)
    theirs = MixtralSparseMoeBlock(
        MixtralConfig(**sizes, num_local_experts=E, num_experts_per_tok=k)
    )
    ours = ep.MoE(ep.Config(64, D, 1, 4, 4, F, experts=E, top_k=k))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
        theirs.gate.weight.copy_(ours.router.weight)
        gate_up = torch.cat((ours.experts.gate_proj, ours.experts.up_proj), 1)
        theirs.experts.gate_up_proj.copy_(gate_up)
        theirs.experts.down_proj.copy_(ours.experts.down_proj)
    results = []
    for block in (ours, theirs):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(3, 17, D, generator=generator, requires_grad=True)
        out = block(x)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        results.append({"output": out.detach(), "x": x.grad})
    gate, up = theirs.experts.gate_up_proj.grad.chunk(2, 1)
    results[0] |= {name: p.grad for name, p in ours.named_parameters()}
    results[1] |= {
        "router.weight": theirs.gate.weight.grad,
        "experts.gate_proj": gate,
        "experts.up_proj": up,
        "experts.down_proj": theirs.experts.down_proj.grad,
    }
    return (*dp.worst_error(*results), len(results[0]))


def main():
    wrong = []
    for E, k in ((8, 2), (4, 4), (16, 3)):
        error, name, compared = compare(E, k)
        print(f"{k} of {E} experts: worst of {compared} tensors {name}, relative error {error:.1e}")
        wrong += [f"{name}: {error:.1e}"] * (not error < 2e-6)
    print(f"validate_06 FAIL: {wrong[0]}" if wrong else "validate_06 OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
