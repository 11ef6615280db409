"""The bench's own arithmetic, and that it sees a difference in time, in bytes and in results."""

import random
import statistics
import time
from functools import partial

import pytest
import torch

import bench
import bench_cost


def test_the_interval_of_a_median_covers_it():
    values = list(range(15))
    random.Random(0).shuffle(values)
    assert bench.interval(values) == (3, 11)  # P(3 or fewer of 15 coins) = 1.8 % on each side
    assert bench.interval([5.0]) == (5.0, 5.0)
    draw, hits = random.Random(1), 0
    for _ in range(2000):  # a skewed law whose median is 2^2
        low, high = bench.interval([draw.uniform(0, 4) ** 2 for _ in range(21)])
        hits += low <= 4 <= high
    assert 0.95 <= hits / 2000 < 0.99


def toy(seconds, kib, value, group):
    held = torch.zeros(kib, 1024, dtype=torch.uint8)

    def results():
        return {"w": held[:1, :1].float() + 1 + value * group.rank()}

    return lambda: time.sleep(seconds), results


def measured(row, pairs=15):
    error, quantities = bench.measure(row, pairs, peaks=1)
    return quantities, bench.report("toy", row, error, quantities)


def test_it_tells_twice_the_time_and_the_bytes(capsys):
    slow, fast = partial(toy, 0.02, 3072, 0.0), partial(toy, 0.01, 1024, 0.0)
    quantities, failures = measured(bench.Row(slow, fast, peak=2.0))
    assert quantities["peak MiB"] == [(pytest.approx(3, abs=0.05), pytest.approx(1, abs=0.05))]
    assert len(failures) == 2 and "peak ratio 3.0" in failures[1]
    ratio = float(failures[0].split("wall ratio ")[1].split()[0])
    assert 1.5 < ratio < 2.5 and "above 1.0" in failures[0]
    out = capsys.readouterr().out
    assert "<= 2.00" in out and f"{ratio:.3f}" in out and "(2 ranks, " in out
    assert measured(bench.Row(fast, slow, peak=0.5))[1] == []


def burn(milliseconds, group):
    """Rank 1 computes so long, rank 0 half of it, and both wait."""
    held = torch.ones(1)

    def step():
        end = time.process_time() + (group.rank() + 1) / 2 * milliseconds / 1000
        while time.process_time() < end:
            pass
        time.sleep(0.01)

    return step, lambda: {"w": held}


def test_cpu_is_the_processor_time_of_the_busiest_rank():
    quantities, _ = measured(bench.Row(partial(burn, 10), partial(burn, 5)), pairs=5)
    assert len(quantities["cpu ms"]) == len(quantities["wall ms"]) >= 5
    for (ours, theirs), wall in zip(quantities["cpu ms"], quantities["wall ms"]):
        assert 10 <= ours and 5 <= theirs
        assert wall[0] >= 20 and wall[1] >= 15
    ours, theirs = map(statistics.median, zip(*quantities["cpu ms"]))
    assert ours < 12 and theirs < 7  # of one step gloo's thread may take more: it spins, waiting


def test_different_results_are_a_failure_whatever_the_time():
    """Also if only another rank than the first sees them."""
    row = bench.Row(partial(toy, 0.0, 1, 0.0), partial(toy, 0.01, 1, 0.1))
    _, (failure,) = measured(row, pairs=1)
    assert "w differs, relative error 0.0909" in failure


@pytest.mark.full
@pytest.mark.parametrize("name", bench.ROWS)
def test_both_sides_of_a_row_compute_the_same(name):
    row = bench.ROWS[name]
    (error, where), quantities = bench.measure(row, pairs=1, peaks=1)
    assert error <= row.tolerance, where
    assert all(ours > 0 and theirs > 0 for values in quantities.values() for ours, theirs in values)


@pytest.mark.parametrize(
    "name", [n if "07" in n else pytest.param(n, marks=pytest.mark.full) for n in bench_cost.GROWTH]
)
def test_growth_is_what_the_formulas_say(name, capsys):
    values = bench_cost.GROWTH[name][0][1:3]
    assert bench_cost.grow(name, values, steps=1) == []
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    calls, sizes = ([int(row[i].replace(",", "")) for row in rows] for i in (-2, -1))
    # No size adds calls, but without NCCL a reduce-scatter is a send to each other rank (03).
    units = 3  # embedding, one block, norm and head
    more = [units * (n - 2) for n in values] if name.startswith("ranks") else [0, 0]
    assert len(rows) == 2 and calls[1] - more[1] == calls[0] - more[0] > 0
    assert 0.5 < sizes[1] / sizes[0] < 4  # twice the width is four times the weights, at the most


def test_a_wrong_formula_is_a_failure(monkeypatch):
    right = bench_cost.combined.sent

    def wrong(*args):
        return {key: (calls, size + 1) for key, (calls, size) in right(*args).items()}

    monkeypatch.setattr(bench_cost.combined, "sent", wrong)
    flags = "--dp 2 --micro-batch 1 --batch 2 --seq 16"
    took, calls, size, failures = bench_cost.run(bench_cost.with_width(64), flags, 2, steps=1)
    assert took > 0 and calls > 0 and any("by formula" in failure for failure in failures)


@pytest.mark.full
def test_every_axis_sends_what_its_formulas_say(capsys):
    assert bench_cost.axes(T=32) == []
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split("  ")[0] for row in rows] == list(bench_cost.AXES)
