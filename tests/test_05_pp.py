"""05: schedules as pure functions, their lowering and simulation; parity of every one of them."""

import dataclasses
import time
from fractions import Fraction
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

memory = import_module("01_memory")
dp = import_module("02_dp")
zero = import_module("03_zero")
pp = import_module("05_pp_1f1b")

CONFIG = memory.Config(vocab=37, dim=8, layers=9, heads=2, kv_heads=1, ffn=12)
TIED = dataclasses.replace(CONFIG, tied=True)
DENSE = {False: CONFIG, True: TIED}
T = 6


def defined(name, p, m):
    return name != "interleaved" or m % p == 0


def cases(most_p, most_m, chunks=(2, 3)):
    """(name, schedule, p, m) for all that is defined."""
    for p in range(1, most_p + 1):
        for m in range(1, most_m + 1):
            for v in chunks:
                for name, schedule in pp.schedules(v).items():
                    if defined(name, p, m) and (v == chunks[0] or name == "interleaved"):
                        yield name, schedule, p, m


ALL = list(cases(6, 13))


# --- Schedules, without processes ----------------------------------------------------------------


def test_every_schedule_is_complete_ordered_and_without_deadlock():
    """Done once each, after what it needs, on a transport that blocks: check raises otherwise."""
    assert len(ALL) > 300 and {name for name, *_ in ALL} == set(pp.schedules())
    for name, schedule, p, m in ALL:
        lowered = pp.lower(schedule.make(p, m))
        pp.check(lowered)
        halves = 3 if name.startswith("zb") else 2
        actions = [a for items in lowered for a in items if isinstance(a, pp.Action)]
        assert len(actions) == len(set(actions)) == halves * p * schedule.v * m
        assert {a.stage for a in actions} == set(range(p * schedule.v))


def happens_before(lowered):
    """An order of all items that respects lists and matched transfers; written apart from check."""
    after = {}
    for r, items in enumerate(lowered):
        for k, item in enumerate(items):
            after[r, k] = {(r, k - 1)} if k else set()
            if isinstance(item, pp.Transfer) and item.way == "receive":
                sends = lowered[item.peer]
                after[r, k].add((item.peer, sends.index(pp.Transfer("send", item.value, r))))
    order, done = [], set()
    while len(done) < len(after):
        free = [x for x, before in after.items() if x not in done and before <= done]
        assert free, "a circle"
        done.update(free)
        order += [lowered[r][k] for r, k in free]
    return order


def test_what_a_stage_uses_was_made_before_in_every_order():
    for name, schedule, p, m in [case for case in ALL if case[2] <= 4 and case[3] <= 6]:
        n = p * schedule.v
        place = {item: k for k, item in enumerate(happens_before(pp.lower(schedule.make(p, m))))}
        back = "I" if name.startswith("zb") else "B"
        for s in range(n):
            for i in range(m):
                forward, backward = pp.Action("F", s, i), pp.Action(back, s, i)
                assert place[forward] < place[backward]
                assert s == 0 or place[pp.Action("F", s - 1, i)] < place[forward]
                assert s == n - 1 or place[pp.Action(back, s + 1, i)] < place[backward]
                assert back == "B" or place[backward] < place[pp.Action("W", s, i)]


def test_messages_of_a_pair_are_posted_in_the_same_order_on_both_sides():
    for name, schedule, p, m in ALL:
        lowered = pp.lower(schedule.make(p, m))
        for a in range(p):
            for b in range(p):
                sent = [t.value for t in lowered[a] if t[0] == "send" and t.peer == b]
                received = [t.value for t in lowered[b] if t[0] == "receive" and t.peer == a]
                assert sent == received


