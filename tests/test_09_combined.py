"""09: the composed run equals one device; arguments' rules, mesh, sync table, dry run."""

import ast
import csv
import math
import multiprocessing
import random
import re
import sys
import time
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

combined = import_module("09_combined_5d")
dp, memory = combined.dp, combined.memory


def run(capfd, *argv, code=0):
    """09 in this process (its ranks are forked); returns the lines it printed."""
    argv = [str(a) for a in argv]
    assert combined.main(argv) == code, capfd.readouterr()
    out = capfd.readouterr()
    return (out.out or out.err).splitlines()


# --- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        "--dp 1 --micro-batch 12",
        "--dp 2",
        "--dp 3 --micro-batch 2",
        "--dp 4 --micro-batch 1 --optimizer sgd --lr 0.1",
        "--dp 2 --micro-batch 2 --dtype float32",
        "--dp 3 --dtype bfloat16",
        "--dp 2 --cp 2 --micro-batch 3",
        "--dp 2 --cp 2 --zero 3 --cp-kind allgather --micro-batch 2",
        "--dp 4 --zero 2 --hybrid 2 --micro-batch 1 --optimizer sgd",
        "--cp 4 --cp-kind ulysses --zero 1",
        "--dp 2 --tp 2 --zero 2 --recompute selective --micro-batch 3",
        "--cp 2 --tp 2 --recompute full:3",
        "--dp 2 --zero 3 --recompute full --micro-batch 2",
    ],
)
def test_check_passes(capfd, argv):
    if "--dtype" not in argv:
        argv += " --dtype float64"
    lines = run(capfd, "--steps", 3, "--seq", 24, "--check", *argv.split())
    assert lines[-1] == "09_combined_5d OK"
    compared = {words[0]: int(words[1]) for words in map(str.split, lines)
                if words and words[0] in ("gradient", "weight", "norm", "loss")}  # fmt: skip
    assert compared == {"gradient": 3 * 39, "weight": 39, "norm": 3, "loss": 3}
    assert "replicas: 0 weights differ between ranks" in lines


def test_every_number_of_ranks_gives_the_same_losses(capfd, tmp_path):
    columns = []
    for ranks in (1, 2, 3, 4):
        file = tmp_path / f"{ranks}.csv"
        run(capfd, "--dp", ranks, "--steps", 5, "--seq", 8, "--dtype", "float64", "--csv", file)
        rows = list(csv.DictReader(file.open()))
        assert list(rows[0])[:2] == ["step", "loss"] and [r["step"] for r in rows] == list("12345")
        columns.append([float(row["loss"]) for row in rows])
    assert columns[0][4] < columns[0][0]
    for losses in columns[1:]:
        assert max(abs(a - b) for a, b in zip(losses, columns[0])) < 1e-10


def masked_run(argv):
    """train() on samples with uneven masks, a whole micro-batch of them without a valid label."""

    class Masked(dp.Samples):
        def __call__(self, i):
            tokens, labels = super().__call__(i)
            valid = 0 if i % 12 in (4, 5) else 5 * i % len(labels) + 1
            return tokens, torch.where(torch.arange(len(labels)) < valid, labels, dp.IGNORE)

    dp.Samples = Masked  # in this forked rank only
    return combined.train(combined.parse(argv))


@pytest.mark.parametrize(
    "ranks, size", [(3, 4), *(pytest.param(n, 2, marks=pytest.mark.full) for n in (1, 2, 3))]
)
def test_uneven_masks(capfd, ranks, size):
    argv = f"--dp {ranks} --micro-batch {size} --steps 3 --seq 24 --check --dtype float64".split()
    assert dp.launch(masked_run, ranks, argv, timeout=60) == [0] * ranks
    assert re.search(r"^gradient +117 ", capfd.readouterr().out, re.M)


def wrong_reference(argv):
    """The check must see a run that differs: here one weight is scaled before training."""
    build = memory.build

    def other(*args):
        model = build(*args)
        if not other.built:
            model.layers["2"].mlp.up_proj.weight.data *= 1 + 1e-9
        other.built = True
        return model

    other.built = False
    combined.memory.build = other
    return combined.train(combined.parse(argv))


