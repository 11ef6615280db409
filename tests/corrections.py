"""Where the Ultra-Scale Playbook, notes made from it and well-known code are wrong or approximate.

    python tests/corrections.py

Each row: what is said (and by whom), the number that follows from it, and the number that follows
here, from the function of a chapter that tests hold to a measurement. test_readme.py holds README's
copy of this table to what this prints.
"""

import sys
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
memory, dp, zero, tp, pp, fp8 = (
    import_module(name)
    for name in ("01_memory", "02_dp", "03_zero", "04_tp_sp", "05_pp_1f1b", "08_fp8")
)

C, T = memory.PRESETS["llama3-8b"], 8192
H100 = dict(flops=989e12, bandwidth=50e9)
PLAYBOOK, NOTE, CODE = "playbook", "often said", "code"


def parameters():
    h, L, V = C.dim, C.layers, C.vocab
    theirs = h * V + L * (12 * h * h + 13 * h) + 2 * h
    return f"{theirs / 1e9:.2f}e9", f"{memory.parameter_count(C) / 1e9:.2f}e9"


def block_weights():
    norms, tables = (2 * C.layers + 1) * C.dim, 2 * C.vocab * C.dim
    return "16", f"{(memory.parameter_count(C) - norms - tables) / C.layers / C.dim**2:.1f}"


def state():
    recipes = memory.RECIPES
    return tuple(
        str(sum(memory.state_bytes(C, recipes[name]).values()) // memory.parameter_count(C))
        for name in ("no-master", "bf16")
    )


def activations():
    c = memory.PRESETS["smollm-1.7b"]
    return "34", f"{memory.block_bytes(c, 1, memory.BF16, 'none') / c.dim:.1f}"


def attention_flops():
    theirs = memory.CONVENTIONS["6·N + 12·L·H·h·T  (PaLM, nanoGPT, the playbook)"](C, T)
    return f"{theirs / 1e9:.1f}", f"{memory.flops_per_token(C, T) / 1e9:.1f}"


def dp_overlap():
    needed = [dp.tokens_to_hide(2**20, element=element, **H100) for element in (1, 2)]
    return tuple(f"{float(n):,.0f}" for n in needed)


def tp_overlap():
    ratios = [tp.transfer_to_compute(C.dim, 8, element=element, **H100) for element in (1, 2)]
    return tuple(f"{ratio:.1f}" for ratio in ratios)


def zero_2(m=8):
    one, two = (zero.sent(s, {"all": 1024}, [["all"]], 8, 2, 2, m=m).values() for s in (1, 2))
    ratio = Fraction(sum(size for _, size in two), sum(size for _, size in one))
    return "1", f"{float(ratio)}"


def idle_share(p=8, m=8):
    r = pp.bubble("1f1b", p, m)
    return f"{float(r):.0%}", f"{float(r / (1 + r)):.0%}"


def recomputed():
    step, with_full = (sum(memory.executed_flops(C, 1, T, mode)) for mode in ("none", "full"))
    backward = 2 / 3 * step
    return "2", f"{(with_full - step + backward) / backward:.2f}"


def months_405b():
    c = memory.PRESETS["llama3-405b"]
    flops = 6 * memory.parameter_count(c) * 20 * memory.parameter_count(c)
    hours = memory.gpu_hours(flops, memory.PEAKS["h100", "bf16"], 0.5)
    return "5 to 6", f"{hours / 1024 / (365.25 / 12 * 24):.0f}"


def cast_infinity():
    infinity = torch.tensor([torch.inf])
    casts = infinity.to(fp8.E4M3), fp8.cast(infinity, fp8.E4M3)
    return tuple(str(x.float().item()) for x in casts)


def fp8_bytes():
    bf16, v3 = (fp8.bytes_per_parameter(fp8.STATES[name])[0]
                for name in ("bf16, fp32 gradient sums", "DeepSeek-V3"))  # fmt: skip
    return str(bf16 // 2), str(v3)


ROWS = [  # who says what, and a function that returns the number so, and the number here
    (PLAYBOOK, "parameters of Llama-3 8B: N = h·V + L·(12h² + 13h) + 2h", parameters),
    (PLAYBOOK, "weights of a block, in h²: 16 (of Llama-3 8B)", block_weights),
    (PLAYBOOK, "bytes a parameter in its figures: no fp32 master, bf16 gradients", state),
    (PLAYBOOK, "bytes a block keeps: 34·s·b·h, whatever FFN and heads (SmolLM 1.7B)", activations),
    (PLAYBOOK, "FLOPs a token: 6N + 12·L·h·s, not causal (8B, s 8,192; 1e9)", attention_flops),
    (PLAYBOOK, "tokens that hide dp's sum in bf16: bytes forgotten, N not cancelled", dp_overlap),
    (PLAYBOOK, "tp 8 at 50 GB/s, transfer / products: bytes forgotten", tp_overlap),
    (PLAYBOOK, "ZeRO-2 sends no more than ZeRO-1 (8 micro-batches: times as much)", zero_2),
    (PLAYBOOK, "(p-1)/m, taken for the share of time lost (8 stages, 8 micro-batches)", idle_share),
    (CODE, "infinity cast to e4m3: torch's cast, and the one here", cast_infinity),
    (NOTE, "recomputing every layer doubles the FLOPs of backward (times as many)", recomputed),
    (NOTE, "months for 405B on 1,024 H100s: 20 tokens a parameter, MFU 50 %", months_405b),
    (NOTE, "FP8 training halves the bytes a parameter (DeepSeek-V3's recipe)", fp8_bytes),
]


def main():
    print(f"{'who':10} {'what is said':72}{'so':>8}{'here':>8}")
    for who, claim, function in ROWS:
        theirs, ours = function()
        print(f"{who:10} {claim:72}{theirs:>8}{ours:>8}")


if __name__ == "__main__":
    main()
