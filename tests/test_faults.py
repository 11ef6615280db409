"""09 under faults, the short form: `python tests/faults.py` has the campaigns."""

import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

combined, dp, zero, pp = faults.combined, faults.dp, faults.zero, faults.pp
GOOD = {"the same bits", "other layout, 1e-10"}


@pytest.fixture
def root(tmp_path):
    data = np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint16)
    data.tofile(tmp_path / "text.bin")
    return tmp_path


def run(root, argv, arrange=faults.quiet_train, name="run", seconds=60):
    """A run of 09 in a folder of its own; returns exit code, output, folder, seconds."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "out").write_text("")
    begin = time.monotonic()
    code = faults.finish(faults.job(argv(folder), folder / "out", arrange), seconds)
    return code, (folder / "out").read_text(), folder, time.monotonic() - begin


def words(layout, *more, family="dense", timeout=30):
    return lambda folder: [*faults.words(family, layout, folder, timeout), *map(str, more)]


# --- The campaigns --------------------------------------------------------------------------------


def test_a_few_random_kills():
    done = faults.kills(2, seed=3, report=lambda *args, **kwargs: None)
    assert len(done) >= 2 and {outcome for *_, outcome in done} <= GOOD, done


@pytest.mark.campaign
def test_two_hundred_kills():
    done = faults.kills(200, seed=1)
    hits = [moment for _, moment, _ in done if not moment.startswith("not hit")]
    assert {outcome for *_, outcome in done} <= GOOD and len(hits) >= 200
    named = {moment for moment, _ in faults.MOMENTS}
    assert len(named & set(hits)) >= 7, "of the moments of a run most were met"


def test_some_inputs():
    done = faults.inputs(15, seed=2, report=lambda *args, **kwargs: None)
    assert [case for case in done if case[2]] == []
    assert {code for _, code, _ in done} >= {0, 2}


@pytest.mark.campaign
def test_five_hundred_inputs():
    done = faults.inputs(500, seed=3)
    assert [case for case in done if case[2]] == []
    assert sum(code == 0 for _, code, _ in done) >= 50


@pytest.mark.full
def test_memory_stays_flat():
    seen, code, count, said, _ = faults.long(1.5, every=20)
    late = [size for minute, size in seen.items() if minute > 0.5]
    assert code == 0 and said.startswith("SIGTERM: stopped after step") and count >= 2
    assert len(late) >= 3 and max(late) < 1.01 * late[0]


# --- SIGTERM --------------------------------------------------------------------------------------


def at_call(owner, name, call, rank, act):
    """Before the call-th call of a function on one rank, act()."""
    faults.quiet_train()
    before, calls = getattr(owner, name), itertools.count(1)

    def watched(*args, **kwargs):
        if dist.get_rank() == rank and next(calls) == call:
            act()
        return before(*args, **kwargs)

    setattr(owner, name, watched)


@pytest.mark.parametrize("layout", ["--dp 2 --zero 2", "--pp 2 --tp 2 --schedule zb-v"])
def test_sigterm_to_one_rank_saves_on_all_and_resuming_gives_the_same_digits(root, layout):
    act = lambda: os.kill(os.getpid(), signal.SIGTERM)
    code, out, folder, _ = run(
        root, words(layout), partial(at_call, pp.Pipeline, "step", 2, 1, act)
    )
    assert code == 0 and "SIGTERM: stopped after step 3" in out, out
    assert sorted(p.name for p in (folder / "c").iterdir()) == ["step-000002", "step-000003"]
    code, out, folder, _ = run(root, words(layout))
    assert code == 0 and "step-000003: 3 steps done" in out, out
    expected, _ = faults.uninterrupted("dense", layout, root)
    assert faults.difference(folder, expected, bitwise=True) == ""


@pytest.mark.parametrize(
    "check, said",
    [(2, "steps 1-2"), pytest.param(5, "nothing was compared", marks=pytest.mark.full)],
)
def test_a_run_that_sigterm_stops_still_says_what_it_found(root, check, said):
    act = lambda: os.kill(os.getpid(), signal.SIGTERM)

    def argv(folder):
        every = words("--dp 2 --zero 1", "--check", check)(folder)
        return [word for word in every if word != "--resume"]

    code, out, *_ = run(root, argv, partial(at_call, pp.Pipeline, "step", 2, 1, act))
    assert code == 0 and "SIGTERM: stopped after step 3" in out, out
    assert said in out and "sent in a step" in out and "replicas: 0" in out
    assert out.splitlines()[-1] == "09_combined_5d OK"


def test_sigterm_to_the_launcher_is_passed_on(root):
    act = lambda: os.kill(os.getppid(), signal.SIGTERM)
    argv = words("--dp 2", "--steps", 100_000)
    code, out, folder, _ = run(root, argv, partial(at_call, pp.Pipeline, "step", 2, 0, act))
    assert code == 0 and (said := re.search(r"SIGTERM: stopped after step (\d+)", out)), out
    assert (folder / "c" / f"step-{int(said[1]):06d}" / "index.json").exists()


# --- Who dies or hangs ----------------------------------------------------------------------------


def test_a_rank_that_hangs_is_named_with_the_collective(root):
    """B158: within the time-out, nothing left behind. `run` fails if a process stays."""
    act = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    argv = words("--dp 3 --zero 3", timeout=3)
    code, out, folder, took = run(root, argv, partial(at_call, zero.Optimizer, "step", 3, 1, act))
    assert code == 1 and took < 30, (code, took)
    assert re.search(
        r"rank [02] waited in all_reduce over \S+ for rank 1 \(died or hangs\)", out
    ), out
    assert [p.name for p in (folder / "c").iterdir()] == ["step-000002"]
    assert "Traceback" not in out


def test_rank_0_hangs_before_the_ranks_have_met(root):
    """The launcher keeps the store where they meet: with rank 0 all would hang, time-out or not."""
    act = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    argv = words("--dp 2", timeout=2)
    code, out, _, took = run(root, argv, partial(at_call, dist, "new_group", 3, 0, act))
    assert code == 1 and took < 30 and "rank 1 waited in new_group over " in out, out
    assert "for rank 0 (died or hangs)" in out, out


def test_a_rank_that_dies_is_named_with_the_collective(root):
    act = lambda: os.kill(os.getpid(), signal.SIGKILL)
    code, out, _, _ = run(root, words("--dp 2"), partial(at_call, pp.Pipeline, "step", 2, 1, act))
    assert code == 1 and "rank 1 of 2 failed: died with exit code -9" in out, out
    assert re.search(r"rank 0 waited in all_reduce over \S+ for rank 1 ", out), out


def test_a_rank_that_raises_is_named_not_the_ones_that_wait(root):
    def act():
        raise ValueError("a mistake of its own")

    code, out, _, _ = run(root, words("--dp 3"), partial(at_call, pp.Pipeline, "step", 2, 1, act))
    assert code == 1 and "rank 1 of 3 failed: Traceback" in out and "a mistake of its own" in out


def test_ranks_leave_when_their_launcher_is_gone(root):
    """Or they would train on, and nobody would ever stop them."""
    act = lambda: os.kill(os.getppid(), signal.SIGKILL)
    argv = words("--dp 2", "--steps", 100_000)
    code, _, folder, _ = run(root, argv, partial(at_call, pp.Pipeline, "step", 2, 0, act))
    assert code == -9 and faults.whole_files_only(folder / "c") == ""


@pytest.mark.full
def test_torchrun_brings_the_job_back_by_itself(root):
    """B159: a worker is killed; all restart, load the same step, and the losses are the same."""
    base = "--dp 2 --batch 4 --seq 16 --steps 30 --save-every 5 --dtype float64".split()
    assert combined.main([*base, "--ckpt", f"{root}/whole", "--csv", f"{root}/whole.csv"]) == 0
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    argv += ["--max-restarts", "2", "09_combined_5d.py", *base,
             "--resume", "--ckpt", f"{root}/parts"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        [*argv, "--csv", f"{root}/parts.csv"], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    while not (root / "parts" / "step-000005").exists() and agent.poll() is None:
        time.sleep(0.05)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, _ = agent.communicate(timeout=240)
    assert agent.returncode == 0 and "resumed from" in out, out
    rows = [[line.split(",")[:4] for line in (root / name).read_text().splitlines()]
            for name in ("whole.csv", "parts.csv")]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 31


# --- What is not finite ---------------------------------------------------------------------------


NAME = "layers.1.mlp.up_proj.weight"


def poison(rank, value, step=2, name=NAME):
    """In one step one rank has another number in one gradient; that step must change nothing."""
    faults.quiet_train()
    collect, train_step, steps = zero.Flat.collect, combined.train_step, itertools.count(1)
    now = [0]

    def collected(flat, key, p):
        if key == name and now[0] == step and dist.get_rank() == rank:
            p.grad.view(-1)[0] = value
        return collect(flat, key, p)

    def state(job):
        kinds = job.optimizer.tensors()
        held = [t for kind, ts in kinds.items() if kind != "gradients" for t in ts]
        return [
            t.detach().clone() for t in held + [b for _, b in combined.saved_buffers(job.model)]
        ]

    def stepped(job, *args):
        now[0], before = next(steps), state(job)
        result = train_step(job, *args)
        same = all(map(torch.equal, before, state(job)))
        assert same == (now[0] == step and not np.isfinite(value)), f"step {now[0]}: {same}"
        return result

    zero.Flat.collect, combined.train_step = collected, stepped


@pytest.mark.parametrize(
    "family, layout, rank, value",
    [
        ("moe", "--pp 2 --dp 2 --ep 2 --zero 2", 1, float("inf")),
        pytest.param("dense", "--dp 2", 1, float("nan"), marks=pytest.mark.full),
        pytest.param("dense", "--dp 3 --zero 3", 2, float("inf"), marks=pytest.mark.full),
        ("dense", "--tp 2 --zero 1", 0, float("nan")),
    ],
)
def test_a_gradient_that_is_not_finite(root, family, layout, rank, value):
    """Nothing changes on any rank; said is the step, rank, stage, parameter. Or it is skipped."""
    name = NAME if family == "dense" else "layers.0.self_attn.o_proj.weight"
    arrange = partial(poison, rank, value, name=name)
    code, out, folder, _ = run(root, words(layout, family=family), arrange, "stop")
    last = out.splitlines()[-1]
    assert code == 1 and last.startswith("09_combined_5d FAIL: step 2: loss "), out
    assert re.search(rf"first on rank \d, stage 0: the gradient of {name}$", last), last
    assert not (folder / "c").exists() or not list((folder / "c").glob("step-*"))
    skip = words(layout, "--on-nonfinite", "skip", family=family)
    code, out, folder, _ = run(root, skip, arrange, "skip")
    assert code == 0 and "skipped: step 2: loss" in out and "1 of 4 steps skipped" in out, out
    # One device that skips the same step ends at the same weights.
    one = words("--dp 1", "--on-nonfinite", "skip", family=family)
    code, out, other, _ = run(root, one, partial(poison, 0, value, name=name), "one")
    assert code == 0, out
    ours, theirs = ({str(key): t for key, t in faults.contents(f / "c" / "step-000004").items()}
                    for f in (folder, other))  # fmt: skip
    error, where = dp.worst_error(ours, theirs)
    assert error < 1e-10, (error, where)


def test_the_later_layer_is_named_of_all_that_backward_has_reached(root):
    code, out, _, _ = run(root, words("--pp 2"), partial(poison_activations, 1))
    last = out.splitlines()[-1]
    assert code == 1 and re.search(r"stage 0: the gradient of layers\.1\.\S+$", last), last


def poison_activations(layer):
    """From block `layer` backward on, every gradient is nan, in step 2."""
    faults.quiet_train()
    compose, train_step, steps = combined.compose, combined.train_step, itertools.count(1)
    now = [0]

    def composed(*args):
        job = compose(*args)
        for number, block in job.model.layers.items():
            if int(number) == layer:
                block.register_full_backward_pre_hook(
                    lambda module, grads: tuple(
                        g * (float("nan") if now[0] == 2 else 1) for g in grads
                    )
                )
        return job

    def stepped(*args):
        now[0] = next(steps)
        return train_step(*args)

    combined.compose, combined.train_step = composed, stepped


def spiked():
    """The second step's gradient is 1e30 times too large on one rank: it is clipped everywhere."""
    faults.quiet_train()
    collect, train_step, steps = zero.Flat.collect, combined.train_step, itertools.count(1)
    now = [0]

    def collected(flat, key, p):
        if now[0] == 2 and dist.get_rank() == 1:
            p.grad.mul_(1e30)
        return collect(flat, key, p)

    def stepped(job, groups, batches, positions, lr, *args):
        now[0] = next(steps)
        before = [p.detach().clone() for p in job.model.parameters()]
        result = train_step(job, groups, batches, positions, lr, *args)
        moved = sum((p - b).square().sum() for p, b in zip(job.model.parameters(), before)) ** 0.5
        size = sum(b.square().sum() for b in before) ** 0.5
        assert 0 < moved <= lr * (1 + combined.WEIGHT_DECAY * size) * (1 + 1e-6), moved
        return result

    zero.Flat.collect, combined.train_step = collected, stepped