def test_check_fails_when_a_weight_differs_by_one_part_in_a_billion(capfd):
    argv = "--dp 2 --steps 2 --seq 24 --check --dtype float64".split()
    assert dp.launch(wrong_reference, 2, argv, timeout=60) == [1, 1]
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("09_combined_5d FAIL: layers.") and "relative error" in last


def drifting_replica(argv):
    step = combined.zero.Optimizer.step

    def nudged(self, lr, skip):
        step(self, lr, skip)
        if dist.get_rank() == 1:
            self.flats[1].parameters["layers.0.self_attn.k_proj.weight"].data.view(-1)[0] += 1e-7

    combined.zero.Optimizer.step = nudged
    return combined.train(combined.parse(argv))


def test_check_sees_a_replica_that_drifts(capfd):
    argv = "--dp 2 --steps 1 --seq 24 --check".split()
    assert dp.launch(drifting_replica, 2, argv, timeout=60) == [1, 1]
    assert "layers.0.self_attn.k_proj.weight differs between ranks" in capfd.readouterr().out


def test_the_reference_uses_nothing_of_the_later_chapters():
    tree = ast.parse((ROOT / "09_combined_5d.py").read_text())
    functions = {f.name: f for f in tree.body if isinstance(f, (ast.FunctionDef, ast.ClassDef))}
    chapters = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "import_module" in ast.unparse(node.value)
        for target in node.targets
    }
    assert {"memory", "dp", "zero", "cp"} <= chapters
    called, todo = set(), ["reference"]
    while todo:  # and whatever of this file it calls
        called.add(name := todo.pop())
        names = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)}
        assert not names & (chapters - {"memory"}), f"{name} uses {names & chapters}"
        assert not names & {"dist", "train_step"}
        todo += [n for n in names if n in functions and n not in called]
    assert called == {"reference", "plain_model", "PlainMoE", "torch_optimizer", "learning_rate"}


# --- a step that must not happen ------------------------------------------------------------------


def poisoned_run(argv, where):
    """One rank's second step has a loss, or only a gradient, that is not finite."""
    args, before = combined.parse(argv), {}
    step = combined.pp.Pipeline.step

    def poisoned(pipeline, batches, N, positions):
        loss = step(pipeline, batches, N, positions)
        model = poisoned.model
        poisoned.calls += 1
        if poisoned.calls == 2:
            before.update({n: p.detach().clone() for n, p in model.named_parameters()})
            before[""] = model
            if dist.get_rank() == 1 and where == "gradient":
                poisoned.optimizer.order[0].full[-1] = float("inf")
            if dist.get_rank() == 1 and where == "loss":
                loss = loss * float("nan")
            if dist.get_rank() == 1 and where == "auxiliary":
                combined.ep.moe_layers(model)[0].loss = torch.tensor(float("inf"))
        return loss

    poisoned.calls = 0
    combined.pp.Pipeline.step, compose = poisoned, combined.compose

    def composed(*args):
        job = compose(*args)
        poisoned.model, poisoned.optimizer = job.model, job.optimizer
        return job

    combined.compose = composed
    code = combined.train(args)
    model = before.pop("")
    same = [torch.equal(p, before[n]) for n, p in model.named_parameters()]
    return code, poisoned.calls, len(same), all(same)


@pytest.mark.parametrize(
    "where, said",
    [("loss", "first on rank 1"), ("gradient", "the gradient of lm_head.weight")],
)
def test_what_is_not_finite_stops_all_ranks_and_changes_nothing(capfd, where, said):
    argv = "--dp 3 --steps 5 --seq 24".split()
    assert dp.launch(poisoned_run, 3, argv, where, timeout=60) == [(1, 2, 39, True)] * 3
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("09_combined_5d FAIL: step 2: ") and said in last


def test_so_does_an_auxiliary_loss(capfd):
    argv = "--dp 2 --model tiny-moe --batch 4 --steps 5 --seq 24".split()
    assert dp.launch(poisoned_run, 2, argv, "auxiliary", timeout=60) == [(1, 2, 43, True)] * 2
    assert "auxiliary loss inf, no weight was changed" in capfd.readouterr().out.splitlines()[-1]