def test_in_flight_and_bubble_are_the_formulas():
    held = 0
    for name, schedule, p, m in ALL:
        lowered = pp.lower(schedule.make(p, m))
        v = schedule.v
        for r in range(p):
            assert pp.peaks(lowered[r])[0] == pp.in_flight(name, p, m, v, r)
        for F, I, W in [(1, 1, 1), (3, 2, 2), (2, 5, 1), (1, 2, 4)]:
            if name == "zb-h1" and W > F:
                continue
            if name == "zb-v" and (m < 2 * p - 1 or len({F, I, W}) > 1):
                continue
            took = pp.simulate(lowered, pp.times(F, I, W)).time
            assert Fraction(took, m * v * (F + I + W)) - 1 == pp.bubble(name, p, m, v, F, I, W)
            held += 1
    assert held > 1000
    assert [pp.in_flight("1f1b", 4, 8, 1, r) for r in range(4)] == [4, 3, 2, 1]
    assert pp.bubble("1f1b", 4, 8) * 8 * 3 == 3 * (1 + 2)  # (p - 1)·(F + B), not (F + W)


def test_the_formulas_stop_holding_where_we_say():
    def idle(name, p, m, *cost, hop=0):
        lowered = pp.lower(pp.schedules()[name].make(p, m))
        v, work = pp.schedules()[name].v, sum(cost) * m
        return Fraction(pp.simulate(lowered, pp.times(*cost), hop).time, v * work) - 1

    assert idle("zb-h1", 4, 8, 1, 1, 2) > pp.bubble("zb-h1", 4, 8, 1, 1, 1, 2)  # W > F
    assert idle("zb-v", 4, 8, 1, 2, 1) > pp.bubble("zb-v", 4, 8, 2, 1, 2, 1)
    assert idle("zb-v", 4, 4, 1, 1, 1) > pp.bubble("zb-v", 4, 4, 2)  # m < 2p - 1
    assert idle("1f1b", 4, 8, 1, 1, 1, hop=1) > pp.bubble("1f1b", 4, 8)
    # A stage that is slower than the others idles all of them.
    lowered = pp.lower(pp.one_f_one_b(4, 32))
    slow = pp.simulate(lowered, lambda a: pp.times()(a) * (2 if a.stage == 3 else 1))
    assert slow.idle[0] > Fraction(1, 2) > slow.idle[3]


def test_published_bubbles_of_eight_ranks():
    """facts/playbook_bubble_p8.csv, from the Ultra-Scale Playbook: (p - 1)/(v·m), as simulated."""
    rows = [(8, 32, 8, 0.02734375), (8, 32, 4, 0.0546875), (8, 16, 2, 0.21875), (8, 8, 4, 0.21875),
            (8, 32, 1, 0.21875), (8, 16, 1, 0.4375), (8, 8, 1, 0.875), (8, 4, 1, 1.75)]  # fmt: skip
    for p, m, v, published in rows:
        schedule = partial(pp.interleaved, v=v) if v > 1 else pp.one_f_one_b
        took = pp.simulate(pp.lower(schedule(p, m)), pp.times()).time
        assert Fraction(took, 3 * m * v) - 1 == Fraction(published)


def test_zb_h1_idles_less_than_1f1b_and_holds_no_more_than_its_first_rank():
    for p in range(2, 7):
        for m in range(1, 13):
            a, b = (pp.lower(make(p, m)) for make in (pp.zb_h1, pp.one_f_one_b))
            ours, theirs = (pp.simulate(x, pp.times()) for x in (a, b))
            assert ours.time < theirs.time and max(ours.idle) < max(theirs.idle)
            most = [max(pp.peaks(items)[0] for items in x) for x in (a, b)]
            assert most[0] == most[1] == min(m, p)
            # What has not had its input gradient yet, rank by rank, is exactly as with 1F1B.
            for r in range(p):
                open_ = [a._replace(kind="B") if a.kind == "I" else a for a in a[r] if a[0] in "FI"]
                assert pp.peaks(open_)[0] == pp.peaks(b[r])[0]


def naive(ranks):
    """Each rank by itself: receive, act, send. Right, but for the order."""
    rank_of, last = pp.find_stages(ranks), max(pp.find_stages(ranks))
    lists = []
    for r, actions in enumerate(ranks):
        items = []
        for a in actions:
            if value := pp.needs(a, last):
                maker = value.stage - 1 if value.what == "x" else value.stage + 1
                items += [pp.Transfer("receive", value, rank_of[maker])]
            items.append(a)
            if value := pp.makes(a, last):
                items += [pp.Transfer("send", value, rank_of[value.stage])]
        lists.append(items)
    return lists


