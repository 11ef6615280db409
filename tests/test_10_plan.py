"""10: the closed forms equal 09's dry run; collectives, time, search, advice; the command line."""

import json
import math
import random
import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

plan = import_module("10_plan")
combined, pp, memory = plan.combined, plan.pp, plan.memory
Layout = plan.Layout
H100, FUSED, EAGER = plan.HARDWARE["h100"], plan.STACKS["fused"], plan.STACKS["eager"]


# --- the closed forms and the dry run -----------------------------------------------------------


def dry(lay, rank):
    """What 09 measures of one rank, as plain numbers."""
    args = plan.arguments_of_09(lay, rank)
    assert combined.violations(args, lay.world) == []
    try:
        found = combined.dry_step(args, lay.world)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sizes = {kind: sum(t.numel() * t.element_size() for t in ts) for kind, ts in found.held.items()}
    wire = {key: (found.wire.calls[key], n) for key, n in found.wire.bytes.items() if n}
    return sizes, found.activations, found.flops, wire, found.peak


def assert_equal_to_the_dry_run(lay, rank):
    sizes, kept, flops, wire, peak = dry(lay, rank)
    assert plan.states(lay, rank) == sizes
    assert plan.kept_at_most(lay, rank) == kept
    assert plan.executed(lay, rank) == flops
    assert plan.sent(lay, rank) == wire
    assert len(wire) >= 3 or lay.world == 1
    assert min(flops) > 0 and kept > 0
    return peak


TINY = dict(seq=64, micro_batch=1)


@pytest.mark.parametrize(
    "lay, rank",
    [
        (Layout("tiny", dp=2, tp=8, pp=2, zero=1, recompute="full:2", batch=8, **TINY), 21),
        (Layout("tiny-moe", dp=2, cp=2, tp=2, pp=2, ep=4, batch=8, **TINY), 13),
    ],
)
def test_closed_forms_equal_the_dry_run(lay, rank):
    assert_equal_to_the_dry_run(lay, rank)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "full:3"])
def test_closed_forms_of_every_stage_and_recomputation(zero, recompute):
    cut = dict(zero=zero, recompute=recompute)
    assert_equal_to_the_dry_run(Layout("tiny", dp=3, cp=2, pp=2, batch=12, **cut, **TINY), 11)
    assert_equal_to_the_dry_run(Layout("tiny-moe", dp=4, tp=2, ep=8, batch=8, **cut, **TINY), 5)
    lay = Layout("tiny", dp=2, tp=2, pp=2, batch=8, schedule="interleaved", **cut, **TINY)
    assert_equal_to_the_dry_run(lay, 6)
    assert_equal_to_the_dry_run(replace(lay, schedule="afab", dtype="float32"), 1)
    assert_equal_to_the_dry_run(replace(lay, tp=4, cp=2, cp_kind="ulysses", schedule="1f1b"), 3)
    assert_equal_to_the_dry_run(replace(lay, tp=4, cp=2, cp_kind="allgather", pp=1), 15)
    assert_equal_to_the_dry_run(Layout("smollm-1.7b", dp=2, pp=2, batch=8, **cut, **TINY), 3)


REAL = ["llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b"]


def random_layout(number):
    """A layout of a real model on up to 16,384 ranks, and one of its ranks."""
    dice = random.Random(number)
    while True:
        model = dice.choice(REAL)
        t, p, k = (
            dice.choice([1, 2, 4, 8, 16]),
            dice.choice([1, 2, 4, 8, 16]),
            dice.choice([1, 2, 4]),
        )
        d, m = 2 ** dice.randrange(11), dice.choice([1, 2, 4]) * (p if p < 16 else 1)
        experts = plan.is_mixture(plan.MODELS[model])
        lay = Layout(
            model, dp=d, cp=k, tp=t, pp=p, ep=dice.choice([1, 2, 4, 8]) if experts else 1,
            zero=dice.randrange(4), recompute=dice.choice(["none", "selective", "full", "full:9"]),
            seq=dice.choice([2048, 4096]), batch=d * min(m, 8),
            schedule=dice.choice(["1f1b", "1f1b", "interleaved", "afab"]),
            cp_kind=dice.choice(["ring", "allgather"]),
        )  # fmt: skip
        rank = dice.randrange(lay.world)
        if lay.world <= 16384 and not combined.violations(
            plan.arguments_of_09(lay, rank), lay.world
        ):
            if plan.MODELS[model].layers <= 24 * p:  # a rank's part: fake tensors take time, too
                return lay, rank


