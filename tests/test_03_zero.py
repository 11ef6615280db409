"""03: every stage of ZeRO computes what one process computes, and holds and sends what it says."""

from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

memory = import_module("01_memory")
dp = import_module("02_dp")
zero = import_module("03_zero")

STAGES = (0, 1, 2, 3)
T, BATCH, LR, DECAY = 7, 12, 0.05, 0.3
SIZES = {"vocab": 61, "dim": 15, "layers": 3, "heads": 2, "kv_heads": 1, "ffn": 19, "head_dim": 6}
CONFIG = memory.Config(**SIZES)  # units of 915, 1425 and 930: no even number of ranks divides them
TIED = memory.Config(**SIZES, tied=True)


def make(kind, matrices, vectors):
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=LR, fused=True)
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


make("adamw", [torch.zeros(1)], [])  # what torch.optim imports at its first use, before the forks


def sample(i):
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(CONFIG.vocab, (T + 1,), generator=generator)
    labels = tokens[1:].clone()
    labels[5 * i % T + 1 :] = dp.IGNORE  # uneven: between 1 and T valid tokens
    return tokens[:-1], labels


def sharded(model, units, stage, kind="adamw", cut=None, **more):
    """The model's optimizer, everything cut over the world, or over `cut` = (shard, same)."""
    world = dist.group.WORLD
    if cut is None:
        cut = (world, ()) if stage else (None, (world,))
    groups = {name: cut for name, _ in model.named_parameters()}
    more = {"on_finished": memory.on_finished} | more
    return zero.Optimizer(model, units, groups, stage, partial(make, kind), **more)


def gradients(optimizer):
    return optimizer.gathered([flat.grad for flat in optimizer.flats])


def weights(optimizer):
    return optimizer.gathered([flat.shard for flat in optimizer.flats])