def test_a_spike_moves_the_weights_no_further_than_any_step(root):
    """It is finite: the step is taken, with the length of the clipped gradient, on all ranks."""
    argv = words("--dp 2", "--optimizer", "sgd", "--lr", 0.1)
    code, out, folder, _ = run(root, argv, spiked)
    assert code == 0, out
    norms = [float(row[2]) for row in faults.losses(folder)]
    assert norms[1] > 1e25 and max(norms[0], *norms[2:]) < 1e3
    assert all(np.isfinite(float(row[1])) for row in faults.losses(folder))


# --- A full disk, and data ------------------------------------------------------------------------


def no_space(rank):
    """No file of this rank may be longer than a few bytes, as on a disk that is full."""
    faults.quiet_train()
    train = combined.train

    def wrapped(args):
        if dist.get_rank() == rank:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        return train(args)

    combined.train = wrapped


def test_a_full_disk_costs_the_checkpoint_not_the_run(root):
    code, out, folder, _ = run(root, words("--dp 2 --zero 1"), partial(no_space, 1))
    assert code == 1 and "checkpoint of step 2 not written (rank 1: OSError" in out, out
    assert out.splitlines()[-1].startswith("09_combined_5d FAIL: checkpoint of step 4: rank 1")
    assert len(faults.losses(folder)) == 4
    assert [p.name for p in (folder / "c").iterdir()] == ["step-000004.tmp"]
    code, out, folder, _ = run(root, words("--dp 2 --zero 1"))  # there is space again
    assert code == 0 and [p.name for p in (folder / "c").iterdir() if "tmp" in p.name] == []
    expected, _ = faults.uninterrupted("dense", "--dp 2 --zero 1", root)
    assert faults.difference(folder, expected, bitwise=True) == ""


