"""09 with --tp: composed with dp, cp and ZeRO, over checkpoints, and by the dry run."""

import dataclasses
import re
import shutil
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from conftest import run_script

combined = import_module("09_combined_5d")
dp, memory, tp, zero = combined.dp, combined.memory, combined.tp, combined.zero

# Nothing divides by 4 that need not: 61 words, one kv head.
ODD = memory.Config(vocab=61, dim=20, layers=2, heads=4, kv_heads=1, ffn=12, head_dim=4)
PRESETS = {"odd": ODD, "tied": dataclasses.replace(ODD, tied=True, kv_heads=2)}


class Text(dp.Samples):
    """Bytes made small enough for the vocabulary; documents of uneven length."""

    def __call__(self, i):
        tokens, labels = super().__call__(i)
        valid = torch.arange(len(labels)) < 5 * i % len(labels) + 1
        return tokens % 61, torch.where(valid, labels % 61, dp.IGNORE)


def train(argv):
    """combined.train on the small models, in a forked rank."""
    combined.MODELS.update(PRESETS)
    dp.Samples = Text
    combined.show_text = lambda *args, **kwargs: None
    return combined.train(combined.parse(argv))


def trained(capfd, argv):
    combined.MODELS.update(PRESETS)
    args = combined.parse(argv.split())
    world = args.dp * args.cp * args.tp
    codes = dp.launch(train, world, argv.split(), timeout=60)
    out = capfd.readouterr().out.splitlines()
    assert codes == [0] * world and out[-1] == "09_combined_5d OK", out
    return out


@pytest.mark.parametrize(
    "layout, model",
    [
        ("--tp 2", "odd"),
        ("--tp 4 --zero 1", "tied"),
        ("--dp 2 --tp 2 --zero 2", "odd"),
        ("--cp 2 --tp 2", "tied"),
        ("--dp 2 --tp 2 --zero 3 --micro-batch 2", "tied"),
        pytest.param("--tp 4", "odd", marks=pytest.mark.full),
        pytest.param("--dp 2 --cp 2 --tp 4 --zero 3", "odd", marks=pytest.mark.full),
        pytest.param("--dp 2 --cp 2 --tp 2 --zero 1 --hybrid 2", "tied", marks=pytest.mark.full),
        pytest.param("--cp 2 --tp 2 --cp-kind ulysses", "odd", marks=pytest.mark.full),
        pytest.param("--cp 2 --tp 2 --cp-kind allgather", "tied", marks=pytest.mark.full),
    ],
)
def test_layouts_compute_what_one_device_does(capfd, layout, model):
    argv = f"{layout} --model {model} --batch 4 --steps 3 --seq 16 --check --dtype float64"
    out = trained(capfd, argv)
    compared = {words[0]: int(words[1]) for words in map(str.split, out)
                if words and words[0] in ("gradient", "weight", "norm", "loss")}  # fmt: skip
    names = 21 if model == "odd" else 20
    assert compared == {"gradient": 3 * names, "weight": names, "norm": 3, "loss": 3}
    assert "replicas: 0 weights differ between ranks" in out
    rows = [line.split()[:2] for line in out if re.match(r"(tp|sharing) +\w+ +[1-9]", line)]
    assert ["tp", "all_gather"] in rows and ["tp", "reduce_scatter"] in rows
    if " --tp 4" in f" {layout}" or model == "odd":
        assert ["sharing", "all_reduce"] in rows


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3, 6))])
def test_bf16_is_held_to_the_error_of_one_device(capfd, seed):
    argv = "--dp 2 --tp 2 --batch 4 --steps 2 --seq 16 --check --dtype bfloat16 --seed"
    assert dp.launch(train, 4, [*argv.split(), str(seed)], timeout=60) == [0] * 4
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    rows = [row[:2] for row in rows if row and row[0] in ("gradient", "weight", "norm", "loss")]
    assert rows == [["gradient", "78"], ["weight", "39"], ["norm", "2"], ["loss", "2"]]


def drifting(argv, name):
    """One rank's copy of a parameter moves by a bit after the step."""
    step = zero.Optimizer.step

    def nudged(self, lr, skip=None):
        step(self, lr, skip)
        if dist.get_rank() == 1:
            for flat in self.flats:
                if name in flat.parameters:
                    flat.parameters[name].data.view(-1)[0] += 1e-7

    zero.Optimizer.step = nudged
    return train(argv)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.self_attn.k_proj.weight"])
def test_replicas_over_tp_that_drift_are_seen(capfd, name):
    argv = "--tp 2 --model odd --batch 2 --steps 1 --seq 16 --check".split()
    assert dp.launch(drifting, 2, argv, name, timeout=60) == [1, 1]
    assert f"{name} differs between ranks" in capfd.readouterr().out


