"""09 with all its axes: the lattice, random layouts, and the traps of composition one by one."""

import itertools
import json
import math
import random
import re
import shutil
from importlib import import_module

import lattice
import numpy as np
import pytest
import torch
import torch.distributed as dist

combined = import_module("09_combined_5d")
dp, memory, zero, tp, pp, ep = (
    getattr(combined, name) for name in ("dp", "memory", "zero", "tp", "pp", "ep")
)

ALL_FIVE = "--dp 2 --tp 2 --pp 2 --cp 2 --ep 4 --batch 8 --micro-batch 1 --model tied-moe"


@pytest.fixture(autouse=True)
def models(monkeypatch):
    monkeypatch.setattr(combined, "MODELS", combined.MODELS | lattice.MODELS)


# --- Parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        f"{ALL_FIVE} --batch 4 --schedule zb-v --zero 3 --optimizer adamw --recompute full:2",
        f"{ALL_FIVE} --schedule zb-v --zero 3 --optimizer adamw --recompute full:2",
        "--pp 3 --dp 2 --batch 12 --micro-batch 2 --model dense --schedule zb-h1 --zero 2",
        f"{ALL_FIVE} --schedule interleaved --zero 1 --hybrid 2 --cp-kind allgather",
        f"{ALL_FIVE} --schedule 1f1b --zero 2 --optimizer sgd --recompute selective --ep 8",
        "--pp 4 --batch 8 --micro-batch 2 --model tied-moe --schedule afab --zero 0",
        "--tp 4 --pp 2 --batch 4 --micro-batch 1 --model untied --schedule zb-h1 --zero 1",
        "--dp 2 --pp 2 --batch 8 --micro-batch 1 --model dense --zero 3",  # a table cut on 2 ranks
    ],
)
def test_layouts_compute_what_one_device_does(argv):
    launches, refused = lattice.fitting([argv.split()])
    assert not refused
    count, failures, worst = lattice.run(launches, report=lambda *args, **kwargs: None)
    assert (count, failures) == (1, []) and worst["gradient"] > 0 < worst["weight"]


def test_random_layouts():
    draw = random.Random(14)
    launches, _ = lattice.fitting([lattice.random_layout(draw, ranks=8) for _ in range(3)])
    count, failures, _ = lattice.run(launches, report=lambda *args, **kwargs: None)
    assert count >= 2 and failures == []


@pytest.mark.campaign
def test_two_hundred_random_layouts():
    draw = random.Random(0)
    launches, refused = lattice.fitting([lattice.random_layout(draw) for _ in range(200)])
    count, failures, _ = lattice.run(launches)
    assert count == 200 - len(refused) >= 150 and failures == []


@pytest.mark.campaign
def test_the_lattice():
    launches = lattice.lattice()
    assert sum(map(len, launches.values())) == 1344  # each with SGD and with AdamW
    assert not lattice.fitting(list(itertools.chain(*launches.values())))[1], "no cell is refused"
    count, failures, _ = lattice.run(launches)
    assert (count, failures) == (1344, [])


# --- What goes wrong where axes are composed ------------------------------------------------------
#
# Each trap is a change to one line of what the ranks run. The check has to see it.


def row_without(pattern, shard=None):
    """The sync table with one row's `same` emptied, or its `shard` another."""
    assert sum(pattern in row[0] for row in combined.SYNC) == 1
    combined.SYNC = [
        (name, shard or cut, same if shard else ()) if pattern in name else (name, cut, same)
        for name, cut, same in combined.SYNC
    ]


def after(owner, name, change):
    """Replace a function by itself and then `change` of its result and arguments."""
    before = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(before(*args, **kwargs), *args))


def contiguous_positions(args, groups, device):
    T = args.seq // args.cp
    return torch.arange(T) + dist.get_rank(groups["cp"]) * T


def labels_shifted_after_the_cut(batches, *_):
    return [(tokens, tokens.roll(-1, 1)) for tokens, _ in batches]


def counted_in_forward(out, ctx, dout, loss, demand, moe):
    moe.load += demand
    return out


def without_sequence_group(result, *_):
    for moe in ep.moe_layers(result.model):
        moe.sequence_group = None
    return result


def reversed_labels(pipeline, batches, N, positions, step=pp.Pipeline.step):
    if pipeline.last in pipeline.stages:
        batches = [(x, y) for (x, _), (_, y) in zip(batches, batches[::-1])]
    return step(pipeline, batches, N, positions)


