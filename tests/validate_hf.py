"""01 against Hugging Face's Llama, by hand: python tests/validate_hf.py   (needs transformers)

A random LlamaForCausalLM's state dict goes into our Llama; logits and gradients of both are
compared in float32, for GQA, tied and untied heads, free head sizes, with and without Llama 3.1's
rotary scaling. With transformers 5.24 and torch 2.13 the logits are equal bit for bit.
"""

import itertools
import sys
from importlib import import_module
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
memory = import_module("01_memory")


def theirs(c):
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if s := c.rope_scaling:
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low,
                 "high_freq_factor": s.high,
                 "original_max_position_embeddings": s.original}  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab, hidden_size=c.dim, num_hidden_layers=c.layers,
            num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
            intermediate_size=c.ffn, tie_word_embeddings=c.tied, rms_norm_eps=c.norm_eps,
            rope_parameters=rope, max_position_embeddings=131072, initializer_range=0.2,
        )
    )  # fmt: skip


def compare(c):
    """(largest difference of a logit, largest relative error of a gradient)"""
    hf, ours = theirs(c), memory.build(c)
    ours.load_state_dict({n.removeprefix("model."): w for n, w in hf.state_dict().items()})
    tokens = torch.randint(0, c.vocab, (2, 77))
    a, b = ours(tokens), hf(tokens).logits
    ours.loss(a, tokens).backward()
    torch.nn.functional.cross_entropy(b.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    mine = {n: p.grad for n, p in ours.named_parameters()}
    errors = [
        ((mine[n.removeprefix("model.")] - p.grad).norm() / p.grad.norm()).item()
        for n, p in hf.named_parameters()
    ]
    return (a - b).abs().max().item(), max(errors)


def main():
    torch.manual_seed(0)
    scalings = None, memory.RopeScaling(), memory.RopeScaling(factor=4.0, original=16)
    worst = [0.0, 0.0]
    for kv, tied, scaling, head in itertools.product((8, 2, 1), (False, True), scalings, (16, 24)):
        c = memory.Config(211, 128, 3, 8, kv, 200, head, tied, 5e5 if scaling else 1e4, scaling)
        worst = [max(pair) for pair in zip(worst, compare(c))]
    ok = worst[0] < 1e-5 and worst[1] < 1e-5
    print(f"36 shapes: logits differ by {worst[0]:.1e} at most, gradients by {worst[1]:.1e}")
    print("validate_hf OK" if ok else "validate_hf FAIL")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