def test_check_refuses_unlowered_and_naive_1f1b():
    for p in (2, 3, 4):
        with pytest.raises(ValueError, match="does not have it"):
            pp.check(pp.one_f_one_b(p, 6))
        with pytest.raises(ValueError, match="deadlock"):
            pp.check(naive(pp.one_f_one_b(p, 6)))
        pp.check(naive(pp.afab(p, 6)))  # this one has no two that send at once


def mutants(lowered):
    """(what was done, lists) with one fault each."""
    for r, items in enumerate(lowered):
        for k, item in enumerate(items):
            rest = items[:k] + items[k + 1 :]
            yield "dropped", lowered[:r] + [rest] + lowered[r + 1 :]
            yield "twice", lowered[:r] + [items[: k + 1] + items[k:]] + lowered[r + 1 :]
            for n in range(k + 1, len(items)):
                other = items[n]
                if isinstance(item, pp.Transfer) and isinstance(other, pp.Transfer):
                    if item.peer == other.peer:
                        both = items[:k] + [other] + items[k + 1 : n] + [item] + items[n + 1 :]
                        yield "swapped", lowered[:r] + [both] + lowered[r + 1 :]
                    break


def test_check_refuses_every_mutation():
    """Any item dropped or doubled, and any transfer swapped with the next one of its rank."""
    tried = {"dropped": 0, "twice": 0, "swapped": 0}
    for name, schedule in pp.schedules().items():
        for p, m in [(2, 4), (3, 3), (4, 4)]:
            for what, lists in mutants(pp.lower(schedule.make(p, m))):
                with pytest.raises(ValueError):
                    pp.check(lists)
                tried[what] += 1
    assert min(tried.values()) > 100


def test_interleaved_refuses_and_names_the_nearest():
    with pytest.raises(ValueError, match="3 micro-batches are no multiple of 6 ranks.* 6$"):
        pp.interleaved(6, 3, 2)
    with pytest.raises(ValueError, match="the nearest are 4 or 8"):
        pp.interleaved(4, 5, 2)
    assert pp.interleaved(2, 4, 2) and pp.one_f_one_b(4, 1)


def test_lower_refuses_a_schedule_that_waits_in_a_circle():
    ranks = pp.one_f_one_b(2, 3)
    ranks[1] = ranks[1][::-1]
    with pytest.raises(ValueError, match="no rank can go on"):
        pp.lower(ranks)