def norm_worker(argv):
    """The gradient norm of a step of known gradients: each rank's are all 1."""
    combined.MODELS.update(PRESETS)
    args = combined.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    for flat in job.optimizer.flats:
        for view in flat.views(flat.full if flat.full is not None else flat.grad).values():
            view.fill_(1)
    total = job.optimizer.squares()
    dist.all_reduce(total, group=groups["control"])
    return total.item()


def test_the_norm_counts_each_element_once():
    whole = memory.parameter_count(ODD)
    padding = 2 * (64 - 61) * ODD.dim  # filled here, zeros in a run
    for n, extra in ((1, 0), (2, 2 * ODD.dim), (4, padding)):
        got = dp.launch(norm_worker, n, ["--tp", str(n), "--model", "odd"], timeout=60)
        assert got == [whole + extra] * n


def text_worker(argv):
    combined.MODELS.update(PRESETS)
    args = combined.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    dense = memory.build(PRESETS[args.model], args.seed)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        ours, expected = combined.next_logits(args, job.pipeline, groups, ids), dense(ids)[0, -1]
    return ours.shape == (61,) and dp.relative_error(ours, expected) < 1e-5


def test_the_next_words_logits_of_a_length_that_tp_does_not_divide():
    assert dp.launch(text_worker, 4, ["--tp", "4", "--model", "odd"], timeout=60) == [True] * 4


@pytest.mark.full
def test_the_model_writes_the_same_text_on_any_layout(capfd, monkeypatch):
    at_leisure = partial(combined.show_text, seconds=100.0)  # or a slow machine writes less
    monkeypatch.setattr(combined, "show_text", at_leisure)
    texts = []
    for layout in ("", "--tp 2"):
        assert combined.main(f"{layout} --steps 1 --seq 24 --dtype float64".split()) == 0
        texts.append(capfd.readouterr().out.split("the model writes")[1])
    assert texts[0] == texts[1] and len(texts[0]) > 100


# --- Checkpoints ------------------------------------------------------------------------------


def weights_worker(argv):
    """Whole weights and moments of the newest checkpoint, loaded into the layout of argv."""
    combined.MODELS.update(PRESETS)
    args = combined.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    folder = zero.newest(args.ckpt, groups["control"])
    zero.restore(folder, job.optimizer, groups["control"], boxes=combined.boxes(args, groups))
    own = combined.own_weights(args, job)
    whole = combined.whole_tensors(args, own, groups)
    last = args.tp == 4 and groups["tp"].rank() == 3  # words 48 to 60 of 64
    tables = [w for name, w in own.items() if re.match("embed|lm_head", name)] if last else []
    padding = [w[61 - 48 :].abs().sum().item() for w in tables]
    return {name: w.detach() for name, w in whole.items()}, padding


@pytest.mark.parametrize("model", ["odd", pytest.param("tied", marks=pytest.mark.full)])
def test_a_checkpoint_fits_any_other_layout(capfd, tmp_path, model):
    common = f"--model {model} --batch 4 --seq 16 --dtype float64 --ckpt {tmp_path} --save-every 2"
    for i, layout in enumerate(("--tp 4 --zero 1", "--dp 2 --cp 2", "--dp 2 --tp 2 --zero 3")):
        resume = "--resume" if i else ""
        trained(capfd, f"{layout} {common} --steps {2 * i + 2} {resume}")
    index = zero.read_index(tmp_path / "step-000002")
    real = memory.parameter_count(PRESETS[model])
    elements = {"weight": 0, "exp_avg": 0}
    for t in index["tensors"]:
        if t["kind"] in elements:
            elements[t["kind"]] += sum(p["stop"] - p["start"] for p in t["pieces"])
    assert elements == {"weight": real, "exp_avg": real}, "written once, and no padding"

    loaded = []
    for layout, n in (("", 1), ("--tp 4", 4), ("--dp 2 --tp 2 --zero 3", 4)):
        ranks = dp.launch(weights_worker, n, f"{layout} {common}".split(), timeout=60)
        for weights, padding in ranks:
            loaded.append(weights)
            assert all(p == 0 for p in padding)
    names = len(loaded[0])
    assert names == (21 if model == "odd" else 20) and len(loaded) == 9
    for weights in loaded:
        assert all(torch.equal(weights[name], loaded[0][name]) for name in loaded[0])


