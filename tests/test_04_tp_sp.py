"""04: every cut, both forms and every recomputation against one device; bytes against formulas."""

import dataclasses
import itertools
import time
from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

memory = import_module("01_memory")
dp = import_module("02_dp")
tp = import_module("04_tp_sp")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CONFIG = memory.Config(vocab=61, dim=20, layers=2, heads=12, kv_heads=12, ffn=24, head_dim=4)


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def make_groups(kv_heads):
    group = dist.new_group(range(dist.get_world_size()), group_desc="tp")
    sharing = tp.sharing_group(
        group, kv_heads, lambda ranks: dist.new_group(ranks, group_desc="sharing")
    )
    return group, sharing


def batch(c, B=2, T=12, seed=0):
    """Random tokens and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(c.vocab, (2, B, T), generator=generator).unbind()
    return tokens, torch.where(torch.rand(B, T, generator=generator) < 0.3, -100, labels)


def dense_run(c, tokens, labels, dtype=F64, documents=None):
    model = memory.build(c, dtype=dtype)
    loss = model.loss(model(tokens, documents=documents), labels)
    loss.backward()
    return loss.detach(), dp.gradients(model)


def tp_run(c, tokens, labels, group, sharing, sequence, mode="none", dtype=F64, documents=None):
    model = memory.build(c, dtype=dtype)
    memory.recompute(model, mode)
    tp.cut(model, group, sequence)
    loss = model.loss(model(tokens, documents=documents), labels)
    loss.backward()
    tp.sum_partial_gradients(model, group, sharing, sequence)
    return loss.detach(), dp.gradients(model)


def own(gradients, c, group):
    return {
        name: tp.own_part(name, g, group.rank(), group.size(), c.kv_heads)
        for name, g in gradients.items()
    }


def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- Parity -----------------------------------------------------------------------------------

CASES = {  # by tp: what is different from CONFIG
    1: [dict(), dict(kv_heads=2, tied=True)],
    2: [dict(kv_heads=6), dict(kv_heads=2, tied=True), dict(kv_heads=1), dict(vocab=60)],
    3: [dict(), dict(kv_heads=3), dict(kv_heads=1, tied=True), dict(vocab=4)],
    4: [
        dict(kv_heads=4),
        dict(kv_heads=2),  # two ranks share a head
        dict(kv_heads=1, tied=True),  # all four do
        dict(vocab=10),  # the last rank has one word and two columns of padding
        dict(vocab=5),  # and here nothing but padding
    ],
}


def parity_worker(cases):
    results = []
    for changes, sequence in itertools.product(cases, (False, True)):
        c = config(**changes)
        group, sharing = make_groups(c.kv_heads)
        tokens, labels = batch(c)
        expected_loss, expected = dense_run(c, tokens, labels)
        loss, gradients = tp_run(c, tokens, labels, group, sharing, sequence)
        error, name = dp.worst_error(gradients, own(expected, c, group))
        error = max(error, dp.relative_error(loss, expected_loss))
        results.append((error, f"{changes} {sequence} {name}", len(gradients), group.size()))
    return results


@pytest.mark.parametrize("n", CASES)
def test_parity_with_one_device(n):
    for results in dp.launch(parity_worker, n, CASES[n], timeout=20):
        assert len(results) == 2 * len(CASES[n])
        for error, where, compared, size in results:
            assert error < 1e-11, where
            assert compared in (20, 21) and size == n  # 9 in each layer, norm, tables


def recompute_worker():
    c, results = config(kv_heads=1), []
    group, sharing = make_groups(c.kv_heads)
    tokens, labels = batch(c)
    documents = torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)
    for sequence, words in itertools.product((False, True), (None, documents)):
        loss, expected = dense_run(c, tokens, labels, documents=words)
        plain = None
        for mode in ("none", "selective", "full", "full:1"):
            run = tp_run(c, tokens, labels, group, sharing, sequence, mode, documents=words)
            plain = plain or run
            error, name = dp.worst_error(run[1], own(expected, c, group))
            same = all(torch.equal(g, plain[1][name]) for name, g in run[1].items())
            results.append((error, same and torch.equal(run[0], plain[0]), mode, name))
    return results


def test_recomputation_gives_the_same_bits():
    for results in dp.launch(recompute_worker, 2, timeout=20):
        assert len(results) == 16
        for error, same, mode, name in results:
            assert error < 1e-11 and same, (mode, name)


def stage_worker():
    c, results = config(kv_heads=4), []
    group, _ = make_groups(c.kv_heads)
    rank, n, positions = group.rank(), group.size(), torch.arange(12)
    whole = torch.randn(2, 12, c.dim, dtype=F64, generator=torch.Generator().manual_seed(3))
    for sequence in (False, True):
        models = [memory.build(c, dtype=F64) for _ in range(2)]
        for model in models:
            model.embed_tokens = model.lm_head = model.norm = None
        tp.cut(models[1], group, sequence)
        outs = []
        for model, x in zip(models, (whole, whole.chunk(n, 1)[rank] if sequence else whole)):
            x = x.clone().requires_grad_()
            y = model(x, positions)
            y.square().sum().backward()
            outs.append((y.detach(), x.grad))
        for dense, ours in zip(*outs):
            dense = dense.chunk(n, 1)[rank] if sequence else dense
            results.append(dp.relative_error(ours, dense))
    return results


@pytest.mark.parametrize("n", [2, 4])
def test_a_stage_and_the_gradient_of_its_input(n):
    for results in dp.launch(stage_worker, n, timeout=20):
        assert len(results) == 4 and max(results) < 1e-11


def sgd_worker():
    c, results = config(kv_heads=2), []
    group, sharing = make_groups(c.kv_heads)
    for sequence in (False, True):
        dense, model = memory.build(c, dtype=F64), memory.build(c, dtype=F64)
        tp.cut(model, group, sequence)
        for step in range(10):
            tokens, labels = batch(c, seed=step)
            for m in (dense, model):
                m.zero_grad()
                (m.loss(m(tokens), labels) / (labels != -100).sum()).backward()
            tp.sum_partial_gradients(model, group, sharing, sequence)
            with torch.no_grad():
                for p in [*dense.parameters(), *model.parameters()]:
                    p -= 0.5 * p.grad
        weights = {name: p.detach() for name, p in model.named_parameters()}
        expected = own({name: p.detach() for name, p in dense.named_parameters()}, c, group)
        error, _ = dp.worst_error(weights, expected)
        moved = (dense.norm.weight - 1).abs().max().item()
        mine = {
            name: w.tolist()
            for name, w in weights.items()
            if tp.cut_dimension(name) is None or "k_proj" in name or "v_proj" in name
        }
        results.append((error, moved, mine))
    return results


def test_ten_sgd_steps_leave_replicas_identical_bit_for_bit():
    ranks = dp.launch(sgd_worker, 4, timeout=20)
    for form in zip(*ranks):
        for rank, (error, moved, mine) in enumerate(form):
            assert error < 1e-10 and moved > 1e-3
            assert len(mine) == 9  # 5 norms, k and v of two layers
            for name, weight in mine.items():
                shared = "layernorm" in name or name == "norm.weight" or rank % 2 == 1
                if shared:  # ranks 0, 1 hold the first kv head, 2, 3 the second
                    before = form[0 if "norm" in name else rank - 1]
                    assert weight == before[2][name], name
        assert form[0][2]["layers.0.self_attn.k_proj.weight"] != (
            form[2][2]["layers.0.self_attn.k_proj.weight"]
        )


def bf16_worker():
    c = config(kv_heads=4)
    group, sharing = make_groups(c.kv_heads)
    tokens, labels = batch(c)
    wide = memory.build(c, dtype=F64)  # from the same rounded weights
    wide.load_state_dict(memory.build(c, dtype=BF16).state_dict())
    loss = wide.loss(wide(tokens), labels)
    loss.backward()
    exact = own(dp.gradients(wide), c, group)
    allowed, _ = dp.worst_error(own(dense_run(c, tokens, labels, BF16)[1], c, group), exact)
    errors = [
        dp.worst_error(tp_run(c, tokens, labels, group, sharing, s, "none", BF16)[1], exact)
        for s in (False, True)
    ]
    return errors, max(everyone(allowed))


def test_bf16_is_as_good_as_on_one_device():
    for errors, allowed in dp.launch(bf16_worker, 2, timeout=20):
        assert len(errors) == 2 and 1e-4 < allowed < 0.1
        assert all(error <= 1.5 * allowed for error, _ in errors), (errors, allowed)


# --- What a linear keeps ----------------------------------------------------------------------


def in_flight_worker():
    """Gradients of two micro-batches under several orders, and what the caches still hold."""
    c, results = config(kv_heads=4), {}
    group, _ = make_groups(c.kv_heads)
    batches = [batch(c, seed=s) for s in (1, 2)]

    def run(order, when=None, mode="none", frozen=()):
        model = memory.build(c, dtype=F64)
        memory.recompute(model, mode)
        tp.cut(model, group)
        later = memory.Later() if when else None
        linears = {n: m for n, m in model.named_modules() if isinstance(m, memory.Linear)}
        for name, part in linears.items():
            part.when = later or part.when
            part.weight.requires_grad_(not name.endswith(frozen))
        losses = []
        with dp.Wire() as wire:
            for action, i in order:
                if action == "f":
                    losses.append(model.loss(model(batches[i][0]), batches[i][1]))
                elif action == "b":
                    losses[i].backward()
                while when == "each" and later.jobs:
                    later.run()
            if when == "shuffled":  # jobs of both micro-batches in turn
                half = len(later.jobs) // 2
                jobs = list(later.jobs)
                later.jobs.clear()
                later.jobs.extend(j for pair in zip(jobs[:half], jobs[half:]) for j in pair)
            while later and later.jobs:
                later.run()
        entries = sum(len(m.what.made) for m in linears.values() if hasattr(m.what, "made"))
        assert entries == 0, "a gathered sequence was left behind"
        return dp.gradients(model), wire.calls["tp", "all_gather"]

    def compare(name, *args, **kwargs):
        got, calls = run(*args, **kwargs)
        same = {k: g is not None for k, g in got.items()}
        error = max(
            dp.relative_error(g, plain[k]) for k, g in got.items() if g is not None
        )
        results[name] = error, calls, [k for k, present in same.items() if not present]

    f1b1 = [("f", 0), ("b", 0), ("f", 1), ("b", 1)]
    flight = [("f", 0), ("f", 1), ("b", 0), ("b", 1)]
    plain, results["calls"] = run(f1b1)
    compare("two in flight", flight)
    compare("last first", [("f", 0), ("f", 1), ("b", 1), ("b", 0)])
    for mode in ("selective", "full"):
        compare(mode, flight, mode=mode)
        compare(f"deferred, {mode}", flight, when="end", mode=mode)
    compare("deferred", flight, when="end")
    compare("deferred, at once", flight, when="each")
    compare("deferred, shuffled", flight, when="shuffled")
    compare("frozen q", flight, frozen=("q_proj",))
    compare("frozen k, v, gate", flight, when="end", frozen=("k_proj", "v_proj", "gate_proj"))
    compare("frozen first matrices", flight,
            frozen=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))  # fmt: skip
    return results


def test_shards_are_gathered_once_for_all_users_in_any_order():
    for results in dp.launch(in_flight_worker, 2, timeout=20):
        calls = results.pop("calls")
        pairs = 2 * CONFIG.layers + 1
        assert calls == 2 * 3 * pairs  # two micro-batches: forward, backward, weight gradients
        assert len(results) == 12
        for name, (error, sent, missing) in results.items():
            assert error < 1e-12, name
            if name == "frozen first matrices":
                sent += 2 * 2 * CONFIG.layers  # nothing is gathered again, except for the head
            if name.endswith("full"):
                sent -= 2 * 2 * CONFIG.layers  # the recomputed forward enters once more
            assert sent == calls, name
            assert len(missing) == 2 * {"frozen q": 1, "frozen k, v, gate": 3,
                                        "frozen first matrices": 5}.get(name, 0)  # fmt: skip


def frozen_between_worker():
    c = config(kv_heads=4)
    group, _ = make_groups(c.kv_heads)
    tokens, labels = batch(c)
    results = []
    for sequence in (False, True):
        models = [memory.build(c, dtype=F64) for _ in range(2)]
        tp.cut(models[1], group, sequence)
        for model in models:
            model.layers["1"].requires_grad_(False)
            model.loss(model(tokens), labels).backward()
        tp.sum_partial_gradients(models[1], group, None, sequence)
        dense, ours = (
            {k: g for k, g in dp.gradients(m).items() if not k.startswith("layers.1")}
            for m in models
        )
        untouched = all(p.grad is None for p in models[1].layers["1"].parameters())
        results.append((dp.worst_error(ours, own(dense, c, group)), len(ours), untouched))
    return results


def test_layers_below_a_frozen_one_get_their_gradients():
    for results in dp.launch(frozen_between_worker, 2, timeout=20):
        for (error, name), compared, untouched in results:
            assert error < 1e-11 and compared == 12 and untouched, name


# --- Bytes and calls --------------------------------------------------------------------------

SHAPES = [  # changes of the config, B, T, dtype, mode
    (dict(kv_heads=4), 2, 12, F64, "none"),
    (dict(kv_heads=4, layers=3), 1, 24, F32, "selective"),
    (dict(kv_heads=4, tied=True), 4, 12, BF16, "full"),
    (dict(kv_heads=1, layers=3), 2, 24, BF16, "full:1"),
    (dict(kv_heads=2, vocab=64), 3, 12, F32, "none"),
]


def bytes_worker():
    results = []
    for (changes, B, T, dtype, mode), sequence in itertools.product(SHAPES, (False, True)):
        c = config(**changes)
        group, sharing = make_groups(c.kv_heads)
        n, grad = group.size(), max(dtype.itemsize, 4)
        kinds = [memory.kind_of(mode, i) for i in range(c.layers)]
        model = memory.build(c, dtype=dtype)
        memory.recompute(model, mode)
        tp.cut(model, group, sequence)
        tokens, labels = (t.clone() for t in batch(c, B, T))
        live = memory.Live(batch=lambda: [tokens, labels], parameters=model.parameters)
        with dp.Wire() as wire, live:
            loss = model.loss(model(tokens), labels)
            live.settled()
            kept = live.bytes()
            loss.backward()
            tp.sum_partial_gradients(model, group, sharing, sequence)
        measured = {key: (wire.calls[key], wire.bytes[key]) for key in wire.calls}
        formula = {("tp", k): v for k, v in tp.sent(c, B, T, dtype, n, sequence, kinds).items()}
        norms, kv = tp.sent_partial(c, n, sequence, grad)
        formula["tp", "all_reduce"] = tuple(map(sum, zip(formula["tp", "all_reduce"], norms)))
        if sharing:
            formula["sharing", "all_reduce"] = kv
        parameters = tp.held_parameters(c, n) * dtype.itemsize
        activations = sum(tp.held(c, B, T, dtype, n, sequence, kinds).values())
        results.append((measured, formula, kept, parameters, activations))
    return results


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 4])
def test_bytes_and_calls_equal_the_functions(n):
    for results in dp.launch(bytes_worker, n, timeout=20):
        assert len(results) == 10
        for measured, formula, kept, parameters, activations in results:
            assert measured == formula and sum(calls for calls, _ in measured.values()) > 0
            assert kept["parameters"] == parameters
            assert kept["activations"] == activations


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_block_keeps_what_01_says_divided_by_tp(n, kind, dtype):
    c = config(kv_heads=12)
    ours = tp.held(c, 2, 12, dtype, n, True, [kind] * c.layers)["blocks"]
    assert ours * n == c.layers * memory.block_bytes(c, 24, dtype, kind)
    # without SP it is 01's formula for a block with fewer heads and a narrower FFN
    local = config(heads=12 // n, kv_heads=12 // n, ffn=24 // n)
    without = tp.held(c, 2, 12, dtype, n, False, [kind] * c.layers)["blocks"]
    assert without == c.layers * memory.block_bytes(local, 24, dtype, kind)
    one = tp.held(c, 2, 12, dtype, 1, True, [kind] * c.layers)
    assert one.pop("embedding") == 9 * 24
    assert one == memory.kept_bytes(c, 2, 12, dtype, kind)


def test_a_head_that_four_ranks_hold_is_kept_by_all_four():
    c = config(kv_heads=1)
    shared, cut = (tp.held(x, 2, 12, F32, 4)["blocks"] for x in (c, config(kv_heads=4)))
    assert shared == cut  # one head each, and not a quarter of one
    assert shared * 4 - 2 * memory.block_bytes(c, 24, F32, "none") == 2 * 24 * 3 * 2 * 4 * 4


def test_tp_and_sp_send_the_same_and_the_second_gather_a_quarter_more():
    c = config(dim=4096, layers=8)
    without = tp.sent(c, 1, 4096, BF16, 4, sequence=False)
    sp = tp.sent(c, 1, 4096, BF16, 4)
    activations = without["all_reduce"][1] - sp["all_reduce"][1]  # both have the loss's
    again = sp["all_gather"][1] / 3
    assert sp["all_gather"][1] + sp["reduce_scatter"][1] - again == activations
    assert again * 4 == activations
    # forward, a block: 2 all-reduce of 2·3/4 of B·T·D, or 2 gathers and 2 scatters of 3/4 of it
    fewer = tp.sent(config(dim=4096, layers=7), 1, 4096, BF16, 4, sequence=False)
    block = 4096 * 4096 * 2 * 3 // 4
    assert without["all_reduce"][1] - fewer["all_reduce"][1] == 2 * 2 * 2 * block
    assert tp.sent_partial(c, 4)[0] == (1, 17 * 4096 * 4 * 3 // 2)
    assert tp.sent_partial(c, 4, sequence=False) == ((0, 0), (0, 0))


def test_parameters_of_one_rank():
    for tied, kv, vocab in itertools.product((False, True), (12, 4, 1), (64, 61)):
        c = config(tied=tied, kv_heads=kv, vocab=vocab)
        assert tp.held_parameters(c, 1) == memory.parameter_count(c)
    c = memory.PRESETS["llama3-70b"]
    assert tp.held_parameters(c, 8) * 8 - memory.parameter_count(c) == 7 * 161 * c.dim  # norms


def test_when_transfers_can_hide():
    c = memory.PRESETS["llama3-70b"]
    h100 = dict(flops=989e12, element=2)
    inside = tp.transfer_to_compute(2 * c.ffn, 8, bandwidth=450e9, **h100)
    across = tp.transfer_to_compute(2 * c.ffn, 16, bandwidth=50e9, **h100)
    assert inside == pytest.approx(0.268, abs=1e-3) and across == pytest.approx(5.17, abs=1e-2)
    # from bytes and FLOPs themselves, at two numbers of tokens
    for n in (100, 8192):
        transfer = 7 / 8 * n * c.dim * 2 / 450e9
        products = 2 * n * c.dim * 2 * c.ffn / 8 / 989e12
        assert transfer / products == pytest.approx(inside)
    # the playbook's condition, (tp - 1) / (2 h) · F / B, lacks the bytes of an element
    assert tp.transfer_to_compute(c.dim, 8, 989e12, 450e9, 2) == pytest.approx(
        2 * 7 / (2 * c.dim) * 989e12 / 450e9
    )


# --- The operations ---------------------------------------------------------------------------


def operations_worker():
    group, _ = make_groups(1)
    n, rank = group.size(), group.rank()
    whole = torch.ones(2, 3 * n, 5, dtype=F64)
    part = torch.full((2, 3, 5), 2.0**rank, dtype=F64, requires_grad=True)
    everything = float(2**n - 1)  # the sum of 2^rank names the ranks that took part
    out = {}

    y = tp.enter(part, group)
    out["gather"] = y.is_contiguous() and all(
        (y[:, 3 * r : 3 * r + 3] == 2.0**r).all() for r in range(n)
    )
    (y * 2.0**rank).sum().backward()
    out["gather backward"] = bool((part.grad == everything).all())

    x = (whole * 2.0**rank).requires_grad_()
    y = tp.leave(x, group)
    out["scatter"] = y.shape == part.shape and bool((y == everything).all())
    (y * 2.0**rank).sum().backward()
    out["scatter backward"] = all(
        (x.grad[:, 3 * r : 3 * r + 3] == 2.0**r).all() for r in range(n)
    )

    x = (whole * 2.0**rank).requires_grad_()
    before = x.detach().clone()
    y = tp.leave(x, group, sequence=False)
    out["sum"] = bool((y == everything).all()) and torch.equal(x.detach(), before)
    (y * 2.0**rank).sum().backward()
    out["sum backward"] = bool((x.grad == 2.0**rank).all())

    x = (whole * 3).requires_grad_()
    y = tp.enter(x, group, sequence=False)
    out["copy"] = torch.equal(y, x)
    (y * 2.0**rank).sum().backward()
    out["copy backward"] = bool((x.grad == everything).all())

    strided = torch.ones(5, 3 * n, 2, dtype=F64).transpose(0, 2)  # not contiguous
    out["not contiguous"] = bool((tp.scattered(strided, group) == n).all()) and bool(
        (tp.gathered(strided, group) == 1).all()
    )
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_operation_sends_forward_and_backward_what_it_says(n):
    for out in dp.launch(operations_worker, n, timeout=20):
        assert len(out) == 9
        assert [name for name, right in out.items() if not right] == []


def bias_worker():
    group, _ = make_groups(1)
    n, rank, results = group.size(), group.rank(), []
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 6), (12, 6), (12,), (3, 12)
    x, w1, b1, w2 = (torch.randn(s, dtype=F64, generator=generator) for s in shapes)
    b2 = torch.tensor([100.0, 200.0, 300.0], dtype=F64)
    for sequence in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, w1, b1, w2, b2)]
        y = F.linear(F.linear(leaves[0], *leaves[1:3]).sin(), *leaves[3:])
        y.square().sum().backward()

        cut = [x.chunk(n, 1)[rank] if sequence else x, w1.chunk(n, 0)[rank], b1.chunk(n, 0)[rank],
               w2.chunk(n, 1)[rank], b2]  # fmt: skip
        ours = [t.clone().requires_grad_() for t in cut]
        h = tp.column_parallel(ours[0], ours[1], ours[2], group, sequence).sin()
        z = tp.row_parallel(h, ours[3], ours[4], group, sequence)
        z.square().sum().backward()
        if sequence:
            dist.all_reduce(ours[4].grad, group=group)  # partial, as the norms'

        gx, gw1, gb1, gw2, gb2 = (t.grad for t in leaves)
        expected = [gx.chunk(n, 1)[rank] if sequence else gx, gw1.chunk(n, 0)[rank],
                    gb1.chunk(n, 0)[rank], gw2.chunk(n, 1)[rank], gb2]  # fmt: skip
        y = y.chunk(n, 1)[rank] if sequence else y
        results.append(dp.relative_error(z.detach(), y.detach()))
        results += [dp.relative_error(a.grad, b) for a, b in zip(ours, expected)]
    return results


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_row_parallel_bias_is_added_once(n):
    for results in dp.launch(bias_worker, n, timeout=20):
        assert len(results) == 12 and max(results) < 1e-12


def powers_worker():
    c = config(kv_heads=2)
    group, sharing = make_groups(c.kv_heads)
    model = memory.build(c)
    tp.cut(model, group)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0 ** group.rank())
    tp.sum_partial_gradients(model, group, sharing)
    return {name: p.grad.aminmax() for name, p in model.named_parameters()}


def test_gradients_are_summed_over_the_ranks_that_hold_the_parameter():
    ranks = dp.launch(powers_worker, 4, timeout=20)
    kinds = Counter()
    for rank, grads in enumerate(ranks):
        for name, (low, high) in grads.items():
            expected = 2.0**rank
            if "norm" in name:
                expected = 15.0
            elif "k_proj" in name or "v_proj" in name:
                expected = 3.0 if rank < 2 else 12.0
            kinds[expected] += 1
            assert low == high == expected, name
    assert kinds[15.0] == 4 * 5 and kinds[3.0] == kinds[12.0] == 2 * 4


def forgetful_worker():
    c = config(kv_heads=4)
    group, _ = make_groups(c.kv_heads)
    tokens, labels = batch(c)
    expected_loss, expected = dense_run(c, tokens, labels)
    model = memory.build(c, dtype=F64)
    tp.cut(model, group)
    loss = model.loss(model(tokens), labels)
    loss.backward()  # and no sum_partial_gradients
    errors = {
        name: dp.relative_error(p.grad, own(expected, c, group)[name])
        for name, p in model.named_parameters()
    }
    wrong = {name for name, error in errors.items() if error > 1e-11}
    return dp.relative_error(loss.detach(), expected_loss), wrong, len(errors)


def test_without_the_sum_the_loss_is_right_and_all_norm_gradients_are_wrong():
    for loss_error, wrong, compared in dp.launch(forgetful_worker, 4, timeout=20):
        assert loss_error < 1e-13 and compared == 21
        assert len(wrong) == 2 * CONFIG.layers + 1 and all("norm" in name for name in wrong)


# --- The vocabulary ---------------------------------------------------------------------------


def loss_worker(V, dtype, scale, rows):
    """The loss of random logits beside torch's; what is in the padded columns must not matter."""
    group, _ = make_groups(1)
    n, rank = group.size(), group.rank()
    tp.VocabParallelCrossEntropy.ROWS = rows
    generator = torch.Generator().manual_seed(V)
    logits = (torch.randn(2, 7, V, dtype=F64, generator=generator) - 2) * scale
    logits = logits.to(dtype).double()
    labels = torch.randint(V, (2, 7), generator=generator)
    labels[0, :3] = -100
    labels[1, 0], labels[1, 1] = V - 1, 0
    x = logits.clone().requires_grad_()
    expected = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum")
    (3 * expected).backward()

    size = -(-V // n)
    first, padding = rank * size, size * n - V
    columns = min(max(V - first, 0), size)
    results = []
    for garbage in (0.0, 1e4, float("inf"), float("nan")):
        padded = F.pad(logits, (0, padding), value=garbage)[..., first : first + size]
        ours = padded.to(dtype).clone().requires_grad_()
        loss = tp.vocab_parallel_cross_entropy(ours, labels, first, columns, group)
        (3 * loss).backward()
        dense = F.pad(x.grad, (0, padding))[..., first : first + size]
        gap = (ours.grad.double() - dense).norm() / x.grad.norm()  # a part may be all zeros
        results.append((gap.item(), dp.relative_error(loss.detach(), expected.detach())))
    nothing = torch.full_like(labels, -100)
    ours = padded.to(dtype).clone().requires_grad_()
    loss = tp.vocab_parallel_cross_entropy(ours, nothing, first, columns, group)
    loss.backward()
    return results, loss.item(), ours.grad.abs().max().item()


@pytest.mark.parametrize(
    "V, n, dtype, scale, rows",
    [
        (12, 1, F64, 1, 1024),
        (11, 2, F64, 1, 1024),  # odd
        (10, 4, F64, 1, 3),  # the last rank: one word, two columns of padding; several pieces
        (5, 4, F64, 1, 1024),  # the last rank: padding alone
        (11, 3, F64, 1e4, 1024),  # exp of the logits is infinite
        (11, 2, F32, 1, 1024),
        (11, 2, BF16, 1, 4),
    ],
)
def test_vocab_parallel_loss(V, n, dtype, scale, rows):
    bound = {F64: 1e-13, F32: 1e-6, BF16: 5e-3}[dtype]
    for results, loss, gradient in dp.launch(loss_worker, n, V, dtype, scale, rows, timeout=20):
        assert len(results) == 4 and loss == gradient == 0
        for gap, error in results:
            assert gap < bound and error < min(bound, 1e-6)


def hidden_worker():
    """d(hidden) of head and loss, whole and in two pieces of the sequence, on every rank."""
    c = config(vocab=61, kv_heads=4)
    group, _ = make_groups(c.kv_heads)
    n, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 12, c.dim, dtype=F64, generator=generator)
    _, labels = batch(c)
    out = []
    for chunks in (1, 2):
        for cut, sequence in ((False, False), (True, False), (True, True)):
            model = memory.build(c, dtype=F64)
            if cut:
                tp.cut(model, group, sequence)
            scattered = n if cut and sequence else 1
            x = hidden.clone().requires_grad_()
            total = 0
            for piece, label in zip(x.chunk(chunks, 1), labels.chunk(chunks, 1)):
                mine = piece.chunk(scattered, 1)[rank % scattered]
                total = total + model.loss(model.lm_head(mine), label)
            total.backward()
            if scattered > 1:
                dist.all_reduce(x.grad, group=group)  # put the shards' gradients together
            out.append((x.grad, model.lm_head.weight.grad))
    whole = out[0]
    gaps = [dp.relative_error(dx, whole[0]) for dx, _ in out]
    for i in (1, 2, 4, 5):
        mine = tp.own_part("lm_head.weight", whole[1], rank, n, c.kv_heads)
        gaps.append(dp.relative_error(out[i][1], mine))
    return gaps, out[1][0].tolist()