def skipped_first_step(argv):
    jobs, compose, step = [], combined.compose, combined.pp.Pipeline.step
    combined.compose = lambda *args: jobs.append(compose(*args)) or jobs[-1]
    combined.pp.Pipeline.step = lambda *args: step(*args) * float("nan")
    combined.train(combined.parse(argv))
    return jobs[0].scales.fresh


def test_a_skipped_first_step_leaves_fp8_without_a_past():
    argv = "--fp8 delayed --on-nonfinite skip --batch 2 --seq 24 --steps 1".split()
    assert dp.launch(skipped_first_step, 1, argv, timeout=60) == [True]


# --- precision ------------------------------------------------------------------------------------


def small_steps():
    model = memory.build(memory.PRESETS["tiny"], dtype=torch.bfloat16)
    args = combined.parse(["--optimizer", "sgd"])
    groups = dict.fromkeys((n for n, _ in model.named_parameters()), (None, ()))
    optimizer = combined.zero.Optimizer(
        model, combined.zero.llama_units(model), groups, 0,
        combined.partial(combined.torch_optimizer, args),
    )  # fmt: skip
    for _ in range(8):
        for flat in optimizer.order:
            for name, p in flat.parameters.items():
                p.grad = torch.full_like(p, 1e-3, dtype=torch.float32)
                optimizer.gradient_finished(flat, name, p)
        optimizer.sum_gradients()
        optimizer.step(1.0)
    return model.norm.weight.float()


def test_bf16_weights_feel_small_updates_through_their_masters():
    (w,) = dp.launch(small_steps, 1, timeout=30)  # ones; the next bf16 below 1 is 0.004 away
    assert torch.equal(w, torch.full_like(w, 0.9921875)), "8 steps of 0.001, rounded once"


def slow_reference(argv):
    reference = combined.reference

    def slow(*args):
        time.sleep(3)
        return reference(*args)

    combined.reference = slow
    return combined.train(combined.parse(argv))


@pytest.mark.full
def test_the_others_wait_for_the_reference_however_long_it_takes(capfd):
    argv = "--dp 2 --steps 1 --seq 24 --batch 2 --check --timeout 2".split()
    assert dp.launch(slow_reference, 2, argv, timeout=2) == [0, 0]


def test_learning_rate():
    args = combined.parse(["--steps", "100", "--lr", "1"])
    rates = [combined.learning_rate(step, args) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in zip(rates[10:], rates[11:])) and 0.1 < rates[-1] < 0.102


# --- the mesh and the table -----------------------------------------------------------------------


def test_mesh_of_any_order():
    assert combined.mesh({"dp": 2, "tp": 4}) == {
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "tp": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }
    draw = random.Random(0)
    for _ in range(20):
        axes = draw.sample(["pp", "dp", "cp", "tp"], 4)
        sizes = {axis: draw.choice([1, 2, 3]) for axis in axes}
        world = math.prod(sizes.values())
        coordinates = {r: np.unravel_index(r, tuple(sizes.values())) for r in range(world)}
        for i, axis in enumerate(axes):
            groups = combined.mesh(sizes)[axis]
            assert sorted(sum(groups, [])) == list(range(world))
            for ranks in groups:  # equal in every coordinate but this one, in its order
                assert [coordinates[r][i] for r in ranks] == list(range(sizes[axis]))
                assert len({tuple(np.delete(coordinates[r], i)) for r in ranks}) == 1
        one, two = draw.sample(range(4), 2)
        joint = combined.mesh(sizes, f"{axes[one]}·{axes[two]}")[f"{axes[one]}·{axes[two]}"]
        assert sorted(sum(joint, [])) == list(range(world))
        for ranks in joint:  # the first axis outermost
            pairs = [(coordinates[r][one], coordinates[r][two]) for r in ranks]
            assert pairs == sorted(pairs) and len(set(pairs)) == len(ranks)
            assert len(ranks) == sizes[axes[one]] * sizes[axes[two]]
            assert len({tuple(np.delete(coordinates[r], [one, two])) for r in ranks}) == 1