SOME = (1, 9, 17, 31)  # the others take an hour


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.full if n in SOME else pytest.mark.campaign)
        for n in range(50)
    ],
)
def test_closed_forms_of_real_models_on_up_to_16384_ranks(number):
    lay, rank = random_layout(number)
    peak = assert_equal_to_the_dry_run(lay, rank)
    most, _, unseen = plan.fullest(lay, rank)
    assert most - unseen == pytest.approx(peak, rel=0.05)


def test_random_layouts_are_large_and_varied():
    found = [random_layout(number)[0] for number in range(50)]
    assert {lay.model for lay in found} == set(REAL) and len(set(found)) >= 48
    assert max(lay.world for lay in found) >= 8192
    for axis in ("dp", "cp", "tp", "pp", "ep", "zero", "recompute", "schedule"):
        assert len({getattr(lay, axis) for lay in found}) >= 3 or axis in ("cp", "schedule")


# --- bytes of the estimate: the quick sums of the search are those of the closed forms -----------


BARE = replace(FUSED, reserve=0.0)


@pytest.mark.parametrize("zero, recompute", [(0, "none"), (1, "full:9"), (1, "selective")])
@pytest.mark.parametrize("model, e", [("llama3-8b", 1), ("mixtral-8x7b", 8)])
def test_memory_of_the_search_is_that_of_the_closed_forms(model, e, zero, recompute):
    cut = dict(zero=zero, recompute=recompute)
    lay = Layout(model, dp=8, tp=4, pp=4, ep=e, seq=4096, batch=64, **cut)
    for place in range(lay.pp):
        ours = plan.held(BARE, lay, place)
        exact = plan.states(lay, place * lay.dp * lay.tp)
        for kind, size in exact.items():
            assert ours[kind] == pytest.approx(size, rel=1e-3)
        both = ours["activations"] + ours["logits and loss"] / 2  # without the logits' gradient
        kept = plan.kept_at_most(lay, place * lay.dp * lay.tp)
        assert both == pytest.approx(kept, rel=0.03)


def test_a_stack_with_more_copies_holds_more():
    lay = Layout("llama3-8b", dp=8, tp=4, seq=4096, batch=64)
    more = {"wide": 12, "gathered": 2, "logit": 6, "gradient": 2}
    for name, value in more.items():
        bare, with_it = (
            plan.peak(st, lay)[0] for st in (BARE, replace(BARE, **{name: value}))
        )
        assert with_it > bare


def test_what_tp_sends_by_block_is_what_it_sends():
    lay = Layout("llama3-8b", dp=1, tp=4, seq=4096, batch=2, recompute="full:5")
    c, total = plan.MODELS[lay.model], {}
    for kind, count in [("none", c.layers - 5), ("full", 5), ("first", 1), ("last", 1)]:
        for collective, calls, size in plan.tp_sent(c, 1, 4096, 4, kind):
            before = total.get(collective, (0, 0))
            total[collective] = before[0] + count * calls * 2, before[1] + count * size * 2
    exact = {name: cost for (axis, name), cost in plan.sent(lay, 0).items() if axis == "tp"}
    exact["all_reduce"] = tuple(map(sum, zip(exact["all_reduce"], (-1, -1))))  # of the norms, below
    norms = plan.dp.sent([65 * c.dim * 4], 4)
    assert total["all_gather"] == exact["all_gather"]
    assert total["reduce_scatter"] == exact["reduce_scatter"]
    assert total["all_reduce"][1] == exact["all_reduce"][1] + 1 - norms[1]


