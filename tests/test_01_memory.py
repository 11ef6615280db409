"""01: every formula against a measurement; bytes and FLOPs with zero tolerance."""

import math
import random
import sys
import time
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

memory = import_module("01_memory")
MODES = ("none", "selective", "full", "full:1")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
SMALL = memory.Config(vocab=301, dim=48, layers=3, heads=4, kv_heads=2, ffn=89, head_dim=10)
LLAMA2_7B = memory.Config(vocab=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn=11008)


def recipe_of(dtype):
    """fp32 and fp64 alone; a half precision with everything else in fp32."""
    wide = memory.at_least_fp32(dtype)
    return memory.Recipe(dtype, wide, None if dtype == wide else wide, wide)


def batch(c, B, T, seed=0):
    tokens = torch.randint(c.vocab, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def live_after_forward(model, tokens, labels, **kwargs):
    """Bytes that forward created and that are alive at its end."""
    inputs = [tokens, labels, *(t for t in kwargs.values() if t is not None)]
    live = memory.Live(inputs=lambda: inputs, parameters=model.parameters)
    with live:
        loss = model.loss(model(tokens, **kwargs), labels)
        return live.bytes()["activations"], loss


# --- the model is still the same function -------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_norm_swiglu_and_loss_equal_plain_autograd(dtype, monkeypatch):
    monkeypatch.setattr(memory.CrossEntropyFunction, "ROWS", 7)  # several pieces, the last short
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1.6e-2}[dtype]
    torch.manual_seed(0)
    x, gate = (torch.randn(3, 11, 40).to(dtype).requires_grad_() for _ in range(2))
    w = torch.randn(40).to(dtype).requires_grad_()
    labels = torch.randint(40, (3, 11))
    labels[0, :4] = -100

    def cross_entropy(x):
        x = x.to(memory.at_least_fp32(dtype)).flatten(0, -2)
        return F.cross_entropy(x, labels.flatten(), reduction="sum")

    pairs = {
        "norm": (
            lambda: memory.NormFunction.apply(x, w, 1e-5),
            lambda: F.rms_norm(x, (40,), w, 1e-5),
        ),
        "swiglu": (lambda: memory.SwiGLUFunction.apply(gate, x), lambda: F.silu(gate) * x),
        "loss": (lambda: memory.summed_cross_entropy(x, labels), lambda: cross_entropy(x)),
    }
    for name, (ours, plain) in pairs.items():
        results = []
        for run in (ours, plain):
            y = run()
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
            grads = torch.autograd.grad(y, (x, w, gate), dy, allow_unused=True)
            results.append([y] + [g for g in grads if g is not None])
        assert len(results[0]) == len(results[1]) == {"norm": 3, "swiglu": 3, "loss": 2}[name]
        for a, b in zip(*results):
            assert a.dtype == b.dtype
            assert (a - b).double().norm() <= tolerance * b.double().norm(), name


