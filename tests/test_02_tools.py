"""02, the tools: ranks and how they fail, the wire meter, the samples, plain data parallelism."""

import os
import sys
import time
from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.distributed as dist

dp = import_module("02_dp")
memory = dp.memory


# --- ranks -------------------------------------------------------------------------------------


def who(x):
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), x


@pytest.mark.parametrize("world", [1, 2, 5])
def test_launch_returns_results_by_rank(world):
    assert dp.launch(who, world, "x", timeout=20) == [(r, world, 1, "x") for r in range(world)]


def fail(how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "die":
            os._exit(9)
        if how == "exit":
            sys.exit("enough")
        time.sleep(100)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "how, rank, trace, timeout",
    [
        ("raise", 1, "ValueError: boom", 60),
        ("die", 1, "died with exit code 9", 60),
        ("exit", 1, "SystemExit: enough", 60),
        ("hang", None, "imed out", 2),  # who waits in vain says so
    ],
)
def test_a_rank_that_fails_takes_the_others_down(how, rank, trace, timeout, capfd):
    begin = time.monotonic()
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(fail, 3, how, timeout=timeout)
    assert time.monotonic() - begin < 10
    assert trace in failed.value.trace and failed.value.code == 1
    assert rank is None or failed.value.rank == rank
    shown = capfd.readouterr().err
    assert shown.startswith(f"rank {failed.value.rank} of 3 failed") and trace in shown
    assert shown.count("of 3 failed") == 1, "only the first is shown"


def fail_on_rank_two():
    return dp.verdict("test", ["broken"] if dist.get_rank() == 2 else [])


def test_a_failure_on_any_rank_is_everybodys(capfd):
    assert dp.launch(fail_on_rank_two, 3, timeout=20) == [1, 1, 1]
    assert capfd.readouterr().out == "test FAIL: broken\n"


# --- the wire meter ------------------------------------------------------------------------------


def every_collective():
    n, me = dist.get_world_size(), dist.get_rank()
    dp_group = dist.new_group(range(n), group_desc="dp")
    x, part = torch.ones(6), torch.empty(2)
    with dp.Wire() as wire:
        dist.all_reduce(x, group=dp_group)
        dist.all_reduce(x)
        dist.broadcast(x, 0, group=dp_group)
        dist.reduce(x, 0, group=dp_group)
        dist.all_gather([torch.empty(6) for _ in range(n)], x, group=dp_group)
        dist.reduce_scatter(part, [part.clone() for _ in range(n)], group=dp_group)
        dist.all_to_all_single(torch.empty(6), x, group=dp_group)
        # uneven: rank r sends r + 1 rows of 2 numbers to rank 0 and nothing to the others
        rows = torch.ones(me + 1, 2)
        received = torch.empty(6 if me == 0 else 0, 2)
        dist.all_to_all_single(
            received, rows, [1, 2, 3] if me == 0 else [0, 0, 0], [me + 1, 0, 0], group=dp_group
        )
        dist.gather(
            part, [torch.empty(2) for _ in range(n)] if me == 0 else None, 0, group=dp_group
        )
        dist.scatter(
            part, [torch.ones(2) for _ in range(n)] if me == 0 else None, 0, group=dp_group
        )
        dist.barrier(group=dp_group)
        if me == 0:
            dist.send(x, 1, group=dp_group)
        if me == 1:
            dist.recv(x, 0, group=dp_group)
    return dict(wire.calls), dict(wire.bytes)