def llama(config, frozen=(), dtype=torch.float64):
    model = memory.build(config, seed=1, dtype=dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def my_batches(step, m):
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = dp.my_samples(step, BATCH, rank, world)
    return dp.micro_batches(sample, numbers, BATCH // world // m, "cpu")


def step_of(model, optimizer, step, m, max_norm=0.5):
    """One training step; returns (whole gradients before clipping, loss)."""
    batches = my_batches(step, m)
    N = dp.count_valid(batches, dist.group.WORLD)
    optimizer.begin(len(batches))
    loss = dp.accumulate_gradients(model, batches, N)
    dist.all_reduce(loss)
    optimizer.sum_gradients()
    found = gradients(optimizer)
    optimizer.scale(zero.clip_factor(optimizer, max_norm, dist.group.WORLD))
    optimizer.step(LR)
    return found, loss.item()


def dense(config, steps, kind, frozen=(), max_norm=0.5):
    """One process, nothing of 03: gradients by name and step, weights, moments, losses."""
    model = llama(config, frozen)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = [p for p in named.values() if p.dim() < 2]
    optimizer = make(kind, [p for p in named.values() if p.dim() > 1], vectors)
    found, losses = {}, []
    for step in range(steps):
        pairs = [sample(i) for i in range(step * BATCH, (step + 1) * BATCH)]
        tokens, labels = (torch.stack(column) for column in zip(*pairs))
        loss = model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()
        loss.backward()
        losses.append(loss.item())
        found.update({(name, step): p.grad.clone() for name, p in named.items()})
        torch.nn.utils.clip_grad_norm_(named.values(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        (name, k): t for name, p in named.items() for k, t in optimizer.state[p].items() if t.dim()
    }
    return found, dict(model.named_parameters()), moments, losses


# --- Parity ------------------------------------------------------------------------------------


def parity(cases, steps, frozen, units=None):
    for config, stage, m, kind in cases:
        expected, final, _, losses = dense(config, steps, kind, frozen)
        model = llama(config, frozen)
        every = zero.llama_units(model)
        every = zero.merged(every, units) if units else every
        optimizer = sharded(model, every, stage, kind)
        ours = {}
        for step in range(steps):
            found, loss = step_of(model, optimizer, step, m)
            ours.update({(name, step): g for name, g in found.items()})
            assert abs(loss - losses[step]) < 1e-12
        case = stage, m, kind, config.tied
        assert len(expected) == steps * len([n for n in final if not n.startswith(frozen)])
        error, name = dp.worst_error(ours, expected)
        assert error < 1e-11, (case, name, error)
        error, name = dp.worst_error(weights(optimizer), final)
        assert error < 1e-10, (case, name, error)
        if frozen:
            start, now = dict(llama(config).named_parameters()), weights(optimizer)
            for name in (n for n in start if n.startswith(frozen)):
                assert torch.equal(now[name], start[name]), name
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            ours = optimizer.tensors()
            held = torch.tensor([sum(t.numel() for t in ours[k]) for k in ("moments", "gradients")])
            if stage:
                dist.all_reduce(held)  # padding, and at stage 1 every rank's own, at the most
            assert held[0] == (2 * trained if kind == "adamw" else 0), (stage, held, trained)
            ranks = dist.get_world_size() if stage == 1 else 1
            padding = len(optimizer.order) * (dist.get_world_size() - 1)  # at the most
            assert 0 <= held[1] - ranks * trained <= ranks * padding, (stage, held)
        if stage < 3:  # what the model computes with is what the shards say
            assert all(torch.equal(p, weights(optimizer)[n]) for n, p in model.named_parameters())
    return dist.get_world_size(), len(final)  # tied: the last case has one tensor less


CASES = [
    (CONFIG, 0, 3, "adamw"),
    (CONFIG, 1, 1, "sgd"),
    (CONFIG, 1, 3, "adamw"),
    (CONFIG, 2, 1, "adamw"),
    (CONFIG, 2, 3, "sgd"),
    (CONFIG, 3, 1, "sgd"),
    (CONFIG, 3, 3, "adamw"),
    (TIED, 1, 3, "sgd"),
    (TIED, 3, 3, "adamw"),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_stage_computes_what_one_process_computes(world):
    cases = CASES if world == 2 else [CASES[2], CASES[4], CASES[8]] if world < 4 else CASES[7:]
    for ranks, compared in dp.launch(parity, world, cases, 5, (), timeout=20):
        assert ranks == world and compared == 29


@pytest.mark.parametrize("units", [1, 2, 3])
def test_larger_units_compute_the_same(units):
    cases = [(CONFIG, stage, m, "adamw") for stage in (1, 2, 3) for m in (1, 3)]
    dp.launch(parity, 2, cases, 3, (), units, timeout=20)


FROZEN = ("embed_tokens", "layers.0.", "layers.2.mlp", "layers.1.input_layernorm")


def test_frozen_weights_stay_as_they_are_and_nothing_is_kept_for_them():
    cases = [(CONFIG, stage, 3, "adamw") for stage in STAGES]
    dp.launch(parity, 2, cases, 5, FROZEN, timeout=20)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("frozen", [(), FROZEN, ("layers.1.",), ("lm_head", "norm")])
def test_every_stage_in_every_combination(world, frozen):
    cases = [
        (config, stage, m, kind)
        for config in ((CONFIG, TIED) if not frozen else (CONFIG,))
        for stage in STAGES
        for m in (1, 3)
        for kind in ("sgd", "adamw")
    ]
    dp.launch(parity, world, cases, 5, frozen, timeout=20)


class Toy(nn.Module):
    """Units of odd sizes, of memory.Linear, so that weight gradients can be deferred."""

    def __init__(self, sizes=((5, 3), (3, 7), (7, 1)), dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(memory.Linear(i, o) for i, o in sizes)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(o)) for _, o in sizes)
        for part in self.parts:
            nn.init.normal_(part.weight)
        self.to(dtype)

    def forward(self, x):
        for unit in self.units():
            x = unit[0](x)
        return x

    def units(self):
        if not hasattr(self, "together"):
            self.together = nn.ModuleList(Scaled(p, s) for p, s in zip(self.parts, self.scales))
        return [[unit] for unit in self.together]


class Scaled(nn.Module):
    def __init__(self, part, scale):
        super().__init__()
        self.part, self.scale = part, scale

    def forward(self, x):
        return self.part(x) * self.scale


def toy(**more):
    model = Toy(**more)
    model.units()
    return model


def orthogonal(stage, m, later):
    """Each micro-batch of each rank gives gradient to a column of its own, and nobody else does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = toy(sizes=((world * m, 5),))
    jobs = memory.Later()
    if later:
        model.parts[0].when = jobs
    optimizer = sharded(model, model.units(), stage, "sgd")
    for step in range(2):  # twice: nothing may be left of the first
        optimizer.begin(m)
        with dp.Wire() as wire:
            for j in range(m):
                x = torch.zeros(1, world * m, dtype=torch.float64)
                x[0, rank * m + j] = 1.0
                model(x).sum().backward()
                if later == "each":
                    jobs.run()
            while jobs.jobs:
                jobs.run()
            optimizer.sum_gradients()
        found = gradients(optimizer)
        weight = found["parts.0.weight"]  # (5, world·m), every column the scale
        assert torch.equal(weight, model.scales[0].detach()[:, None].expand_as(weight)), weight
        optimizer.step(0.0)
        reductions = 0 if stage == 0 else 1 if stage == 1 or later == "end" else m
        calls = {name: count for (_, name), count in wire.calls.items() if name != "all_gather"}
        sends = reductions * (world - 1)
        assert calls == ({"send": sends} if stage else {"all_reduce": 1}), calls


def all_orthogonal():
    if dist.get_world_size() == 1:
        return
    for stage in STAGES[:3]:  # at stage 3 the assertion would read a parameter that isn't there
        for m in (1, 3):
            for later in (None, "each", "end"):
                orthogonal(stage, m, later)
    return dist.get_world_size()


def test_no_micro_batch_is_lost_or_counted_twice_also_when_deferred():
    """B37. The number of reductions: once a step at stage 1, at 2 once for each micro-batch."""
    assert dp.launch(all_orthogonal, 3, timeout=20) == [3, 3, 3]


def deferred(stage):
    """Zero bubble's order: all input gradients first, the weight gradients of the Llama after."""
    expected, final, *_ = dense(CONFIG, 2, "sgd")
    model, later = llama(CONFIG), memory.Later()
    for module in model.modules():
        if isinstance(module, memory.Linear):
            module.when = later
    optimizer = sharded(model, zero.llama_units(model), stage, "sgd")
    ours, count = {}, 0
    for step in range(2):
        batches = my_batches(step, 3)
        N = dp.count_valid(batches, dist.group.WORLD)
        optimizer.begin(len(batches))
        for i, (tokens, labels) in enumerate(batches):
            (model.loss(model(tokens), labels) / N).backward()
            for _ in range(10 * i):  # some of them now, others with the next micro-batch
                later.run()
                count += 1
        while later.jobs:
            later.run()
            count += 1
        optimizer.sum_gradients()
        ours.update({(name, step): g for name, g in gradients(optimizer).items()})
        optimizer.scale(zero.clip_factor(optimizer, 0.5, dist.group.WORLD))
        optimizer.step(LR)
    assert count == 2 * 3 * (7 * CONFIG.layers + 1)
    error, name = dp.worst_error(ours, expected)
    assert error < 1e-11, (stage, name, error)
    error, name = dp.worst_error(weights(optimizer), final)
    assert error < 1e-11, (stage, name, error)
    return len(expected)


def all_deferred():
    return [deferred(stage) for stage in STAGES]


def test_deferred_weight_gradients_are_reduced_when_they_are_finished():
    assert dp.launch(all_deferred, 2, timeout=20)[0] == [2 * 30] * 4


# --- The cut -----------------------------------------------------------------------------------


def test_the_padded_length_is_the_next_multiple():
    """B34"""
    assert [zero.padded(n, 8) for n in (19, 16, 1, 0)] == [24, 16, 8, 0]
    assert [zero.padded(57, n) for n in (1, 2, 3, 4, 5)] == [57, 58, 57, 60, 60]


def one_cut(stage):
    """Parameter, gradient, master and moments cover the same; padding is on several ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = nn.Parameter(torch.arange(12, dtype=torch.bfloat16).view(3, 4))
    q = nn.Parameter(torch.arange(100, 103, dtype=torch.bfloat16))
    model = nn.Module()
    model.w, model.b = p, q
    optimizer = sharded(model, [[model]], stage) if stage < 3 else None
    if optimizer is None:
        flat = zero.Flat({"w": p, "b": q}, dist.group.WORLD, (), 3)
        shard, master, found = flat.shard, flat.master, None
    else:
        (p * p).sum().backward()
        (q * q).sum().backward()
        optimizer.sum_gradients()
        flat = optimizer.flats[0]
        shard, master = flat.shard, flat.master
    S = -(-15 // world)
    whole = torch.tensor([*range(12), 100, 101, 102] + [0] * (S * world - 15))
    mine = whole[rank * S : (rank + 1) * S]
    assert shard.tolist() == master.tolist() == mine.tolist()
    assert master.dtype == torch.float32 and shard.dtype == torch.bfloat16
    if optimizer:
        assert flat.grad.tolist() == (world * 2 * mine).tolist()
        sizes = {n: (b - a) for n, (a, b, _) in flat.pieces(flat.master).items()}
        for name, w in optimizer.weights.items():
            assert w.numel() == sizes[name] == optimizer.inner.state[w]["exp_avg"].numel()
        assert sum(sizes.values()) == len([x for x in range(rank * S, (rank + 1) * S) if x < 15])
    return S


def all_cuts():
    return [one_cut(stage) for stage in (1, 2, 3)]


@pytest.mark.parametrize("world", [2, 4])
def test_one_rule_says_what_belongs_to_a_rank(world):
    """B31, B35: flat, not by rows of a matrix."""
    assert dp.launch(all_cuts, world, timeout=20)[0] == [-(-15 // world)] * 3


def more_ranks_than_elements(stage):
    """Three elements on four ranks, and a parameter with none."""
    model = toy(sizes=((2, 3), (3, 0)))
    model.parts[0].weight.requires_grad_(False)
    outer = nn.Linear(3, 0, bias=False, dtype=torch.float64)
    model.outer = outer
    units = [[model.together[0]], [model.together[1]], [outer]]
    optimizer = sharded(model, units, stage)
    reference = toy(sizes=((2, 3), (3, 0)))
    inner = make("adamw", [], [reference.scales[0]])
    for step in range(3):
        x = torch.full((2, 2), 1.0 + step, dtype=torch.float64)
        h = model.together[0](x)
        (h.square().sum() + model.together[1](h).sum() + outer(h).sum()).backward()
        optimizer.sum_gradients()
        optimizer.step(LR)
        (dist.get_world_size() * (reference.together[0](x)).square().sum()).backward()
        inner.step()
        inner.zero_grad()
    flat = optimizer.flats[0] if optimizer.flats[0].trainable else optimizer.flats[1]
    found = weights(optimizer)
    error = dp.relative_error(found["scales.0"], reference.scales[0])
    assert error < 1e-13, error
    assert found["outer.weight"].shape == (0, 3) == model.outer.weight.shape
    assert found["parts.1.weight"].shape == (0, 3)
    return flat.length, sum(w.numel() for w in optimizer.weights.values())


def all_small():
    return [more_ranks_than_elements(stage) for stage in STAGES]


def test_empty_shards_and_empty_parameters():
    """B30, B42: one element on each of three ranks, none on the fourth; all take part."""
    results = dp.launch(all_small, 4, timeout=20)
    assert [r[1:] for r in results] == [[(4, 1)] * 3] * 3 + [[(4, 0)] * 3]


def non_contiguous(stage):
    model = nn.Module()
    model.w = nn.Parameter(torch.arange(15.0).view(3, 5).T)
    assert not model.w.is_contiguous()
    optimizer = sharded(model, [[model]], stage, "sgd")
    if stage < 3:
        (model.w * torch.arange(15.0).view(5, 3)).sum().backward()
        optimizer.sum_gradients()
        assert torch.equal(gradients(optimizer)["w"], 2 * torch.arange(15.0).view(5, 3))
    assert torch.equal(weights(optimizer)["w"], torch.arange(15.0).view(3, 5).T)


def all_non_contiguous():
    for stage in STAGES:
        non_contiguous(stage)
    return dist.get_world_size()


def test_a_parameter_that_is_not_contiguous():
    assert dp.launch(all_non_contiguous, 2, timeout=20) == [2, 2]


def both_reductions():
    """With the backend's own reduce-scatter and point to point, also into a part of the input."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    for name in ("send", "reduce_scatter"):
        zero.reduces_by = lambda group: name
        whole = torch.arange(world * 5.0) * 10**rank
        with dp.Wire() as wire:
            zero.reduce_scatter(whole[rank * 5 : (rank + 1) * 5], whole, dist.group.WORLD)()
        assert list(wire.calls) == [("default_pg", name)]
        found.append((whole[rank * 5 : (rank + 1) * 5].tolist(), sum(wire.bytes.values())))
    assert found[0] == found[1]
    return found[0][0]


@pytest.mark.parametrize("world", [2, 4])
def test_the_reduction_is_the_same_either_way(world):
    ones = int("1" * world)
    expected = [[ones * (5.0 * r + i) for i in range(5)] for r in range(world)]
    assert dp.launch(both_reductions, world, timeout=20) == expected


# --- Precision ---------------------------------------------------------------------------------


def mixed(stage, dtype_of, lr, steps, m):
    """A Llama whose dtypes differ by parameter, trained; returns whole masters by name."""
    model = llama(CONFIG, dtype=torch.float32)
    for name, p in model.named_parameters():
        p.data = p.data.to(dtype_of(name))
        p.grad_dtype = torch.float32
    optimizer = sharded(model, zero.llama_units(model), stage)
    for step in range(steps):
        batches = my_batches(step, m)
        N = dp.count_valid(batches, dist.group.WORLD)
        optimizer.begin(len(batches))
        dp.accumulate_gradients(model, batches, N)
        optimizer.sum_gradients()
        assert {flat.grad.dtype for flat in optimizer.flats} == {torch.float32}
        optimizer.step(lr)
    assert len({flat.whole.dtype for flat in optimizer.flats}) == 2
    assert len(optimizer.flats) == 2 * (CONFIG.layers + 1) + 1
    rounded = weights(optimizer)
    assert {n: t.dtype for n, t in rounded.items()} == {n: dtype_of(n) for n in rounded}
    return optimizer.gathered([flat.master for flat in optimizer.flats]), rounded


def norms_in_fp32(name):
    return torch.float32 if name.endswith("norm.weight") else torch.bfloat16


def fp32_norm(self, x):
    return memory.NormFunction.apply(x.float(), self.weight, self.eps).to(x.dtype)


def mixed_parity():
    memory.RMSNorm.forward = fp32_norm  # in this rank only: ranks are forks
    lr, steps = 1e-3, 4
    model = llama(CONFIG, dtype=torch.float32)
    for name, p in model.named_parameters():
        p.data = p.data.to(norms_in_fp32(name))
        p.grad_dtype = torch.float32
    named = dict(model.named_parameters())
    masters = {name: p.detach().float() for name, p in named.items()}
    inner = make("adamw", [w for w in masters.values() if w.dim() > 1],
                 [w for w in masters.values() if w.dim() < 2])  # fmt: skip
    for group in inner.param_groups:
        group["lr"] = lr
    for step in range(steps):  # the same micro-batches, one after the other, on one process
        pairs = [sample(i) for i in range(step * BATCH, (step + 1) * BATCH)]
        tokens, labels = (torch.stack(column) for column in zip(*pairs))
        N = (labels != dp.IGNORE).sum()
        for i in range(0, BATCH, 2):
            (model.loss(model(tokens[i : i + 2]), labels[i : i + 2]) / N).backward()
        for name, p in named.items():
            masters[name].grad = p.grad
        inner.step()
        for name, p in named.items():
            p.data.copy_(masters[name])
            p.grad = None
    start = dict(llama(CONFIG, dtype=torch.float32).named_parameters())
    for stage in STAGES:
        ours, rounded = mixed(stage, norms_in_fp32, lr, steps, 3)
        for name in masters:
            # the order of a sum in fp32 is all that may differ, and what it moves in bf16 weights
            moved = (masters[name] - start[name]).norm()
            assert (ours[name] - masters[name]).norm() < 2e-2 * moved, (stage, name)
            assert torch.equal(rounded[name], ours[name].to(norms_in_fp32(name))), (stage, name)
    return len(masters)


def test_bf16_and_fp32_parameters_in_one_unit():
    """B47: each dtype has its own buffer; fp32 stays fp32; bf16 has an fp32 master."""
    assert dp.launch(mixed_parity, 2, timeout=20) == [30, 30]


def small_steps(stage):
    """A weight of 1.0 in bf16 doesn't feel a step of 0.001; its master does."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    model.w.grad_dtype = torch.float32
    optimizer = sharded(model, [[model]], stage, "sgd")
    for _ in range(10):
        optimizer.begin(4)
        # 256 and ones: a sum of bf16 numbers would lose the ones
        for part in (256.0, 1.0, 1.0, 1.0):
            (model.w * part).sum().backward()
        optimizer.sum_gradients()
        assert gradients(optimizer)["w"].tolist() == [2 * 259.0] * 5
        optimizer.step(0.001 / 518)
    return model.w.tolist() if stage < 3 else weights(optimizer)["w"].tolist()


def all_small_steps():
    return [small_steps(stage) for stage in STAGES[:3]]


def test_small_steps_and_small_gradients_are_not_rounded_away():
    expected = torch.tensor(0.99).bfloat16().item()
    assert dp.launch(all_small_steps, 2, timeout=20)[0] == [[expected] * 5] * 3


def lossy(stage):
    """The gather in bf16, of an fp32 model: what computes is rounded, the shards are not."""
    wire = (lambda shard: shard.bfloat16(), lambda packed: packed.float())
    model = llama(CONFIG, dtype=torch.float32)
    optimizer = sharded(model, zero.llama_units(model), stage, wire=wire)
    seen = {}

    def look(module, x):
        seen.update({n: p.detach().clone() for n, p in model.named_parameters() if p.data.numel()})

    step_of(model, optimizer, 0, 1)
    if stage == 3:
        block = model.layers["1"]
        block.mlp.register_forward_hook(lambda module, x, y: seen.update(
            {n: p.detach().clone() for n, p in block.named_parameters()}))  # fmt: skip
    with dp.Wire() as wire:
        step_of(model, optimizer, 1, 1)
    if stage < 3:
        seen = {name: p.detach() for name, p in model.named_parameters()}
    else:
        optimizer.spread()
        step_of(model, optimizer, 2, 1)
    exact = optimizer.gathered([flat.master for flat in optimizer.flats])
    if stage < 3:
        assert all(torch.equal(seen[n], exact[n].bfloat16().float()) for n in seen)
        assert any(not torch.equal(seen[n], exact[n]) for n in seen)
    else:
        assert all(torch.equal(t, t.bfloat16().float()) for t in seen.values()) and len(seen) == 9
    lengths = {k: flat.length for k, flat in enumerate(optimizer.flats)}
    units = [[k] for k in lengths]
    formula = zero.sent(stage, lengths, units, dist.get_world_size(), weight=2)["all_gather"]
    gathers = (wire.calls["default_pg", "all_gather"], wire.bytes["default_pg", "all_gather"])
    looking = (5, sum(lengths.values()) // 2 * 4)  # gathered gradients: fp32, not over this wire
    assert gathers == (formula[0] + looking[0], formula[1] + looking[1]), (gathers, formula)
    return len(seen)


def all_lossy():
    return [lossy(stage) for stage in (1, 2, 3)]


def test_the_gather_takes_a_wire_format():
    assert dp.launch(all_lossy, 2, timeout=20)[0] == [30, 30, 9]


# --- Norm, overflow ------------------------------------------------------------------------------


def norms(layout):
    """Large gradients on one shard, tiny ones on the others: one factor, that of the whole."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shard, same = None, ()
    for ranks in [[0, 1], [2, 3]]:  # every rank makes every group
        group = dist.new_group(ranks)
        shard = group if rank in ranks else shard
    for ranks in [[0, 2], [1, 3]]:
        group = dist.new_group(ranks)
        same = (group,) if rank in ranks else same
    cut = {
        "whole": (None, (dist.group.WORLD,)),
        "shard": (dist.group.WORLD, ()),
        "hybrid": (shard, same),
        "copies": (None, (shard, *same)),
    }[layout]
    found = []
    for stage in (1, 2):
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(37, dtype=torch.float64))
        optimizer = sharded(model, [[model]], stage, "sgd", cut)
        g = torch.cat([torch.full((9,), 1e3), torch.full((28,), 1e-3)]).double()
        (model.w * g).sum().backward()
        optimizer.sum_gradients()
        factor = zero.clip_factor(optimizer, 1.0, dist.group.WORLD)
        expected = 1.0 / ((world * g).norm() + 1e-6)
        assert abs(factor / expected - 1) < 1e-12, (layout, stage, factor, expected)
        optimizer.scale(factor)
        optimizer.step(1.0)
        assert dp.relative_error(-model.w.detach(), world * g * expected) < 1e-12
        found.append(factor.item())
    return found


@pytest.mark.parametrize("layout", ["whole", "shard", "hybrid", "copies"])
def test_every_element_counts_once_in_the_norm(layout):
    """B48, B49: the same factor on all ranks, however the parameter is cut and copied."""
    results = dp.launch(norms, 4, layout, timeout=20)
    assert len(results) == 4 and all(r == results[0] for r in results)


def overflow(stage):
    model = llama(CONFIG)
    optimizer = sharded(model, zero.llama_units(model), stage)
    step_of(model, optimizer, 0, 1)
    before = weights(optimizer)
    state = [t.clone() for s in optimizer.inner.state.values() for t in s.values()]
    batches = my_batches(1, 1)
    optimizer.begin(1)
    dp.accumulate_gradients(model, batches, 10)
    optimizer.sum_gradients()
    flat = optimizer.flats[0]
    if dist.get_rank() == 1 and stage or dist.get_rank() == 0 and not stage:
        flat.grad[3] = float("inf")  # on one shard alone
    squares = optimizer.squares()
    dist.all_reduce(squares)
    skip = 1 - torch.isfinite(squares).float()
    optimizer.scale((1.0 / squares.sqrt()).clamp(max=1))
    optimizer.step(LR, skip)
    after = weights(optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    now = [t for s in optimizer.inner.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, now)) and len(now) > 0
    step_of(model, optimizer, 1, 1)  # and nothing of it is left
    return skip.item(), weights(optimizer)


def overflows():
    _, final, *_ = dense(CONFIG, 2, "adamw")
    for stage in STAGES:
        skipped, found = overflow(stage)
        assert skipped == 1.0
        assert dp.worst_error(found, final)[0] < 1e-10, stage
    return len(final)


def test_infinity_on_one_shard_skips_the_step_everywhere():
    """B53"""
    assert dp.launch(overflows, 2, timeout=20) == [30, 30]


# --- Hybrid --------------------------------------------------------------------------------------


def hybrid(cases):
    rank = dist.get_rank()
    for ranks in [[0, 1], [2, 3]]:
        group = dist.new_group(ranks, group_desc="inside")
        shard = group if rank in ranks else (None if rank >= ranks[0] else shard)
    for ranks in [[0, 2], [1, 3]]:
        group = dist.new_group(ranks, group_desc="across")
        if rank in ranks:
            same = (group,)
    for stage, m in cases:
        expected, final, *_ = dense(CONFIG, 3, "adamw")
        model = llama(CONFIG)
        optimizer = sharded(model, zero.llama_units(model), stage, cut=(shard, same))
        ours = {}
        for step in range(3):
            with dp.Wire() as wire:
                found, _ = step_of(model, optimizer, step, m)
            ours.update({(name, step): g for name, g in found.items()})
        assert dp.worst_error(ours, expected)[0] < 1e-11
        assert dp.worst_error(weights(optimizer), final)[0] < 1e-10
        # across nodes: once a step, whatever m, and only this rank's half of the gradients
        lengths = [flat.length // 2 * 8 for flat in optimizer.flats]
        calls, size = dp.sent(lengths, 2)
        key = "across", "all_reduce"
        assert (wire.calls[key], wire.bytes[key]) == (calls, size)
        assert calls == CONFIG.layers + 2
    return shard.size(), same[0].size()


def test_hybrid_cuts_inside_a_node_and_sums_across_once():
    assert dp.launch(hybrid, 4, [(1, 3), (2, 3), (3, 1)], timeout=20) == [(2, 2)] * 4


# --- What is held and sent -----------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Every storage that an operator has touched, weakly; calls look() after each operator."""

    def __init__(self, look=lambda: None):
        super().__init__()
        self.seen, self.look = {}, look

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), t.device
        self.look()
        return result


def layout(config, n):
    """Flats and units by hand, from the shapes."""
    c = config
    block = 2 * c.dim * (c.heads + c.kv_heads) * c.head_dim + 3 * c.dim * c.ffn + 2 * c.dim
    up = lambda elements: -(-elements // n) * n  # noqa: E731
    flats = {"embed": up(c.vocab * c.dim)} | {str(i): up(block) for i in range(c.layers)}
    flats["head"] = up(c.dim + (0 if c.tied else c.vocab * c.dim))
    units = [["embed"], *[[str(i)] for i in range(c.layers)]]
    return flats, units + [["head", "embed"] if c.tied else ["head"]]


def storages_bytes(tensors):
    """Bytes of the distinct storages under these tensors, as they are now."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def bytes_held_and_sent(stage, config, m, dtype):
    """Measured beside formula: when a step is taken, the most before it, and on the wire."""
    n, world = dist.get_world_size(), dist.group.WORLD
    wide = memory.at_least_fp32(dtype)
    model = llama(config, dtype=dtype)
    optimizer = sharded(model, zero.llama_units(model), stage)
    step_of(model, optimizer, 0, m)
    optimizer.begin(m)
    if stage >= 2 and n > 1:  # until the first reduction
        assert storages_bytes(w.grad for w in optimizer.weights.values()) == 0
    flats, units = layout(config, n if stage else 1)
    master = wide.itemsize if wide != dtype else 0
    formula = zero.held(
        stage, flats, units, n, dtype.itemsize, wide.itemsize, master, 2 * wide.itemsize
    )
    parameters = list(model.parameters())
    shards = [w for w in optimizer.weights.values()]
    moments = [t for s in optimizer.inner.state.values() for t in s.values() if t.dim()]
    grads = [w.grad for w in shards]

    def at_rest():
        return {
            "parameters": storages_bytes([*parameters, *(flat.shard for flat in optimizer.flats)]),
            "gradients": storages_bytes(grads),
            "master copy": storages_bytes(shards) if master else 0,
            "moments": storages_bytes(moments),
        }

    padding = sum(flat.length for flat in optimizer.flats) - sum(p.numel() for p in parameters)
    # moments have no padding: they are counted as what the parameters have
    mine = sum(w.numel() for w in shards)
    assert at_rest()["moments"] == 2 * wide.itemsize * mine
    assert 0 <= formula["moments"] - 2 * wide.itemsize * mine <= 2 * wide.itemsize * padding
    peak = {"gathered": 0, "unreduced": 0}

    def look():
        if stage == 3:
            peak["gathered"] = max(peak["gathered"], storages_bytes(parameters))
        if stage >= 2:
            full = [flat.full for flat in optimizer.flats if flat.full is not None]
            peak["unreduced"] = max(peak["unreduced"], storages_bytes(full))

    batches = my_batches(1, m)
    N = dp.count_valid(batches, world)
    optimizer.begin(m)
    with dp.Wire() as wire, Storages(look):
        dp.accumulate_gradients(model, batches, N)
        optimizer.sum_gradients()
        held = at_rest() | {"moments": formula["moments"]}
        optimizer.step(LR)
    assert held == {kind: formula[kind] for kind in held}, (stage, held, formula)
    if n > 1:
        assert peak == {k: formula[k] for k in peak}, (stage, peak, formula)
    sizes = dtype.itemsize, wide.itemsize
    expected = zero.sent(stage, flats, units, n, *sizes, m, reduction=zero.reduces_by(world))
    measured = {
        name: (wire.calls[group, name], wire.bytes[group, name]) for group, name in wire.calls
    }
    if stage == 0:
        assert measured == {"all_reduce": dp.sent([x * wide.itemsize for x in flats.values()], n)}
    else:
        assert measured == expected, (stage, measured, expected)
    return sum(formula[kind] for kind in ("parameters", "gradients", "master copy", "moments"))


def all_bytes():
    return [
        [bytes_held_and_sent(stage, config, m, dtype) for stage in STAGES]
        for config, m, dtype in [
            (CONFIG, 1, torch.float64),
            (CONFIG, 3, torch.bfloat16),
            (TIED, 3, torch.float32),
        ]
    ]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_bytes_held_and_sent_are_what_the_functions_say(world):
    for by_stage in dp.launch(all_bytes, world, timeout=20)[0]:
        assert by_stage == sorted(by_stage, reverse=True)  # every stage holds less


def test_the_functions_give_the_textbook_numbers():
    """Ψ = 7.5e9 in bf16 on 64 ranks, as in the ZeRO paper: 120, 31.4, 16.6 and 1.88 GB.

    The paper reduces gradients in bf16, so 2 + 2 + 12 bytes a parameter.
    """
    psi = 7_500_000_000
    for stage, expected in enumerate((120.0, 31.4, 16.6, 1.88)):
        rows = zero.held(stage, {"all": psi}, [["all"]], 64, 2, 2, 4, 8)
        rest = sum(v for k, v in rows.items() if k not in ("gathered", "unreduced"))
        assert float(f"{rest / 1e9:.3g}") == expected
    for stage, factor in ((1, 2), (2, 2), (3, 3)):  # 2Ψ, 2Ψ, 3Ψ, but for the last block at stage 3
        flats = {str(i): 64 for i in range(100)}
        rows = zero.sent(stage, flats, [[k] for k in flats], 64, 1, 1)
        sent = sum(size for _, size in rows.values())
        assert sent == 63 * (100 * factor - (stage == 3))
    for m in (1, 3):  # (m + 1)Ψ
        rows = zero.sent(2, {"0": 64}, [["0"]], 64, 1, 1, m)
        assert sum(size for _, size in rows.values()) == 63 * (m + 1)


def kept_after_forward(stage):
    """Bytes alive after a forward pass that weren't before, without parameters."""
    model = llama(CONFIG)
    optimizer = sharded(model, zero.llama_units(model), stage)
    (tokens, labels), *_ = my_batches(0, 1)
    with Storages() as storages:
        loss = model.loss(model(tokens), labels)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    parameters |= {flat.shard.untyped_storage()._cdata for flat in optimizer.flats}
    alive = {
        key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()
        for key, (ref, _) in storages.seen.items()
        if key not in parameters and not ref.expired()
    }
    del loss
    return sum(alive.values())


def activations():
    return [kept_after_forward(stage) for stage in STAGES]


def test_activations_are_the_same_at_every_stage():
    kept = dp.launch(activations, 2, timeout=20)[0]
    assert kept[0] > BATCH // 2 * T * CONFIG.dim * 8 * CONFIG.layers and len(set(kept)) == 1


# --- Stage 3's window ----------------------------------------------------------------------------


class Trace(TorchDispatchMode):
    """The order of gathers, reductions and matmuls of a pass, as letters G, R and m."""

    def __init__(self):
        super().__init__()
        self.events = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        letter = {"c10d::_allgather_base_": "G", "c10d::send": "R"}.get(name)
        if letter or name in ("aten::mm", "aten::linear", "aten::addmm"):
            self.events.append(letter or "m")
        return op(*args, **(kwargs or {}))


def prefetch_order():
    model = toy(sizes=((5, 5),) * 4)
    optimizer = sharded(model, model.units(), 3)
    x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    with Trace() as forward:
        y = model(x)
    with Trace() as backward:
        y.sum().backward()
    optimizer.sum_gradients()
    return "".join(forward.events), "".join(backward.events)


def test_the_next_unit_travels_while_this_one_computes():
    """Gathers 0 and 1 are under way before 0 computes, 2 before 1, and so on; back likewise."""
    forward, backward = dp.launch(prefetch_order, 2, timeout=20)[0]
    assert forward == "GGm" "Gm" "Gm" "m"
    # each of four units has two matmuls, and is reduced when its last gradient is there
    assert backward == "G" "mmR" "G" "mmR" "G" "mmR" "mmR", backward


def waits(stage):
    """Each collective is waited for once, before what it fills is read, and buffers are let be."""
    under_way, done = {}, []

    def watched(start, name):
        def begin(into, source, *more):
            key = name, len(done) + len(under_way)
            wait, before = start(into, source, *more), source.clone()
            under_way[key] = None

            def end():
                assert name == "reduce_scatter" or torch.equal(source, before)
                wait()
                under_way.pop(key)  # a second wait fails here
                done.append(name)

            return end

        return begin

    zero.all_gather = watched(zero.all_gather, "all_gather")
    zero.reduce_scatter = watched(zero.reduce_scatter, "reduce_scatter")
    model = llama(TIED)
    optimizer = sharded(model, zero.llama_units(model), stage)
    for step in range(2):
        batches = my_batches(step, 3)
        optimizer.begin(3)
        dp.accumulate_gradients(model, batches, 10)
        optimizer.sum_gradients()
        assert not under_way, (stage, under_way)
        optimizer.step(LR)
        assert not under_way, (stage, under_way)
    return done.count("all_gather"), done.count("reduce_scatter")


@pytest.mark.parametrize("stage, expected", [(1, (10, 10)), (2, (10, 30)), (3, (60, 30))])
def test_every_collective_is_waited_for_exactly_once(stage, expected):
    """Five flats, two steps of three micro-batches; the tied table is gathered for the head too."""
    assert dp.launch(waits, 2, stage, timeout=20) == [expected] * 2


def recomputed(stage, outside):
    expected, final, *_ = dense(CONFIG, 2, "adamw", ("layers.1.",))
    model = llama(CONFIG, ("layers.1.",))
    optimizer = sharded(model, zero.llama_units(model), stage)
    again = []
    for number, block in model.layers.items():
        again.append(0)
        if outside:  # the block's hooks run again in recomputation
            model.layers[number] = block = Outside(block)
        else:  # they don't
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ours = {}
    for step in range(2):
        batches = my_batches(step, 3)
        N = dp.count_valid(batches, dist.group.WORLD)
        optimizer.begin(3)
        with dp.Wire() as wire:
            dp.accumulate_gradients(model, batches, N)
            optimizer.sum_gradients()
        ours.update({(name, step): g for name, g in gradients(optimizer).items()})
        optimizer.scale(zero.clip_factor(optimizer, 0.5, dist.group.WORLD))
        optimizer.step(LR)
    assert dp.worst_error(ours, expected)[0] < 1e-11, (stage, outside)
    assert dp.worst_error(weights(optimizer), final)[0] < 1e-10, (stage, outside)
    assert len(ours) == 2 * (30 - 9)
    return sum(count for (_, name), count in wire.calls.items() if name == "all_gather")


class Outside(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args):
        # Without early stop recomputation runs to the block's end, and its last hook too.
        with set_checkpoint_early_stop(False):
            return checkpoint(self.block, *args, use_reentrant=False)


def all_recomputed():
    return [recomputed(stage, outside) for stage, outside in ((2, True), (3, True), (3, False))]


def test_recomputation_with_a_frozen_block_finds_its_parameters_and_gathers_no_more():
    """B55: three micro-batches, five units: 5 gathers forward, 4 backward each."""
    counts = dp.launch(all_recomputed, 2, timeout=20)[0]
    assert counts == [0] + [3 * (5 + 4)] * 2


def without_gradients():
    model = llama(CONFIG)
    expected = llama(CONFIG)
    optimizer = sharded(model, zero.llama_units(model), 3)
    tokens = torch.stack([sample(i)[0] for i in range(3)])
    with torch.no_grad():
        for _ in range(2):
            assert dp.relative_error(model(tokens), expected(tokens)) < 1e-14
            assert storages_bytes(model.parameters()) == 0  # nothing stays
    (model(tokens).sum() / 100).backward()
    optimizer.sum_gradients()
    model(tokens)  # a forward that nobody goes back through
    assert storages_bytes(model.parameters()) > 0
    optimizer.step(LR)  # what it left doesn't survive as a stale weight
    with torch.no_grad():
        gathered = {name: p.clone() for name, p in weights(optimizer).items()}
        expected.load_state_dict(gathered, strict=True)
        assert dp.relative_error(model(tokens), expected(tokens)) < 1e-14
    return storages_bytes(model.parameters())


def test_forward_without_backward_frees_everything_and_leaves_no_stale_weight():
    assert dp.launch(without_gradients, 2, timeout=20) == [0, 0]


def call(order):
    model = toy(sizes=((3, 3),) * 3)
    sharded(model, model.units(), 3)
    x = torch.ones(1, 3, dtype=torch.float64)
    for i in order[dist.get_rank()]:
        x = model.together[i](x)


@pytest.mark.parametrize(
    "order, words",
    [
        (((0, 1, 2), (0, 1, 1, 2)), "unit 1 is called, but it is the turn of unit 2"),
        (((0, 2), (0, 2)), "unit 2 is called, but it is the turn of unit 1"),
    ],
)
def test_a_unit_out_of_turn_is_refused(order, words, capfd):
    """B41: ranks that call a module a different number of times would wait for each other."""
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(call, 2, order, timeout=10)
    assert words in failed.value.trace


def branches(stage, order_of):
    """Two branches, in another order on each rank: gradients arrive in another order too."""
    model = toy(sizes=((4, 4), (4, 4)))
    optimizer = sharded(model, model.units(), stage, "sgd")
    rank = dist.get_rank()
    x = torch.full((1, 4), 1.0 + rank, dtype=torch.float64)
    parts = [model.together[i](x).sum() * (10 if i else 1) for i in order_of[rank]]
    for part in parts if rank else reversed(parts):
        part.backward()
    optimizer.sum_gradients()
    return gradients(optimizer)


def any_order():
    expected = toy(sizes=((4, 4), (4, 4)))
    for rank in range(2):
        x = torch.full((1, 4), 1.0 + rank, dtype=torch.float64)
        (expected.together[0](x).sum() + 10 * expected.together[1](x).sum()).backward()
    for stage in (1, 2):
        for order in (((0, 1), (1, 0)), ((0, 1), (0, 1)), ((1, 0), (1, 0))):
            found = branches(stage, order)
            assert dp.worst_error(found, dp.gradients(expected))[0] < 1e-14, (stage, order)
    return len(found)


def test_gradients_may_arrive_in_any_order():
    """B38: what is reduced together is fixed by the layout, not by arrival."""
    assert dp.launch(any_order, 2, timeout=20) == [4, 4]


def one_unit(stage):
    """The unit is an argument: with the whole model as one, results are the same."""
    _, final, *_ = dense(CONFIG, 2, "adamw")
    model = llama(CONFIG)
    modules = [module for unit in zero.llama_units(model) for module in unit]
    optimizer = sharded(model, [modules], stage)
    for step in range(2):
        step_of(model, optimizer, step, 3)
    assert len(optimizer.flats) == 1
    return dp.worst_error(weights(optimizer), final)[0]


def all_one_unit():
    return max(one_unit(stage) for stage in (1, 2, 3))


def test_the_size_of_a_unit_changes_nothing():
    """B39"""
    assert max(dp.launch(all_one_unit, 3, timeout=20)) < 1e-10


# --- Refusals ------------------------------------------------------------------------------------


def refuse(what):
    model = toy(sizes=((3, 3),) * 2)
    units = model.units()
    if what == "in no unit":
        units = units[:1]
    optimizer = sharded(model, units, 1)
    x = torch.ones(1, 3, dtype=torch.float64)
    if what == "has no gradient":
        units[0][0](x).sum().backward()
    elif what == "more backward passes":
        optimizer.begin(1)
        model(x).sum().backward()
        model(x).sum().backward()
    else:
        model(x).sum().backward()
        model.parts[1].weight.requires_grad_(False)
    optimizer.sum_gradients()


@pytest.mark.parametrize(
    "what, names",
    [
        ("in no unit", "parts.1.weight, scales.1"),
        ("has no gradient", "scales.1"),
        ("more backward passes", "scales.1"),
        ("was frozen or freed", "parts.1.weight"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(what, names, capfd):
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(refuse, 2, what, timeout=10)
    assert what in failed.value.trace and names in failed.value.trace