# --- collectives ---------------------------------------------------------------------------------


def test_a_group_in_a_node_uses_the_fast_link_and_others_their_cards():
    inside = plan.transfer(H100, 0, 1e9, 8, 1, 1, "all_reduce")
    assert inside == pytest.approx(1e9 / (450e9 * 0.8))
    whole_nodes = plan.transfer(H100, 0, 1e9, 16, 1, 2, "all_reduce")
    assert whole_nodes == pytest.approx(1e9 / (400e9 * 0.8))  # through eight cards
    strided = plan.transfer(H100, 0, 1e9, 16, 8, 16, "all_reduce")
    assert strided == pytest.approx(1e9 / (50e9 * 0.8))  # one rank a node: one card
    assert plan.transfer(H100, 1, 0, 8, 1, 1, "all_reduce") == pytest.approx(7 * plan.HOP)
    hops = plan.transfer(H100, 1, 0, 32, 1, 4, "all_reduce")
    assert hops == pytest.approx(7 * plan.HOP + 3 * H100.hop)


def test_only_a_ring_leaves_a_node_through_all_its_cards():
    card = 50e9 * 0.8
    assert plan.link(H100, 64, 1, 8, "all_gather")[1] == 8 * card
    assert plan.link(H100, 64, 1, 8, "send")[1] == card  # a neighbour in the next node
    assert plan.link(H100, 64, 1, 8, "all_to_all")[1] == pytest.approx(63 / 56 * card)
    assert plan.link(H100, 8, 1, 1, "all_to_all")[1] == 450e9 * 0.8


def test_a_rack_of_72_is_one_node():
    assert plan.link(plan.HARDWARE["gb200"], 64, 1, 1, "all_gather")[1] == 900e9 * 0.8
    assert plan.link(plan.HARDWARE["h100"], 64, 1, 8, "all_gather")[1] < 900e9 * 0.8


@pytest.mark.parametrize("collective, column", plan.COLUMN.items())
def test_the_measured_curve_is_met_at_its_points(collective, column):
    hw = plan.HARDWARE["h100-efa"]
    for nodes, *rates in hw.curve:
        rate = plan.link(hw, 8 * nodes, 1, nodes, collective)[1]
        assert rate == pytest.approx(min(rates[column - 1], 400e9 if nodes > 1 else 1e15))
    between = plan.interpolate(hw.curve, 11, column)
    assert hw.curve[4][column] < between < hw.curve[3][column]
    assert plan.interpolate(hw.curve, 1000, column) == hw.curve[-1][column]


# --- time ----------------------------------------------------------------------------------------


def layouts_of(model="llama3-8b", gpus=64, batch=64, seq=4096):
    c = plan.MODELS[model]
    for d, k, t, p, e in plan.degrees(c, H100, gpus, batch, seq, {}):
        for zero in (0, 1, 3):
            yield Layout(model, d, k, t, p, e, zero, seq=seq, batch=batch)


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "better",
    [
        dict(peak=2e15), dict(hbm=1e13), dict(inside=9e11), dict(card=1e11), dict(reached=1.0),
        dict(sustained=0.9), dict(hop=1e-6),
    ],
)  # fmt: skip
def test_better_hardware_is_never_slower_and_sometimes_faster(model, better):
    hw = replace(H100, **better)
    pairs = [
        (plan.estimate(hw, FUSED, lay).seconds, plan.estimate(H100, FUSED, lay).seconds)
        for lay in layouts_of(model)
    ]
    assert all(new <= old * (1 + 1e-12) for new, old in pairs)
    assert any(new < old * 0.9999 for new, old in pairs) and len(pairs) > 50


def test_every_line_is_time_and_useful_flops_take_at_least_theirs():
    for lay in layouts_of():
        e = plan.estimate(H100, FUSED, lay)
        assert all(t >= 0 for t in e.lines.values())
        assert 0 < e.mfu(H100) < H100.sustained * FUSED.matmul
        assert set(e.lines) <= set(plan.WHY)


