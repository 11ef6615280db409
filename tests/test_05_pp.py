"""05: schedules as pure functions, their lowering and simulation; parity of every one of them."""

import dataclasses
import random
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
            if name == "zb-h1" and W > F or name == "zb-v" and (m < 2 * p - 1 or len({F, I, W}) > 1):
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
    rank_of, last = pp.placement(ranks), max(pp.placement(ranks))
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
        assert dp.launch(torch_1f1b, p, m, timeout=20) == pp.one_f_one_b(p, m)
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
