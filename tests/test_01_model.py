"""01, the model: published sizes, an independent forward in numpy, the seams, initialisation."""

import dataclasses
import random
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F

memory = import_module("01_memory")

SMALL = memory.Config(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, ffn=40)
VARIANTS = {
    "gqa": SMALL,
    "mha tied": dataclasses.replace(SMALL, kv_heads=4, tied=True),
    "mqa wide heads": dataclasses.replace(SMALL, kv_heads=1, head_dim=12),
    "llama 3.1 rope": dataclasses.replace(
        SMALL, rope_theta=500.0, rope_scaling=memory.RopeScaling(factor=4.0, original=16)
    ),
}


def tokens(c, B=2, T=23, seed=0):
    return torch.randint(0, c.vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, ids):
    loss = model.loss(model(ids), ids.roll(-1, 1))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys() and len(a) > 1
    for name in a:
        assert torch.equal(a[name], b[name]), name


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, published",
    [
        ("smollm-1.7b", 1_711_376_384),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, published):
    with torch.device("meta"):
        model = memory.Llama(memory.PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == published
    assert memory.parameter_count(memory.PRESETS[name]) == published


def test_parameter_count_of_any_shape():
    draw = random.Random(0)
    for _ in range(30):
        kv = draw.choice([1, 2, 3])
        c = memory.Config(
            vocab=draw.randrange(5, 99), dim=draw.randrange(8, 65), layers=draw.randrange(1, 4),
            heads=kv * draw.choice([1, 2, 5]), kv_heads=kv, ffn=draw.randrange(3, 70),
            head_dim=draw.choice([2, 6, 8]), tied=draw.random() < 0.5,
        )  # fmt: skip
        with torch.device("meta"):
            assert sum(p.numel() for p in memory.Llama(c).parameters()) == memory.parameter_count(c)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="kv_heads 3 does not divide heads 4"):
        dataclasses.replace(SMALL, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        dataclasses.replace(SMALL, head_dim=7)


# --- values ------------------------------------------------------------------------------------


def numpy_llama(c, w, ids):
    """The Llama written once more, in numpy and float64, one head at a time."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w[name + ".weight"]

    def rope(x):
        half = c.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            f = c.rope_theta ** (-2 * i / c.head_dim)
            if s := c.rope_scaling:
                wavelength = 2 * np.pi / f
                if wavelength > s.original / s.low:
                    f = f / s.factor
                elif wavelength > s.original / s.high:
                    smooth = (s.original / wavelength - s.low) / (s.high - s.low)
                    f = (1 - smooth) * f / s.factor + smooth * f
            angle = np.arange(len(x)) * f
            out[:, i] = x[:, i] * np.cos(angle) - x[:, i + half] * np.sin(angle)
            out[:, i + half] = x[:, i + half] * np.cos(angle) + x[:, i] * np.sin(angle)
        return out

    x = w["embed_tokens.weight"][ids]
    for layer in range(c.layers):
        p = f"layers.{layer}."
        h = norm(x, p + "input_layernorm")
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        heads = []
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            cut = slice(kv * c.head_dim, (kv + 1) * c.head_dim)
            scores = rope(q[:, head * c.head_dim : (head + 1) * c.head_dim]) @ rope(k[:, cut]).T
            scores = scores / np.sqrt(c.head_dim)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, cut])
        x = x + np.concatenate(heads, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm")
        gate, up = (h @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    head = w["embed_tokens.weight"] if c.tied else w["lm_head.weight"]
    return norm(x, "norm") @ head.T


@pytest.mark.parametrize("c", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_an_independent_forward(c):
    model = memory.build(c, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # large enough that every term matters
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    ids = tokens(c, B=1)
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    expected = numpy_llama(c, weights, ids[0].numpy())
    np.testing.assert_allclose(model(ids)[0].detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("c", VARIANTS.values(), ids=VARIANTS)
def test_gradients_equal_numerical_ones(c):
    model = memory.build(c, dtype=torch.float64)
    ids = tokens(c, B=1, T=7)
    _, gradients = loss_and_gradients(model, ids)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                p.add_(direction, alpha=step)
                ends.append(model.loss(model(ids), ids.roll(-1, 1)))
                p.add_(direction, alpha=-step)
        slope = ((ends[0] - ends[1]) / 2e-6).item()
        assert (gradients[name] * direction).sum().item() == pytest.approx(
            slope, rel=1e-6, abs=1e-6
        ), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_swiglu_equal_autograd(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, w, dy = (
        torch.randn(s, generator=generator).to(dtype) for s in ((3, 5, 8),) * 2 + ((8,), (3, 5, 8))
    )
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    pairs = [
        (lambda a, b: memory.NormFunction.apply(a, b, 1e-5),
         lambda a, b: F.rms_norm(a, (8,), b, 1e-5), w),
        (memory.SwiGLUFunction.apply, lambda a, b: F.silu(a) * b, y),
    ]  # fmt: skip
    for ours, theirs, second in pairs:
        results = []
        for function, inputs in ((ours, (x, second)), (theirs, (x.double(), second.double()))):
            a, b = (t.clone().requires_grad_() for t in inputs)
            out = function(a, b)
            results.append([out, *torch.autograd.grad(out, (a, b), dy.to(out.dtype))])
        for mine, right in zip(*results):
            assert mine.dtype == dtype
            assert (mine.double() - right).norm() / right.norm() < bound


def test_loss_is_a_sum_over_valid_tokens():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, -100, 6], [0, 2, -100]])
    loss = memory.summed_cross_entropy(logits, labels)
    logp = logits.log_softmax(-1)
    torch.testing.assert_close(
        loss, -(logp[0, 0, 1] + logp[0, 2, 6] + logp[1, 0, 0] + logp[1, 1, 2])
    )
    nothing = memory.summed_cross_entropy(logits, torch.full((2, 3), -100))
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing == 0 and (gradient == 0).all()
    assert memory.summed_cross_entropy(logits.bfloat16(), labels).dtype == torch.float32


def test_documents_do_not_see_each_other():
    model = memory.build(SMALL, dtype=torch.float64)
    ids = tokens(SMALL, B=1, T=12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    both = model(ids, positions, documents)
    for part in (slice(0, 5), slice(5, 12)):
        torch.testing.assert_close(both[:, part], model(ids[:, part]), rtol=1e-10, atol=1e-12)


def test_a_stage_is_a_llama_with_parts_missing():
    c = dataclasses.replace(SMALL, layers=3)
    whole = memory.build(c, dtype=torch.float64)
    first, last = (memory.build(c, dtype=torch.float64) for _ in range(2))
    first.norm = first.lm_head = last.embed_tokens = None
    del first.layers["1"], first.layers["2"], last.layers["0"]
    ids, positions = tokens(c), torch.arange(23)
    out = last(first(ids, positions), positions)
    assert torch.equal(out, whole(ids))
    names = {n for stage in (first, last) for n, _ in stage.named_parameters()}
    assert names == {n for n, _ in whole.named_parameters()}


# --- seams -------------------------------------------------------------------------------------


class PlainCopy:
    def forward(x, w):
        return x @ w.T

    def input_grad(dy, w):
        return dy @ w

    def weight_grad(dy, x):
        return dy.flatten(0, -2).T @ x.flatten(0, -2)


class KeepCopy:
    def save(x):
        return (x.view_as(x),)

    def load(kept):
        return kept


def attend_copy(q, k, v, positions, documents=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def loss_copy(logits, labels):
    return memory.CrossEntropyFunction.apply(logits.flatten(0, -2), labels.flatten())


def replace_every_seam(model):
    """Returns how many were replaced."""
    count = 0
    for module in model.modules():
        for seam, copy in {
            "how": PlainCopy, "what": KeepCopy, "when": lambda w, job: job(),
            "enter": lambda x: x, "leave": lambda x: x, "attend": attend_copy,
            "lookup": lambda ids, w: F.embedding(ids, w), "loss": loss_copy,
        }.items():  # fmt: skip
            if hasattr(module, seam):
                setattr(module, seam, copy)
                count += 1
    return count


def test_every_seam_replaced_by_a_copy_of_its_default_gives_the_same_bits():
    a, b = memory.build(SMALL), memory.build(SMALL)
    # per block 7 linears of 3, attention 3, FFN 2; embedding 2, head 3 + 1, loss 1
    assert replace_every_seam(b) == SMALL.layers * (7 * 3 + 3 + 2) + 2 + 4 + 1
    ids = tokens(SMALL)
    (loss_a, grads_a), (loss_b, grads_b) = loss_and_gradients(a, ids), loss_and_gradients(b, ids)
    assert torch.equal(loss_a, loss_b)
    assert_same_bits(grads_a, grads_b)


def test_each_seam_is_really_called():
    model, called = memory.build(SMALL), []
    for name, module in model.named_modules():
        for seam in ("enter", "leave", "attend", "lookup", "loss"):
            if hasattr(module, seam):
                default = getattr(module, seam)
                setattr(
                    module,
                    seam,
                    lambda *a, d=default, n=f"{name}.{seam}": (called.append(n), d(*a))[1],
                )
    loss_and_gradients(model, tokens(SMALL))
    assert len(called) == len(set(called)) == SMALL.layers * 5 + 2 + 1 + 1


@pytest.mark.parametrize("c", VARIANTS.values(), ids=VARIANTS)
def test_deferred_weight_gradients_are_the_same_and_say_when_they_are_finished(c):
    a, b = memory.build(c, dtype=torch.float64), memory.build(c, dtype=torch.float64)
    later, said = memory.Later(), []
    for module in b.modules():
        if isinstance(module, memory.Linear):
            module.when = later
    for name, p in b.named_parameters():
        memory.on_finished(p, lambda p, name=name: said.append((name, p.grad.clone())))
    linears = {n for n, p in b.named_parameters() if n.endswith("proj.weight") or "head" in n}
    if c.tied:
        linears.add("embed_tokens.weight")
    for ids in (tokens(c, seed=1), tokens(c, seed=2)):  # twice: accumulation
        loss_and_gradients(a, ids)
        loss_and_gradients(b, ids)
        early = {name for name, _ in said}
        assert not early & linears, "said while the gradient waits"
        while later.jobs:
            later.run()
        assert sorted(n for n, _ in said) == sorted(n for n, _ in b.named_parameters())
        for name, gradient in said:
            assert torch.equal(gradient, b.get_parameter(name).grad), "said too early: " + name
            torch.testing.assert_close(gradient, a.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
        said.clear()


def test_a_weight_used_twice_is_finished_once():
    w = torch.nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
    x, later, said = torch.randn(3, 5, dtype=torch.float64), memory.Later(), []
    memory.linear(memory.linear(x, w), w).sum().backward()
    expected, w.grad = w.grad, None
    memory.on_finished(w, said.append)
    memory.linear(memory.linear(x, w, when=later), w, when=later).sum().backward()
    assert w.grad is None and len(later.jobs) == 2
    later.run()
    assert not said
    later.run()
    assert len(said) == 1
    torch.testing.assert_close(w.grad, expected)


def test_a_frozen_weight_still_passes_the_gradient_on():
    c = SMALL
    a, b = memory.build(c, dtype=torch.float64), memory.build(c, dtype=torch.float64)
    for p in b.layers["1"].parameters():
        p.requires_grad_(False)
    _, expected = loss_and_gradients(a, tokens(c))
    _, gradients = loss_and_gradients(b, tokens(c))
    for name, gradient in gradients.items():
        if name.startswith("layers.1"):
            assert gradient is None
        else:
            assert torch.equal(gradient, expected[name])


def test_a_waiting_weight_gradient_does_not_keep_the_graph():
    later = memory.Later()
    first, second = memory.Linear(4, 4), memory.Linear(4, 4)
    for p in (first.weight, second.weight):
        torch.nn.init.eye_(p)
    second.when = later
    second(first(torch.ones(2, 4))).sum().backward()
    ((_, job),) = later.jobs
    held = [cell.cell_contents for cell in job.__closure__]  # dy, and a list of what stays of x
    held = [t for part in held for t in (part if isinstance(part, list) else [part])]
    kept = [t for t in held if isinstance(t, torch.Tensor)]
    assert len(kept) >= 2 and all(t.grad_fn is None for t in kept)


# --- initialisation ----------------------------------------------------------------------------


def test_a_parameter_starts_from_its_name_and_the_seed_alone():
    small = dict(memory.build(SMALL, seed=5).named_parameters())
    deep = dict(memory.build(dataclasses.replace(SMALL, layers=4), seed=5).named_parameters())
    assert all(torch.equal(p, deep[name]) for name, p in small.items())
    other = dict(memory.build(SMALL, seed=6).named_parameters())
    drawn = [n for n in small if not n.endswith("norm.weight")]
    assert len(drawn) == 16 and not any(torch.equal(small[n], other[n]) for n in drawn)
    assert not torch.equal(small[drawn[1]], small[drawn[8]]), "two names, one value"
    torch.randn(3)  # the global generator plays no part
    again = dict(memory.build(SMALL, seed=5, dtype=torch.float64).named_parameters())
    assert all(torch.equal(p.double(), again[n]) for n, p in small.items())


def test_weights_below_fp32_accumulate_gradients_in_fp32():
    model = memory.build(SMALL, dtype=torch.bfloat16)
    loss, gradients = loss_and_gradients(model, tokens(SMALL))
    assert loss.dtype == torch.float32
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert memory.at_least_fp32(torch.float64) == torch.float64