def test_every_parameter_matches_one_row():
    for name, c in memory.PRESETS.items():
        with torch.device("meta"):
            names = [n for n, _ in memory.Llama(c).named_parameters()]
        assert sorted(sum(combined.sync_rows(names), [])) == sorted(names)
    for stranger in (
        "layers.0.self_attn.bias",
        "norm.weight2",
        "my.norm.weight",
        "layers.x.norm.weight",
    ):
        with pytest.raises(ValueError, match=f"{stranger} matches 0 rows"):
            combined.sync_rows([stranger])
    twice = combined.SYNC + [(r"norm\..*", (), ())]
    with pytest.raises(ValueError, match="norm.weight matches 2 rows"):
        combined.sync_rows(["norm.weight"], twice)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, messages",
    [
        ("--model tinny", ["--model tinny: did you mean tiny?"]),
        ("--model gpt", ["--model gpt: one of tiny, smollm-1.7b"]),
        ("--dtype fp16 --optimizer adam",
         ["--optimizer adam: did you mean adamw?", "--dtype fp16: "]),
        ("--batch 10 --dp 3",
         ["--batch 10 is not a multiple of dp 3 x micro-batch 3 = 9: the nearest are 9 or 18"]),
        ("--batch 2 --dp 4 --micro-batch 1", ["= 4: the nearest are 4"]),
        ("--dp 0 --steps -1 --seq 0",
         ["--dp 0: at least 1", "--seq 0: at least 1", "--steps -1: at least 1"]),
        ("--lr nan --seed -3",
         ["--seed -3: from 0 to 2^32 - 1", "--lr nan: above 0, at most a million"]),
        ("--data /no/such/file --model tinny",
         ["--model tinny", "--data /no/such/file: no such file"]),
        ("--dry-run --dp 2 --world 3 --rank 3",
         ["3 ranks, but the layout dp 2 needs 2", "--rank 3: from 0 to 2"]),
        ("--csv /no/such/folder/x.csv --timeout 1e300",
         ["--timeout 1e+300: at least 1 second, at most a million",
          "--csv /no/such/folder/x.csv: no such folder"]),
        ("--seq 100000000", ["tokens are too few for --seq 100000000 and a next token"]),
    ],
)  # fmt: skip
def test_bad_arguments_get_one_message_with_all_rules(capfd, argv, messages):
    lines = run(capfd, *argv.split(), code=2)
    assert len(lines) == len(messages) and all(
        line.startswith("09_combined_5d: ") for line in lines
    )
    for message, line in zip(messages, lines):
        assert message in line
    assert not dist.is_initialized()


def test_a_checkpoint_continues_its_own_run_only(capfd, tmp_path):
    argv = ["--steps", 2, "--seq", 24, "--batch", 2, "--ckpt", tmp_path]
    run(capfd, *argv)
    (line,) = run(capfd, *argv, code=2)
    assert f"--ckpt {tmp_path} holds checkpoints: --resume, or another folder" in line
    lines = run(capfd, *argv, "--resume", "--optimizer", "sgd", "--lr", 0.5, code=1)
    assert "is of another run: optimizer sgd, not adamw, lr 0.5, not 0.003" in lines[-1]
    assert run(capfd, *argv[2:], "--steps", 3, "--resume")[-1] == "09_combined_5d OK"


