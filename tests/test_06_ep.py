"""06: the layer against a loop over tokens, every layout against one device, balance, bytes."""

import dataclasses
import itertools
import math
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

memory = import_module("01_memory")
dp = import_module("02_dp")
zero = import_module("03_zero")
pp = import_module("05_pp_1f1b")
ep = import_module("06_ep")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CONFIG = ep.Config(
    vocab=61, dim=16, layers=2, heads=4, kv_heads=2, ffn=24, experts=4, top_k=2
)  # fmt: skip


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def batch(c, B=4, T=6, seed=0):
    """Random tokens and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(c.vocab, (2, B, T), generator=generator).unbind()
    return tokens, torch.where(torch.rand(B, T, generator=generator) < 0.3, -100, labels)


def layer(c, dtype=F64, seed=0):
    """One MoE layer with weights large enough that the experts and the choice matter."""
    moe = ep.build_moe(dataclasses.replace(c, layers=1), seed, dtype).layers["0"].mlp
    with torch.no_grad():
        for p in moe.parameters():
            p.mul_(10)
    return moe


def states(*shape, seed=1, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- One device ---------------------------------------------------------------------------------


def token_by_token(moe, x):
    """The layer as one would tell it, by plain functions: no stack, no sort, no seam."""
    c, out = moe.config, []
    m, shared = moe.experts, moe.shared_expert
    for t in x.flatten(0, 1):
        logits = moe.router.weight @ t
        scores = logits.softmax(0) if c.score == "softmax" else logits.sigmoid()
        choice = (scores.detach() + moe.router.bias).tolist()
        size = c.experts // c.nodes
        nodes = [range(i, i + size) for i in range(0, c.experts, size)]
        if c.most_nodes:
            best = max(1, c.top_k // c.most_nodes)
            nodes.sort(key=lambda es: -sum(sorted((choice[e] for e in es), reverse=True)[:best]))
            nodes = nodes[: c.most_nodes]
        reach = sorted(e for es in nodes for e in es)
        chosen = sorted(reach, key=lambda e: -choice[e])[: c.top_k]  # sorted() is stable
        total = sum(scores[e] for e in chosen) if c.renormalise else 1
        y = torch.zeros_like(t)
        for e in chosen:
            h = F.silu(m.gate_proj[e] @ t) * (m.up_proj[e] @ t)
            y = y + c.scale * scores[e] / total * (m.down_proj[e] @ h)
        if shared is not None:
            h = F.silu(shared.gate_proj.weight @ t) * (shared.up_proj.weight @ t)
            y = y + shared.down_proj.weight @ h
        out.append(y)
    return torch.stack(out).view_as(x)


LAYERS = {
    "top 1": dict(top_k=1, renormalise=False),
    "top 2": dict(),
    "top 4 of 4": dict(top_k=4),
    "not renormalised": dict(renormalise=False),
    "shared": dict(shared=2),
    "sigmoid, scaled": dict(score="sigmoid", scale=2.5, shared=1, experts=8, top_k=4),
    "few nodes": dict(experts=8, top_k=4, nodes=4, most_nodes=2, score="sigmoid"),
    "one node": dict(experts=8, top_k=3, nodes=2, most_nodes=1),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layer_is_what_one_would_tell(case):
    moe = layer(config(**LAYERS[case]))
    moe.router.bias += states(moe.config.experts, seed=5) * 0.1  # changes some choices
    results = []
    for function in (moe, partial(token_by_token, moe), partial(ep.by_definition, moe)):
        moe.zero_grad()
        x = states(2, 5, 16).requires_grad_()
        (function(x) * states(2, 5, 16, seed=2)).sum().backward()
        grads = {name: p.grad for name, p in moe.named_parameters()}
        results.append({**grads, "x": x.grad, "out": function(x).detach()})
    for other in results[1:]:
        error, name = dp.worst_error(results[0], other)
        assert error < 1e-12 and len(other) == 6 + 3 * bool(moe.config.shared), name


def test_order_of_softmax_and_choice():
    """Logits [2, 1, 0, -1], k = 2, by hand."""
    logits, e = torch.tensor([[2.0, 1, 0, -1]], dtype=F64), math.e
    weights, experts, p = ep.route(logits, torch.zeros(4), config())
    assert experts.tolist() == [[0, 1]]
    assert torch.allclose(weights, torch.tensor([[e / (e + 1), 1 / (e + 1)]], dtype=F64))
    assert torch.allclose(weights, logits[:, :2].softmax(-1))  # the same as softmax after top-k
    weights, _, p = ep.route(logits, torch.zeros(4), config(renormalise=False))
    total = e**2 + e + 1 + 1 / e
    assert torch.allclose(weights, torch.tensor([[e**2 / total, e / total]], dtype=F64))
    assert torch.equal(weights, p[:, :2])
    weights, _, p = ep.route(logits, torch.zeros(4), config(score="sigmoid", scale=2.0))
    s = [1 / (1 + math.exp(-v)) for v in (2, 1, 0, -1)]
    expected = torch.tensor([[2 * s[0] / (s[0] + s[1]), 2 * s[1] / (s[0] + s[1])]], dtype=F64)
    assert torch.allclose(weights, expected) and abs(p.sum() - 1) < 1e-12


def test_bias_changes_the_choice_and_not_the_weights():
    logits, bias = torch.tensor([[2.0, 1, 0, -1]], dtype=F64), torch.tensor([0, 0, 0, 5.0])
    weights, experts, p = ep.route(logits, bias, config())
    assert experts.tolist() == [[3, 0]]
    assert torch.allclose(weights, (p[:, [3, 0]] / p[:, [3, 0]].sum()))


def test_equal_scores_go_to_the_lowest_numbers():
    scores = torch.zeros(3, 64)
    assert ep.largest(scores, 3).tolist() == [[0, 1, 2]] * 3
    scores[0, 40] = scores[0, 7] = scores[0, 50] = 1
    assert ep.largest(scores, 4)[0].tolist() == [7, 40, 50, 0]
    limited = ep.within_nodes(torch.zeros(1, 8), 4, 2, 2)
    assert torch.isfinite(limited).tolist() == [[True] * 4 + [False] * 4]


def test_the_choice_is_made_in_fp32():
    """Logits that bf16 can't tell apart; bf16 weights and inputs give fp32 logits."""
    logits = torch.tensor([[10.000, 10.001, 10.002, 0]])
    assert ep.route(logits, torch.zeros(4), config())[1].tolist() == [[2, 1]]
    assert ep.route(logits.bfloat16().float(), torch.zeros(4), config())[1].tolist() == [[0, 1]]
    moe, x = layer(config(), BF16), states(1, 50, 16, dtype=BF16)
    logits = moe.router(x)
    assert logits.dtype == F32
    assert torch.equal(logits, x.float() @ moe.router.weight.float().T)
    assert not torch.equal(logits, (x @ moe.router.weight.T).float())
    assert moe(x).dtype == BF16


