"""03: a checkpoint of one layout is read by any other; a damaged one is seen and passed over."""

import json
import os
import resource
import signal
import tracemalloc
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from test_03_zero import (
    CONFIG, SIZES, STAGES, TIED, Storages, dense, dp, llama, make, memory, sample, sharded, step_of,
    weights, zero,
)  # fmt: skip


def build(config, stage, kind="adamw", dtype=torch.float64, frozen=()):
    model = llama(config, frozen, dtype)
    return model, sharded(model, zero.llama_units(model), stage, kind)


def state(optimizer):
    """Every tensor of the training state, whole, by (name, kind), on every rank."""
    pieces = [
        (p.name, p.kind, p.shape, p.box, p.start, p.stop, p.tensor.clone())
        for p in optimizer.state()
        if p.owned
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    whole, filled = {}, {}
    for name, kind, shape, box, start, stop, t in sum(everyone, []):
        assert box == tuple((0, size) for size in shape)
        whole.setdefault((name, kind), t.new_zeros(shape).reshape(-1))[start:stop] = t
        filled[name, kind] = filled.get((name, kind), 0) + stop - start
    assert all(filled[key] == t.numel() for key, t in whole.items())
    return whole


def save(directory, step, optimizer):
    return zero.save(directory, step, optimizer.state(), {"run": "test"}, dist.group.WORLD)


def newest(directory):
    said = []
    return zero.newest(directory, dist.group.WORLD, said.append), said


def restore(directory, optimizer):
    folder, _ = newest(directory)
    return zero.restore(folder, optimizer, dist.group.WORLD)["step"]


# --- From one layout to another ----------------------------------------------------------------


def train(directory, config, stage, kind, first, last, dtype=torch.float64, keep=False):
    """Steps first to last, resuming and saving; returns losses, and the state if asked for."""
    model, optimizer = build(config, stage, kind, dtype)
    if first:
        assert restore(directory, optimizer) == first
    losses = [step_of(model, optimizer, step, 1)[1] for step in range(first, last)]
    save(directory, last, optimizer)
    return losses, state(optimizer) if keep else None


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def equal(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(bits(a[key]), bits(b[key])) for key in a)


@pytest.mark.parametrize(
    "world, stage, kind", [(1, 0, "adamw"), (2, 1, "adamw"), (2, 3, "adamw"), (3, 2, "sgd")]
)
def test_the_same_layout_goes_on_bit_for_bit(world, stage, kind, tmp_path):
    """B162, B167: moments, their dtype and the count of steps come back too."""
    run = partial(dp.launch, train, world, timeout=20)
    losses, expected = run(tmp_path / "a", CONFIG, stage, kind, 0, 4, torch.float64, True)[0]
    run(tmp_path / "b", CONFIG, stage, kind, 0, 2)
    again, found = run(tmp_path / "b", CONFIG, stage, kind, 2, 4, torch.float64, True)[0]
    assert again == losses[2:]
    assert equal(found, expected) and len(found) == (30 * 4 if kind == "adamw" else 30)


def test_bf16_goes_on_bit_for_bit(tmp_path):
    """What is saved of a bf16 weight is its fp32 master."""
    run = partial(dp.launch, train, 2, timeout=20)
    losses, expected = run(tmp_path / "a", CONFIG, 3, "adamw", 0, 4, torch.bfloat16, True)[0]
    run(tmp_path / "b", CONFIG, 3, "adamw", 0, 2, torch.bfloat16)
    again, found = run(tmp_path / "b", CONFIG, 3, "adamw", 2, 4, torch.bfloat16, True)[0]
    assert again == losses[2:] and equal(found, expected)
    assert {t.dtype for t in found.values()} == {torch.float32}


LAYOUTS = [(4, 3), (2, 1), (3, 2), (1, 0), (4, 2)]  # (ranks, stage)


def reshard(directory, config, stage, target):
    """Load the newest, save it as step `target` from this layout; returns the whole state."""
    model, optimizer = build(config, stage)
    restore(directory, optimizer)
    save(directory, target, optimizer)
    return state(optimizer)


@pytest.mark.parametrize("config", [TIED, pytest.param(CONFIG, marks=pytest.mark.full)])
def test_there_and_back_through_other_layouts_is_bit_for_bit(config, tmp_path):
    """B33, B43, B51: by name, padding of one layout never reaches another. A tied table once."""
    world, stage = LAYOUTS[0]
    _, expected = dp.launch(
        train, world, tmp_path, config, stage, "adamw", 0, 2, torch.float64, True, timeout=20
    )[0]
    sizes = {}
    for i, (world, stage) in enumerate([*LAYOUTS[1:], LAYOUTS[0]]):
        found = dp.launch(reshard, world, tmp_path, config, stage, 3 + i, timeout=20)[0]
        assert equal(found, expected), (world, stage)
        folder = tmp_path / f"step-{3 + i:06d}"
        sizes[world, stage] = sum(f.stat().st_size for f in folder.glob("*.bin"))
        assert len(list(folder.glob("*.bin"))) == world
    names = 29 if config.tied else 30
    elements = memory.parameter_count(config)  # written once, padding never
    assert set(sizes.values()) == {3 * 8 * elements + 4 * names}
    assert len(found) == 4 * names and "lm_head.weight" in {n for n, _ in found} or config.tied


def test_training_goes_on_in_another_layout(tmp_path):
    """Two steps on 4 ranks at stage 3, two on 2 at stage 1, two on 3 at stage 2: one run."""
    _, final, moments, losses = dense(CONFIG, 6, "adamw")
    for first, (world, stage) in zip((0, 2, 4), LAYOUTS):
        keep = first == 4
        found, whole = dp.launch(
            train, world, tmp_path, CONFIG, stage, "adamw", first, first + 2, torch.float64, keep,
            timeout=20,
        )[0]  # fmt: skip
        assert found == pytest.approx(losses[first : first + 2], rel=1e-12)
    for name, p in final.items():
        assert dp.relative_error(whole[name, "weight"], p.detach().reshape(-1)) < 1e-10, name
    assert len(moments) == 60
    for (name, kind), t in moments.items():
        assert dp.relative_error(whole[name, kind], t.reshape(-1)) < 1e-10, (name, kind)
    assert {t.item() for (_, kind), t in whole.items() if kind == "step"} == {6.0}


def huge_and_tiny(directory, write):
    """B52: shards of which one has a part of one parameter and others have many parameters."""
    model = nn.Module()
    for i in range(9):
        setattr(model, f"p{i}", nn.Parameter(torch.full((1 if i else 101,), float(i))))
    optimizer = sharded(model, [[model]], 2, "adamw")
    if write:
        save(directory, 1, optimizer)
    else:
        for flat in optimizer.flats:
            flat.master.zero_()
        restore(directory, optimizer)
    return len(optimizer.weights), weights(optimizer)


def test_ranks_with_different_numbers_of_parameters(tmp_path):
    written = dp.launch(huge_and_tiny, 3, tmp_path, True, timeout=20)
    assert [count for count, _ in written] == [1, 1, 9]
    for world in (2, 5):
        _, read = dp.launch(huge_and_tiny, world, tmp_path, False, timeout=20)[0]
        assert equal(read, written[0][1]) and len(read) == 9


def other_weights(directory, stage, write):
    model = memory.build(CONFIG, seed=8 if write else 1, dtype=torch.float64)
    for p in model.layers["1"].parameters():
        p.requires_grad_(False)
    optimizer = sharded(model, zero.llama_units(model), stage)
    if write:
        save(directory, 1, optimizer)
    else:
        restore(directory, optimizer)
    if stage < 3:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights(optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_gets_every_weight_also_the_frozen_ones(stage, tmp_path):
    expected = dp.launch(other_weights, 2, tmp_path, 3, True, timeout=20)[0]
    for found in dp.launch(other_weights, 3, tmp_path, stage, False, timeout=20):
        assert equal(found, expected) and len(found) == 30


def unfreeze(directory):
    """B46: a block frozen for two steps, then trained: its moments start when its training does."""
    model, optimizer = build(CONFIG, 3, frozen=("layers.0.",))
    for step in range(2):
        step_of(model, optimizer, step, 1)
    save(directory, 2, optimizer)
    model, optimizer = build(CONFIG, 1)
    said = []
    folder, _ = newest(directory)
    zero.restore(folder, optimizer, dist.group.WORLD, said.append)
    assert len(said) == 1 and "9 parameters" in said[0]
    for step in range(2, 4):
        step_of(model, optimizer, step, 1)
    return weights(optimizer)


def test_unfreezing_through_a_checkpoint(tmp_path):
    found = dp.launch(unfreeze, 2, tmp_path, timeout=20)[0]
    model = llama(CONFIG)
    named = dict(model.named_parameters())
    vectors = [p for p in named.values() if p.dim() < 2]
    optimizer = make("adamw", [p for p in named.values() if p.dim() > 1], vectors)
    for step in range(4):
        pairs = [sample(i) for i in range(step * 12, (step + 1) * 12)]
        tokens, labels = (torch.stack(column) for column in zip(*pairs))
        (model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()).backward()
        for name, p in named.items():
            if step < 2 and name.startswith("layers.0."):
                p.grad = None  # torch then leaves it alone
        torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    error, name = dp.worst_error(found, {n: p.detach() for n, p in named.items()})
    assert error < 1e-10, (name, error)


# --- Boxes: what tensor parallelism cut before ZeRO ----------------------------------------------


def random_box(rng, shape):
    box = []
    for size in shape:
        low = int(rng.integers(0, size))
        box.append((low, int(rng.integers(low, size)) + 1))
    return box


def places(shape, box, start, stop):
    """By numpy: where in the whole tensor the elements [start, stop) of the box are."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return whole[tuple(slice(a, b) for a, b in box)].reshape(-1)[start:stop]


def test_runs_and_overlaps_against_numpy():
    rng = np.random.default_rng(0)
    met = 0
    for _ in range(500):
        shape = tuple(rng.integers(1, 6, rng.integers(0, 5)).tolist())
        sides = []
        for _ in range(2):
            box = random_box(rng, shape)
            if rng.random() < 0.3:
                box = [(0, size) for size in shape]
            elements = int(np.prod([b - a for a, b in box]))
            start, stop = sorted(rng.integers(0, elements + 1, 2).tolist())
            sides.append((shape, box, start, stop))
        for side in sides:
            found = [p + i for p, _, count in zero.runs(*side) for i in range(count)]
            assert found == places(*side).tolist(), side
            at = [p + i for _, p, count in zero.runs(*side) for i in range(count)]
            assert at == list(range(side[3] - side[2]))
        ours, theirs = (places(*side).tolist() for side in sides)
        pairs = [
            (to + i, at + i)
            for to, at, count in zero.overlaps(zero.runs(*sides[0]), zero.runs(*sides[1]))
            for i in range(count)
        ]
        common = set(ours) & set(theirs)
        assert sorted(pairs) == sorted((ours.index(x), theirs.index(x)) for x in common)
        met += len(pairs) > 0
    assert met > 100


def cut(rows, columns, n, rank, stage):
    """A (6, 10) matrix cut by a grid of tp ranks, and each part by ZeRO over n."""
    whole = torch.arange(60.0).view(6, 10)
    part, zero_rank = divmod(rank, n)
    i, j = divmod(part, columns)
    box = ((6 // rows * i, 6 // rows * (i + 1)), (10 // columns * j, 10 // columns * (j + 1)))
    mine = whole[box[0][0] : box[0][1], box[1][0] : box[1][1]].reshape(-1)
    size = -(-len(mine) // n)
    start, stop = min(zero_rank * size, len(mine)), min((zero_rank + 1) * size, len(mine))
    return box, start, stop, mine[start:stop].clone()


def boxes(directory, saved, read):
    """Write under one (rows, columns, n), read under another."""
    rank = dist.get_rank()
    box, start, stop, mine = cut(*saved, rank, 1)
    pieces = [zero.Piece("w", "weight", (6, 10), box, start, stop, mine, True)]
    zero.save(directory, 1, pieces, {}, dist.group.WORLD)
    box, start, stop, expected = cut(*read, rank, 1)
    found = torch.full_like(expected, -1.0)
    pieces = [zero.Piece("w", "weight", (6, 10), box, start, stop, found, True)]
    zero.load(Path(directory, "step-000001"), pieces)
    return torch.equal(found, expected), len(found)


@pytest.mark.parametrize(
    "saved, read",
    [
        ((1, 1, 4), (2, 1, 2)),
        ((2, 1, 2), (1, 2, 2)),
        ((1, 2, 2), (2, 2, 1)),
        ((2, 2, 1), (1, 1, 4)),
        ((1, 2, 2), (1, 1, 4)),
    ],
)
def test_pieces_of_cut_tensors_fit_other_cuts(saved, read, tmp_path):
    results = dp.launch(boxes, 4, tmp_path, saved, read, timeout=20)
    assert all(good for good, _ in results) and sum(count for _, count in results) == 60


# --- Memory --------------------------------------------------------------------------------------


def loading(directory, stage):
    """Bytes that Python and torch hold while loading, beyond what the rank has anyway."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(1000, 1900))
    optimizer = sharded(model, [[model]], 3, "adamw")
    with torch.no_grad():
        for w in optimizer.weights.values():
            w.copy_(torch.arange(w.numel()))
    if stage == "save":
        save(directory, 1, optimizer)
        return
    held = optimizer.tensors()
    own = sum(t.numel() * 4 for t in held["parameters"] + held["moments"])
    alive = []

    def look():
        refs = [r for r, _ in storages.seen.values() if not r.expired()]
        alive.append(sum(torch.UntypedStorage._new_with_weak_ptr(r.cdata).nbytes() for r in refs))

    tracemalloc.start()
    with Storages(look) as storages:
        restore(directory, optimizer)
    _, peak = tracemalloc.get_traced_memory()
    return own, max(alive), peak


def test_loading_holds_a_block_more_than_the_rank_has(tmp_path):
    dp.launch(loading, 2, tmp_path, "save", timeout=20)
    for own, alive, peak in dp.launch(loading, 3, tmp_path, "load", timeout=20):
        whole = 1000 * 1900 * 4
        assert own == pytest.approx(3 * whole / 3, rel=1e-3)  # a third of weight and two moments
        # torch's: the state, and the values in hand (over Python's buffer, so counted twice)
        assert alive <= own + 2 * zero.BLOCK
        # Python's: a buffer in hand while the one before it is given back, and the index
        assert peak < 2 * zero.BLOCK + 200_000
        assert 2 * zero.BLOCK < 3 * whole  # or a reader of everything would pass


# --- Faults --------------------------------------------------------------------------------------


def write_two(directory):
    model, optimizer = build(CONFIG, 2)
    for step in (1, 2):
        step_of(model, optimizer, step, 1)
        save(directory, step, optimizer)
    return state(optimizer)


def read(directory):
    model, optimizer = build(CONFIG, 1)
    folder, said = newest(directory)
    return zero.restore(folder, optimizer, dist.group.WORLD)["step"], said


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda f: os.truncate(f / "rank-00001.bin", 100),
    "longer": lambda f: (f / "rank-00001.bin").open("ab").write(b"x"),
    "missing": lambda f: (f / "rank-00000.bin").unlink(),
    "flipped byte": lambda f: flip(f / "rank-00000.bin", 1234),
    "flipped byte of the index": lambda f: flip(f / "index.json", 700),
    "no index": lambda f: (f / "index.json").unlink(),
    "empty index": lambda f: (f / "index.json").write_text(""),
    "another JSON": lambda f: (f / "index.json").write_text("[1, 2]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(damage, tmp_path):
    """B165"""
    dp.launch(write_two, 2, tmp_path, timeout=20)
    assert dp.launch(read, 2, tmp_path, timeout=20)[0] == (2, [])
    DAMAGE[damage](tmp_path / "step-000002")
    step, said = dp.launch(read, 3, tmp_path, timeout=20)[0]
    assert step == 1 and len(said) == 1 and "step-000002 is damaged" in said[0]


def test_every_flipped_byte_of_an_index_is_seen(tmp_path):
    dp.launch(write_two, 1, tmp_path, timeout=20)
    path = tmp_path / "step-000002" / "index.json"
    good = path.read_bytes()
    index = zero.read_index(path.parent)
    for at in range(0, len(good) - 1, 397):
        flip(path, at)
        try:
            assert zero.read_index(path.parent) == index  # a space between two tokens, at the most
        except (ValueError, KeyError, TypeError):
            pass
        path.write_bytes(good)
    assert zero.read_index(path.parent) == index


def killed(directory, moment):
    model, optimizer = build(CONFIG, 2)
    save(directory, 1, optimizer)

    def pieces():
        for i, piece in enumerate(optimizer.state()):
            if i == 5 and dist.get_rank() == 1 and moment == "writing":
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    if moment == "before the rename" and dist.get_rank() == 0:
        zero.write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    zero.save(directory, 2, pieces(), {}, dist.group.WORLD)


@pytest.mark.parametrize("moment", ["writing", "before the rename"])
def test_a_rank_killed_while_saving_leaves_the_last_good_one(moment, tmp_path, capfd):
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(killed, 2, tmp_path, moment, timeout=10)
    assert "exit code -9" in failed.value.trace
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002.tmp"]
    assert dp.launch(read, 2, tmp_path, timeout=20)[0] == (1, [])
    dp.launch(write_two, 2, tmp_path, timeout=20)  # what is left of it is in nobody's way
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert dp.launch(read, 2, tmp_path, timeout=20)[0] == (2, [])


def full_disk(directory):
    model, optimizer = build(CONFIG, 2)
    save(directory, 1, optimizer)
    if dist.get_rank() == 1:  # no file of this process may be longer, as on a disk that is full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        save(directory, 2, optimizer)
    except zero.CheckpointError as error:
        failed = str(error)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    step_of(model, optimizer, 0, 1)  # training goes on
    again, said = newest(directory)
    save(directory, 3, optimizer)
    return failed, again.name, newest(directory)[0].name


def test_a_full_disk_fails_on_all_ranks_alike_and_training_goes_on(tmp_path):
    results = dp.launch(full_disk, 3, tmp_path, timeout=10)
    assert len(set(results)) == 1
    failed, before, after = results[0]
    assert failed.startswith("rank 1: OSError") and "too large" in failed
    assert (before, after) == ("step-000001", "step-000003")


def nothing_good(directory):
    try:
        return newest(directory)
    except zero.CheckpointError as error:
        return str(error)


def test_no_checkpoint_is_none_and_only_damaged_ones_are_an_error(tmp_path):
    assert dp.launch(nothing_good, 2, tmp_path / "nowhere", timeout=10) == [(None, [])] * 2
    (tmp_path / "step-000007").mkdir()
    found = dp.launch(nothing_good, 2, tmp_path, timeout=10)
    assert found == [f"no checkpoint in {tmp_path} is good"] * 2


def mismatch(directory, what):
    saved, read = {
        "fewer layers": (memory.Config(**SIZES | {"layers": 2}), CONFIG),
        "wider": (CONFIG, memory.Config(**SIZES | {"dim": 24})),
    }[what]
    model, optimizer = build(saved, 1)
    save(directory, 1, optimizer)
    model, optimizer = build(read, 1)
    restore(directory, optimizer)


@pytest.mark.parametrize(
    "what, words",
    [
        ("fewer layers", "no weight of layers.2."),
        ("wider", "embed_tokens.weight is [61, 15], not [61, 24]"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(what, words, tmp_path, capfd):
    with pytest.raises(dp.RankFailed) as failed:
        dp.launch(mismatch, 2, tmp_path, what, timeout=10)
    assert "CheckpointError" in failed.value.trace and words in failed.value.trace


def test_reading_executes_nothing(tmp_path):
    """The index is JSON, the rest is numbers: a reader that knows only numpy gets the weights."""
    expected = dp.launch(write_two, 2, tmp_path, timeout=20)[0]
    folder = tmp_path / "step-000002"
    files = sorted(p.name for p in folder.iterdir())
    assert files == ["index.json", "rank-00000.bin", "rank-00001.bin"]
    index = json.loads((folder / "index.json").read_text())["index"]
    for entry in index["tensors"]:
        whole = np.zeros(int(np.prod(entry["shape"])), entry["dtype"])
        for piece in entry["pieces"]:
            count = piece["stop"] - piece["start"]
            whole[piece["start"] : piece["stop"]] = np.fromfile(
                folder / piece["file"], entry["dtype"], count, offset=piece["offset"]
            )
        assert whole.tobytes() == expected[entry["name"], entry["kind"]].numpy().tobytes()
    assert len(index["tensors"]) == 120


# --- The main job ------------------------------------------------------------------------------


def main_job(capfd, *arguments):
    combined = import_module("09_combined_5d")
    command = ["--seq", "16", "--batch", "4", "--dtype", "float64", *map(str, arguments)]
    code = combined.main(command)
    return code, "".join(capfd.readouterr())


@pytest.mark.full
def test_the_main_job_resumes_in_another_layout(tmp_path, capfd):
    """Losses, norms and learning rates are those of the run that wasn't interrupted."""
    code, out = main_job(capfd, "--steps", 4, "--csv", tmp_path / "whole.csv")
    assert code == 0, out
    part = ["--steps", 4, "--csv", tmp_path / "parts.csv", "--ckpt", tmp_path / "c"]
    code, out = main_job(capfd, *part, "--save-every", 2, "--dp", 2, "--zero", 3)
    assert code == 0 and "checkpoint of step 2: " in out and "bytes in" in out, out
    os.truncate(tmp_path / "c" / "step-000004" / "rank-00000.bin", 10)
    code, out = main_job(capfd, *part, "--resume", "--dp", 4, "--zero", 2, "--hybrid", 2)
    assert code == 0 and "step-000004 is damaged" in out and "2 steps done" in out, out
    whole = np.loadtxt(tmp_path / "whole.csv", delimiter=",", skiprows=1, usecols=range(4))
    parts = np.loadtxt(tmp_path / "parts.csv", delimiter=",", skiprows=1, usecols=range(4))
    assert whole.shape == parts.shape == (4, 4)
    np.testing.assert_allclose(parts, whole, rtol=1e-10)
    code, out = main_job(capfd, *part, "--resume", "--seed", 5)
    assert code == 1 and "seed 5, not 0" in out, out