@pytest.mark.parametrize("schedule", ["afab", "1f1b", "interleaved"])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 16)])
def test_pipeline_time_is_that_of_the_simulated_schedule(schedule, p, m):
    """Uneven stages: within 6 % of 05's clock, each stage with its own time."""
    lay = Layout("llama3-8b", pp=p, batch=m, schedule=schedule, seq=4096)
    e = plan.estimate(H100, FUSED, lay)
    c = plan.MODELS[lay.model]
    counts = combined.layers_by_stage(lay)
    full = {s: plan.Part(n, s == 0, s == len(counts) - 1, 0) for s, n in enumerate(counts)}
    cost = {s: sum(plan.micro_batch(H100, FUSED, lay, x, 1).values()) for s, x in full.items()}
    assert sum(n for n, *_ in plan.stages(c, p, lay.v, 4096)) == c.layers == sum(counts)

    def seconds(action):
        return cost[action.stage] * {"F": 1 / 3, "B": 2 / 3}[action.kind]

    clock = pp.simulate(pp.lower(combined.actions(lay)), seconds).time
    once = ("optimizer", "gradients", "weights spread", "other", "pipeline transfers")
    ours = sum(t for name, t in e.lines.items() if name not in once)
    assert ours == pytest.approx(float(clock), rel=0.06)


def test_stages_are_those_of_09():
    for p, schedule in [(4, "1f1b"), (4, "interleaved"), (16, "1f1b"), (4, "zb-v")]:
        lay = Layout("llama3-70b", pp=p, schedule=schedule, batch=16, seq=8192, recompute="full:9")
        c, counts = plan.MODELS[lay.model], combined.layers_by_stage(lay)
        ours = plan.stages(c, p, lay.v, lay.seq, lay.recompute, schedule)
        for rank, part in enumerate(ours):
            kinds = combined.stage_kinds(lay, rank)
            every = sum(kinds.values(), [])
            ends = 0 in kinds, len(counts) - 1 in kinds
            assert part == (len(every), *ends, every.count("full"))