def test_losses_that_cannot_be_written_do_not_stop_the_run(root):
    code, out, folder, _ = run(root, words("--dp 2", "--csv", "/dev/full"))
    assert (
        code == 1 and "--csv /dev/full: [Errno 28] No space left on device" in out.splitlines()[-1]
    )
    assert (folder / "c" / "step-000004").exists() and Path("/dev/full").is_char_device()


def test_changed_data_are_seen_when_resuming(root):
    assert run(root, words("--dp 2"))[0] == 0
    data = bytearray((root / "text.bin").read_bytes())
    data[4000] ^= 1
    (root / "text.bin").write_bytes(data)
    code, out, _, _ = run(root, words("--dp 2"))
    assert code == 1 and re.search(r"is of another run: data \d+, not \d+$", out.splitlines()[-1])


def test_a_file_of_one_window_is_enough_for_every_batch(root):
    """An epoch is every window once; a batch of 12 takes 12 epochs of it."""
    (root / "text.bin").write_bytes((root / "text.bin").read_bytes()[: 2 * 17])
    code, out, folder, _ = run(root, words("--dp 3"))
    assert code == 0 and len(faults.losses(folder)) == 4, out


def test_no_rank_is_left_without_a_part(root):
    """B163: fewer sequences than ranks, or fewer tokens than cp and tp cut, are refused."""
    for argv, said in (
        ("--dp 4 --batch 2 --micro-batch 1", "--batch 2 is not a multiple of dp 4"),
        ("--cp 4 --seq 4", "--seq 4 is not a multiple of 2 x cp 4 = 8"),
    ):
        args = combined.parse(argv.split())
        assert any(said in rule for rule in combined.violations(args, 4)), argv


