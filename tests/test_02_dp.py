"""02: the collectives, every form of data parallelism against one device, and its reductions."""

import itertools
import json
import math
import multiprocessing
import re
import time
from fractions import Fraction
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import run_script

memory = import_module("01_memory")
dp = import_module("02_dp")

F64 = torch.float64
CONFIG = memory.Config(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, ffn=52)
WHOLE = 2**40


def dp_group():
    return dist.new_group(range(dist.get_world_size()), group_desc="dp")


def sample(i, T=12):
    """Sample i: random tokens; the first (5·i mod (T+1)) labels count, so some have none."""
    tokens = torch.randint(CONFIG.vocab, (T + 1,), generator=torch.Generator().manual_seed(i))
    valid = 5 * i % (T + 1)
    return tokens[:-1], torch.where(torch.arange(T) < valid, tokens[1:], dp.IGNORE)


def dense(batch, config=CONFIG, dtype=F64):
    """The gradients of samples 0 … batch-1 on one device, and the loss."""
    model = memory.build(config, dtype=dtype)
    tokens, labels = (torch.stack(column) for column in zip(*map(sample, range(batch))))
    loss = model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()
    loss.backward()
    return dp.gradients(model), loss.item()


def my_batches(batch, micro, rank=None, world=None):
    rank = dist.get_rank() if rank is None else rank
    numbers = dp.my_samples(0, batch, rank, world or dist.get_world_size())
    return dp.micro_batches(sample, numbers, micro, "cpu")


def same_on_all_ranks(tensors):
    mine = {name: t.tolist() for name, t in tensors.items()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return all(other == everyone[0] for other in everyone)


# --- The collectives -----------------------------------------------------------------------------


def collectives_worker():
    return dp.collectives(dp_group(), "cpu")


@pytest.mark.parametrize("n", [1, 3, 4])
def test_collectives_leave_what_their_names_say(n):
    got = dp.launch(collectives_worker, n, timeout=20)
    start = [[10 * r + i for i in range(n)] for r in range(n)]
    total = [sum(column) for column in zip(*start)]
    firsts = [10 * r for r in range(n)]
    empty = [[]] * (n - 1)
    expected = {
        "(start)": start,
        "broadcast": [start[0]] * n,
        "reduce": [total, *empty],
        "all_reduce": [total] * n,
        "gather": [firsts, *empty],
        "all_gather": [firsts] * n,
        "scatter": [[start[0][r]] for r in range(n)],
        "reduce_scatter": [[total[r]] for r in range(n)],
        "all_to_all": [[start[other][r] for other in range(n)] for r in range(n)],
    }
    for name, by_rank in expected.items():
        assert [rank[name] for rank in got] == by_rank, name
    # The last rank comes to the barrier after 20·(n-1) ms, and nobody leaves it before.
    assert all(rank["barrier, ms"][0] >= 20 * (n - 1) - 1 for rank in got)
    assert len(expected) + 1 == len(got[0])


def playbook_a0():
    rank, n = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0] * 3)
    dist.all_reduce(total)
    parts = [torch.tensor([(rank + 1.0) * i for i in range(1, 3)]) ** (j + 1) for j in range(n)]
    mine = torch.zeros(2)
    dist.reduce_scatter(mine, parts)
    return total.tolist(), mine.tolist()


def test_playbook_appendix_a0_values():
    got = dp.launch(playbook_a0, 3, timeout=20)
    assert [total for total, _ in got] == [[6, 6, 6]] * 3
    assert [mine for _, mine in got] == [[6, 12], [14, 56], [36, 288]]


LENGTHS = [0, 1, 2, 3, 7, 64, 1003]


def ring_worker():
    group, results = dp_group(), []
    for length, dtype in itertools.product(LENGTHS, [F64, torch.float32, torch.int64]):
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randint(-1000, 1000, (length,), generator=generator).to(dtype)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        with dp.Wire() as wire:
            dp.ring_all_reduce(x, group)
        equal = torch.equal(x, expected)  # whole numbers: sums are exact in any order
        calls, size = wire.calls["dp", "send"], wire.bytes["dp", "send"]
        results.append((equal, calls, size, length * x.element_size()))
    square = torch.full((3, 5), 1.0 + dist.get_rank())
    dp.ring_all_reduce(square, group)
    with pytest.raises(RuntimeError):
        dp.ring_all_reduce(torch.ones(4, 6).t(), group)
    return results, square


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ring_all_reduce_of_any_length(n):
    got = dp.launch(ring_worker, n, timeout=20)
    assert len(got[0][0]) == 21
    for by_rank in zip(*(results for results, _ in got)):
        K = by_rank[0][3]
        assert all(equal for equal, *_ in by_rank)
        assert all(calls == 2 * (n - 1) for _, calls, *_ in by_rank)
        assert sum(size for *_, size, _ in by_rank) == 2 * (n - 1) * K
    assert all(torch.equal(square, torch.full((3, 5), n * (n + 1) / 2)) for _, square in got)


# --- Every form against one device ----------------------------------------------------------------


def run_form(group, batches, size, config=CONFIG):
    """One step: gradients, loss, (calls, bytes) on dp, buckets started by the end of backward."""
    model = memory.build(config, dtype=F64)
    buckets = dp.Buckets(model.named_parameters(), group, size) if size else None
    with dp.Wire() as wire:
        N = dp.count_valid(batches, dist.group.WORLD)
        if buckets:
            buckets.start(passes=len(batches))
        loss = dp.accumulate_gradients(model, batches, N)
        early = len(buckets.running) if buckets else 0
        buckets.finish() if buckets else dp.sum_gradients(model.named_parameters(), group)
    dist.all_reduce(loss)
    cost = wire.calls["dp", "all_reduce"], wire.bytes["dp", "all_reduce"]
    assert {g for g, _ in wire.calls} == {"dp", "default_pg"}
    return dp.gradients(model), loss.item(), cost, early