def test_bad_data(capfd, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    np.array([1, 2, 256] * 99, dtype=np.uint16).tofile(tmp_path / "beyond.bin")
    np.save(tmp_path / "negative.npy", np.array([1, -1] * 99))
    for name, message in {
        "empty.txt": "the file is empty",
        "beyond.bin": "token id 256 is beyond the vocabulary of 256 (tiny)",
        "negative.npy": "token id -1 is negative",
    }.items():
        (line,) = run(capfd, "--data", tmp_path / name, code=2)
        assert message in line and name in line


@pytest.mark.parametrize("kind", ["txt", "bin", "npy"])
def test_other_data(capfd, tmp_path, kind):
    ids = np.random.default_rng(0).integers(0, 250, 5000)
    file = tmp_path / f"data.{kind}"
    if kind == "npy":
        np.save(file, ids)
    else:
        ids.astype(np.uint16 if kind == "bin" else np.uint8).tofile(file)
    argv = ["--dp", 2, "--steps", 2, "--seq", 24, "--check", "--dtype", "float64"]
    assert run(capfd, "--data", file, *argv)[-1] == "09_combined_5d OK"


@pytest.mark.full
def test_torchrun_with_the_wrong_world(script):
    out = script("09_combined_5d.py", "--dp", 3, "--model", "tinny", torchrun=2)
    assert out.returncode != 0
    message = [line for line in out.stderr.splitlines() if line.startswith("09_combined_5d: ")]
    assert message == [
        "09_combined_5d: --model tinny: did you mean tiny?",
        "09_combined_5d: 2 ranks, but the layout dp 3 needs 3",
    ]


def test_torchrun(script):
    argv = "--dp 2 --zero 3 --steps 2 --seq 24 --check".split()
    out = script("09_combined_5d.py", *argv, torchrun=2)
    assert out.returncode == 0 and out.stdout.splitlines()[-1] == "09_combined_5d OK", out.stderr
    assert all(len(line) <= 80 for line in out.stdout.splitlines())


# --- the dry run ----------------------------------------------------------------------------------


def real_step(argv):
    """What the dry run claims, measured: bytes held and sent in one real step."""
    args = combined.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    sample = dp.Samples(dp.open_tokens(), args.seq, 0)
    positions = combined.my_positions(args, groups, "cpu")
    with dp.Wire() as wire:
        batches = combined.my_batches(args, groups, sample, 0, "cpu")
        combined.train_step(job, groups, batches, positions, 1e-3)
    held = {kind: dp._bytes(tensors) for kind, tensors in job.optimizer.tensors().items()}
    keys = [key for key in wire.calls if wire.bytes[key]]
    name = {("dp·cp inside", "send"): ("dp·cp inside", "reduce_scatter"),  # gloo's, see 03
            ("dp·cp", "send"): ("dp·cp", "reduce_scatter")}  # fmt: skip
    calls, size = ({name.get(k, k): of[k] for k in keys} for of in (wire.calls, wire.bytes))
    return held, calls, size


@pytest.mark.parametrize(
    "layout",
    [
        "--dp 2",
        "--dp 2 --dtype bfloat16 --zero 3",
        "--dp 1 --cp 2 --zero 1",
        "--dp 4 --zero 2 --hybrid 2",
    ],
)
def test_a_dry_run_holds_and_sends_what_a_real_step_does(capfd, layout):
    argv = [*layout.split(), "--batch", "8", "--seq", "24", "--micro-batch", "2"]
    args = combined.parse(argv)
    held, calls, size = dp.launch(real_step, args.dp * args.cp, argv, timeout=60)[1]
    held = {kind: bytes_ for kind, bytes_ in held.items() if bytes_}
    lines = run_dry(capfd, *argv, "--rank", "1")
    cells = [re.split(r" {2,}", line.replace(",", "")) for line in lines]
    assert {c[0]: int(c[-1]) for c in cells if c[0] in held} == held
    rows = {(c[0], c[1]): c[2:] for c in cells if len(c) == 6 and c[0] != "sent in a step"}
    assert rows.keys() == calls.keys() and len(rows) > 1
    for key, cells in rows.items():
        assert cells == [str(calls[key])] * 2 + [str(int(size[key]))] * 2
    assert lines[-1] == "09_combined_5d OK"


def run_dry(capfd, *argv):
    """A dry run makes the process group of its process, so it gets a forked one of its own."""
    capfd.readouterr()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(combined.main(["--dry-run", *argv]))
    )
    child.start()
    child.join(timeout=100)
    out = capfd.readouterr()
    assert child.exitcode == 0, out
    return out.out.splitlines()


@pytest.mark.full
def test_a_dry_run_of_a_world_that_no_machine_here_could_hold(capfd):
    lines = run_dry(capfd, *"--model llama3-8b --dp 256 --batch 512 --micro-batch 1".split(),
                    *"--seq 8192 --dtype bfloat16 --zero 1 --rank 255".split())  # fmt: skip
    N = memory.parameter_count(memory.PRESETS["llama3-8b"])
    held = {
        cells[0]: int(cells[-1].replace(",", ""))
        for line in lines
        if len(cells := re.split(r" {2,}", line)) == 3 and cells[0] != "held between steps"
    }
    assert held == {"parameters": 2 * N, "gradients": 4 * N, "master copy": 4 * N // 256,
                    "moments": 8 * N // 256}  # fmt: skip
