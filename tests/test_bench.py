"""The bench's own arithmetic, and that it sees a difference in time, in bytes and in results."""

import random
import time
from functools import partial

import torch

import bench


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

    def step():
        time.sleep(seconds)
        return {"w": held[:1, :1].float() + value}

    return step


def test_it_tells_twice_the_time_and_the_bytes():
    row = bench.Row(partial(toy, 0.02, 3072, 1.0), partial(toy, 0.01, 1024, 1.0))
    cells, failure = bench.run("toy", row, 15)
    assert 1.5 < float(cells[3]) < 2.5 and "above 1.0" in failure
    assert cells[6] == "3.0 / 1.0"
    back = bench.Row(row.theirs, row.ours)
    assert bench.run("toy", back, 15)[1] is None


def test_different_results_are_a_failure_whatever_the_time():
    row = bench.Row(partial(toy, 0.0, 1, 1.0), partial(toy, 0.01, 1, 1.1))
    assert "w differs, relative error 0.0909" in bench.run("toy", row, 15)[1]