def parity_worker():
    n, group = dist.get_world_size(), dp_group()
    batch = 6 * n
    reference, reference_loss = dense(batch)
    sizes = [g.numel() * 8 for g in reference.values()]
    results = []
    for size, M in itertools.product([None, 1, 8, 12345, WHOLE], [1, 3]):
        batches = my_batches(batch, 6 // M)
        assert len(batches) == M
        grads, loss, cost, early = run_form(group, batches, size)
        expected = dp.sent(sizes, n, size)
        count = expected[0]
        if size:
            expected = tuple(map(sum, zip(expected, dp.sent_used(len(sizes), n))))
        results.append(
            {
                "form": (size, M),
                "errors": {k: dp.relative_error(g, reference[k]) for k, g in grads.items()},
                "loss": abs(loss - reference_loss),
                "cost": (cost, expected),
                "early": (early, count if size else 0),
                "same": same_on_all_ranks(grads),
            }
        )
    return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_form_has_the_gradients_of_one_device(n):
    names = {name for name, _ in memory.build(CONFIG).named_parameters()}
    assert len(names) == 21
    calls = {}
    for results in dp.launch(parity_worker, n, timeout=30):
        assert len(results) == 10
        for r in results:
            assert r["errors"].keys() == names
            assert max(r["errors"].values()) < 1e-11, (r["form"], max(r["errors"].items()))
            assert r["loss"] < 1e-12 and r["same"]
            measured, expected = r["cost"]
            assert measured == expected, r["form"]  # calls and bytes, exactly
            size, M = r["form"]
            calls.setdefault(size, set()).add(measured[0])  # the same for 1 and 3 micro-batches
            # All were under way when backward ended: the last parameter's hook starts the last.
            assert r["early"][0] == r["early"][1]
    assert {size: len(c) for size, c in calls.items()} == dict.fromkeys(calls, 1)
    assert calls[None] == {21} and calls[1] == calls[8] == {22} and calls[WHOLE] == {2}
    assert 2 < min(calls[12345]) < 22


def split_worker(batch):
    n, group, results = dist.get_world_size(), dp_group(), {}
    share = batch // n
    for micro in (m for m in range(1, share + 1) if share % m == 0):
        model = memory.build(CONFIG, dtype=F64)
        buckets = dp.Buckets(model.named_parameters(), group, 5000)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(2):
            batches = my_batches(batch, micro)
            assert micro * len(batches) * n == batch  # micro-batch · accumulation · dp
            N = dp.count_valid(batches, dist.group.WORLD)
            buckets.start(len(batches))
            loss = dp.accumulate_gradients(model, batches, N)
            buckets.finish()
            dist.all_reduce(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # once, after the sum
            optimizer.step()
            losses.append(loss.item())
        results[micro] = losses, {k: p.detach() for k, p in model.named_parameters()}
    return results


def test_any_split_of_one_global_batch_is_the_same_training():
    batch, splits = 12, []
    model = memory.build(CONFIG, dtype=F64)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.5), []
    tokens, labels = (torch.stack(column) for column in zip(*map(sample, range(batch))))
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    weights = {k: p.detach() for k, p in model.named_parameters()}
    for n in (1, 2, 3, 4):
        for micro, (losses, ours) in dp.launch(split_worker, n, batch, timeout=20)[0].items():
            splits.append((micro, batch // n // micro, n))
            assert losses == pytest.approx(expected, rel=1e-13)
            assert dp.worst_error(ours, weights)[0] < 1e-12
    assert len(splits) == 6 + 4 + 3 + 2


def order_worker():
    """All forwards, then all backwards, first to last and last to first."""
    group, results = dp_group(), []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        model = memory.build(CONFIG, dtype=F64)
        buckets = dp.Buckets(model.named_parameters(), group, 5000)
        with dp.Wire() as wire:
            batches = my_batches(6, 1)
            N = dp.count_valid(batches, dist.group.WORLD)
            buckets.start(passes=3)
            losses = [model.loss(model(tokens), labels) / N for tokens, labels in batches]
            started = []
            for i in order:
                started.append(len(buckets.running))
                losses[i].backward()
            started.append(len(buckets.running))
            buckets.finish()
        error, _ = dp.worst_error(dp.gradients(model), dense(6)[0])
        results.append((error, started, wire.calls["dp", "all_reduce"], len(buckets.buckets)))
    return results


def test_one_reduction_a_step_whatever_the_order_of_forwards_and_backwards():
    for results in dp.launch(order_worker, 2, timeout=20):
        for error, started, calls, count in results:
            assert error < 1e-11 and count > 2
            assert started == [0, 0, 0, count]  # none before the last backward, all during it
            assert calls == count + 1


def uneven_worker(counts):
    """Rank r has counts[r] micro-batches of one sample each; perhaps none."""
    group, rank = dp_group(), dist.get_rank()
    model = memory.build(CONFIG, dtype=F64)
    buckets = dp.Buckets(model.named_parameters(), group, 5000)
    first = sum(counts[:rank])
    batches = dp.micro_batches(sample, range(first, first + counts[rank]), 1, "cpu")
    N = torch.tensor(sum(int((sample(i)[1] >= 0).sum()) for i in range(sum(counts))))
    buckets.start(len(batches))
    dp.accumulate_gradients(model, batches, N)
    buckets.finish()
    return dp.worst_error(dp.gradients(model), dense(sum(counts))[0])[0]


@pytest.mark.parametrize("counts", [(3, 2), (3, 0), (1, 2, 3)])
def test_ranks_with_different_numbers_of_micro_batches_do_not_hang(counts):
    assert max(dp.launch(uneven_worker, len(counts), counts, timeout=10)) < 1e-11


def test_every_rank_gets_as_many_samples_and_together_each_once():
    for batch, parts in [(12, 3), (145 // 5 * 5, 5), (7, 7), (8, 1)]:
        for step in (0, 3):
            shares = [dp.my_samples(step, batch, part, parts) for part in range(parts)]
            assert len({len(share) for share in shares}) == 1
            assert sorted(itertools.chain(*shares)) == list(range(step * batch, (step + 1) * batch))


# --- Deferred weight gradients --------------------------------------------------------------------


def later_worker(tied):
    config = memory.Config(**{**CONFIG.__dict__, "tied": tied})
    reference, _ = dense(6, config)
    group, results = dp_group(), {}
    # F forward and backward of a micro-batch, W one deferred weight gradient, w all that wait
    for order in ("FwFwFw", "FFFw", "FFwFw", "FFFWWWWWw", "FWWWFWFw"):
        model = memory.build(config, dtype=F64)
        later = memory.Later()
        for module in model.modules():
            if isinstance(module, memory.Linear):
                module.when = later
        buckets = dp.Buckets(model.named_parameters(), group, 5000, on_finished=memory.on_finished)
        batches = iter(my_batches(6, 1))
        N = torch.tensor(sum(int((sample(i)[1] >= 0).sum()) for i in range(6)))
        buckets.start(passes=3)
        for action in order:
            if action == "F":
                tokens, labels = next(batches)
                (model.loss(model(tokens), labels) / N).backward()
                backward = len(buckets.running)
            else:
                for _ in range(1 if action == "W" else len(later.jobs)):
                    later.run()
        assert not later.jobs and next(batches, None) is None
        early = len(buckets.running)
        buckets.finish()
        error, name = dp.worst_error(dp.gradients(model), reference)
        results[order] = error, name, backward, early, len(buckets.buckets)
    return results


@pytest.mark.parametrize("tied", [False, True])
def test_deferred_weight_gradients_start_the_reduction_when_they_are_finished(tied):
    for results in dp.launch(later_worker, 2, tied, timeout=20):
        assert len(results) == 5
        for order, (error, name, backward, early, count) in results.items():
            assert error < 1e-11, (order, name)
            # The first bucket holds the head: nothing starts in backward, all with the last job.
            # Tied, the head is the embedding, in the last bucket; the norm starts at once.
            assert backward == int(tied) and early == count > 2, order


def recompute_worker():
    results = []
    for reentrant, deferred in itertools.product([False, True], repeat=2):
        model, later = memory.build(CONFIG, dtype=F64), memory.Later()
        for block in model.layers.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        for module in model.modules():
            if isinstance(module, memory.Linear) and deferred:
                module.when = later
        named = model.named_parameters()
        buckets = dp.Buckets(named, dp_group(), 5000, on_finished=memory.on_finished)
        batches = my_batches(6, 1)
        N = dp.count_valid(batches, dist.group.WORLD)
        buckets.start(3)
        dp.accumulate_gradients(model, batches, N)
        while later.jobs:
            later.run()
        early = len(buckets.running) == len(buckets.buckets) > 2
        buckets.finish()
        results.append((dp.worst_error(dp.gradients(model), dense(6)[0])[0], early))
    return results


@pytest.mark.full  # torch's checkpoint imports its compiler in every rank: 4 s
def test_recomputed_layers():
    for results in dp.launch(recompute_worker, 2, timeout=20):
        assert len(results) == 4 and all(error < 1e-11 and early for error, early in results)


def deferred_but_not_computed():
    model, later = memory.build(CONFIG, dtype=F64), memory.Later()
    model.layers["1"].mlp.up_proj.when = later
    buckets = dp.Buckets(model.named_parameters(), dp_group(), on_finished=memory.on_finished)
    tokens, labels = my_batches(2, 1)[0]
    buckets.start(passes=1)
    model.loss(model(tokens), labels).backward()
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj\.weight: a deferred"):
        buckets.finish()
    later.run()
    buckets.finish()  # nothing was lost
    return model.layers["1"].mlp.up_proj.weight.grad.abs().sum().item()


def test_finishing_before_a_deferred_gradient_is_an_error_with_its_name():
    a, b = dp.launch(deferred_but_not_computed, 2, timeout=10)
    assert a == b > 0


def deferred_and_not_told():
    model, later = memory.build(CONFIG, dtype=F64), memory.Later()
    model.layers["1"].mlp.up_proj.when = later
    buckets = dp.Buckets(model.named_parameters(), dp_group())
    tokens, labels = my_batches(2, 1)[0]
    buckets.start(passes=1)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj\.weight: deferred, so"):
        model.loss(model(tokens), labels).backward()
    return True


def test_a_deferred_gradient_without_its_word_is_an_error_with_its_name():
    assert all(dp.launch(deferred_and_not_told, 2, timeout=10))


def heard_before_worker():
    """Somebody else listens on the same parameters, and did so first."""
    model, heard = memory.build(CONFIG, dtype=F64), []
    for name, p in model.named_parameters():
        memory.on_finished(p, lambda p, name=name: heard.append(name))
    named = model.named_parameters()
    buckets = dp.Buckets(named, dp_group(), 5000, on_finished=memory.on_finished)
    batches = my_batches(6, 1)
    N = dp.count_valid(batches, dist.group.WORLD)
    buckets.start(3)
    dp.accumulate_gradients(model, batches, N)
    buckets.finish()
    return dp.worst_error(dp.gradients(model), dense(6)[0])[0], len(heard)


def test_another_listener_changes_nothing():
    assert all(error < 1e-11 and heard == 63 for error, heard in
               dp.launch(heard_before_worker, 2, timeout=10))  # fmt: skip


# --- Parameters that are unused, shared, frozen, strided, of several dtypes -----------------------


class Branches(nn.Module):
    """A trunk, and branches of which a forward pass uses those it is told."""

    def __init__(self, names="abc"):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4, dtype=F64)
        self.branch = nn.ModuleDict({name: nn.Linear(4, 4, dtype=F64) for name in names})

    def forward(self, x, use):
        x = self.trunk(x)
        return sum((self.branch[name](x).square().sum() for name in use), x.sum())


def inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, dtype=F64, generator=generator)


def used(rank, step):
    """Branch a on rank 0 alone, b on all, c nowhere; in step 2 branch c on the last rank alone."""
    return ("ab" if rank == 0 else "b") + ("c" if step == 2 and rank == 1 else "")


def train_branches(optimizer, ranks, buckets=None, model=None):
    trace = []
    for step in range(4):
        if buckets:
            buckets.start(passes=1)
        else:
            optimizer.zero_grad()
        loss = sum(model(inputs(rank, step), used(rank, step)) for rank in ranks)
        loss.backward()
        if buckets:
            buckets.finish()
        trace.append({k: None if p.grad is None else p.grad.clone()
                      for k, p in model.named_parameters()})  # fmt: skip
        optimizer.step()
    return trace, {k: p.detach() for k, p in model.named_parameters()}


def unused_worker(size):
    model = Branches()
    buckets = dp.Buckets(model.named_parameters(), dp_group(), size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return train_branches(optimizer, [dist.get_rank()], buckets, model)


@pytest.mark.parametrize("size", [1, 300, WHOLE])
def test_unused_on_some_ranks_is_summed_and_unused_on_all_stays_none(size):
    model = Branches()
    start = {k: p.detach().clone() for k, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    expected, weights = train_branches(optimizer, [0, 1], None, model)
    assert [step["branch.c.weight"] is None for step in expected] == [True, True, False, True]
    for trace, ours in dp.launch(unused_worker, 2, size, timeout=10):
        for step, (got, want) in enumerate(zip(trace, expected)):
            for name in want:
                if want[name] is None:
                    assert got[name] is None, (step, name)
                else:
                    assert dp.relative_error(got[name], want[name]) < 1e-14, (step, name)
        assert dp.worst_error(ours, weights)[0] < 1e-13
        assert not torch.equal(weights["branch.c.weight"], start["branch.c.weight"])
        assert len(ours) == 8


def arrival_worker():
    """Ranks finish their gradients in opposite orders, in buckets of one parameter."""
    model, rank = Branches("abcdef"), dist.get_rank()
    buckets = dp.Buckets(model.named_parameters(), dp_group(), 1)
    finished = []
    for name, p in model.named_parameters():
        memory.on_finished(p, lambda p, name=name: finished.append(name))
    with dp.Wire():
        for step in range(3):
            buckets.start(passes=1)
            model(inputs(rank, 0), "abcdef"[:: 1 if rank else -1]).backward()
            buckets.finish()
    return dp.gradients(model), finished[: len(finished) // 3]


def test_buckets_start_in_one_order_whatever_the_order_of_arrival():
    model = Branches("abcdef")
    sum(model(inputs(rank, 0), "abcdef") for rank in range(3)).backward()
    results = dp.launch(arrival_worker, 3, timeout=10)
    orders = [finished for _, finished in results]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    for grads, _ in results:
        assert dp.worst_error(grads, dp.gradients(model))[0] < 1e-14


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh()).square().sum()


def shared_worker(keep):
    model = Shared()
    named = list(model.named_parameters(remove_duplicate=not keep))
    calls = []
    buckets = dp.Buckets(named, dp_group(), 1)
    memory.on_finished(model.a.weight, calls.append)
    buckets.start(passes=1)
    model(inputs(dist.get_rank(), 0)).backward()
    buckets.finish()
    return dp.gradients(model), len(named), len(calls), len(buckets.buckets)


@pytest.mark.parametrize("keep", [False, True])
def test_shared_weight_has_one_place_and_the_sum_of_its_uses(keep):
    model = Shared()
    sum(model(inputs(rank, 0)) for rank in range(2)).backward()
    for grads, named, calls, count in dp.launch(shared_worker, 2, keep, timeout=10):
        assert named == (4 if keep else 3) and calls == 1 and count == 3
        assert dp.worst_error(grads, dp.gradients(model))[0] < 1e-14


def frozen_worker():
    model, group = Branches(), dp_group()
    model.branch["b"].weight.requires_grad_(False)
    buckets = dp.Buckets(model.named_parameters(), group, 1)
    buckets.start(passes=1)
    model(inputs(dist.get_rank(), 0), "ab").backward()
    buckets.finish()
    first = {k: g for k, g in dp.gradients(model).items() if g is not None}
    model.trunk.bias.requires_grad_(False)  # frozen later: as if unused
    buckets.start(passes=1)
    model(inputs(dist.get_rank(), 0), "ab").backward()
    buckets.finish()
    second = {k: g.clone() for k, g in dp.gradients(model).items() if g is not None}
    model.branch["b"].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"branch\.b\.weight was frozen"):
        buckets.start(passes=1)
    return set(first), second, len(buckets.buckets)


def test_frozen_parameters():
    model = Branches()
    sum(model(inputs(rank, 0), "ab") for rank in range(2)).backward()
    want = {k: g for k, g in dp.gradients(model).items() if g is not None}
    del want["branch.b.weight"]
    for first, second, count in dp.launch(frozen_worker, 2, timeout=10):
        assert first == want.keys() and count == 7
        assert second.keys() == want.keys() - {"trunk.bias"}
        assert dp.worst_error(second, {k: want[k] for k in second})[0] < 1e-14


def different_worker(what):
    model = Branches()
    if dist.get_rank() == 1 and what == "frozen":
        model.trunk.bias.requires_grad_(False)
    if dist.get_rank() == 1 and what == "shape":
        model.branch["a"].weight = nn.Parameter(torch.ones(4, 5, dtype=F64))
    size = 7 if dist.get_rank() == 1 and what == "size" else 8
    dp.Buckets(model.named_parameters(), dp_group(), size)
    time.sleep(5)


@pytest.mark.parametrize(
    "what, name",
    [("frozen", "trunk.bias"), ("shape", "branch.a.weight (4, 5)"), ("size", "bucket size of 7")],
)
def test_parameters_that_differ_between_ranks_are_named(what, name, capfd):
    begin = time.monotonic()
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(different_worker, 2, what, timeout=10)
    assert time.monotonic() - begin < 4
    assert failed.value.rank == 1 and "buckets differ" in failed.value.trace
    assert name in failed.value.trace


class Strided(nn.Module):
    """A transposed, a permuted, an expanded and an ordinary parameter."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.t = nn.Parameter(torch.randn(4, 8, dtype=F64, generator=g).t())
        self.p = nn.Parameter(torch.randn(2, 3, 4, dtype=F64, generator=g).permute(2, 0, 1))
        self.one = nn.Parameter(torch.randn(3, 1, 1, 5, dtype=F64, generator=g).transpose(1, 3))
        self.plain = nn.Parameter(torch.randn(8, 4, dtype=F64, generator=g))

    def forward(self, x):  # x (3, 4)
        y = x @ (self.t * self.plain).t()  # (3, 8)
        z = torch.einsum("bd,def->bef", x, self.p)
        return y.square().sum() + z.pow(3).sum() + (self.one.square() * y.mean()).sum()


def strided_worker(size):
    model = Strided()
    buckets = dp.Buckets(model.named_parameters(), dp_group(), size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    strides = []
    for step in range(3):
        buckets.start(passes=2)
        for part in inputs(dist.get_rank(), step).split(2):
            model(part).backward()
        buckets.finish()
        strides += [p.grad.stride() == p.stride() for p in (model.t, model.p, model.plain)]
        optimizer.step()
    return {k: p.detach().contiguous() for k, p in model.named_parameters()}, strides


@pytest.mark.parametrize("size", [1, WHOLE])
def test_non_contiguous_parameters(size):
    model = Strided()
    assert not model.t.is_contiguous() and not model.p.is_contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for part in inputs(rank, step).split(2):
                model(part).backward()
        optimizer.step()
    weights = {k: p.detach() for k, p in model.named_parameters()}
    for ours, strides in dp.launch(strided_worker, 2, size, timeout=10):
        assert len(ours) == 4 and len(strides) == 9 and all(strides)
        assert dp.worst_error(ours, weights)[0] < 1e-12


DTYPES = [F64, torch.float32, torch.bfloat16, torch.float16]


class Dtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(
            nn.Parameter(torch.arange(1.0, 4 + i).to(DTYPES[i % 4])) for i in range(8)
        )

    def forward(self, scale):
        return sum((w.double() * scale).sum() for w in self.w)


def dtypes_worker(size):
    model = Dtypes()
    buckets = dp.Buckets(model.named_parameters(), dp_group(), size)
    buckets.start(passes=2)
    for i in range(2):
        model(10.0**dist.get_rank() + i).backward()
    buckets.finish()
    return [(p.grad.dtype, p.grad) for p in model.w], len(buckets.buckets)


@pytest.mark.parametrize("size, count", [(1, 8), (WHOLE, 2)])
def test_several_dtypes_each_in_at_least_fp32(size, count):
    wide = {F64: F64}
    for grads, buckets in dp.launch(dtypes_worker, 3, size, timeout=10):
        assert buckets == count and len(grads) == 8
        for i, (dtype, grad) in enumerate(grads):
            assert dtype == wide.get(DTYPES[i % 4], torch.float32)
            assert torch.equal(grad, torch.full((3 + i,), 225.0, dtype=dtype))


def precise_worker(dtype, values, passes):
    w = nn.Parameter(torch.ones(5, dtype=dtype))
    buckets = dp.Buckets([("w", w)], dp_group())
    buckets.start(passes)
    for _ in range(passes):
        (w * values[dist.get_rank()]).sum().backward()
    buckets.finish()
    return w.grad


@pytest.mark.parametrize(
    "dtype, values, passes, total",
    [
        (torch.bfloat16, (256.0, 1.0, 1.0, 1.0), 1, 259.0),  # added in bf16: 256
        (torch.bfloat16, (1.0, 1.0), 300, 600.0),  # accumulated in bf16: 512
        (torch.float16, (20000.0,) * 4, 1, 80000.0),  # fp16 ends at 65504
        (torch.float16, (1e-7,) * 4, 1, 4 * float(torch.tensor(1e-7, dtype=torch.float16))),
    ],
)
def test_gradients_below_fp32_are_summed_in_fp32(dtype, values, passes, total):
    for grad in dp.launch(precise_worker, len(values), dtype, values, passes, timeout=10):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, torch.full((5,), total))


def norm_worker(kind):
    w = nn.Parameter(torch.ones(1, dtype=F64))
    buckets = dp.Buckets([("w", w)], dp_group())
    buckets.start(1)
    (w * 0.8 / dist.get_world_size()).sum().backward()
    buckets.finish()
    return nn.utils.clip_grad_norm_([w], 1.0, norm_type=kind).item(), w.grad.item()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_norm_of_a_summed_gradient_is_a_local_matter(n):
    for kind in (1.0, 2.0, math.inf):
        for norm, grad in dp.launch(norm_worker, n, kind, timeout=10):
            assert norm == pytest.approx(0.8, rel=1e-15) and grad == pytest.approx(0.8, rel=1e-15)


def infinite_worker(reduce):
    w = nn.Parameter(torch.ones(6))
    buckets = dp.Buckets([("w", w)], dp_group(), reduce=reduce)
    buckets.start(1)
    (w * (math.inf if dist.get_rank() == 0 else 1.0)).sum().backward()
    buckets.finish()
    return torch.isfinite(w.grad).any().item()


@pytest.mark.parametrize("reduce", [dp.plain, dp.bf16_on_the_wire])
def test_infinity_on_one_rank_is_seen_by_all(reduce):
    assert dp.launch(infinite_worker, 3, reduce, timeout=10) == [False] * 3


def misuse_worker():
    model, group = Branches(), dp_group()
    buckets = dp.Buckets(model.named_parameters(), group, 1)
    with pytest.raises(RuntimeError, match="without start"):
        buckets.finish()
    model(inputs(0, 0), "a").backward()  # outside a step: an ordinary backward
    kept = model.trunk.weight.grad.clone()
    buckets.start(passes=1)
    assert model.trunk.weight.grad is None  # nothing of it gets into the step
    model(inputs(dist.get_rank(), 0), "abc").backward()
    with pytest.raises(RuntimeError, match=r"branch\.\w\.\w+: backward pass 2 in a step of 1"):
        model(inputs(dist.get_rank(), 0), "abc").backward()
    with pytest.raises(RuntimeError, match="again before finish"):
        buckets.start(passes=1)
    with pytest.raises(ValueError, match="no parameter"):
        dp.Buckets([("w", nn.Parameter(torch.ones(1), requires_grad=False))], group)
    return kept.abs().sum().item()


def test_misuse_is_one_clear_error():
    assert min(dp.launch(misuse_worker, 2, timeout=10)) > 0


def too_many_passes_worker():
    """passes=inf: reductions start in finish(), right all the same."""
    model = Branches()
    buckets = dp.Buckets(model.named_parameters(), dp_group(), 1)
    buckets.start(passes=math.inf)
    model(inputs(dist.get_rank(), 0), "abc").backward()
    early = len(buckets.running)
    buckets.finish()
    return dp.gradients(model), early


def test_a_number_of_passes_too_high_costs_the_overlap_alone():
    model = Branches()
    sum(model(inputs(rank, 0), "abc") for rank in range(2)).backward()
    for grads, early in dp.launch(too_many_passes_worker, 2, timeout=10):
        assert early == 0 and dp.worst_error(grads, dp.gradients(model))[0] < 1e-14


def held_worker():
    model = memory.build(CONFIG, dtype=torch.bfloat16)
    buckets = dp.Buckets(model.named_parameters(), dp_group(), 5000)
    buckets.start(1)
    tokens, labels = my_batches(2, 1)[0]
    model.loss(model(tokens), labels).backward()
    buckets.finish()
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes()
                for g in dp.gradients(model).values()}  # fmt: skip
    return sum(storages.values()), [4 * p.numel() for p in model.parameters()], len(storages)


def test_held_are_the_gradients_and_nothing_twice():
    for measured, sizes, storages in dp.launch(held_worker, 2, timeout=10):
        assert measured == dp.held(sizes) and 2 < storages < len(sizes)


# --- Pure functions -------------------------------------------------------------------------------


def test_assign_fills_buckets_in_order():
    assert dp.assign([], 10) == []
    assert dp.assign([4, 4, 4], 8) == [[0, 1], [2]]
    assert dp.assign([4, 4, 4], 1) == [[0], [1], [2]]
    assert dp.assign([3, 20, 3, 3, 0], 8) == [[0], [1], [2, 3, 4]]
    assert dp.assign([1] * 100, 25) == [list(range(i, i + 25)) for i in range(0, 100, 25)]
    assert dp.assign([7, 9], WHOLE) == [[0, 1]]
    generator = torch.Generator().manual_seed(0)
    for limit in (1, 50, 117, 1000):
        sizes = torch.randint(0, 120, (60,), generator=generator).tolist()
        buckets = dp.assign(sizes, limit)
        assert list(itertools.chain(*buckets)) == list(range(60))
        for ids, after in itertools.zip_longest(buckets, buckets[1:]):
            assert len(ids) == 1 or sum(sizes[i] for i in ids) <= limit
            if after:  # it was full: the next would not have fitted
                assert sum(sizes[i] for i in ids) + sizes[after[0]] > limit


def test_tokens_to_hide():
    assert round(dp.tokens_to_hide(2**30, 989e12, 50e9, element=2)) == 19780
    assert round(dp.tokens_to_hide(2**30, 989e12, 50e9, element=4)) == 39560
    assert dp.tokens_to_hide(1, 989e12, 50e9, 2) == 0
    for n, P, element in [(2, 10**6, 4), (512, 8 * 10**9, 2)]:
        flops, bandwidth = 10**14, 10**10
        tokens = dp.tokens_to_hide(n, flops, bandwidth, element)
        _, size = dp.sent([P * element], n)
        assert Fraction(4) * tokens * P / flops == size / bandwidth  # backward = the sum


def test_hidden_share():
    waits = [("compute", "wait", 5.0, 6.0)]
    spans = [
        ("bucket 0", "sum", 1.0, 4.0),
        ("bucket 1", "sum", 2.0, 6.0),
        ("compute", "backward", 0, 5),
    ]
    assert dp.hidden([waits + spans, spans]) == 1 - 1 / 14
    assert dp.hidden([[("compute", "wait", 0, 2), ("bucket 0", "sum", 0, 2)]]) == 0


def dry_run(n, results):
    """One rank of n without the others, on tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=n)
    group = dist.new_group(range(n), group_desc="dp")
    with FakeTensorMode():
        model = memory.build(memory.PRESETS["tiny"], dtype=torch.bfloat16)
        buckets = dp.Buckets(model.named_parameters(), group, 2**20)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with dp.Wire() as wire:
            buckets.start(passes=2)
            for _ in range(2):
                model.loss(model(tokens), tokens).backward()
            buckets.finish()
    sizes = [4 * p.numel() for p in model.parameters()]
    results.put((wire.calls["dp", "all_reduce"], wire.bytes["dp", "all_reduce"], sizes))


def test_dry_run_of_buckets_looks_at_no_value():
    # In a process of its own: the fake group is the only one of its process.
    context, n = multiprocessing.get_context("fork"), 512
    results = context.SimpleQueue()
    process = context.Process(target=dry_run, args=(n, results))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    calls, bytes, sizes = results.get()
    parts = dp.sent(sizes, n, 2**20), dp.sent_used(len(sizes), n)
    assert (calls, bytes) == tuple(map(sum, zip(*parts))) and calls == 5


# --- Other reductions -----------------------------------------------------------------------------


def reduced(flat, reduce, group):
    flat = flat.clone()
    with dp.Wire() as wire:
        for work in reduce(flat, group):
            work.wait()
    return flat, wire


def noise(length, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, dtype=dtype, generator=generator)


def bf16_worker():
    n, group, rows = dist.get_world_size(), dp_group(), []
    for length in (1, 5, 1000, 4099):
        flat, wire = reduced(noise(length, dist.get_rank()), dp.bf16_on_the_wire, group)
        addends = [noise(length, rank).bfloat16().float() for rank in range(n)]
        expected = torch.stack(addends).sum(0).bfloat16().float()
        cost = sum(wire.calls.values()), sum(wire.bytes.values())
        rows.append((torch.equal(flat, expected), cost, dp.sent_bf16(length, n),
                     same_on_all_ranks({"flat": flat})))  # fmt: skip
    ones, _ = reduced(torch.full((6,), 256.0 if dist.get_rank() == 0 else 1.0),
                      dp.bf16_on_the_wire, group)  # fmt: skip
    return rows, ones[0].item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bf16_on_the_wire_rounds_twice_and_adds_in_fp32(n):
    for rows, ones in dp.launch(bf16_worker, n, timeout=10):
        assert len(rows) == 4
        for equal, cost, formula, same in rows:
            assert equal and same and cost == formula
        # 256 + 1 + 1 + 1 = 259, which is 260 in bf16; added in bf16 it would stay 256.
        assert ones == {1: 256, 2: 256, 3: 258, 4: 260}[n]
    assert dp.sent_bf16(1000, 4)[1] * 2 == dp.sent([4000], 4)[1]  # half of fp32's


def hierarchical_worker(size):
    group = dp_group()
    inside, across = dp.node_groups(size)
    assert (inside.size(), across.size()) == (size, dist.get_world_size() // size)
    rows = []
    for length in (1, 7, 1000):
        x = noise(length, dist.get_rank(), F64)
        flat, wire = reduced(x, dp.hierarchical(inside, across), group)
        expected, _ = reduced(x, dp.plain, group)
        cost = [
            (sum(c for (g, _), c in wire.calls.items() if g == name),
             sum(b for (g, _), b in wire.bytes.items() if g == name))
            for name in ("inside", "across")
        ]  # fmt: skip
        formula = dp.sent_hierarchical(length, 8, inside.size(), across.size())
        rows.append((dp.relative_error(flat, expected), cost, list(formula),
                     same_on_all_ranks({"flat": flat})))  # fmt: skip
    return rows


@pytest.mark.parametrize("n, size", [(4, 2), (4, 1), (4, 4), (6, 3), (6, 2)])
def test_hierarchical_equals_flat_and_crosses_with_a_part(n, size):
    for rows in dp.launch(hierarchical_worker, n, size, timeout=20):
        assert len(rows) == 3
        for error, cost, formula, same in rows:
            assert error < 1e-14 and same and cost == formula
    # What a rank sends across, against an all-reduce of the whole across as many nodes.
    assert (
        dp.sent_hierarchical(1200, 8, size, n // size)[1][1] * size == dp.sent([9600], n // size)[1]
    )


def topk_worker(share):
    n, group, length = dist.get_world_size(), dp_group(), 501
    top = dp.TopK(share)
    delivered, true = torch.zeros(length, dtype=F64), torch.zeros(length, dtype=F64)
    buffer, costs, sparse = torch.empty(length, dtype=F64), set(), []
    for step in range(6):
        parts = [noise(length, 10 * step + rank, F64) for rank in range(n)]
        true += sum(parts)
        buffer.copy_(parts[dist.get_rank()])  # the bucket's buffer, the same in every step
        with dp.Wire() as wire:
            for work in top(buffer, group):
                work.wait()
        delivered += buffer
        sparse.append((buffer != 0).sum().item())
        costs.add((sum(wire.calls.values()), sum(wire.bytes.values())))
    rest = top.rest[buffer].clone()
    dist.all_reduce(rest, group=group)
    error = dp.relative_error(delivered + rest, true)
    return error, dp.relative_error(delivered, true), costs, top.sent(length, 8, n), max(sparse)


@pytest.mark.parametrize("n, share", [(1, 0.1), (3, 0.1), (3, 1.0), (4, 0.001)])
def test_topk_and_what_it_keeps_add_up_to_the_true_sum(n, share):
    count = max(1, round(share * 501))
    for error, without, costs, formula, most in dp.launch(topk_worker, n, share, timeout=10):
        assert error < 1e-13 and costs == {formula}
        assert most <= n * count
        assert without > 0.1 if share < 1 else without < 1e-13  # it did leave something behind
    assert formula == (2, (n - 1) * count * 12)


class Forgetful(dp.TopK):
    """Top-k without error feedback."""

    def __call__(self, flat, group):
        self.rest.clear()
        yield from super().__call__(flat, group)


def loss_gap_worker(make, steps=25):
    group, model = dp_group(), memory.build(CONFIG, dtype=torch.float32)
    buckets = dp.Buckets(model.named_parameters(), group, 20000, make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    tokens = torch.arange(600) * 7 % 31  # something to learn
    windows = dp.Samples(tokens.numpy(), 16, seed=0)
    for step in range(steps):
        numbers = dp.my_samples(step, 4, dist.get_rank(), dist.get_world_size())
        batches = dp.micro_batches(windows, numbers, 2, "cpu")
        N = dp.count_valid(batches, dist.group.WORLD)
        buckets.start(len(batches))
        loss = dp.accumulate_gradients(model, batches, N)
        buckets.finish()
        optimizer.step()
    dist.all_reduce(loss)
    return loss.item()


def make_plain():
    return dp.plain


def make_topk():
    return dp.TopK(0.02)


def make_forgetful():
    return Forgetful(0.02)


def make_bf16():
    return dp.bf16_on_the_wire


def test_loss_gap_of_compressed_reductions():
    losses = {make.__name__: dp.launch(loss_gap_worker, 2, make, timeout=20)[0]
              for make in (make_plain, make_topk, make_forgetful, make_bf16)}  # fmt: skip
    plain, topk, forgetful, bf16 = losses.values()
    assert abs(bf16 - plain) < 0.001
    # The numbers of TopK's docstring. It is behind, but far less than without error feedback.
    said = [float(x) for x in re.findall(r"loss (0\.\d+)", dp.TopK.__doc__)]
    assert [topk, plain, forgetful] == pytest.approx(said, rel=0.1)
    assert plain < topk < plain + 0.2 * (forgetful - plain)


# --- Overlap, seen --------------------------------------------------------------------------------


def trace_worker(path):
    group = dp_group()
    model = memory.build(CONFIG, dtype=F64)
    loss, cost, ranks = dp.first_step(model, my_batches(6, 1), group, 5000, dp.plain)
    if dist.get_rank() == 0:
        dp.write_trace(path, ranks)
    return ranks, dp.hidden(ranks)


def test_trace_shows_sums_that_start_before_backward_ends(tmp_path):
    n, path = 3, tmp_path / "trace.json"
    ranks, share = dp.launch(trace_worker, n, str(path), timeout=20)[0]
    assert len(ranks) == n and 0 < share <= 1
    for spans in ranks:
        names = [name for _, name, *_ in spans]
        assert names.count("forward") == names.count("backward") == 2 and "finish" in names
        sums = [s for s in spans if s[1] == "sum"]
        assert len(sums) == len({lane for lane, *_ in sums}) == names.count("wait") > 2
        last = [s for s in spans if s[1] == "backward"][-1]
        assert all(last[2] < begin < last[3] for _, _, begin, _ in sums)  # issued inside it
        assert all(begin <= end for *_, begin, end in spans)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(n))
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        f"rank {r}" for r in range(n)
    ]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == sum(map(len, ranks))
    for rank, spans in enumerate(ranks):  # every span is there, in microseconds
        mine = {(e["name"], e["ts"], e["dur"]) for e in drawn if e["pid"] == rank}
        assert mine == {(name, begin * 1e6, (end - begin) * 1e6) for _, name, begin, end in spans}
    lanes = {}
    for e in drawn:  # what shares a lane is one after another, or inside one another
        lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        for (a, b), (c, d) in itertools.combinations(sorted(spans), 2):
            assert b <= c or (a <= c and d <= b)


@pytest.mark.full
@pytest.mark.parametrize("n", [3, pytest.param(1, marks=pytest.mark.full)])
def test_the_script_on_another_number_of_ranks(n, tmp_path):
    got = run_script("02_dp.py", "--dp", n, "--trace", tmp_path / "t.json")
    assert got.returncode == 0, got.stderr
    lines = got.stdout.splitlines()
    assert lines[-1] == "02_dp OK" and max(map(len, lines)) <= 80
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(n))