def torch_1f1b(m):
    """The order in which torch's 1F1B really calls its stage on this rank.

    (Its table for display, _get_pipeline_order, numbers the last rank's forwards from 1.)
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, p, called = dist.get_rank(), dist.get_world_size(), []
    stage = PipelineStage(torch.nn.Linear(2, 2), rank, p, torch.device("cpu"))
    for kind, method in [("F", "forward_one_chunk"), ("B", "backward_one_chunk")]:

        def note(i, *args, kind=kind, call=getattr(stage, method), **kwargs):
            called.append(pp.Action(kind, rank, i))
            return call(i, *args, **kwargs)

        setattr(stage, method, note)
    schedule = Schedule1F1B(stage, m, loss_fn=lambda y, t: (y - t).square().sum())
    args = (torch.ones(m, 2),) if rank == 0 else ()
    schedule.step(*args, **({"target": torch.zeros(m, 2)} if rank == p - 1 else {}))
    return called


def test_action_order_is_that_of_torch():
    from torch.distributed.pipelining import schedules as theirs

    for p, m in [(2, 2), (3, 7), (4, 8)]:
        assert dp.launch(torch_1f1b, p, m, timeout=40) == pp.one_f_one_b(p, m)
    compared = 0
    for p in (2, 3, 4):
        for m in (p, 2 * p, 3 * p):
            for v in (2, 3):
                torchs = object.__new__(theirs.ScheduleInterleaved1F1B)
                torchs.pp_group_size, torchs.n_local_stages, torchs._n_microbatches = p, v, m
                torchs.number_of_rounds, torchs.microbatches_per_round = m // p, p
                for r in range(p):
                    ops = torchs._calculate_single_rank_operations(r)
                    ops = [(a[1].value, a[0], a[2]) for a in ops if a and a[1].value in "FB"]
                    assert ops == pp.interleaved(p, m, v)[r]
                    compared += 1
    assert compared == 54


def test_drawing():
    lines = pp.draw(pp.simulate(pp.lower(pp.one_f_one_b(4, 4)), pp.times()).spans, 4)
    assert lines[0] == "rank 0  F0F1F2F3            B0    B1    B2    B3"
    assert lines[3] == "rank 3        F0B0  F1B1  F2B2  F3B3"
    lowered = pp.lower(pp.zb_v(2, 3))
    picture = pp.svg({"a & b": (pp.simulate(lowered, pp.times()).spans, 2)})
    import xml.etree.ElementTree as xml

    root = xml.fromstring(picture)
    assert len([x for x in root if x.tag.endswith("rect")]) == 2 * 2 * 3 * 3


# --- Stages --------------------------------------------------------------------------------------


def test_split_is_the_best_there_is():
    """Against every possible split, for small numbers."""

    def slowest(counts, head):
        return max(*counts[:-1], counts[-1] + head) if len(counts) > 1 else counts[0] + head

    def splits(layers, n):
        if n == 1:
            yield [layers]
            return
        for first in range(1, layers + 1):
            for rest in splits(layers - first, n - 1):
                yield [first, *rest]

    for layers in range(3, 10):
        for n in (1, 2, 3, 4):
            for head in (0.0, 0.17, 1.0, 2.9, 4.5):
                ours = pp.split(layers, n, head)
                assert sum(ours) == layers and len(ours) == n
                best = min(slowest(x, head) for x in splits(layers, n))
                assert slowest(ours, head) == pytest.approx(best)
    with pytest.raises(ValueError, match="at least 7 layers, not 6"):
        pp.split(6, 8)


def test_the_head_costs_several_layers():
    """The playbook: lm_head of its 3.57B model takes about 2.9 layers (V 131072, T 4096)."""
    c = memory.Config(131072, 3072, 28, 24, 8, 8192)  # its numbers but for what it does not say
    assert 2 < pp.head_flops(c) / pp.block_flops(c, 4096) < 4
    # The sum over the model is 01's count (causal: half of T on average, in two products).
    c, T = memory.PRESETS["llama3-8b"], 8192
    total = c.layers * pp.block_flops(c, T) + pp.head_flops(c)
    assert 3 * total == memory.flops_per_token(c, T)


def test_stages_together_are_the_model():
    for counts in ([1, 4], [4, 1], [0, 3, 2], [2, 3, 0], [1, 1, 1, 2]):
        whole = memory.build(dataclasses.replace(CONFIG, layers=5), dtype=torch.float64)
        stages = pp.cut_stages(whole, counts, range(len(counts)))
        named = [n for stage in stages.values() for n, _ in stage.named_parameters()]
        assert sorted(named) == sorted(n for n, _ in whole.named_parameters())
        ids, positions = torch.arange(12).view(2, 6), torch.arange(6)
        x = ids
        for stage in stages.values():
            x = stage(x, positions)
        assert torch.equal(x, whole(ids))


# --- Parity --------------------------------------------------------------------------------------


def data(sizes, seed=0):
    """Micro-batches of sizes (B, T), labels partly ignored, no two with equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for k, (B, length) in enumerate(sizes):
        tokens = torch.randint(CONFIG.vocab, (B, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, : k % 3] = dp.IGNORE
        batches.append((tokens[:, :-1], labels))
    return batches


def dense(batches, tied=False, frozen=()):
    """Loss and gradients of one device, micro-batch by micro-batch only if lengths differ."""
    model = llama(tied, frozen)
    N = sum((labels != dp.IGNORE).sum() for _, labels in batches)
    if len({tokens.shape[1] for tokens, _ in batches}) == 1:
        batches = [tuple(torch.cat(x) for x in zip(*batches))]
    loss = sum(model.loss(model(tokens), labels) for tokens, labels in batches) / N
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, N


def llama(tied, frozen=()):
    model = memory.build(DENSE[tied], seed=1, dtype=torch.float64)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def counts_for(n, kind):
    """Layers by stage: as split makes them, or as uneven as can be."""
    if kind == "even":
        return pp.split(CONFIG.layers, n, 0.5)
    if n == 1:
        return [CONFIG.layers]
    most = CONFIG.layers - (n - 2)  # middle stages have one each
    return [most, *[1] * (n - 2), 0] if kind == "front" else [0, *[1] * (n - 2), most]


class Slow(pp.Pipeline):
    """A pipeline in which one rank now and then is late."""

    late = None

    def take(self, value):
        if dist.get_rank(self.group) == self.late and value.micro_batch % 2 == 0:
            time.sleep(0.02)
        return super().take(value)


def pipeline(name, schedule, m, group, counts, model, kind=pp.Pipeline):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    lowered = pp.lower(schedule.make(p, m))
    mine = [s for s, r in enumerate(pp.ranks_of_stages(name, p, schedule.v)) if r == rank]
    stages = pp.cut_stages(model, counts, mine)
    shape = lambda tokens: (*tokens.shape, CONFIG.dim)  # noqa: E731
    return kind(stages, lowered, group, shape, memory.Later), stages


def full_name(name, tied):
    return "embed_tokens.weight" if tied and name == "lm_head.weight" else name


def run_case(group, ends, name, v, sizes, split="even", tied=False, frozen=(), late=None,
             recompute="none", steps=1):  # fmt: skip
    """(worst error of this rank's gradients and of the loss, names compared)"""
    schedule = pp.schedules(v)[name]
    p, batches = dist.get_world_size(group), data(sizes)
    counts = counts_for(p * schedule.v, split)
    model = llama(tied, frozen)
    memory.recompute(model, recompute)
    Slow.late = late
    pipe, stages = pipeline(name, schedule, len(batches), group, counts, model, Slow)
    expected_loss, expected, N = dense(batches, tied, frozen)
    for _ in range(steps):
        loss = pipe.step(batches, N)
    if tied:
        pp.sum_tied(stages, len(counts) - 1, ends)
    dist.all_reduce(loss, group=group)
    found = {full_name(n, tied): p for n, p in pp.parameters(stages).items()}
    assert all(p.grad is None for p in found.values() if not p.requires_grad)
    found = {n: p.grad / steps for n, p in found.items() if p.requires_grad}
    assert not any(getattr(p, "waiting", 0) for p in pp.parameters(stages).values())
    error = dp.worst_error(found, {n: expected[n] for n in found})[0] if found else 0.0
    return max(error, dp.relative_error(loss, expected_loss)), sorted(found)


def run_cases(many):
    torch.set_num_threads(1)
    p = dist.get_world_size()
    group = dist.new_group(range(p), group_desc="pp")
    ends = dist.new_group(sorted({0, p - 1}), group_desc="tied")
    return [run_case(group, ends, *args, **more) for args, more in many]


def hold(p, many, timeout=40):
    """Run the cases on p ranks; all gradients of the model, each below 1e-11."""
    ranks = dp.launch(run_cases, p, many, timeout=timeout)
    assert len(ranks) == p
    for k, (args, more) in enumerate(many):
        tied, frozen = more.get("tied", False), tuple(more.get("frozen", ()))
        names = {n for n, q in llama(tied, frozen).named_parameters() if q.requires_grad}
        assert {n for rank in ranks for n in rank[k][1]} == names
        worst = max(rank[k][0] for rank in ranks)
        assert worst < 1e-11, (p, args, more, worst)


def parity_cases(p, ms, splits=("even", "front", "back")):
    turn = 0
    for m in ms:
        for name in pp.schedules():
            if defined(name, p, m):
                for v in (2, 3) if name == "interleaved" and p * 3 <= CONFIG.layers + 1 else (2,):
                    turn += 1
                    split = splits[turn % len(splits)]
                    yield (name, v, [(1 + turn % 2, T)] * m), {"split": split}


@pytest.mark.parametrize("p", [*(pytest.param(p, marks=pytest.mark.full) for p in (2, 3)), 4])
def test_parity(p):
    hold(p, list(parity_cases(p, sorted({1, p - 1, p, p + 1, 2 * p}))))


@pytest.mark.full
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["even", "front", "back"])
def test_parity_of_every_number_of_micro_batches(p, split):
    hold(p, list(parity_cases(p, range(1, 10), [split])), timeout=60)