def everything_decays(args, matrices, vectors, make=combined.torch_optimizer):
    return make(args, matrices + vectors, [])


MOE8 = "--dp 2 --tp 2 --cp 2 --ep 4 --batch 4 --micro-batch 1 --model moe --zero 1 --seed 1"
TIED = "--dp 2 --tp 2 --pp 2 --batch 8 --micro-batch 1 --model dense --zero 1 --seed 1"
MUTATIONS = {
    "expert gradients over the wrong group": (
        lambda: row_without("experts", "dp·cp"), MOE8, r"experts.*gradient"),
    "norm gradients not summed over tp": (
        lambda: row_without("layernorm"), TIED, r"norm.*gradient"),
    "router gradients not summed over tp": (
        lambda: row_without("router"), MOE8, r"(router|shared).*gradient"),
    "tied embedding's halves not summed": (
        lambda: row_without("embed_tokens"), TIED, r"embed_tokens.*gradient"),
    "shared kv heads not summed": (
        lambda: row_without("[kv]_proj"), "--tp 4 --batch 2 --model dense", r"[kv]_proj.*gradient"),
    "tied embedding counted twice in the norm": (
        lambda: after(zero.Optimizer, "squares", lambda total, optimizer: total + sum(
            flat.grad.square().sum() / 2 for flat in optimizer.order
            if "embed_tokens.weight" in flat.range)), TIED, r"step \d, norm"),
    "a rank's own gradient norm": (
        lambda: after(zero.Optimizer, "squares", lambda total, _: total * dist.get_world_size()),
        TIED, r"step \d, norm"),
    "contiguous rotary positions under zigzag": (
        lambda: setattr(combined, "my_positions", contiguous_positions), MOE8, r"proj.*gradient"),
    "reduction after the first micro-batch": (
        lambda: setattr(zero.Optimizer, "begin", lambda self, passes=1, begin=zero.Optimizer.begin:
                        begin(self, 1)), TIED, r"more backward passes|gradient"),
    "loss divided by the micro-batches again": (
        lambda: setattr(pp.Pipeline, "step", lambda self, batches, N, positions,
                        step=pp.Pipeline.step: step(self, batches, N * len(batches), positions)),
        TIED, r"gradient"),
    "labels of another micro-batch": (
        lambda: setattr(pp.Pipeline, "step", reversed_labels), TIED, r"gradient"),
    "valid tokens of this rank alone": (
        lambda: setattr(dp, "count_valid", lambda batches, group: sum(
            (labels != dp.IGNORE).sum() for _, labels in batches)), TIED, r"gradient"),
    "labels shifted after the cut": (
        lambda: after(combined, "my_batches", labels_shifted_after_the_cut), MOE8, r"gradient"),
    "router counts under recomputation": (
        lambda: setattr(ep.Attach, "forward", staticmethod(
            lambda ctx, *args, forward=ep.Attach.forward: counted_in_forward(
                forward(ctx, *args), ctx, *args))),
        f"{MOE8} --recompute full", r"bias|ep"),
    "router counts of this rank alone": (
        lambda: setattr(ep, "end_step", lambda model, group, skip, end=ep.end_step:
                        end(model, None, skip)), MOE8, r"bias"),
    "auxiliary loss by a rank's part of a sequence": (
        lambda: after(combined, "compose", without_sequence_group), MOE8, r"auxiliary|gradient"),
    "padding of the vocabulary in the loss": (
        lambda: setattr(tp, "vocab_parallel_cross_entropy", lambda logits, labels, first, columns,
                        group, loss=tp.vocab_parallel_cross_entropy: loss(
                            logits, labels, first, logits.shape[-1], group)), TIED, r"gradient"),
    "weight decay decided by shards": (
        lambda: setattr(combined, "torch_optimizer", everything_decays), TIED, r"norm.*weight"),
}  # fmt: skip