def test_the_hidden_gradient_of_the_loss_is_summed_once_in_any_pieces():
    ranks = dp.launch(hidden_worker, 2, timeout=20)
    for gaps, dx in ranks:
        assert len(gaps) == 10 and max(gaps) < 1e-12
        assert dx == ranks[0][1]


# --- Cutting ----------------------------------------------------------------------------------


def names_worker():
    c = config(kv_heads=2, tied=True, vocab=10)
    group, _ = make_groups(c.kv_heads)
    dense, model = memory.build(c, dtype=F64), memory.build(c, dtype=F64)
    identities = {name: id(p) for name, p in model.named_parameters()}
    tp.cut(model, group)
    same = identities == {name: id(p) for name, p in model.named_parameters()}
    tied = model.lm_head.weight is model.embed_tokens.weight
    held = sum(p.numel() for p in model.parameters())
    storages = {p.untyped_storage() for p in model.parameters()}
    before = {name: p.shape for name, p in model.named_parameters()}
    # a loader gives each rank its own part, and nothing of the model changes but the values
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    state.update(own(dense.state_dict(), c, group))
    model.load_state_dict(state)
    unchanged = before == {name: p.shape for name, p in model.named_parameters()}
    tokens, _ = batch(c)
    logits = model(tokens)[..., : min(max(10 - 3 * group.rank(), 0), 3)].detach()
    parts = everyone(logits.tolist())
    whole = torch.cat([torch.tensor(part, dtype=F64) for part in parts if part], -1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = {name: p.detach() for name, p in dense.named_parameters()}
    rebuilt = {
        name: tp.whole_tensor(name, w, expected[name].shape, group, c.kv_heads)
        for name, w in weights.items()
    }
    boxes = []
    for name, w in weights.items():
        sides = tp.box(name, expected[name].shape, group.rank(), 4, c.kv_heads)
        theirs = expected[name][tuple(slice(*side) for side in sides)]
        boxes.append(torch.equal(theirs, w[tuple(slice(b - a) for a, b in sides)]))
    return dict(
        same=same,
        tied=tied,
        unchanged=unchanged,
        freed=sum(storage.nbytes() for storage in storages) == held * 8,
        count=held == tp.held_parameters(c, 4),
        logits=dp.relative_error(whole, dense(tokens).detach()) < 1e-12,
        initial=dp.worst_error(rebuilt, expected)[0] == 0 and len(rebuilt) == 20,
        boxes=all(boxes) and len(boxes) == 20,
    )


def test_names_identity_ties_and_values_survive_the_cut():
    for facts in dp.launch(names_worker, 4, timeout=20):
        assert len(facts) == 8 and [name for name, right in facts.items() if not right] == []


@pytest.mark.parametrize(
    "changes, n, words",
    [
        (dict(heads=8, kv_heads=2), 3, "does not divide heads 8"),
        (dict(heads=12, kv_heads=4), 3, "tp 3 and kv_heads 4: one has to divide the other"),
        (dict(heads=12, kv_heads=4, ffn=22), 4, "does not divide ffn 22"),
        (dict(heads=12, kv_heads=4), 3, "the nearest that fit are 2 and 4"),
        (dict(heads=4, kv_heads=2), 64, "the nearest that fit are 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_nearest(changes, n, words):
    assert words in "; ".join(tp.misfits(config(**changes), n))
    good = [t for t in range(1, 65) if not tp.misfits(config(**changes), t)]
    assert 1 in good and n not in good


def refused_worker():
    group, _ = make_groups(1)
    said = []
    with pytest.raises(ValueError) as error:
        tp.cut(memory.build(config(heads=5, kv_heads=5)), group)
    said.append(str(error.value))
    model = memory.build(config())
    tp.cut(model, group)
    tokens, labels = batch(CONFIG, T=7)
    with pytest.raises(RuntimeError) as error:
        model(tokens)
    said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        memory.recompute(model, "selective")
    said.append(str(error.value))
    return said


def test_what_does_not_fit_fails_at_once_on_all_ranks():
    for heads, length, late in dp.launch(refused_worker, 2, timeout=20):
        assert "tp 2 does not divide heads 5" in heads
        assert "7" in length  # 09 says it before the start, with the nearest lengths
        assert "call recompute before" in late


def test_every_parameter_is_in_the_table():
    for name, _ in memory.build(config()).named_parameters():
        tp.cut_dimension(name)
    with pytest.raises(ValueError, match="bias is in no row"):
        tp.cut_dimension("layers.0.self_attn.q_proj.bias")


# --- Overlap ----------------------------------------------------------------------------------


def async_worker():
    group, _ = make_groups(1)
    n, rank, results = group.size(), group.rank(), []
    for B, t in ((1, 1), (2, 3)):
        generator = torch.Generator().manual_seed(5)
        whole = torch.randn(B, n * t, 6, dtype=F64, generator=generator)
        shapes = (8, 6), (8, 6), (6, 8)
        weights = [torch.randn(s, dtype=F64, generator=generator) + rank for s in shapes]
        outs = []
        for overlapped in (False, True):
            leaves = [whole.chunk(n, 1)[rank].clone(), *(w.clone() for w in weights)]
            x, gate, up, down = (t.requires_grad_() for t in leaves)
            with dp.Wire() as wire:
                if overlapped:
                    g, u = tp.AsyncColumn.apply(group, x, gate, up)
                    y = tp.AsyncRow.apply(group, F.silu(g) * u, down)
                else:
                    y = tp.enter(x, group)
                    g, u = F.linear(y, gate), F.linear(y, up)
                    y = tp.row_parallel(F.silu(g) * u, down, None, group)
                (y * torch.arange(y.numel()).view_as(y)).sum().backward()
            sizes = Counter()
            for (_, kind), size in wire.bytes.items():
                sizes[kind] += size
            outs.append(([y.detach(), x.grad, gate.grad, up.grad, down.grad], sizes))
        results += [dp.relative_error(b, a) for a, b in zip(outs[0][0], outs[1][0])]
        # both ways as many bytes, and the ring gathers x again for the weight gradients
        plain, ring = (sum(sizes.values()) for _, sizes in outs)
        results.append(0.0 if ring == plain * 5 / 4 else 1.0)
    return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_async_pairs_equal_the_plain_pair(n):
    for results in dp.launch(async_worker, n, timeout=20):
        assert len(results) == 12 and max(results) < 1e-12


def hidden_share_worker():
    group, _ = make_groups(1)
    x = torch.randn(4, 1024, 1024)  # 16 MiB: long beside what a thread needs to wake up
    waits = []
    for work in (lambda piece: None, lambda piece: time.sleep(0.1)):
        tp.blocked(x, group, work)
        waits.append(min(tp.blocked(x, group, work) for _ in range(5)))
    return waits


def test_a_piece_arrives_while_the_other_is_worked_on():
    # Work that needs no core: what a GPU's products are to the network.
    ranks = dp.launch(hidden_share_worker, 2, timeout=20)
    assert sum(busy for _, busy in ranks) < 0.5 * sum(idle for idle, _ in ranks)