@pytest.mark.full
def test_a_run_that_changes_its_layout_goes_on_as_one_device_would(capfd, tmp_path):
    losses = []
    for name, layouts in (("one", ["", ""]), ("tp", ["--tp 4", "--dp 2 --tp 2 --zero 2"])):
        for steps, layout, resume in zip((2, 4), layouts, ("", "--resume")):
            # both parts are told of four steps, so that the learning rate is the same
            argv = f"{layout} --model odd --batch 4 --seq 16 --dtype float64 --steps 4 {resume}"
            argv += f" --ckpt {tmp_path / name} --save-every 2 --csv {tmp_path / name}.csv"
            trained(capfd, argv)
            if not resume:  # as if it had been killed after step 2
                shutil.rmtree(tmp_path / name / "step-000004")
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()[1:]
        assert [line.split(",")[0] for line in lines] == list("1234")
        losses.append([float(line.split(",")[1]) for line in lines])
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-10


# --- Rules and the dry run --------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--tp 3", "tiny: tp 3 does not divide heads 8: the nearest that fit are 2 and 4"),
        ("--tp 16", "tiny: tp 16 does not divide heads 8: the nearest that fit are 8"),
        ("--tp 0", "--tp 0: at least 1"),
        ("--tp 2 --seq 25", "--seq 25 is not a multiple of tp 2: the nearest are 24 or 26"),
        ("--tp 4 --cp 2 --seq 24", "2 x cp 2 x tp 4 = 16: the nearest are 16 or 32"),
        ("--cp 2 --seq 25", "--seq 25 is not a multiple of 2 x cp 2 = 4: the nearest are 24 or 28"),
        ("--tp 8 --cp 2 --cp-kind ulysses --seq 64", "--cp 2 does not divide the 1 heads of tiny"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_choice(argv, message):
    args = combined.parse(argv.split())
    rules = combined.violations(args, max(args.dp * args.cp * args.tp, 1))
    assert any(message in rule for rule in rules), rules


def real_step(argv):
    args = combined.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    sample = dp.Samples(dp.open_tokens(), args.seq, 0)
    with dp.Wire() as wire:
        batches = combined.my_batches(args, groups, sample, 0, "cpu")
        positions = combined.my_positions(args, groups, "cpu")
        combined.train_step(job, groups, batches, positions, 1e-3)
    held = {kind: dp._bytes(tensors) for kind, tensors in job.optimizer.tensors().items()}
    name = {("dp·cp", "send"): ("dp·cp", "reduce_scatter")}  # gloo's, see 03
    keys = [key for key in wire.calls if wire.bytes[key]]
    return held, {name.get(key, key): (wire.calls[key], wire.bytes[key]) for key in keys}


@pytest.mark.full
@pytest.mark.parametrize(
    "argv",
    [
        "--tp 2 --cp 2 --seq 24 --dtype bfloat16",
        pytest.param("--tp 2 --dp 2 --seq 24", marks=pytest.mark.full),
    ],
)
def test_a_dry_run_holds_and_sends_what_a_real_step_does(argv):
    held, sent = dp.launch(real_step, 4, argv.split(), timeout=60)[1]
    out = run_script("09_combined_5d.py", "--dry-run", *argv.split(), "--rank", "1")
    assert out.returncode == 0, out.stdout + out.stderr
    lines = [line.replace(",", "").split() for line in out.stdout.splitlines() if line]
    assert lines[-1] == ["09_combined_5d", "OK"]
    for kind, size in ((kind, size) for kind, size in held.items() if size):
        shown = [words[-1] for words in lines if words[: len(kind.split())] == kind.split()]
        assert shown == [str(size)], kind
    rows = {tuple(words[:2]): words[2:] for words in lines if len(words) == 6}
    assert len(sent) >= 5
    for key, (calls, size) in sent.items():
        assert rows[key][0] == str(calls)
        assert size.denominator == 1 and rows[key][2:] == [str(int(size))] * 2, key
    assert rows.keys() - {("sent", "in")} == sent.keys()


@pytest.mark.full
def test_a_dry_run_of_a_world_that_no_machine_here_could_hold():
    argv = "--model llama3-8b --dp 8 --cp 2 --tp 8 --zero 1 --batch 16 --micro-batch 1"
    argv += " --seq 8192 --dtype bfloat16 --rank 127"
    out = run_script("09_combined_5d.py", "--dry-run", *argv.split())
    assert out.returncode == 0, out.stderr
    parameters = tp.held_parameters(memory.PRESETS["llama3-8b"], 8)
    (line,) = [line for line in out.stdout.splitlines() if line.startswith("parameters")]
    size = int(line.split()[-1].replace(",", ""))
    assert 0 <= size - 2 * parameters < 16 * 100 * 2  # ZeRO pads each flat by less than 16