def mutated(argv, name):
    torch.set_num_threads(1)
    combined.MODELS |= lattice.MODELS
    args = lattice.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    sample, expected = lattice.Text(dp.open_tokens(), 16, args.seed), None
    if dist.get_rank() == 0:  # before the change
        expected = combined.reference(args, sample, lattice.STEPS, torch.float64, "cpu")
    if name:
        MUTATIONS[name][0]()
    return lattice.cell(args, groups, sample, expected)[0]


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_the_check_sees(name, capfd):
    _, argv, seen = MUTATIONS[name]
    args = combined.parse(argv.split())
    world = math.prod(combined.layout(args).values())
    try:
        wrong = sum(dp.launch(mutated, world, argv.split(), name, timeout=60), [])
    except dp.RankFailed:  # a rank has noticed by itself
        wrong = [capfd.readouterr().err]
    assert any(re.search(seen, line) for line in wrong), wrong


@pytest.mark.full
@pytest.mark.parametrize("argv", sorted({argv for _, argv, _ in MUTATIONS.values()}))
def test_the_same_without_the_change(argv):
    args = combined.parse(argv.split())
    world = math.prod(combined.layout(args).values())
    assert dp.launch(mutated, world, argv.split(), None, timeout=60) == [[]] * world


# --- Groups ---------------------------------------------------------------------------------------