def test_the_meter_counts_what_each_collective_sends():
    zero, one, two = dp.launch(every_collective, 3, timeout=20)
    common = {
        ("dp", "all_reduce"): (1, 2 * 2 * 24 // 3),
        ("default_pg", "all_reduce"): (1, 32),
        ("dp", "broadcast"): (1, 16),
        ("dp", "reduce"): (1, 16),
        ("dp", "all_gather"): (1, 2 * 24),
        ("dp", "reduce_scatter"): (1, 16),
        ("dp", "barrier"): (1, 0),
    }
    own = [
        {("dp", "all_to_all"): (2, 16 + 0), ("dp", "gather"): (1, 0), ("dp", "scatter"): (1, 16),
         ("dp", "send"): (1, 24)},
        {("dp", "all_to_all"): (2, 16 + 2 * 8), ("dp", "gather"): (1, 8),
         ("dp", "scatter"): (1, 0)},
        {("dp", "all_to_all"): (2, 16 + 3 * 8), ("dp", "gather"): (1, 8),
         ("dp", "scatter"): (1, 0)},
    ]  # fmt: skip
    for (calls, size), mine in zip((zero, one, two), own):
        assert {k: (calls[k], size[k]) for k in calls} == {**common, **mine}


class SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None


def forward_and_backward():
    x = torch.ones(4, requires_grad=True)
    with dp.Wire() as wire:
        SumBoth.apply(x, dist.group.WORLD).sum().backward()
    dist.all_reduce(x.detach())  # outside: not counted
    return wire.calls["default_pg", "all_reduce"], wire.bytes["default_pg", "all_reduce"]


def test_the_meter_sees_backward_and_fractions():
    assert dp.launch(forward_and_backward, 3, timeout=20) == [(2, Fraction(2 * 2 * 2 * 16, 3))] * 3


def unknown_collective():
    with dp.Wire():
        dist.all_reduce_coalesced([torch.ones(1)])


def test_the_meter_refuses_what_it_does_not_know():
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(unknown_collective, 2, timeout=20)
    assert "no rule for c10d::allreduce_coalesced_" in failed.value.trace


# --- the samples ---------------------------------------------------------------------------------


def test_an_epoch_is_every_window_once_and_the_next_one_another_order():
    tokens = np.arange(100, dtype=np.uint8)
    sample = dp.Samples(tokens, T=9, seed=1)
    assert sample.windows == 11
    epochs = [[sample(e * 11 + i)[0].tolist() for i in range(11)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [list(range(9 * i, 9 * i + 9)) for i in range(11)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = dp.Samples(tokens, T=9, seed=1)
    assert again(25)[0].tolist() == epochs[2][3], (
        "a function of the number, not of what came before"
    )
    assert [dp.Samples(tokens, 9, seed=2)(i)[0].tolist() for i in range(11)] != epochs[0]


def test_labels_are_the_next_tokens():
    inputs, labels = dp.Samples(np.arange(100, dtype=np.uint16), T=9, seed=0)(4)
    assert (labels == inputs + 1).all() and inputs.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_parts_of_a_batch_are_disjoint_and_complete(parts):
    for step in (0, 7):
        numbers = [list(dp.my_samples(step, 12, part, parts)) for part in range(parts)]
        assert sum(numbers, []) == list(range(step * 12, step * 12 + 12))


def test_micro_batches_keep_the_order():
    sample = dp.Samples(np.arange(100, dtype=np.uint8), T=9, seed=0)
    batches = dp.micro_batches(sample, range(3, 9), 2, "cpu")
    assert [b[0].shape for b in batches] == [(2, 9)] * 3
    assert torch.equal(
        torch.cat([b[1] for b in batches]), torch.stack([sample(i)[1] for i in range(3, 9)])
    )


def test_files_of_tokens(tmp_path):
    ids = np.array([3, 1, 65535, 2], dtype=np.uint16)
    (tmp_path / "a.txt").write_bytes(b"hello")
    ids.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids.astype(np.int32))
    assert dp.open_tokens(str(tmp_path / "a.txt")).tolist() == list(b"hello")
    for kind in ("bin", "npy"):
        tokens = dp.open_tokens(str(tmp_path / f"a.{kind}"))
        assert tokens.tolist() == ids.tolist() and isinstance(tokens, np.memmap)
        assert dp.token_range(tokens, piece=3) == (1, 65535)
    library = dp.open_tokens()
    assert len(library) > 1_000_000 and dp.token_range(library)[1] < 256


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.txt", None, "no such file"),
        ("empty.bin", b"", "is empty"),
        ("odd.bin", b"abc", "3 bytes are no uint16 tokens"),
        ("broken.npy", b"not numpy", "broken.npy: "),
        ("float.npy", np.ones(3), "float64 (3,) is no list of token ids"),
        ("table.npy", np.ones((2, 2), dtype=int), "int64 (2, 2) is no list of token ids"),
        ("objects.npy", np.array([{}], dtype=object), "Python objects"),
    ],
)
def test_files_that_are_no_tokens(tmp_path, name, content, message):
    if isinstance(content, np.ndarray):
        np.save(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError)) as error:
        dp.open_tokens(str(tmp_path / name))
    assert message in str(error.value)