def test_two_ranks_interleaved_where_next_and_previous_are_one():
    hold(2, [(("interleaved", v, [(1, T)] * m), {}) for v in (2, 3, 4) for m in (2, 4, 8)])


def test_a_slow_rank_changes_nothing():
    hold(2, [((name, 2, [(1, T)] * 4), {"late": late})
             for name in pp.schedules() for late in range(2)])  # fmt: skip


def test_micro_batches_of_different_lengths_and_sizes():
    hold(2, [((name, 2, [(1, 8), (2, 6), (1, 8), (3, 1)]), {}) for name in pp.schedules()])


def test_frozen_stages():
    """The first, the last, and one between: gradients pass through or nobody needs them."""
    first = ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4")
    middle, last = ("layers.3", "layers.4"), ("layers.7", "layers.8", "norm", "lm_head")
    cases = []
    for frozen in (first, middle, last):
        cases += [((name, 2, [(1, T)] * 2), {"frozen": frozen}) for name in pp.schedules()]
    hold(2, cases)


def test_tied_head():
    for p in (2, 3):
        hold(p, [((name, 2, [(1, T)] * p), {"tied": True}) for name in pp.schedules()])


def test_two_steps_accumulate():
    hold(2, [((name, 2, [(1, T)] * 4), {"steps": 2}) for name in pp.schedules()])