def test_presets():
    c = ep.PRESETS["mixtral-8x7b"]
    assert ep.moe_parameters(c) == 46_702_792_704
    assert ep.moe_parameters(c, c.top_k) == 12_879_925_248
    for c in (ep.PRESETS["tiny-moe"], config(shared=2, tied=True)):
        model = ep.build_moe(c)
        count = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
        assert count == ep.moe_parameters(c) == ep.held_experts(c, 1)


def test_flops_are_those_of_the_experts_that_are_met():
    c = config(shared=1, experts=8, top_k=3)
    tokens, labels = batch(c, 2, 8)
    model = ep.build_moe(c, dtype=F64)
    counted = memory.counted_flops(lambda: model.loss(model(tokens), labels).backward())
    useful = ep.moe_flops_per_token(c, 8) * 16
    attention = 6 * c.layers * c.heads * c.head_dim * 8 * 16
    assert counted[0] == useful - attention  # matmuls; 01 counts attention's


@pytest.mark.parametrize("options, message", [
    (dict(top_k=5), "reach"),
    (dict(nodes=3), "nodes divides"),
    (dict(experts=8, nodes=4, most_nodes=1, top_k=3), r"\(2\)"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


# --- Grouped matmul -----------------------------------------------------------------------------

SIZES = [[5, 0, 8], [0, 0, 13], [13, 0, 0], [4, 5, 4], [0, 0, 0]]


def products(sizes, dtype, inner, outer):
    offsets = torch.tensor(sizes).cumsum(0).int()
    how, R = ep.Grouped(sizes, offsets), sum(sizes)
    x, dy = states(R, inner, seed=3, dtype=dtype), states(R, outer, seed=4, dtype=dtype)
    w = states(len(sizes), outer, inner, seed=5, dtype=dtype)
    return how.forward(x, w), how.input_grad(dy, w), how.weight_grad(dy, x)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("inner, outer", [(16, 24), (8, 8), (10, 6), (16, 6), (6, 16)])
def test_one_kernel_equals_the_loop(monkeypatch, sizes, inner, outer):
    """13 rows for 3 experts, some with none; widths that the kernel takes and others."""
    ours = products(sizes, BF16, inner, outer)
    monkeypatch.setattr(ep, "in_one_kernel", lambda *matrices: False)
    loop = products(sizes, BF16, inner, outer)
    for a, b in zip(ours, loop):
        assert a.shape == b.shape and a.dtype == b.dtype == BF16
        assert (a.float() - b.float()).abs().max().item() <= 0.02 if a.numel() else True
    exact = products(sizes, F64, inner, outer)
    for size, dw in zip(sizes, exact[2]):
        assert bool(dw.any()) == (size > 0)


def test_the_kernel_is_used_in_bf16(monkeypatch):
    used = []
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: used.append(x.dtype) or x @ w.sum(0)
                        if w.dim() == 3 else x.new_zeros(3, x.shape[0], w.shape[1]))  # fmt: skip
    products([5, 0, 8], BF16, 16, 24)
    products([5, 0, 8], F64, 16, 24)
    assert used == [BF16, BF16]  # forward and input gradient; the third is the 2-d case


def test_deferred_weight_gradients():
    """05's seam: experts' weight gradients later, in full, also for those without rows."""
    results = []
    for when in (memory.now, memory.Later()):
        moe = layer(config(experts=8))
        moe.experts.when = when
        for seed in (1, 2):
            moe(states(1, 3, 16, seed=seed)).sum().backward()
        if when is not memory.now:
            assert moe.experts.gate_proj.grad is None and len(when.jobs) == 6
            while when.jobs:
                when.run()
        results.append({name: p.grad for name, p in moe.named_parameters()})
    assert dp.worst_error(*results)[0] < 1e-14


# --- Over ranks ---------------------------------------------------------------------------------


def crowd(model):
    ep.crowd(model)


def tie(model):
    """All scores equal: every token to the first k experts."""
    for moe in ep.moe_layers(model):
        torch.nn.init.zeros_(moe.router.weight)


def one_expert_unused(model):
    for moe in ep.moe_layers(model):
        moe.router.bias[-1] = -10


def bent(model):
    """Biases that differ, so that the bias matters to the choice."""
    for moe in ep.moe_layers(model):
        moe.router.bias += torch.linspace(-0.1, 0.1, moe.config.experts)


PARITY = {  # options of the config, what is done to the model, recomputation
    "top 2": ({}, None, "none"),
    "top 1": (dict(top_k=1, renormalise=False), None, "none"),
    "top 4, all to all": (dict(top_k=4), None, "none"),
    "shared, sigmoid": (dict(shared=1, score="sigmoid", scale=2.5), bent, "none"),
    "one expert with all": (dict(top_k=1, renormalise=False), crowd, "none"),
    "an expert with none": ({}, one_expert_unused, "none"),
    "ties, recomputed": (dict(experts=8), tie, "full"),
    "selective": (dict(shared=1), None, "selective"),
    "full": ({}, bent, "full"),
    "few nodes": (dict(experts=8, top_k=2, nodes=4, most_nodes=1), None, "none"),
}


def one_device(c, prepare, tokens, labels, lr=0.5):
    """Loss, gradients and weights after SGD of the whole batch, token by token."""
    model = ep.build_moe(c, dtype=F64)
    if prepare:
        prepare(model)
    for moe in ep.moe_layers(model):
        moe.forward = partial(ep.by_definition, moe)
    loss = model.loss(model(tokens), labels) / (labels != -100).sum()
    loss.backward()
    weights = {name: (p - lr * p.grad).detach() for name, p in model.named_parameters()}
    return loss.detach(), dp.gradients(model), weights


def own(tensors, group, degree):
    return {
        name: ep.own_experts(t, group.rank(), degree) if ep.is_expert(name) else t
        for name, t in tensors.items()
    }


def compare(c, degree, prepare, mode, tokens, labels, groups, mine, micro=None, lr=0.5):
    """The worst errors of this layout, and what was counted."""
    loss, gradients, weights = one_device(c, prepare, tokens, labels)
    N = (labels != -100).sum()
    model = ep.build_moe(c, dtype=F64, group=groups["ep"])
    if prepare:
        prepare(model)
    ep.recompute_moe(model, mode)
    total = torch.zeros((), dtype=F64)
    with dp.Wire() as wire:
        for part in mine.split(micro or max(len(mine), 1)):
            share = model.loss(model(tokens[part]), labels[part]) / N
            share.backward()
            total += share.detach()
    ep.sum_moe_gradients(model, groups["all"], groups["edp"])
    dist.all_reduce(total)
    load, _ = ep.end_step(model, groups["all"])
    ours = dp.gradients(model)
    errors = [dp.worst_error(ours, own(gradients, groups["ep"], degree))]
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
    ours = {name: p.detach() for name, p in model.named_parameters()}
    errors.append(dp.worst_error(ours, own(weights, groups["ep"], degree)))
    gap = abs(total - loss).item()
    return max(errors)[0], max(errors)[1], gap, len(ours), wire, load


def parity_worker(cases):
    results, groups, rank, world = [], {}, dist.get_rank(), dist.get_world_size()
    for case, degree, shares, micro in cases:
        options, prepare, mode = PARITY[case]
        c = config(**options)
        if degree not in groups:
            groups[degree] = ep.make_ep_groups(degree)
        tokens, labels = batch(c, B=sum(shares))
        mine = torch.arange(sum(shares)).split(shares)[rank]
        found = compare(c, degree, prepare, mode, tokens, labels, groups[degree], mine, micro)
        error, name, gap, compared, wire, load = found
        assert error < 1e-11 and gap < 1e-12, (case, degree, name, error, gap)
        assert compared == 2 * (6 + 4 + 3 * bool(c.shared)) + 3, compared
        # Each token once: recomputation must not count it again.
        assert load.sum(1).tolist() == [tokens.numel() * c.top_k] * c.layers, (case, load)
        calls = wire.calls["ep", "all_to_all"]
        passes = 1 if micro is None else -(-len(mine) // micro)
        each = (5, 8)[mode == "full"] * (degree > 1)  # counts, 2 there and 2 back; again
        assert calls == each * c.layers * passes, (case, calls)
        results.append(groups[degree]["ep"].size())
    return results


@pytest.mark.parametrize("world, degrees", [(1, [1]), (2, [1, 2]), (4, [4]), (4, [2])])
def test_every_layout_computes_what_one_device_does(world, degrees):
    cases = [(case, degree, [4 // world] * world, None) for case in PARITY for degree in degrees]
    results = dp.launch(parity_worker, world, cases, timeout=30)
    assert results == [[degree for *_, degree in itertools.product(PARITY, degrees)]] * world


def test_uneven_ranks_and_micro_batches():
    """Ranks with different numbers of sequences, one of them none; micro-batches one by one."""
    cases = [
        ("top 2", 4, [1, 0, 3, 1], None),
        ("top 2", 2, [0, 2, 1, 1], None),
        ("one expert with all", 4, [0, 0, 1, 0], None),
        ("full", 2, [0, 0, 1, 1], None),
        ("selective", 4, [0, 1, 0, 0], None),
        ("shared, sigmoid", 2, [2, 2, 2, 2], 1),
        ("full", 4, [2, 2, 2, 2], 1),
    ]
    dp.launch(parity_worker, 4, cases, timeout=30)


def few_tokens_worker():
    """A layer alone: one token a rank, none on some, none anywhere."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for tokens in ([1, 1, 1, 1], [0, 0, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0]):
        x = states(1, sum(tokens), 16)
        whole, moe = layer(config()), layer(config())
        ep.cut_experts(moe, group)
        whole(x).square().sum().backward()
        mine = x.split(tokens, 1)[rank].clone().requires_grad_()
        moe(mine).square().sum().backward()
        assert mine.grad.shape == mine.shape
        for name, p in moe.named_parameters():
            expected = whole.get_parameter(name).grad
            assert p.grad is not None, name
            if name.startswith("experts."):
                expected = ep.own_experts(expected, rank, 4)
            else:
                dist.all_reduce(p.grad)
            gap = (p.grad - expected).abs().max().item()
            assert gap < 1e-12 * max(1, expected.abs().max().item()), (tokens, name, gap)
    return group.size()


def test_one_token_or_none():
    assert dp.launch(few_tokens_worker, 4, timeout=20) == [4] * 4


def buckets_worker():
    """02's buckets over ranks whose experts partly have no token: they complete, and are right."""
    groups, rank, c = ep.make_ep_groups(1), dist.get_rank(), config(experts=8)
    tokens, labels = batch(c, 2, 1)
    _, gradients, _ = one_device(c, crowd, tokens, labels)
    model = ep.build_moe(c, dtype=F64)
    crowd(model)
    named = list(model.named_parameters())
    buckets = dp.Buckets(named, groups["edp"], 2**12, on_finished=memory.on_finished)
    buckets.start(passes=1)
    N = (labels != -100).sum()
    (model.loss(model(tokens[rank : rank + 1]), labels[rank : rank + 1]) / N).backward()
    buckets.finish()
    grads = dp.gradients(model)
    assert all(g is not None for g in grads.values())
    unused = grads["layers.0.mlp.experts.gate_proj"][2:]
    assert unused.shape[0] == 6 and not unused.any()
    return dp.worst_error(grads, gradients)[0], len(grads)


def test_experts_without_tokens_under_buckets():
    for error, compared in dp.launch(buckets_worker, 2, timeout=20):
        assert error < 1e-11 and compared == 23


def init_worker():
    rank = dist.get_rank()
    whole = ep.build_moe(config(), seed=3)
    part = ep.build_moe(config(), seed=3, group=dist.group.WORLD)
    for (name, a), (other, b) in zip(whole.named_parameters(), part.named_parameters()):
        assert name == other
        assert torch.equal(ep.own_experts(a, rank, 2) if ep.is_expert(name) else a, b), name
    held = sum(p.numel() for p in part.parameters())
    assert held == ep.held_experts(config(), 2) < ep.held_experts(config(), 1)
    try:
        ep.cut_experts(layer(config(experts=3)), dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_start_does_not_depend_on_the_layout():
    assert "ep 2 does not divide 3 experts" in dp.launch(init_worker, 2, timeout=20)[0]


def wire_worker():
    """Rows travel as bytes: a dispatch in another format, half the bytes, rounded once."""
    rank, results = dist.get_rank(), []
    group = dist.new_group(range(2), group_desc="ep")
    x = states(1, 8, 16, seed=rank, dtype=F32)
    for wire in (None, (lambda t: t.bfloat16().view(torch.uint8),
                        lambda t: t.view(torch.bfloat16).float())):  # fmt: skip
        moe = layer(config(), F32)
        ep.cut_experts(moe, group)
        moe.wire = wire
        with dp.Wire() as meter:
            out = moe(x)
        results.append((out.detach(), meter.bytes["ep", "all_to_all"]))
    owner = ep.largest(moe.router(x).softmax(-1), 2).flatten() // 2
    away = int((owner != rank).sum())
    saved = results[0][1] - results[1][1]
    rounded = layer(config(), F32)
    expected = rounded_inputs(rounded, x)
    return saved == away * 16 * 2, away, dp.relative_error(results[1][0], expected), \
        dp.relative_error(results[0][0], results[1][0])  # fmt: skip


def rounded_inputs(moe, x):
    """by_definition with the experts' inputs rounded to bf16."""
    weights, experts, _ = ep.route(moe.router(x), moe.router.bias, moe.config)
    y, m, out = x.bfloat16().float(), moe.experts, 0
    for e in range(moe.config.experts):
        h = F.silu(y @ m.gate_proj[e].T) * (y @ m.up_proj[e].T) @ m.down_proj[e].T
        out = out + ((experts == e) * weights).sum(-1, keepdim=True) * h
    return out.detach()


def test_dispatch_on_another_wire():
    for saved, away, error, difference in dp.launch(wire_worker, 2, timeout=20):
        assert saved and away > 0 and error < 1e-6 < difference < 2e-2


# --- Clipping, and stages without experts -------------------------------------------------------


def optimizer_of(model, experts, rest, **more):
    """03's optimizer, not cut; gradients of experts, of all else, are summed over these groups."""
    groups = {
        name: (None, (experts,) if ep.is_expert(name) else (rest,))
        for name, _ in model.named_parameters()
    }

    def make(matrices, vectors):
        return torch.optim.SGD(matrices + vectors, lr=1.0, fused=True)

    return zero.Optimizer(model, zero.llama_units(model), groups, 0, make, **more)


def norm_worker(degree, dense):
    """A loss whose gradients are known: of norm 3 or 4 for the experts of a rank and its replicas
    together, `dense` for a weight that all have."""
    groups, world = ep.make_ep_groups(degree), dist.get_world_size()
    model = ep.build_moe(config(layers=1), dtype=F64, group=groups["ep"])
    optimizer = optimizer_of(model, groups["edp"], groups["all"])
    expert, weight = model.layers["0"].mlp.experts.up_proj[0, 0, 0], model.norm.weight
    loss = (3 + groups["ep"].rank() % 2) * expert / (world // degree) + dense * weight[0] / world
    (loss + sum((p * 0).sum() for p in model.parameters())).backward()
    optimizer.sum_gradients()
    factor = zero.clip_factor(optimizer, 1.0, groups["all"])
    optimizer.scale(factor)
    optimizer.step(lr=0.1)
    return factor.item(), weight.tolist()


@pytest.mark.parametrize("world, degree", [(2, 2), (4, 2), (4, 4)])
def test_one_norm_for_experts_and_all_else(world, degree):
    """Every expert counts once, on whichever rank it is, and all ranks clip by the same factor."""
    for dense in (0.0, 12.0):
        norm = math.sqrt(25 * degree / 2 + dense**2)
        results = dp.launch(norm_worker, world, degree, dense, timeout=20)
        for factor, weights in results:
            assert abs(factor - 1 / (norm + 1e-6)) < 1e-12
            assert abs(1 - 0.1 * dense * factor - weights[0]) < 1e-12
            assert weights == results[0][1]


def half_moe(c):
    """Two layers; only the second has experts."""
    model, dense = ep.build_moe(c, dtype=F64), memory.build(c, dtype=F64)
    model.layers["0"].mlp = dense.layers["0"].mlp
    return model


def stage_worker():
    """A pipeline of a stage without experts and one with; norm, bias and load of a step."""
    c, rank = config(bias_rate=0.1, balance=0.1), dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]  # the ranks of this stage
    tokens, labels = batch(c)
    batches, N = list(zip(tokens.split(1), labels.split(1))), (labels != -100).sum()
    model = half_moe(c)
    pp.keep_stages(model, [1, 1], [rank])
    lowered = pp.lower(pp.one_f_one_b(2, 4))
    shape = lambda tokens: (*tokens.shape, c.dim)  # noqa: E731
    pipeline = pp.Pipeline({rank: model}, lowered, dist.group.WORLD, shape)
    optimizer = optimizer_of(model, alone, alone, on_finished=memory.on_finished)
    ep.begin_step(model, N)
    pipeline.step(batches, N)
    optimizer.sum_gradients()
    factor = zero.clip_factor(optimizer, 1e-3, dist.group.WORLD).item()
    load, loss = ep.end_step(model, alone)
    return factor, load, float(loss), [moe.router.bias for moe in ep.moe_layers(model)]


def test_a_stage_without_experts_clips_and_ends_its_step_with_the_others():
    c = config(bias_rate=0.1, balance=0.1)
    model, (tokens, labels) = half_moe(c), batch(c)
    N = (labels != -100).sum()
    ep.begin_step(model, N)
    (model.loss(model(tokens), labels) / N).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    expected, auxiliary = ep.end_step(model)
    first, second = dp.launch(stage_worker, 2, timeout=20)
    for factor, *_ in (first, second):
        assert abs(factor * (norm + 1e-6) / 1e-3 - 1) < 1e-11
    assert first[1:] == (None, 0.0, [])
    _, load, loss, (bias,) = second
    assert torch.equal(load, expected) and load.sum() == tokens.numel() * c.top_k
    assert abs(loss - auxiliary) < 1e-12 and auxiliary > 0
    assert torch.equal(bias, ep.moe_layers(model)[0].router.bias) and bias.any()


# --- Bytes --------------------------------------------------------------------------------------

KEPT = [  # options, dtype
    ({}, F64),
    (dict(top_k=1, renormalise=False), F32),
    (dict(shared=2, score="sigmoid", scale=2.5), F32),
    (dict(balance=0.1), F64),
    (dict(balance=0.1, z=0.1, experts=8, top_k=4), F32),
    (dict(shared=1), BF16),
    (dict(score="sigmoid", scale=2.5, renormalise=False, top_k=3), BF16),
]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("case", range(len(KEPT)))
def test_kept_bytes(case, mode):
    options, dtype = KEPT[case]
    for B, T in ((1, 5), (3, 8)):
        c = config(**options)
        tokens, labels = (t.clone() for t in batch(c, B, T))
        model = ep.build_moe(c, dtype=dtype)
        ep.recompute_moe(model, mode)
        ep.begin_step(model, B * T)
        live = memory.Live(
            batch=lambda: [tokens, labels], parameters=model.parameters, buffers=model.buffers
        )
        with live:
            loss = model.loss(model(tokens), labels)
            measured = live.bytes()["activations"]
        blocks = c.layers * ep.held(c, B, T, dtype, 1, mode)
        formula = sum((memory.kept_bytes(c, B, T, dtype, mode) | {"blocks": blocks}).values())
        assert measured == formula
        loss.backward()


def bytes_worker(cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    group, seen = dist.new_group(range(world), group_desc="ep"), []
    for options, mode, B, T, prepare in cases:
        c = config(**options)
        tokens, labels = batch(c, B * world, T)
        model, routing = ep.build_moe(c, dtype=F64), []
        prepare(model)
        for moe in ep.moe_layers(model):
            moe.register_forward_pre_hook(lambda moe, inputs: routing.append(
                ep.route(moe.router(inputs[0]), moe.router.bias, c)[1]))  # fmt: skip
        with torch.no_grad():
            model(tokens)
        model = ep.build_moe(c, dtype=F64, group=group)
        prepare(model)
        ep.recompute_moe(model, mode)
        with dp.Wire() as wire:
            mine = tokens.chunk(world)[rank], labels.chunk(world)[rank]
            model.loss(model(mine[0]), mine[1]).backward()
        costs = [ep.sent_counts(c, world, mode)] * c.layers
        for layer_routing in routing:
            owners = layer_routing.unflatten(0, (world, -1)).flatten(1) // (c.experts // world)
            out = int((owners[rank] != rank).sum())
            into = int((owners == rank).sum() - (owners[rank] == rank).sum())
            costs.append(ep.sent(c, B * T, F64, world, mode, out, into))
            assert ep.journeys(layer_routing.unflatten(0, (world, -1)), c, world, rank)[:2] == (
                out, into)  # fmt: skip
            if prepare is crowd:
                worst = c.top_k * B * T
                assert (out, into) == ((0, (world - 1) * worst) if rank == 0 else (worst, 0))
        measured = wire.calls["ep", "all_to_all"], wire.bytes["ep", "all_to_all"]
        assert measured == tuple(map(sum, zip(*costs))), (options, mode, measured, costs)
        seen.append(int(measured[1]))
    return seen


def nothing(model):
    pass


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_sent(world):
    cases = [
        ({}, "none", 1, 5, nothing),
        (dict(experts=8, top_k=3, dim=24), "none", 2, 7, nothing),
        ({}, "full", 2, 4, nothing),
        (dict(experts=8), "selective", 1, 8, crowd),
        (dict(experts=8), "full", 1, 8, crowd),
    ]
    assert all(n > 0 for seen in dp.launch(bytes_worker, world, cases, timeout=20) for n in seen)


def test_bytes_of_an_even_load():
    c, n = config(experts=8, top_k=2), 64
    calls, size = ep.sent(c, n, BF16, 4)
    assert (calls, size) == (4, 4 * n * 2 * 3 // 4 * c.dim * 2)
    assert ep.sent(c, n, BF16, 4, "full")[1] * 2 == size * 3
    assert ep.sent(c, n, BF16, 1) == ep.sent_counts(c, 1) == (0, 0)
    # the ratio: bytes of one way / bandwidth over FLOPs of the rows / flops
    way, flops = size / 4 / 50e9, 6 * c.dim * c.ffn * n * 2 / 989e12
    assert abs(ep.dispatch_to_compute(c, 4, 989e12, 50e9, 2) - way / flops) < 1e-12 * way / flops


def test_node_limit_bounds_what_crosses():
    c, x = config(experts=32, top_k=8), states(200, 32)
    before = None
    for most in (0, 4, 2, 1):
        limited = dataclasses.replace(c, nodes=4, most_nodes=most)
        experts = ep.route(x, torch.zeros(32), limited)[1]
        nodes = [{e // 8 for e in row} for row in experts.tolist()]
        assert max(map(len, nodes)) <= (most or 4)
        each, once = ep.copies_to_nodes(experts, limited, home=0)
        assert each == sum(e // 8 != 0 for row in experts.tolist() for e in row)
        assert once == sum(len(node - {0}) for node in nodes) <= each
        assert before is None or once <= before
        before = once


def test_nothing_but_splits_looks_at_a_value():
    from torch._subclasses.fake_tensor import FakeTensorMode

    c = config(balance=0.1, z=0.1, shared=1, score="sigmoid", nodes=2, most_nodes=1, bias_rate=0.1)
    for dtype, options in ((BF16, {}), (F64, dict(capacity=1.0))):
        seen, numbers = [], [[[12] * 4]] * 2
        with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ep, "splits", lambda counts: seen.append(counts.shape) or numbers)
            model = ep.build_moe(dataclasses.replace(c, dim=32, ffn=32, **options), dtype=dtype)
            tokens = torch.zeros(4, 6, dtype=torch.int64)
            ep.begin_step(model, 24)
            model.loss(model(tokens), tokens).backward()
            ep.end_step(model)
            assert all(p.grad.shape == p.shape for p in model.parameters())
        assert seen == [(2, 1, 4)] * 2


# --- Capacity and padding -----------------------------------------------------------------------


def test_capacity_drops_the_last_of_an_expert():
    """4 tokens, 1 expert each of 2, capacity 1.0: 2 rows each; the third and fourth are dropped."""
    c = config(experts=2, top_k=1, renormalise=False, capacity=1.0)
    moe = layer(c)
    moe.router.bias[0] = 10
    x = states(1, 4, 16)
    out = moe(x)
    assert not out[0, 2:].any() and out[0, :2].any(-1).all()  # the residual passes them by
    moe.config = dataclasses.replace(c, capacity=0.0)
    assert dp.relative_error(moe(x)[0, :2], out[0, :2]) < 1e-12
    experts = torch.tensor([0, 1, 0, 0, 1, 0, 2, 1])
    assert ep.within_capacity(experts, 2, 2).tolist() == [0, 1, 0, 2, 1, 2, 2, 2]


def test_capacity_large_enough_drops_nothing():
    free, tight = layer(config()), layer(config(capacity=2.0))  # E/k: room for all at one expert
    x = states(2, 5, 16)
    assert torch.equal(free(x), tight(x))


def test_padding_takes_no_place():
    """Two of padding before two real tokens of one expert with two places."""
    c = config(experts=2, top_k=1, renormalise=False, capacity=1.0, balance=1.0, z=1.0)
    moe, x = layer(c), states(1, 4, 16).requires_grad_()
    moe.router.bias[0] = 10
    moe.N, moe.valid = 2, torch.tensor([[False, False, True, True]])
    out = moe(x)
    assert not out[0, :2].any() and out[0, 2:].any(-1).all()
    out.sum().backward()
    assert not x.grad[0, :2].any() and x.grad[0, 2:].any(-1).all()
    assert moe.load.tolist() == [2, 0]
    alone = layer(dataclasses.replace(c, capacity=2.0))  # half as many tokens: the same two places
    alone.router.bias[0], alone.N = 10, 2
    alone(x.detach()[:, 2:]).sum().backward()
    grads = ({n: p.grad for n, p in m.named_parameters()} for m in (moe, alone))
    assert dp.worst_error(*grads)[0] < 1e-12
    moe.valid = torch.zeros(1, 4, dtype=torch.bool)  # nothing but padding
    assert not moe(x).any()


def capacity_worker(spread):
    """4 tokens of one expert on rank 0 and 4 of the other on rank 1, or 2 and 2 of each on both."""
    c = config(experts=2, top_k=1, renormalise=False, capacity=1.0)
    moe = layer(c)
    x = states(1, 200, 16)
    chosen = ep.route(moe.router(x), moe.router.bias, c)[1].flatten()
    first, second = (x[:, chosen == e][:, :4] for e in (0, 1))
    ep.cut_experts(moe, dist.group.WORLD)
    halves = [torch.cat((a, b), 1) for a, b in zip(first.chunk(2, 1), second.chunk(2, 1))]
    mine = (halves if spread else [first, second])[dist.get_rank()]
    return int((~moe(mine).any(-1)).sum())


def test_what_is_dropped_depends_on_the_layout():
    assert dp.launch(capacity_worker, 2, True, timeout=20) == [0, 0]
    assert dp.launch(capacity_worker, 2, False, timeout=20) == [2, 2]


# --- Auxiliary losses ---------------------------------------------------------------------------


def auxiliary_by_hand(c, logits, valid, N):
    """Sequence by sequence, expert by expert, from the formula. logits (B, T, E)."""
    total = 0
    for sequence, real in zip(logits, valid):
        sequence = sequence[real]
        scores = sequence.softmax(-1) if c.score == "softmax" else sequence.sigmoid()
        p = scores / scores.sum(-1, keepdim=True)
        chosen = scores.sort(-1, True).indices[:, : c.top_k]
        for e in range(c.experts):
            f = c.experts * int((chosen == e).sum()) / (c.top_k * len(sequence))
            total = total + c.balance * f * p[:, e].sum() / N
        total = total + c.z * sequence.logsumexp(-1).square().sum() / N
    return total


AUX = [dict(balance=1.0), dict(z=1.0), dict(balance=0.3, z=0.7, score="sigmoid", top_k=3)]


@pytest.mark.parametrize("case", range(len(AUX)))
def test_auxiliary_losses_are_the_formulas(case):
    c = config(**AUX[case])
    x, valid = states(3, 7, 16), torch.arange(7) < torch.tensor([[7], [4], [1]])
    moe, reference = layer(c), layer(c)
    moe.N, moe.valid = 12, valid
    (moe(x) * 0).sum().backward()
    loss = auxiliary_by_hand(c, x @ reference.router.weight.T, valid, 12)
    loss.backward()
    assert abs(moe.loss - loss.item()) < 1e-12
    assert dp.relative_error(moe.router.weight.grad, reference.router.weight.grad) < 1e-12
    assert not moe.experts.gate_proj.grad.any()


def test_value_of_a_perfect_balance():
    """1 whatever k, as f divides by k too; E/k if all goes to the same k with certainty."""
    for k, score in itertools.product((1, 2, 4), ("softmax", "sigmoid")):
        c = config(experts=8, top_k=k, balance=1.0, score=score)
        moe = layer(c)
        moe.N = 8
        logits = torch.zeros(1, 8, 8, dtype=F64)
        probabilities = torch.full((1, 8, 8), 1 / 8, dtype=F64)
        even = torch.full((1, 8), k)
        assert abs(ep.auxiliary_loss(moe, logits, probabilities, even) - 1) < 1e-12
        crowded, sure = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, 8, dtype=F64)
        crowded[:, :k], sure[..., :k] = 8, 1 / k
        assert abs(ep.auxiliary_loss(moe, logits, sure, crowded) - 8 / k) < 1e-12


def test_auxiliary_losses_need_n():
    moe = layer(config(balance=1.0))
    with pytest.raises(RuntimeError, match="begin_step"):
        moe(states(1, 2, 16))
    with torch.no_grad():
        moe(states(1, 2, 16))  # nothing to learn, nothing to divide


def auxiliary_worker(cases):
    """Auxiliary losses alone, the batch cut over micro-batches, dp and the sequence (tp)."""
    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    by_degree = {degree: ep.make_ep_groups(degree) for degree in {1, world}}
    for options, cut_sequence, micro, degree, mode in cases:
        c, groups = config(**options), by_degree[degree]
        x, N = states(4, 8, 16), 32
        reference = layer(c)
        auxiliary_by_hand(c, x @ reference.router.weight.T, torch.ones(4, 8) > 0, N).backward()
        moe = layer(c)
        ep.cut_experts(moe, groups["ep"])
        moe.N, moe.sequence_group = N, groups["all"] if cut_sequence else None
        mine = x.chunk(world, 1 if cut_sequence else 0)[rank]
        for part in mine.split(micro):
            part = part.requires_grad_()
            if mode == "full":
                out = torch.utils.checkpoint.checkpoint(moe, part, use_reentrant=False)
            else:
                out = moe(part)
            (out * 0).sum().backward()
        for tensor in (moe.router.weight.grad, moe.load):
            dist.all_reduce(tensor)
        error = dp.relative_error(moe.router.weight.grad, reference.router.weight.grad)
        assert moe.load.sum() == 4 * 8 * c.top_k
        results.append(error)
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_auxiliary_gradients_do_not_depend_on_the_split(world):
    cases = [
        (options, cut, micro, degree, mode)
        for options in AUX
        for cut, micro in ((False, 1), (False, 4 // world), (True, 1), (True, 4))
        for degree, mode in ((world, "none"), (1, "full"))
    ]
    for errors in dp.launch(auxiliary_worker, world, cases, timeout=30):
        assert max(errors) < 1e-12 and len(errors) == 24


# --- The bias -----------------------------------------------------------------------------------


def bias_worker(mode, micro):
    """Three steps of SGD with the bias on; the whole run, as one device would have it."""
    rank, world, c = dist.get_rank(), dist.get_world_size(), config(bias_rate=0.05, balance=0.01)
    groups, history = ep.make_ep_groups(world), []
    model = ep.build_moe(c, dtype=F64, group=groups["ep"])
    ep.recompute_moe(model, mode)
    for step in range(3):
        tokens, labels = batch(c, 4, 6, seed=step)
        ep.begin_step(model, 24)
        numbers = torch.arange(4).chunk(world)[rank]
        for part in numbers.split(micro):
            (model.loss(model(tokens[part]), labels[part]) / 24).backward()
        ep.sum_moe_gradients(model, groups["all"], groups["edp"])
        load, loss = ep.end_step(model, groups["all"])
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        biases = [moe.router.bias.clone() for moe in ep.moe_layers(model)]
        history.append((load, loss, torch.stack(biases)))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return history


def test_bias_and_logged_numbers_do_not_depend_on_layout_or_recomputation():
    (reference,) = dp.launch(bias_worker, 1, "none", 4, timeout=20)
    bias = torch.zeros(2, 4)
    for load, _, now in reference:
        load = load.double()
        bias = bias + 0.05 * (load.mean(1, keepdim=True) - load).sign()
        assert torch.allclose(now.double(), bias.double(), atol=1e-6) and now.any()
    for world, mode, micro in ((1, "full", 2), (2, "full", 1), (4, "selective", 1)):
        for history in dp.launch(bias_worker, world, mode, micro, timeout=20):
            for (load, loss, bias), (load1, loss1, bias1) in zip(history, reference, strict=True):
                assert torch.equal(load, load1) and torch.equal(bias, bias1)
                assert abs(loss - loss1) < 1e-12 and loss > 0


def test_bias_is_saved_with_the_model_in_fp32():
    model = ep.build_moe(config(bias_rate=0.1), dtype=BF16)
    before = [moe.router.bias for moe in ep.moe_layers(model)]
    for step in range(5):
        tokens, labels = batch(model.config, seed=step)
        model.loss(model(tokens), labels).backward()
        ep.end_step(model)
    saved = model.state_dict()
    other = ep.build_moe(config(), seed=1, dtype=BF16)
    other.load_state_dict(saved)
    for old, moe, loaded in zip(before, ep.moe_layers(model), ep.moe_layers(other)):
        assert moe.router.bias is old and old.dtype == F32 and old.abs().max() > 0.05
        assert torch.equal(loaded.router.bias, old)
    assert not any("load" in name for name in saved)
    assert torch.equal(model(tokens), other(tokens))


def test_without_a_rate_the_bias_stays_and_without_layers_nothing_happens():
    model = ep.build_moe(config())
    tokens, labels = batch(model.config)
    model.loss(model(tokens), labels).backward()
    load, _ = ep.end_step(model)
    assert load.sum() == 2 * tokens.numel() * 2
    assert not any(moe.router.bias.any() for moe in ep.moe_layers(model))
    assert ep.end_step(memory.build(memory.PRESETS["tiny"])) == (None, 0.0)
    assert not ep.end_step(model)[0].any()  # it started new sums


def test_evaluation_counts_nothing():
    moe = layer(config())
    with torch.no_grad():
        moe(states(2, 3, 16))
    assert not moe.load.any()


def skewed_worker(seeds, rates, steps, last):
    """Each rank trains tiny-moe with its own rate of the bias; [(loads, mean loss)] by seed."""
    c = dataclasses.replace(ep.PRESETS["tiny-moe"], bias_rate=rates[dist.get_rank()])
    runs = [ep.train_skewed(c, steps, 8, 64, seed) for seed in seeds]
    return [(loads, losses[-last:].mean().item()) for loads, losses in runs]


@pytest.mark.full
def test_training_from_a_skewed_router():
    """tiny-moe on text: with the bias all layers' load becomes even, without it none's does.

    The even load costs first: an expert sees k/E of the tokens, the two favourites saw all. With
    the bias the loss is behind at step 300 and level at 500. Seeds differ by a percent, so from
    two of them no finer "no worse" can be told.
    """
    last = 50
    without, biased = dp.launch(skewed_worker, 2, (1, 2), (0.0, 0.01), 500, last, timeout=600)
    for (loads, _), (biased_loads, _) in zip(without, biased, strict=True):
        for run in (loads, biased_loads):
            assert ep.imbalance(run[:5]) > 2
        assert ep.imbalance(biased_loads[-last:]) <= 1.2  # of the worst layer
        for number in range(4):
            assert ep.imbalance(loads[-last:, [number]]) > 1.2
    mean, biased_mean = (sum(loss for _, loss in runs) / 2 for runs in (without, biased))
    assert biased_mean < 1.01 * mean