def test_expert_groups_for_every_order_of_the_axes():
    """ep neighbours hold all experts together, edp ranks the same; both stay inside a stage."""
    for axes in itertools.permutations(["pp", "dp", "cp", "tp"]):
        sizes = dict(zip(axes, (2, 3, 2, 2)))
        stages = combined.mesh(sizes, "dp·cp·tp")["dp·cp·tp"]
        where = {r: np.unravel_index(r, tuple(sizes.values())) for r in range(24)}
        pipeline = axes.index("pp")
        for n in (1, 2, 3, 6):
            if (24 // sizes["pp"]) % n:
                continue
            groups = combined.expert_groups(stages, n)
            expert = {r: i for g in groups["ep"] for i, r in enumerate(g)}
            for name, size in (("ep", n), ("edp", 24 // sizes["pp"] // n)):
                assert sorted(sum(groups[name], [])) == list(range(24))
                for ranks in groups[name]:
                    assert len(ranks) == size
                    assert len({where[r][pipeline] for r in ranks}) == 1
                    assert len({expert[r] for r in ranks}) == (size if name == "ep" else 1)


def test_expert_groups_by_values():
    stages = combined.mesh({"pp": 2, "dp": 2, "cp": 1, "tp": 2}, "dp·cp·tp")["dp·cp·tp"]
    assert stages == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert combined.expert_groups(stages, 2) == {
        "ep": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "edp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }


def where_and_what(argv):
    args = lattice.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    seen = []
    combined.my_batches(args, groups, lambda i: (seen.append(i), lattice.Text(
        dp.open_tokens(), 16, 0)(i))[1], 3, "cpu")  # fmt: skip
    return [dist.get_rank(groups[axis]) for axis in ("dp", "pp", "cp", "tp")], seen


def test_who_reads_which_samples():
    """The same within tp, pp and cp, others in each dp rank, together the step's batch once."""
    argv = "--dp 2 --tp 2 --pp 2 --cp 2 --batch 8 --micro-batch 2 --model dense".split()
    ranks = dp.launch(where_and_what, 16, argv, timeout=60)
    by_dp = {d: {tuple(seen) for (place, *_), seen in ranks if place == d} for d in (0, 1)}
    assert all(len(alike) == 1 for alike in by_dp.values())
    first, second = (alike.pop() for alike in by_dp.values())
    assert sorted(first + second) == list(range(24, 32)) and len(first) == 4
    assert len({tuple(place) for place, _ in ranks}) == 16


def next_words(argv):
    combined.MODELS |= lattice.MODELS
    args = lattice.parse(argv)
    groups = combined.make_groups(args, combined.layout(args))
    job = combined.compose(args, groups, "cpu")
    dense, _ = combined.plain_model(args, torch.float64, "cpu")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        ours = combined.next_logits(args, job.pipeline, groups, ids)
        return dp.relative_error(ours, dense(ids)[0, -1].float())


@pytest.mark.parametrize(
    "argv",
    [
        "--dp 2 --pp 2 --tp 2 --schedule interleaved --model dense",
        "--dp 2 --pp 2 --ep 2 --schedule zb-v --model moe",
    ],
)
def test_every_replica_computes_the_same_next_logits(argv):
    """Broadcasts from a stage go out by its global rank, in a group where it is another."""
    args = lattice.parse(argv.split())
    world = math.prod(combined.layout(args).values())
    errors = dp.launch(next_words, world, argv.split(), timeout=60)
    assert len(errors) == world and max(errors) < 1e-6


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--pp 6",
         "--pp 6 with 1 chunks a rank is 6 stages: the 4 layers of tiny are enough for --pp 5"),
        ("--pp 3 --schedule zb-v", "is 6 stages: the 4 layers of tiny are enough for --pp 2"),
        ("--pp 2 --schedule interleaved --batch 3 --micro-batch 1",
         "3 micro-batches are no multiple of --pp 2: the nearest are 2 or 4"),
        ("--schedule zbv --pp 2", "--schedule zbv: did you mean zb-v?"),
        ("--ep 2", "--ep 2: tiny has no experts"),
        ("--model tiny-moe --dp 3 --ep 2",
         "--ep 2 does not divide both 8 experts and dp x cp x tp = 3: the nearest are 1"),
        ("--model tiny-moe --dp 4 --ep 2 --zero 1 --hybrid 4",
         "--hybrid 4 does not divide the 2 ranks"),
        ("--pp 2 --schedule zb-h1 --zero 3 --recompute selective",
         "needs the norm, which --zero 3"),
        ("--pp 0 --ep -1 --chunks 0", "--ep -1: at least 1"),
        ("--fp8 dellayed", "--fp8 dellayed: did you mean delayed?"),
        ("--fp8-optimizer --optimizer sgd", "--fp8-optimizer: for --optimizer adamw, not sgd"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_choice(argv, message):
    args = combined.parse(argv.split())
    rules = combined.violations(args, max(1, math.prod(combined.layout(args).values())))
    assert any(message in rule for rule in rules), rules


def test_every_parameter_of_every_model_matches_one_row():
    for name, c in (combined.MODELS | lattice.MODELS).items():
        with torch.device("meta"):
            model = memory.Llama(c)
            if isinstance(c, ep.Config):
                for block in model.layers.values():
                    block.mlp = ep.MoE(c)
        names = [n for n, _ in model.named_parameters()]
        assert sorted(sum(combined.sync_rows(names), [])) == sorted(names)


# --- Checkpoints ----------------------------------------------------------------------------------


def train(argv):
    combined.MODELS |= lattice.MODELS
    dp.Samples = lattice.Text
    combined.show_text = lambda *args, **kwargs: None
    return combined.train(combined.parse(argv))


@pytest.mark.parametrize(
    "model, layouts",
    [
        ("tied-moe",
         ["--pp 2 --schedule zb-v --dp 2 --ep 2 --zero 3", "--tp 2 --pp 2 --ep 2 --zero 1"]),
        pytest.param(
            "dense", ["--pp 4 --zero 0", "--pp 2 --schedule interleaved --dp 2 --zero 2"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "moe", ["--cp 2 --dp 2 --ep 4 --zero 2", "--pp 2 --schedule zb-h1 --tp 2 --ep 1"],
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_run_that_changes_its_layout_goes_on_as_one_device_would(capfd, tmp_path, model, layouts):
    losses = []
    for name, pair in (("one", ["", ""]), ("many", layouts)):
        for layout, resume in zip(pair, ("", "--resume")):
            argv = f"{layout} --model {model} --batch 8 --seq 16 --dtype float64 --steps 4 {resume}"
            argv += f" --ckpt {tmp_path / name} --save-every 2 --csv {tmp_path / name}.csv"
            args = combined.parse(argv.split())
            world = math.prod(combined.layout(args).values())
            assert dp.launch(train, world, argv.split(), timeout=60) == [0] * world
            if not resume:  # as if it had been killed after step 2
                shutil.rmtree(tmp_path / name / "step-000004")
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()[1:]
        assert [line.split(",")[0] for line in lines] == list("1234")
        losses.append([float(line.split(",")[1]) for line in lines])
        folder = tmp_path / name / "step-000004"
        kinds = [t["kind"] for t in zero.read_index(folder)["tensors"]]
        layers = combined.MODELS[model].layers
        assert kinds.count("buffer") == (layers if "moe" in model else 0)
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-10
    assert len(set(losses[0])) == 4


# --- The timeline ---------------------------------------------------------------------------------


def test_the_trace_has_all_ranks_on_one_timeline(capfd, tmp_path):
    file = tmp_path / "trace.json"
    argv = f"--pp 2 --dp 2 --model dense --seq 16 --batch 8 --steps 7 --trace {file}".split()
    assert dp.launch(train, 4, argv, timeout=60) == [0] * 4
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(4):
        mine = [e for e in events if e["pid"] == rank]
        names = [e["name"] for e in mine]
        for i in range(4):  # micro-batches of each traced step
            assert names.count(f"F{i}") == names.count(f"B{i}") == combined.TRACED
        assert "wait" in names and names.count("data") == combined.TRACED
        last = {}
        for e in sorted(mine, key=lambda e: e["ts"]):  # one thing at a time in each lane
            if e["name"][0] in "FB":
                assert e["ts"] >= last.get(e["tid"], 0)
                last[e["tid"]] = e["ts"] + e["dur"]
    ends = [
        min(e["ts"] + e["dur"] for e in events if e["pid"] == rank and e["name"] == "F0")
        for rank in (0, 2)
    ]
    assert ends[0] < ends[1], "the second stage waits, and ends after the first"


# --- FP8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param("--fp8 tensor --tp 2 --dp 2", marks=pytest.mark.full),
        "--fp8 delayed --pp 2 --schedule zb-h1 --dp 2 --zero 1",
        "--fp8 mx --tp 2 --zero 3 --dp 2 --dtype bfloat16 --recompute full",
        "--fp8 block --fp8-optimizer --zero 2 --dp 2 --ep 2 --model tiny-moe",
        pytest.param(
            "--fp8 tensor --tp 2 --pp 2 --model tiny-moe --ep 2 --recompute full:2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_fp8_is_held_to_the_error_of_one_device(capfd, argv):
    """And its bytes to the formulas, as always."""
    args = combined.parse(argv.split())
    world = math.prod(combined.layout(args).values())
    argv = f"--batch 4 --seq 32 --steps 2 --check {argv}".split()
    codes = dp.launch(train, world, argv, timeout=60)
    out = capfd.readouterr().out
    assert codes == [0] * world, out
    compared = {words[0]: int(words[1]) for line in out.splitlines() if (words := line.split())
                and words[0] in ("gradient", "weight", "norm", "loss")}  # fmt: skip
    names, losses = (43, 4) if args.model == "tiny-moe" else (39, 2)
    assert compared == {"gradient": 2 * names, "weight": names, "norm": 2, "loss": losses}
    if args.fp8 == "delayed":
        assert re.search(r"dp·cp·tp +all_reduce +1 +1 ", out)


@pytest.mark.full
def test_an_fp8_run_goes_on_in_another_layout(capfd, tmp_path):
    """Scales of delayed scaling are made of all ranks' past, which a checkpoint carries."""
    losses = []
    for name, pair in (("one", ["", ""]), ("many", ["--dp 2 --tp 2 --zero 2", "--cp 2 --pp 2"])):
        for layout, resume in zip(pair, ("", "--resume")):
            argv = f"{layout} --fp8 delayed --model untied --batch 4 --seq 16 --dtype float64"
            argv += f" --steps 4 --ckpt {tmp_path / name} --save-every 2 {resume}"
            argv += f" --csv {tmp_path / name}.csv"
            args = combined.parse(argv.split())
            world = math.prod(combined.layout(args).values())
            assert dp.launch(train, world, argv.split(), timeout=60) == [0] * world
            if not resume:
                shutil.rmtree(tmp_path / name / "step-000004")
        kinds = [t["kind"] for t in zero.read_index(tmp_path / name / "step-000002")["tensors"]]
        assert kinds.count("amax") == combined.MODELS["untied"].layers * 7 * 3
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()[1:]
        losses.append([float(line.split(",")[1]) for line in lines])
    assert len(losses[0]) == 4 and max(abs(a - b) for a, b in zip(*losses)) < 1e-10


# --- The dry run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        "--pp 2 --tp 2 --dp 2 --ep 4 --zero 3 --schedule zb-v --batch 8 --model moe --rank 5",
        "--pp 2 --cp 2 --zero 2 --schedule interleaved --batch 4 --model dense --rank 3",
        pytest.param(
            "--tp 2 --dp 2 --fp8 delayed --fp8-optimizer --batch 4 --model moe --ep 2 --rank 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_dry_run_sends_what_the_formulas_say(argv):
    assert dp.launch(dry, 1, argv.split(), timeout=60) == [0]


def dry(argv):
    dist.destroy_process_group()
    combined.MODELS |= lattice.MODELS
    return combined.main(["--dry-run", "--seq", "16", *argv])