@pytest.mark.full
def test_recomputed_layers():
    hold(2, [((name, 2, [(1, T)] * 2), {"recompute": mode})
             for name in ("1f1b", "zb-h1", "zb-v") for mode in ("full", "selective")])  # fmt: skip


def test_the_split_of_a_batch_changes_no_gradient():
    """4 micro-batches of 4 and 8 of 2: dense takes all 16 sequences at once."""
    hold(2, [(("1f1b", 1, [(size, T)] * (16 // size)), {}) for size in (4, 2)])


# --- Weight gradients that wait ------------------------------------------------------------------


class Twice(torch.nn.Module):
    """y = x + w w x with one weight: used twice, biased by the residual."""

    def __init__(self):
        super().__init__()
        self.w = memory.Linear(3, 3)
        torch.nn.init.normal_(self.w.weight, generator=torch.Generator().manual_seed(2))
        self.double()
        self.loss = lambda y, labels: (y.sum(-1) * labels).square().sum()

    def forward(self, x, positions):
        return x + self.w(self.w(x))


def alone(actions, stage, batches, note=None):
    class Noting(pp.Pipeline):
        def weight_grads(self, s, i):
            super().weight_grads(s, i)
            note and note(i)

    shape = lambda x: x.shape  # noqa: E731
    Noting({0: stage}, [actions], dist.group.WORLD, shape, memory.Later).step(batches, 1)


def weight_gradients():
    torch.manual_seed(3)
    batches = [(torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4)) for _ in range(3)]
    alone_each = []
    for x, labels in batches:
        stage = Twice()
        stage.loss(stage(x, None), labels).backward()
        alone_each.append(stage.w.weight.grad)
    order = "F0 F1 I1 F2 I2 W2 I0 W0 W1".split()
    actions = [pp.Action(a[0], 0, int(a[1])) for a in order]
    pp.check([actions])
    stage, seen = Twice(), []
    alone(actions, stage, batches, lambda i: seen.append((i, stage.w.weight.grad.clone())))
    return alone_each, seen


def test_a_w_runs_the_jobs_of_its_micro_batch_and_a_weight_used_twice_counts_twice():
    (each, seen), = dp.launch(weight_gradients, 1)
    assert [i for i, _ in seen] == [2, 0, 1]
    total = 0
    for i, grad in seen:
        total = total + each[i]
        torch.testing.assert_close(grad, total, rtol=1e-13, atol=0)


# --- Bytes ---------------------------------------------------------------------------------------


def bytes_of(name, v, B, length, m, tied):
    p, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(range(p), group_desc="pp")
    ends = dist.new_group(sorted({0, p - 1}), group_desc="tied")
    batches, c = data([(B, length)] * m), DENSE[tied]
    N = sum((labels != dp.IGNORE).sum() for _, labels in batches)
    schedule = pp.schedules(v)[name]
    _, grads, wire, (held, formula) = pp.run_schedule(name, schedule, c, batches, N, group, ends)
    calls, size = wire.calls["pp", "send"], wire.bytes["pp", "send"]
    expected = pp.sent(name, p, m, schedule.v, rank, B * length * c.dim * 8)
    return (calls, size), expected, held, formula


def hold_bytes(p, m, B, length):
    for k, name in enumerate(pp.schedules()):
        ranks = dp.launch(bytes_of, p, name, 2, B, length, m, k % 2 == 0, timeout=40)
        assert len(ranks) == p
        for found, formula, held, held_formula in ranks:
            assert found == formula and found[0] > 0
            assert held == held_formula > 0


def test_bytes_sent_and_held_are_the_formulas():
    hold_bytes(2, 4, 2, 5)  # three ranks below, four in the chapter's own run
    once, twice = (pp.sent("interleaved", 3, 6, v, 1, 8)[1] for v in (1, 2))
    assert twice == 2 * once  # v times as much in the middle


@pytest.mark.full
def test_bytes_on_three_ranks():
    hold_bytes(3, 6, 1, 8)


class Outputs(pp.Pipeline):
    """Notes how many outputs of this stage still have memory when a backward begins."""

    def forward(self, s, i):
        super().forward(s, i)
        if s < self.last:
            y = self.values[pp.Value("x", s + 1, i)].__self__
            self.refs = [*getattr(self, "refs", ()), (i, y.untyped_storage()._weak_ref())]

    def input_grad(self, s, i):
        expired = torch.UntypedStorage._expired
        alive = [k for k, ref in getattr(self, "refs", ()) if not expired(ref)]
        self.alive = [*getattr(self, "alive", ()), (i, alive, len(self.graphs))]
        super().input_grad(s, i)


def outputs(m):
    group = dist.new_group(range(dist.get_world_size()))
    batches = data([(1, T)] * m)
    counts = counts_for(dist.get_world_size(), "even")
    pipe, _ = pipeline("afab", pp.Schedule(pp.afab), m, group, counts, llama(False), Outputs)
    pipe.step(batches, 1)
    return pipe.alive


def test_an_output_is_let_go_when_it_has_been_sent():
    m = 12
    first, last = dp.launch(outputs, 2, m, timeout=40)
    i, alive, flying = first[0]
    assert i == 0 and flying == m  # all are in flight; only what may still travel is held
    assert len(alive) <= pp.Pipeline.IN_THE_AIR < m
    assert all(not ref for _, ref, _ in last)  # the last stage sends none


# --- With data parallelism and ZeRO --------------------------------------------------------------


LR, MAX_NORM = 1e-2, 0.5


def adamw(matrices, vectors):
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, fused=True)


adamw([torch.zeros(1)], [])  # what torch.optim imports at its first use, before the forks


def zero_case(name, stage, tied, frozen, steps, m):
    """pp 2 x dp 2, three steps: (weights and first gradients by name, norms, reductions noted)"""
    rank = dist.get_rank()
    pipes = [dist.new_group(ranks, group_desc="pp") for ranks in ([0, 2], [1, 3])]
    rows = [dist.new_group(ranks, group_desc="dp") for ranks in ([0, 1], [2, 3])]
    ties = [dist.new_group(ranks, group_desc="tied") for ranks in ([0, 2], [1, 3])]
    group, row, tie = pipes[rank % 2], rows[rank // 2], ties[rank % 2]
    assert group.size() == row.size() == tie.size() == 2
    schedule = pp.schedules()[name]
    counts = counts_for(2 * schedule.v, "even")
    pipe, stages = pipeline(name, schedule, m, group, counts, llama(tied, frozen))
    model = torch.nn.ModuleList(stages.values())
    units = [unit for part in stages.values() for unit in zero.llama_units(part)]
    cuts = {}
    for key, _ in model.named_parameters():
        table = "embed_tokens" in key or "lm_head" in key
        both = (tie,) if tied and table and name != "zb-v" else ()
        cuts[key] = (row, both) if stage else (None, (row, *both))
    optimizer = zero.Optimizer(model, units, cuts, stage, adamw, memory.on_finished)
    reductions, real = [], zero.reduce_scatter
    backwards = [0]
    count = pipe.input_grad

    def counted(s, i):
        backwards[0] += 1
        count(s, i)

    def noted(*args):
        reductions.append(backwards[0])
        return real(*args)

    pipe.input_grad, zero.reduce_scatter = counted, noted
    norms, first = [], None
    for step in range(steps):
        batches = data([(1, T)] * 2 * m, seed=step)
        N = sum((labels != dp.IGNORE).sum() for _, labels in batches)
        optimizer.begin(m)
        pipe.step(batches[rank % 2 :: 2], N)
        optimizer.sum_gradients()
        if first is None:
            first = optimizer.gathered([flat.grad for flat in optimizer.flats])
            per_step = list(reductions)
        squares = optimizer.squares()
        dist.all_reduce(squares)
        norms.append(squares.sqrt().item())
        optimizer.scale((MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1))
        optimizer.step(LR)
    zero.reduce_scatter = real
    weights = optimizer.gathered([flat.shard for flat in optimizer.flats])
    short = lambda d: {k.split(".", 1)[1]: t for k, t in d.items()}  # noqa: E731
    return short(weights), short(first), norms, per_step, len(optimizer.order)


def dense_steps(tied, frozen, steps, m):
    model = llama(tied, frozen)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in named.values() if p.dim() > 1]
    optimizer = adamw(matrices, [p for p in named.values() if p.dim() < 2])
    norms, first = [], None
    for step in range(steps):
        tokens, labels = (torch.cat(x) for x in zip(*data([(1, T)] * 2 * m, seed=step)))
        (model.loss(model(tokens), labels) / (labels != dp.IGNORE).sum()).backward()
        first = first or {n: p.grad.clone() for n, p in named.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), first, norms


def hold_zero(name, stage, tied=True, frozen=(), m=4, steps=3):
    ranks = dp.launch(zero_case, 4, name, stage, tied, frozen, steps, m, timeout=30)
    weights, first, norms = dense_steps(tied, frozen, steps, m)
    seen = set()
    for w, g, n, *_ in ranks:
        for found, expected, bound in ((g, first, 1e-11), (w, weights, 1e-10)):
            found = {full_name(k, tied): t for k, t in found.items()}
            errors = {k: dp.relative_error(t, expected[k].detach()) for k, t in found.items()}
            assert all(error < bound for error in errors.values()), (name, stage, errors)
        assert n == pytest.approx(norms, rel=1e-10)
        seen |= {full_name(k, tied) for k in w}
    assert seen == set(weights)
    if tied and name == "1f1b":
        for a, b in ((0, 2), (1, 3)):
            assert torch.equal(ranks[a][0]["embed_tokens.weight"], ranks[b][0]["lm_head.weight"])
    return ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_head_under_zero(stage):
    """Copies stay equal bit for bit, count once in the norm, and are those of one device."""
    for name in ("zb-h1",) if stage == 3 else ("1f1b",):
        hold_zero(name, stage)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, stage",
    # At stage 3 one chunk a rank: 03's window over a model expects its units in their order.
    [(n, z) for n, s in pp.schedules().items() for z in range(4) if z < 3 or s.v == 1],
)
def test_every_schedule_under_zero(name, stage):
    for tied in (True, False):
        hold_zero(name, stage, tied)


def test_when_gradients_are_reduced():
    """ZeRO-1: once, after the stage's last backward. ZeRO-2: for every micro-batch, m times."""
    m = 4
    for name in ("1f1b",):
        for *_, reductions, flats in hold_zero(name, 1, tied=False, m=m, steps=1):
            assert len(reductions) == flats and min(reductions) == m
        for *_, reductions, flats in hold_zero(name, 2, tied=False, m=m, steps=1):
            assert len(reductions) == m * flats
            assert min(reductions) == 1  # already in the first backward


def test_norm_of_all_stages_when_one_is_frozen():
    last = ("layers.5", "layers.6", "layers.7", "layers.8", "norm", "lm_head")
    hold_zero("1f1b", 1, tied=False, frozen=last, steps=2)