def different_data():
    ours = np.arange(50, dtype=np.uint8) + (dist.get_rank() == 2)
    dp.agree(7, "the weather", dist.group.WORLD)
    try:
        dp.agree(dp.fingerprint(ours), "the data", dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_ranks_notice_that_their_data_differ():
    assert dp.launch(different_data, 3, timeout=20) == ["the data is not the same on all ranks"] * 3


def test_a_fingerprint_sees_size_type_and_content():
    tokens = np.arange(200, dtype=np.uint8)
    changed = tokens.copy()
    changed[150] += 1
    prints = [dp.fingerprint(t) for t in (tokens, changed, tokens[:-1], tokens.astype(np.uint16))]
    assert len(set(prints)) == 4 and dp.fingerprint(tokens.copy()) == prints[0]


# --- comparing -----------------------------------------------------------------------------------


def test_relative_error():
    one, zero = torch.ones(4), torch.zeros(4)
    assert dp.relative_error(one * 1.5, one) == 0.5
    assert dp.relative_error(zero, zero) == 0.0
    for wrong in (None, torch.ones(3), one * float("nan"), one * float("inf")):
        assert dp.relative_error(wrong, one) == float("inf")
    assert dp.relative_error(one, zero) == float("inf")
    assert dp.worst_error({"a": one, "b": one * 2}, {"a": one, "b": one}) == (1.0, "b")
    assert dp.worst_error({"a": one}, {"a": one, "b": one})[0] == float("inf")


# --- data parallelism ----------------------------------------------------------------------------


def powers_of_two():
    """Rank r's gradient is 2^r, so the sum names the ranks that took part."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 2.0 ** dist.get_rank())
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    dp.sum_gradients([("p", p), ("frozen", frozen)], groups[dist.get_rank() % 2])
    return p.grad.tolist()


def test_the_sum_is_over_the_group():
    assert dp.launch(powers_of_two, 4, timeout=20) == [[5.0] * 3, [10.0] * 3] * 2


def missing_gradient():
    p = torch.nn.Parameter(torch.zeros(3))
    if dist.get_rank() == 0:
        p.grad = torch.ones(3)
    dp.sum_gradients([("layers.0.lonely", p)], dist.group.WORLD)


def test_a_missing_gradient_is_named():
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(missing_gradient, 2, timeout=20)
    assert "layers.0.lonely has no gradient on rank 1" in failed.value.trace


def masked_sample(i):
    """Uneven masks; samples 2 and 3 have no valid token at all: a whole micro-batch of two."""
    generator = torch.Generator().manual_seed(i)
    ids = torch.randint(0, 61, (17,), generator=generator)
    valid = 0 if i in (2, 3) else 5 * i % 16 + 1
    return ids[:-1], torch.where(torch.arange(16) < valid, ids[1:], dp.IGNORE)


def masked_gradients(size):
    c = memory.Config(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, ffn=40)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = memory.build(c, dtype=torch.float64)
    batches = dp.micro_batches(masked_sample, dp.my_samples(0, 12, rank, world), size, "cpu")
    N = dp.count_valid(batches, dist.group.WORLD)
    loss = dp.accumulate_gradients(model, batches, N)
    dp.sum_gradients(model.named_parameters(), dist.group.WORLD)
    dist.all_reduce(loss)

    dense = memory.build(c, dtype=torch.float64)
    ids, labels = (torch.stack(x) for x in zip(*map(masked_sample, range(12))))
    expected = dense.loss(dense(ids), labels) / (labels != dp.IGNORE).sum()
    expected.backward()
    error = dp.worst_error(dp.gradients(model), dp.gradients(dense))
    return N.item(), abs(loss - expected).item(), error, len(dp.gradients(dense))


@pytest.mark.parametrize(
    "world, size",
    [(1, 1), (1, 12), (2, 1), (2, 2), (3, 2), (3, 4), (4, 1), (6, 2)],
)
def test_uneven_valid_tokens_give_the_dense_gradient(world, size):
    valid = sum(0 if i in (2, 3) else 5 * i % 16 + 1 for i in range(12))
    for N, loss_gap, (error, name), compared in dp.launch(
        masked_gradients, world, size, timeout=30
    ):
        assert N == valid and loss_gap < 1e-12 and compared == 21
        assert error < 1e-11, name


def no_token_at_all():
    labels = torch.full((2, 4), dp.IGNORE)
    return dp.count_valid([(labels, labels)], dist.group.WORLD).item()


def test_a_batch_without_valid_tokens_divides_by_one():
    assert dp.launch(no_token_at_all, 2, timeout=20) == [1, 1]


# --- as a user starts it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, code, said",
    [("sys.exit()", 0, ""), ("sys.exit('why')", 1, "why\n"), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_what_a_script_says_and_how_it_ends_is_seen(script, tmp_path, line, code, said):
    (tmp_path / "a.py").write_text(f"import sys\nprint(sys.argv, __name__)\n{line}\n")
    out = script("a.py", 7, folder=tmp_path)
    assert (out.returncode, out.stdout) == (code, "['a.py', '7'] __main__\n")
    assert said in out.stderr and bool(said) == bool(out.stderr)


@pytest.mark.full
def test_torchrun_starts_it_too(script):
    out = script("02_dp.py", torchrun=3)
    assert out.returncode == 0 and out.stdout.splitlines()[-1] == "02_dp OK", out.stderr
    assert "world 3 = dp 3" in out.stdout