def test_a_list_of_losses_that_is_another_file_is_not_overwritten(root):
    (root / "mine.py").write_text("print('precious')\n")
    code, out, _, _ = run(root, words("--dp 1", "--csv", root / "mine.py"))
    assert code == 2 and "exists and is no list of losses" in out
    assert (root / "mine.py").read_text() == "print('precious')\n"


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, messages",
    [
        ("--dp 1000000000", ["--dp 1000000000: at most 131,072"]),
        ("--dp 512 --batch 512", ["512 ranks on one machine: at most 256"]),
        ("--batch 99999999999999999999 --pp 2",
         ["--batch 99999999999999999999: at most 16,777,216"]),
        ("--timeout 0.5 --on-nonfinite ignore",
         ["--on-nonfinite ignore: one of stop, skip", "--timeout 0.5: at least"]),
        ("--world 4", ["--world is for --dry-run"]),
        ("--csv /", ["--csv /: that is a folder"]),
        ("--ckpt /dev/null", ["--ckpt /dev/null: that is no folder"]),
        ("--dp 4 --zero 2 --hybrid 3 --batch 8",
         ["--hybrid 3: with --zero 1 to 3, a divisor of dp x cp = 4: 1, 2, 4"]),
        ("--model tiny-moe --dp 4 --ep 2 --zero 1 --hybrid 4",
         ["--hybrid 4 does not divide the 2 ranks"]),
    ],
)  # fmt: skip
def test_rules(argv, messages):
    begin = time.monotonic()
    args = combined.parse(argv.split())
    world = args.dp * args.cp * args.tp * args.pp
    rules = combined.violations(args, world)
    for message in messages:
        assert any(message in rule for rule in rules), rules
    assert time.monotonic() - begin < 20


def test_the_nearest_are_found_by_divisors():
    for n in (1, 2, 12, 36, 97, 1024):
        assert combined.divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