@pytest.mark.parametrize("e, t", [(1, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_dp_sends_in_an_estimate_is_what_it_sends(monkeypatch, zero, e, t):
    """Experts over fewer ranks than all else."""
    sizes = dict(dp=8, tp=t, ep=e, zero=zero, seq=4096)
    for m in (1, 4):
        lay = Layout("mixtral-8x7b", **sizes, batch=8 * m)
        exact = {}
        for (group, collective), (_, size) in plan.sent(lay, 0).items():
            if group in ("dp·cp", "edp"):
                exact[collective] = exact.get(collective, 0) + float(size)
        monkeypatch.setattr(plan, "transfer", lambda hw, calls, size, *rest: float(size))
        stack = replace(FUSED, behind=0.0)
        part = plan.stages(plan.MODELS[lay.model], 1, 1, lay.seq)[0]
        lines = plan.once(H100, stack, lay, part, 8, 1.0)
        each = plan.sharded(H100, stack, lay, part, 8, 1.0)
        monkeypatch.undo()
        ours = {
            "all_gather": lines.get("weights spread", 0) + lay.m * each.get("weights gathered", 0),
            "reduce_scatter" if zero else "all_reduce": lines.get("gradients", 0)
            + lay.m * each.get("gradients, each time", 0),
        }
        for collective, size in ours.items():
            # ZeRO-3 keeps the last unit between forward and backward: the estimate does not.
            assert size == pytest.approx(exact.get(collective, 0), rel=0.1), (lay, collective)


def test_a_recomputed_layer_sends_over_cp_once_more():
    none = Layout("llama3-8b", cp=4, dp=2, seq=32768, batch=2, cp_kind="allgather")
    lines = [
        plan.estimate(H100, FUSED, replace(none, recompute=mode)).lines["cp"]
        for mode in ("none", "full:16", "full")
    ]
    assert lines[0] < lines[1] < lines[2]


def test_the_host_is_waited_for_when_there_is_little_work():
    lay = Layout("llama3-8b", dp=1, tp=8, seq=4096, batch=8)
    slow = plan.estimate(H100, EAGER, lay)
    assert slow.lines["waiting for the host"] > 0.3 * slow.seconds
    assert plan.estimate(H100, FUSED, lay).lines["waiting for the host"] == 0


# --- search, rules, mistakes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return plan.search(H100, FUSED, "llama3-8b", 64, 512, 8192)


def test_the_search_is_sorted_and_all_it_finds_can_run(found):
    estimates, seen = found
    speeds = [e.speed for e in estimates]
    assert speeds == sorted(speeds, reverse=True) and 100 < len(speeds) < seen
    for e in estimates[:: max(1, len(estimates) // 60)]:
        lay = e.layout
        assert combined.violations(plan.arguments_of_09(lay), lay.world) == [], lay
        assert lay.world == 64 and e.peak <= plan.room(H100, FUSED)


def test_the_search_misses_nothing(found):
    """No layout drawn at random that can run and fits is faster than the first."""
    best, dice, tried = found[0][0].speed, random.Random(0), 0
    while tried < 200:
        t, p, k = (2 ** dice.randrange(4) for _ in range(3))
        lay = Layout(
            "llama3-8b", dp=64 // t // p // k or 1, cp=k, tp=t, pp=p, zero=dice.randrange(4),
            recompute=dice.choice(["none", "selective", "full"]), seq=8192, batch=512,
            micro_batch=2 ** dice.randrange(4), schedule=dice.choice(["1f1b", "interleaved"]),
        )  # fmt: skip
        if lay.world == 64 and not combined.violations(plan.arguments_of_09(lay), 64):
            tried += 1
            e = plan.estimate(H100, FUSED, lay)
            assert not e.fits or e.speed <= best * (1 + 1e-9), lay


def test_fixed_degrees_are_kept():
    estimates, _ = plan.search(H100, FUSED, "llama3-70b", 64, 512, 8192, dict(tp=8, pp=4, zero=1))
    assert estimates and all(
        (e.layout.tp, e.layout.pp, e.layout.zero) == (8, 4, 1) for e in estimates
    )


def test_rules_are_compared_with_the_ranking(found):
    rows = {
        rule: (best, cost) for _, rule, best, cost in plan.advice(H100, "llama3-8b", 64, found[0])
    }
    best, cost = rows["tp first, as far as the node goes"]
    assert best.layout.tp == 8 and cost == pytest.approx(found[0][0].speed / best.speed - 1)
    assert "under 10B parameters: one technique alone" in rows
    assert "512 GPUs: dp not alone" not in rows and "experts: ep" not in rows


def test_mistakes_cost_time_or_memory(found):
    rows = dict(plan.pitfalls(H100, FUSED, found[0]))
    assert len(rows) == 7
    for name in ("tp over two nodes", "every layer recomputed"):
        assert float(rows[name].split("%")[0]) > 0


def test_whole_run():
    e = plan.estimate(H100, FUSED, Layout("llama3-8b", dp=8, zero=1, seq=8192, batch=8))
    text = plan.whole_run("llama3-8b", e, 1e12, 2.0)
    hours = 1e12 / e.speed / 3600
    assert f"{hours:,.0f} GPU-hours" in text and f"${2 * hours:,.0f}" in text


def test_plans_for_1_to_512_nodes_take_less_than_ten_seconds(capsys):
    begin = time.process_time()
    assert plan.main(["--model", "llama3-70b", "--gpus", "8-4096"]) == 0
    assert time.process_time() - begin < 10
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if "tp" in line or "dp" in line
    ]
    assert [int(row[0].replace(",", "")) for row in rows] == [32 * 2**i for i in range(8)]


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--model", "llama3-71b"], "did you mean llama3-70b"),
        (["--gpu", "h10", "--gpus", "8"], "did you mean h100"),
        (["--tp", "3"], "the nearest that fit are"),
        (["--pp", "200"], "enough for --pp"),
        (["--dp", "0"], "at least 1"),
        (["--recompute", "ful"], "did you mean full"),
        (["--model", "llama3-405b", "--gpus", "8"], "would do"),
        (["--tp", "8", "--batch", "3", "--dp", "2"], "the nearest are 2 or 4"),
        (["--stack", "fuse"], "did you mean fused"),
        (["--gpu", "a100", "--gpus", "8", "--fp8"], "a100 has no products in FP8"),
        (["--gpus", "8", "--schedule", "zb-h1"], "a search (--gpus) tries 1f1b, interleaved"),
    ],
)
def test_bad_input_is_refused_with_the_nearest_valid_choice(argv, words, capsys):
    assert plan.main(argv) == 2
    assert words in capsys.readouterr().err


def test_one_layout_prints_every_line_of_its_estimate(capsys):
    argv = "--model llama3-70b --dp 8 --tp 8 --pp 4 --zero 1 --seq 8192".split()
    assert plan.main(argv) == 0
    out = capsys.readouterr().out
    lay = plan.one_layout(plan.read_arguments(argv))
    for name, t in plan.estimate(H100, FUSED, lay).lines.items():
        assert t < 5e-4 or name in out
    for kind in plan.CUT_BY:
        assert kind in out
    assert out.splitlines()[-1] == "10_plan OK" and max(map(len, out.splitlines())) <= 80


def test_a_dry_run_adds_seconds(capsys):
    argv = "--model tiny --dp 2 --tp 2 --zero 1 --seq 64 --batch 4 --dry-run --rank 3".split()
    try:
        assert plan.main(argv) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    out = capsys.readouterr().out
    assert "rank 3 of 4" in out and "s for these FLOPs" in out


def test_calibration_writes_an_entry_that_is_read_back(tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert plan.main(["--calibrate", str(path)]) == 0
    hw, stack = plan.read_hardware(path)
    assert 1e9 < hw.peak * hw.sustained < 1e16 and 1e8 < hw.hbm < 1e14 and 1e6 < hw.inside < 1e13
    assert 1e-5 < stack["host"] < 1
    saved = json.loads(path.read_text())["hardware"]
    assert saved["node"] == 2 or torch.cuda.is_available()
    capsys.readouterr()
    argv = ["--model", "tiny", "--gpus", "2", "--seq", "128", "--batch", "8",
            "--hardware", str(path)]  # fmt: skip
    assert plan.main(argv) == 0
    assert "dp2" in capsys.readouterr().out


# --- what tests/validate.py computes with ---------------------------------------------------------


def test_constants_are_found_again_in_runs_made_from_them():
    validate = import_module("validate")
    planted = dict(matmul=0.55, host=3e-3, tp_exposed=0.7)
    stack, runs = replace(EAGER, **planted), []
    for d, t in [(8, 1), (4, 2), (2, 4), (1, 8), (16, 1), (32, 1)]:
        for size in (1, 4):
            lay = Layout("smollm-1.7b", dp=d, tp=t, seq=4096, micro_batch=size, batch=128)
            runs.append((lay, validate.seconds(stack, lay)))

    def loss(constants):
        trial = replace(EAGER, **constants)
        return validate.mean_log_error((validate.seconds(trial, lay), s) for lay, s in runs)

    start = {name: getattr(EAGER, name) for name in planted}
    result = validate.search_constants(loss, start, steps=(1.3, 1.1, 1.03, 1.01))
    for name, value in planted.items():
        assert result[name] == pytest.approx(value, rel=0.05), name


def test_rank_correlation():
    validate = import_module("validate")
    assert validate.rank_correlation([1, 2, 3, 4], [10, 20, 30, 50]) == 1
    assert validate.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert math.isclose(validate.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]), 0.8)