def test_loss_of_ignored_labels_only_is_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = memory.summed_cross_entropy(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", memory.PRESETS)
@pytest.mark.parametrize("tied", (False, True))
def test_parameter_count_is_exact(name, tied):
    c = memory.Config(**{**vars(memory.PRESETS[name]), "tied": tied})
    with torch.device("meta"):
        model = memory.Llama(c)
    assert memory.parameter_count(c) == sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert norms == (2 * c.layers + 1) * c.dim  # B4: no invented constant for the norms


def test_tying_changes_parameters_and_not_flops():  # B3
    untied = memory.Config(vocab=1000, dim=64, layers=2, heads=4, kv_heads=4, ffn=128)
    tied = memory.Config(**{**vars(untied), "tied": True})
    assert memory.parameter_count(untied) - memory.parameter_count(tied) == 1000 * 64
    assert memory.flops_per_token(untied, 64) == memory.flops_per_token(tied, 64)
    assert memory.executed_flops(untied, 2, 64) == memory.executed_flops(tied, 2, 64)
    tokens, labels = batch(tied, 2, 8)
    counts = []
    for c in (untied, tied):
        model = memory.build(c)
        counts += [memory.counted_flops(lambda: model.loss(model(tokens), labels).backward())]
    assert counts[0] == counts[1]  # the head of a tied model runs, too


# --- bytes: closed form against what is alive ---------------------------------------------------


def seeded_case(seed):
    draw = random.Random(seed)
    heads = draw.choice((2, 4, 6))
    c = memory.Config(
        vocab=draw.choice((97, 256, 1009)),
        dim=draw.choice((32, 50, 64)),
        layers=draw.choice((1, 2, 3)),
        heads=heads,
        kv_heads=draw.choice([k for k in (1, 2, 3, heads) if heads % k == 0]),
        ffn=draw.choice((37, 96, 131)),
        head_dim=draw.choice((6, 10, 16)),
        tied=draw.random() < 0.4,
    )
    B, T = draw.choice((1, 2, 3)), draw.choice((1, 5, 17, 32))
    dtype, mode = DTYPES[seed % 4], MODES[seed // 4 % 4]
    return c, B, T, recipe_of(dtype), mode


CASES = range(64)


def test_bytes_of_64_configurations():
    """Parameters, gradients, master, moments, activations: zero tolerance. -s prints the list."""
    wrong = []
    for seed in CASES:
        c, B, T, recipe, mode = seeded_case(seed)
        model = memory.build(c, dtype=recipe.weights)
        _, (first, second) = memory.train(model, B, T, recipe, mode)
        state = memory.state_bytes(c, recipe)
        kept = sum(memory.kept_bytes(c, B, T, recipe.weights, mode).values())
        measured = {name: second["optimizer"][name] for name in state}
        measured["activations"] = second["forward"]["activations"]
        expected = state | {"activations": kept}
        print(
            f"{seed:2} V{c.vocab} D{c.dim} L{c.layers} H{c.heads}/{c.kv_heads} h{c.head_dim}"
            f" F{c.ffn} {'tied' if c.tied else ''} B{B} T{T} {recipe.weights} {mode}"
            f" states {sum(state.values()):,} kept {kept:,}"
            f" {'ok' if expected == measured else 'WRONG'}"
        )
        if expected != measured:
            wrong.append((seed, expected, measured))
        for now in (first, second):
            assert now["forward"]["activations"] == kept
            assert now["forward"]["gradients"] == 0
            assert now["backward"]["activations"] == 0  # backward gives everything back
            assert now["backward"]["gradients"] == state["gradients"]
        assert first["backward"]["moments"] == 0 and first["optimizer"]["moments"] > 0
        # "step 1 fits, step 2 does not": by the moments, and by nothing else
        assert second["peak of both"] - first["peak of both"] == state["moments"]
    assert not wrong


def test_the_configurations_cover_what_they_should():
    cases = [seeded_case(seed) for seed in CASES]
    assert len(cases) >= 40
    seen = {(recipe.weights, mode) for _, _, _, recipe, mode in cases}
    assert seen == {(dtype, mode) for dtype in DTYPES for mode in MODES}
    for covered in (
        lambda c, B, T: 1 < c.kv_heads < c.heads,
        lambda c, B, T: c.kv_heads == 1,
        lambda c, B, T: c.kv_heads == c.heads,
        lambda c, B, T: c.heads * c.head_dim != c.dim,
        lambda c, B, T: T % 2,
        lambda c, B, T: T == 1,
        lambda c, B, T: c.ffn == 131,
        lambda c, B, T: c.tied,
        lambda c, B, T: not c.tied,
    ):
        assert sum(bool(covered(*case[:3])) for case in cases) >= 5


@pytest.mark.parametrize("name", memory.RECIPES)
def test_recipes(name):
    recipe, c = memory.RECIPES[name], SMALL
    model = memory.build(c, dtype=recipe.weights)
    _, held = memory.train(model, 2, 9, recipe)
    state = memory.state_bytes(c, recipe)
    assert {k: held[1]["optimizer"][k] for k in state} == state
    per_parameter = {"fp32": 16, "bf16": 18, "bf16-grads": 16, "no-master": 12}[name]
    assert sum(state.values()) == per_parameter * memory.parameter_count(c)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_document_masks(mode, dtype):
    tokens, labels = batch(SMALL, 2, 9)
    model = memory.build(SMALL, dtype=dtype)
    memory.recompute(model, mode)
    documents = torch.zeros(2, 9, dtype=torch.long)
    documents[:, 4:] = 1
    measured, _ = live_after_forward(model, tokens, labels, documents=documents)
    lines = memory.kept_bytes(SMALL, 2, 9, dtype, mode, documents=True)
    assert measured == sum(lines.values())


def test_a_tensor_lives_until_its_last_view_dies():
    live = memory.Live()
    with live:
        a = torch.zeros(100)
        b = a[:10]
        assert live.total == 400
        del a
        assert live.total == 400
        del b
        assert live.total == 0
    assert live.peak == 400


def test_what_plain_autograd_would_keep():
    """The reasons for three of 01's functions, in bytes."""

    def kept(run, *inputs):
        live = memory.Live(inputs=lambda: inputs)
        with live:
            out = run(*inputs)
            node = out.grad_fn  # the graph without the output
            if out.dim():
                del out
            assert node is not None
            return live.bytes()["activations"]

    n, D, V = 12, 40, 1000
    labels = torch.randint(V, (n,))
    for dtype, plain_norm, plain_loss in (
        (torch.float32, 4 * n * D + 4 * n, 4 * n * V),
        (torch.bfloat16, 2 * 4 * n * D + 4 * n, 4 * n * V),
    ):
        x = torch.randn(n, D).to(dtype).requires_grad_()
        w = torch.ones(D, dtype=dtype).requires_grad_()
        logits = torch.randn(n, V).to(dtype).requires_grad_()
        assert kept(lambda x, w: memory.NormFunction.apply(x, w, 1e-5), x, w) == 4 * n
        assert kept(lambda x, w: F.rms_norm(x, (D,), w, 1e-5), x, w) == plain_norm
        assert kept(memory.SwiGLUFunction.apply, x, x.detach().clone().requires_grad_()) == 0
        silu = n * D * dtype.itemsize
        assert kept(lambda x, y: F.silu(x) * y, x, x.detach().clone().requires_grad_()) == silu
        assert kept(memory.summed_cross_entropy, logits, labels) == 4 * n + 4
        wide = lambda x, y: F.cross_entropy(x.float(), y, reduction="sum")  # noqa: E731
        assert kept(wide, logits, labels) >= plain_loss


# --- bytes: temporaries and the peak ------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (5, 1024, 2500))
def test_loss_temporaries(dtype, n):
    logits = torch.randn(n, SMALL.vocab).to(dtype).requires_grad_()
    labels = torch.randint(SMALL.vocab, (n,))
    live = memory.Live(inputs=lambda: (logits, labels))
    with live:
        loss = memory.summed_cross_entropy(logits, labels)
        before = live.peak = live.total
        loss.backward()
    assert live.peak - before == memory.loss_temporaries(SMALL, n, dtype)


@pytest.mark.parametrize(
    "seeds, kinds",
    (
        (range(24), {"loss", "embedding", "ffn"}),
        pytest.param(
            range(1000, 1500),
            {"loss", "embedding", "ffn", "final norm", "first norm", "second norm", "attention"},
            marks=pytest.mark.full,
        ),
    ),
    ids=("24", "500"),
)
def test_peak(seeds, kinds):
    """With V > F and V > H·h the fullest instant of a step is exactly the formula's."""
    seen = set()
    for seed in seeds:
        draw = random.Random(seed)
        D = draw.choice((32, 48))
        ffn = draw.choice((D // 2, 5 * D // 2, 4 * D))
        head_dim = draw.choice((8, 10, 32))
        c = memory.Config(
            vocab=max(ffn, 4 * head_dim) + draw.choice((1, 100, 900)),
            dim=D,
            layers=draw.choice((1, 2, 3)),
            heads=4,
            kv_heads=draw.choice((1, 2, 4)),
            ffn=ffn,
            head_dim=head_dim,
            tied=draw.random() < 0.4,
        )
        B, T = draw.choice((1, 2)), draw.choice((4, 33, 120, 300))
        recipe, mode = memory.RECIPES[list(memory.RECIPES)[seed % 4]], MODES[seed // 4 % 4]
        model = memory.build(c, dtype=recipe.weights)
        _, (_, held) = memory.train(model, B, T, recipe, mode)
        at = memory.peak_bytes(c, B, T, recipe, mode)
        optimizer = at.pop("optimizer")
        fullest = max(at, key=at.get)
        assert at[fullest] == held["peak of both"] - 16 * B * T, (seed, c, B, T, fullest)
        assert optimizer == held["peak of optimizer"] - 16 * B * T
        seen.add(fullest.split(" of layer")[0])
    assert seen >= kinds, seen


def real_model(name, T, recipe, mode):
    c, recipe = memory.PRESETS[name], memory.RECIPES[recipe]
    with FakeTensorMode():
        model = memory.build(c, dtype=recipe.weights)
        _, (first, second) = memory.train(model, 1, T, recipe, mode)
    at, state = memory.peak_bytes(c, 1, T, recipe, mode), memory.state_bytes(c, recipe)
    peak = max(second["peak of both"], second["peak of optimizer"]) - 16 * T
    kept = sum(memory.kept_bytes(c, 1, T, recipe.weights, mode).values())
    print(f"{name} {T} {mode}: states {sum(state.values()):,} kept {kept:,} peak {peak:,}")
    assert {k: second["optimizer"][k] for k in state} == state
    assert second["forward"]["activations"] == kept
    assert max(at.values()) == peak
    assert second["peak of both"] - first["peak of both"] == state["moments"]


@pytest.mark.full
def test_smollm_without_its_memory():
    real_model("smollm-1.7b", 8192, "bf16", "none")


@pytest.mark.full
@pytest.mark.parametrize("name", ("llama3-8b", "llama3-70b", "llama3-405b"))
@pytest.mark.parametrize("mode", ("none", "selective", "full", "full:8"))
def test_real_models_without_their_memory(name, mode):
    real_model(name, 8192, "bf16", mode)


@pytest.mark.full
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ("none", "selective", "full", "full:8"))
def test_peak_on_a_gpu_within_2_percent(mode):
    c, recipe = memory.PRESETS["smollm-1.7b"], memory.RECIPES["bf16"]
    model = memory.build(c, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    memory.train(model, 1, 4096, recipe, mode)
    formula = max(memory.peak_bytes(c, 1, 4096, recipe, mode).values())
    assert torch.cuda.max_memory_allocated() == pytest.approx(formula, rel=0.02)


def test_activations_do_not_grow_with_gradient_accumulation():
    model = memory.build(SMALL)
    tokens, labels = batch(SMALL, 2, 9)
    live = memory.Live(
        inputs=lambda: (tokens, labels),
        parameters=model.parameters,
        gradients=lambda: [p.grad for p in model.parameters() if p.grad is not None],
    )
    kept = sum(memory.kept_bytes(SMALL, 2, 9, torch.float32).values())
    with live:
        for _ in range(3):
            loss = model.loss(model(tokens), labels)
            assert live.bytes()["activations"] == kept
            loss.backward()
            del loss
            assert live.bytes()["activations"] == 0
            assert live.bytes()["gradients"] == 4 * memory.parameter_count(SMALL)


# --- bytes: pipeline stages ---------------------------------------------------------------------


def stage(c, first, last):
    """A Llama that has only the layers first … last - 1, as 05 cuts it."""
    model = memory.build(c)
    for number in list(model.layers):
        if not first <= int(number) < last:
            del model.layers[number]
    if first > 0:
        model.embed_tokens = None
    if last < c.layers:
        model.norm = model.lm_head = None
    return model


@pytest.mark.parametrize("mode", MODES)
def test_stages_keep_their_own_bytes(mode):  # B2
    """1F1B: stage s of p holds min(m, p - s) micro-batches, the last one the logits as well."""
    c = memory.Config(vocab=97, dim=32, layers=4, heads=4, kv_heads=2, ffn=80)
    B, T, stages = 2, 12, 4
    tokens, labels = batch(c, B, T)
    predicted = {}
    for s in range(stages):
        model = stage(c, s, s + 1)
        memory.recompute(model, mode)
        last = s == stages - 1
        one = sum(memory.kept_bytes(c, B, T, torch.float32, mode, layers=[s], last=last).values())
        for m in (8, 2):
            in_flight = min(m, stages - s)
            batches = [tokens if s == 0 else torch.randn(B, T, c.dim) for _ in range(in_flight)]
            inputs = [labels, tokens] if s == 0 else [labels]
            live = memory.Live(batch=lambda: inputs, parameters=model.parameters)
            with live:
                graphs = []
                for x in batches:
                    if s > 0:
                        live.add(x.requires_grad_())  # received, and kept
                    y = model(x, positions=torch.arange(T))
                    graphs.append(model.loss(y, labels) if last else y.grad_fn)
                    del y  # 05 sends it
                measured = live.bytes()["activations"]
            assert measured == in_flight * one, (mode, s, m)
            predicted[s, m] = measured
            del graphs, batches
    if mode == "none":
        one = predicted[2, 8] // 2
        assert predicted[0, 8] == 4 * one
        lines = memory.kept_bytes(c, B, T, torch.float32)
        assert predicted[3, 8] == one + lines["final norm"] + lines["logits"] + lines["loss"]
        assert all(predicted[s, 2] == 2 * one for s in range(3))


# --- recomputation ------------------------------------------------------------------------------


def run(model, tokens, labels, **kwargs):
    loss = model.loss(model(tokens, **kwargs), labels)
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_recomputation_gives_the_same_bits(mode, tied, dtype):
    c = memory.Config(**{**vars(SMALL), "tied": tied})
    tokens, labels = batch(c, 2, 9)
    documents = torch.arange(9).div(4, rounding_mode="floor").expand(2, 9)
    for kwargs in ({}, {"documents": documents}):
        right, model = (memory.build(c, dtype=dtype) for _ in range(2))
        names = [name for name, _ in model.named_parameters()]
        memory.recompute(model, mode)
        assert [name for name, _ in model.named_parameters()] == names
        results = run(right, tokens, labels, **kwargs), run(model, tokens, labels, **kwargs)
        assert len(results[0]) == 1 + len(names)
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", (False, True))
def test_deferred_weight_gradients_and_the_finished_word(mode, tied):
    c = memory.Config(**{**vars(SMALL), "tied": tied})
    tokens, labels = batch(c, 2, 9)
    right = run(memory.build(c), tokens, labels)

    model = memory.build(c)
    memory.recompute(model, mode)
    later, said = memory.Later(), []
    for part in model.modules():
        if isinstance(part, memory.Linear):
            part.when = later
    for name, p in model.named_parameters():
        memory.on_finished(p, lambda p, name=name: said.append((name, p.grad.clone())))
    loss = model.loss(model(tokens), labels)
    loss.backward()
    linears = 7 * c.layers + 1
    assert len(later.jobs) == linears
    waiting = {name for name, p in model.named_parameters() if getattr(p, "waiting", 0)}
    assert not waiting & {name for name, _ in said}
    while later.jobs:
        later.run()
    assert sorted(name for name, _ in said) == sorted(name for name, _ in model.named_parameters())
    grads = dict(model.named_parameters())
    for name, grad in said:  # the word came when the gradient was final
        assert torch.equal(grad, grads[name].grad), name
    for (name, p), expected in zip(model.named_parameters(), right[1:]):
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-6, msg=name)


class Doubled(torch.nn.Module):
    """A stand-in for another FFN, as 06 puts one there."""

    def __init__(self, c):
        super().__init__()
        self.up_proj, self.down_proj = memory.Linear(c.dim, c.ffn), memory.Linear(c.ffn, c.dim)
        self.experts = torch.nn.Parameter(torch.ones(c.dim))

    def forward(self, x):
        return self.down_proj(self.up_proj(x).sin()) + x * self.experts


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_of_cut_replaced_and_missing_parts(mode):
    """Half the heads, another FFN, another attention, a layer less: still the same bits."""
    tokens, labels = batch(SMALL, 2, 9)
    results = []
    for this in ("none", mode):
        model = memory.build(SMALL)
        del model.layers["1"]
        torch.manual_seed(0)
        model.layers["2"].mlp = Doubled(SMALL)
        for p in model.layers["2"].mlp.parameters():
            torch.nn.init.normal_(p, std=0.02)
        attention, h = model.layers["0"].self_attn, SMALL.head_dim
        for part, heads in ((attention.q_proj, 2), (attention.k_proj, 1), (attention.v_proj, 1)):
            part.weight = torch.nn.Parameter(part.weight[: heads * h].detach().clone())
        o_proj = attention.o_proj
        o_proj.weight = torch.nn.Parameter(o_proj.weight[:, : 2 * h].detach().clone())
        attention.attend = lambda q, k, v, positions, documents=None: memory.attend(
            q * 1.5, k, v, positions, documents
        )
        attention.enter = lambda x: x * 2  # the norm's output is hidden: then it is kept
        memory.recompute(model, this)
        results.append(run(model, tokens, labels))
    assert len(results[0]) == 1 + len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_recompute_can_be_changed_and_leaves_foreign_parts_alone():
    tokens, labels = batch(SMALL, 2, 9)
    model = memory.build(SMALL)
    for mode in ("full", "selective", "full:2", "none"):
        memory.recompute(model, mode)
        measured, _ = live_after_forward(model, tokens, labels)
        assert measured == sum(memory.kept_bytes(SMALL, 2, 9, torch.float32, mode).values())

    class Foreign(memory.KeepInput):
        pass

    q = model.layers["0"].self_attn.q_proj
    q.what = Foreign
    memory.recompute(model, "full")
    assert q.what is Foreign
    with pytest.raises(ValueError, match="layers.0.self_attn.q_proj"):
        memory.recompute(model, "selective")
    for mode in ("some", "selective:2", "none:1", "full:", "full:two", "full:-1"):
        with pytest.raises(ValueError, match="full:K"):
            memory.recompute(model, mode)


def test_selective_without_gradients_and_with_frozen_weights():
    tokens, labels = batch(SMALL, 2, 9)
    model = memory.build(SMALL)
    memory.recompute(model, "selective")
    with torch.no_grad():
        model(tokens)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)
    model.loss(model(tokens), labels).backward()
    q = model.layers["0"].self_attn.q_proj.weight.grad
    model = memory.build(SMALL)
    model.loss(model(tokens), labels).backward()
    assert torch.equal(q, model.layers["0"].self_attn.q_proj.weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_no_copy_of_a_weight_is_kept(mode):  # B6
    """A product that makes scaled copies of x and w, as FP8 does, leaves none of them behind."""

    class Scaled(memory.Plain):
        @staticmethod
        def forward(x, w):
            sx, sw = x.abs().amax(), w.abs().amax()
            return F.linear(x / sx, w / sw) * (sx * sw)

    tokens, labels = batch(SMALL, 2, 9)
    model = memory.build(SMALL)
    for part in model.modules():
        if isinstance(part, memory.Linear):
            part.how = Scaled
    memory.recompute(model, mode)
    measured, _ = live_after_forward(model, tokens, labels)
    assert measured == sum(memory.kept_bytes(SMALL, 2, 9, torch.float32, mode).values())


def test_as_few_layers_as_fit():
    """Over-checkpointing: K layers are enough, all of them cost more."""
    c, recipe = memory.PRESETS["smollm-1.7b"], memory.RECIPES["bf16"]
    budget = 72 * 2**30
    peak = lambda mode: max(memory.peak_bytes(c, 4, 8192, recipe, mode).values())  # noqa: E731
    K = memory.layers_to_recompute(c, 4, 8192, recipe, budget)
    assert 0 < K < c.layers
    assert peak(f"full:{K}") <= budget < peak(f"full:{K - 1}")
    flops = [sum(memory.executed_flops(c, 4, 8192, m)) for m in ("none", f"full:{K}", "full")]
    assert (flops[2] - flops[0]) / (flops[1] - flops[0]) == pytest.approx(c.layers / K)
    assert memory.layers_to_recompute(c, 4, 8192, recipe, 10**6) is None


# --- the optimizer ------------------------------------------------------------------------------


def test_adamw_equals_torch():
    c, recipe = SMALL, recipe_of(torch.float64)
    ours, theirs = (memory.build(c, dtype=torch.float64) for _ in range(2))
    mine = memory.AdamW(ours.parameters(), recipe, lr=1e-2)
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for seed in range(4):
        for model, optimizer in ((ours, mine), (theirs, reference)):
            tokens, labels = batch(c, 2, 9, seed)
            (model.loss(model(tokens), labels) / 18).backward()
            optimizer.step()
            model.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        assert (a - b).norm() <= 1e-12 * b.norm(), name


def test_without_the_master_copy_norms_never_move():
    """The Forget paragraph: error 1.00, and a loss that tells nothing."""
    c = memory.PRESETS["tiny"]
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    losses, moved = {}, {}
    for kind in ("fp32", "bf16", "no copy"):
        recipe = memory.RECIPES["fp32" if kind == "fp32" else "bf16"]
        model = memory.build(c, dtype=recipe.weights)
        optimizer = memory.AdamW(model.parameters(), recipe)
        if kind == "no copy":
            optimizer.master = {}
        for _ in range(4):
            loss = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            model.zero_grad()
        losses[kind] = loss.item() / 128
        norm = model.layers["0"].input_layernorm.weight
        moved[kind] = (optimizer.master.get(norm, norm).float() - 1).norm().item()
    assert moved["no copy"] == 0 < 0.8 * moved["fp32"] < moved["bf16"]
    assert abs(losses["no copy"] - losses["fp32"]) < 0.01
    assert losses["fp32"] < math.log(256) - 0.4


def test_bf16_rounds_small_steps_away():
    w = torch.rand(1000).add(0.5).bfloat16()
    for sign in (1, -1):
        assert torch.equal((w.float() * (1 + sign * 0.999 / 512)).bfloat16(), w)
    assert not torch.equal((w.float() * (1 + 1.01 / 256)).bfloat16(), w)


# --- FLOPs and hours ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_executed_flops_equal_the_counter(mode, seed):
    c, B, T, _, _ = seeded_case(seed)
    model = memory.build(c)
    memory.recompute(model, mode)
    tokens, labels = batch(c, B, T)
    counted = memory.counted_flops(lambda: model.loss(model(tokens), labels).backward())
    assert counted == memory.executed_flops(c, B, T, mode)
    assert counted[0] > 0 and counted[1] > 0
    if mode == "full":  # one more forward pass of the blocks
        head = 6 * B * T * c.vocab * c.dim
        assert 3 * (counted[0] - head) == 4 * (memory.executed_flops(c, B, T)[0] - head)


def test_attention_against_unfused_products():
    """torch's own count of the plain products: the full square, two forward, four backward."""
    c = memory.Config(vocab=11, dim=32, layers=2, heads=4, kv_heads=4, ffn=80)
    B, T = 2, 16
    model = memory.build(c)
    tokens, labels = batch(c, B, T)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), labels).backward()
    counts = counter.get_flop_counts()["Global"]
    matmul, attention = memory.executed_flops(c, B, T)
    assert counts[torch.ops.aten.mm] == matmul
    unfused = counts[torch.ops.aten.bmm]
    useful = memory.flops_per_token(c, T) * B * T - matmul
    assert unfused == 2 * useful  # B7: half of the square is masked
    assert attention * 6 == useful * 7  # the fused backward computes the scores again


def test_lookup_costs_nothing_and_recomputation_is_not_useful():  # B8
    small = memory.Config(vocab=50_000, dim=256, layers=2, heads=4, kv_heads=4, ffn=512)
    large = memory.Config(**{**vars(small), "vocab": 50_001})
    T = 64
    head = memory.flops_per_token(large, T) - memory.flops_per_token(small, T)
    assert head == 6 * 256  # 2 forward, 4 backward; the lookup none
    useful = memory.flops_per_token(small, T) * T
    executed = {mode: sum(memory.executed_flops(small, 1, T, mode)) for mode in MODES}
    assert executed["none"] == executed["selective"] < executed["full:1"] < executed["full"]
    time, peak = 0.01, 1e12
    mfu = memory.utilisation(useful, time, peak)
    assert mfu < memory.utilisation(executed["full"], time, peak)  # HFU rises, MFU does not
    model, tokens = memory.build(SMALL), batch(SMALL, 1, T)[0]
    with torch.no_grad():
        forward = memory.counted_flops(lambda: model(tokens))
    trained = memory.executed_flops(SMALL, 1, T)
    assert 3 * forward[0] == trained[0] and 7 * forward[1] == 2 * trained[1]


def test_conventions():  # B7
    c = memory.Config(vocab=1000, dim=1024, layers=2, heads=8, kv_heads=8, ffn=4096)
    kaplan, palm, titan, ours = (f(c, 16384) for f in memory.CONVENTIONS.values())
    N, D, L, T = memory.parameter_count(c), c.dim, c.layers, 16384
    assert kaplan == 6 * N
    assert palm == 6 * N + 12 * L * D * T
    assert titan == palm - 6 * c.vocab * D
    assert titan - ours == 6 * L * D * T + 6 * (2 * L + 1) * D  # half of attention, and the norms


def test_mfu_is_none_without_a_peak_and_at_most_1():  # B10, B7
    assert memory.utilisation(1e12, 1.0, memory.PEAKS.get(("cpu", "bf16"))) is None
    assert memory.utilisation(1e12, 1.0, memory.PEAKS.get(("h100", "fp8"))) is None
    assert memory.gpu_hours(1e20, memory.PEAKS.get(("abacus", "bf16")), 0.4) is None
    assert memory.utilisation(989.4e12, 2.0, memory.PEAKS["h100", "bf16"]) == 0.5

    def seconds(run, repeats=5):
        times = []
        for _ in range(repeats):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times)

    a = torch.randn(768, 768)
    peak = 2 * 768**3 / seconds(lambda: a @ a)
    c = memory.Config(vocab=64, dim=256, layers=1, heads=4, kv_heads=4, ffn=512)
    model, (tokens, labels) = memory.build(c), batch(c, 1, 2048)
    useful = memory.flops_per_token(c, 2048) * 2048
    step = seconds(lambda: model.loss(model(tokens), labels).backward(), 2)
    mfu = memory.utilisation(useful, step, peak)
    print(f"MFU {mfu:.2f} of this machine's own matmul")
    assert 0 < mfu <= 1


def test_gpu_hours():
    """7B with 140B tokens: about 3,300 H100-hours at 50 %."""
    hours = memory.gpu_hours(6 * 7e9 * 140e9, memory.PEAKS["h100", "bf16"], 0.5)
    assert hours == pytest.approx(3300, rel=0.01)
    exact = memory.flops_per_token(LLAMA2_7B, 4096) * 140e9
    hours = memory.gpu_hours(exact, memory.PEAKS["h100", "bf16"], 0.5)
    assert hours == pytest.approx(3370, rel=1e-3)


def test_seven_billion():
    """14 + 14 + 56 + about 30 = about 114 GB, exactly, and what that leaves out."""
    quoted = memory.state_bytes(LLAMA2_7B, memory.RECIPES["no-master"])
    ours = memory.state_bytes(LLAMA2_7B, memory.RECIPES["bf16"])
    kept = sum(memory.kept_bytes(LLAMA2_7B, 1, 4096, torch.bfloat16).values())
    gb = [round(n / 1e9, 1) for n in (*quoted.values(), kept)]
    assert gb == [13.5, 13.5, 0.0, 53.9, 17.6]
    assert round(ours["master copy"] / 1e9) == 27
    assert round((ours["gradients"] - quoted["gradients"]) / 1e9, 1) == 13.5


# --- published figures --------------------------------------------------------------------------


def test_playbook_figures():
    """Some rows of the playbook's figures, in GiB; tests/validate.py compares all 177."""
    validate = import_module("validate")
    for figure, panel, T, *published in (
        ("memusage_activations", "Llama-3.1-8B none", 4096, 26.0259, 26.0259, 52.0518, 97.0156),
        ("memory-recomputation", "1B recompute=full", 8192, 4.0426, 4.0426, 8.0852, 0.5156),
        ("dp_ourjourney_memoryusage", "70B selective", 1024, 131.4141, 131.4141, 525.6562, 21.25),
        ("zero3_memoryusage", "8B DP=8 ZeRO-2", 1024, 15, 1.875, 7.5, 4.25),
        ("tp_sp_memoryusage", "70B TP=8+SP", 4096, 16.4375, 16.4375, 65.75, 10.625),
        ("cp_8Bmemoryusage", "8B TP=2 CP=4", 65536, 7.4785, 7.4785, 29.9141, 44),
        ("pp_memoryusage", "8B PP=8", 16384, 2.6035, 2.6035, 10.4141, 68),
    ):
        ours = [n / 2**30 for n in validate.playbook_row(figure, panel, T)]
        assert ours == pytest.approx(published, abs=6e-5), (figure, panel)
    assert validate.training_hours(None) == []
    assert validate.seven_billion(None) == []


# --- the script ---------------------------------------------------------------------------------


@pytest.mark.full
def test_story(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["01_memory.py"])
    assert memory.main() == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[-1] == "01_memory OK"
    assert max(map(len, lines)) <= 80
    assert out.count("the same bits") == 4


def test_script_for_a_model(monkeypatch, capsys):
    line = "01_memory.py --model tiny --seq 65 --micro-batch 3 --recompute full:2 --gpu abacus"
    monkeypatch.setattr(sys, "argv", line.split())
    assert memory.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "01_memory OK"
    assert max(map(len, lines)) <= 80
    assert "GPU-hours: none, the bf16 peak of 'abacus' is not known" in lines


def test_script_says_which_line_is_wrong(monkeypatch, capsys):
    right = memory.state_bytes
    monkeypatch.setattr(memory, "state_bytes", lambda *a: right(*a) | {"gradients": 1})
    monkeypatch.setattr(sys, "argv", ["01_memory.py", "--model", "tiny", "--seq", "8"])
    assert memory.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("01_memory FAIL: gradients")


@pytest.mark.parametrize("line", ("--recompute ful", "--model gpt5", "--recipe fp4"))
def test_script_refuses(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["01_memory.py", "--model", "tiny", *line.split()])
    with pytest.raises(SystemExit) as refusal:
        memory.main()
    assert refusal.value.code == 2
    assert line.split()[1] in capsys.readouterr().err
