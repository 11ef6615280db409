"""07: every kind of context parallelism against attention written out on one device."""

import contextlib
import math
import multiprocessing
import resource
from collections import Counter
from functools import partial
from importlib import import_module

import pytest
import torch
import torch._dynamo  # torch.optim imports it: once here, before the forks, not in every rank
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

memory = import_module("01_memory")
dp = import_module("02_dp")
cp = import_module("07_cp_ring")
combined = import_module("09_combined_5d")

SMALL = memory.Config(vocab=61, dim=48, layers=2, heads=12, kv_heads=4, ffn=40)
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def written_out(q, k, v, documents=None):
    """Causal attention as in a textbook, heads repeated, all scores in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def error(a, b):
    """Largest difference, by the largest value of b."""
    assert a.shape == b.shape and a.dtype == b.dtype
    return ((a - b).abs().max() / b.abs().max()).item()


# --- Blocks and their merging, without ranks ---------------------------------------------------


def test_merge_is_the_textbook_formula_and_associative():
    outs, lses = random(3, 2, 4, 5, 8), random(3, 2, 4, 5, seed=1)
    weights = lses.exp() / lses.exp().sum(0)
    whole = (weights[..., None] * outs).sum(0), lses.logsumexp(0)
    a, b, c = zip(outs, lses)
    for merged in (cp.merge(*cp.merge(*a, *b), *c), cp.merge(*a, *cp.merge(*b, *c))):
        assert error(merged[0], whole[0]) < 1e-15
        assert error(merged[1], whole[1]) < 1e-15


@pytest.mark.parametrize("gap", [100.0, 500.0, -500.0])
def test_merge_of_very_different_scores(gap):
    assert torch.tensor(88.0).exp().isfinite() and torch.tensor(89.0).exp().isinf()
    out, more = random(2, 1, 2, 3, 4, dtype=F32)
    lse = random(1, 2, 3, dtype=F32)
    merged, lse_of_both = cp.merge(out, lse, more, lse + gap)
    assert torch.equal(merged, more if gap > 0 else out)
    assert torch.equal(lse_of_both, torch.maximum(lse, lse + gap))


def test_merge_of_rows_that_see_nothing():
    out, lse = random(1, 1, 4, 8), random(1, 1, 4)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (cp.merge(out, lse, *nothing), cp.merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    still_nothing = cp.merge(*nothing, *nothing)
    assert torch.equal(still_nothing[0], nothing[0]) and torch.equal(still_nothing[1], nothing[1])


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("mask", ["none", "causal", "visible", "both"])
def test_fused_kernels_are_the_formulas(mask, kv_heads):
    """Forward with its lse, and backward given an out and lse over more keys than the block's."""
    q, k, v = (random(2, h, 7, 8, seed=i) for i, h in enumerate((6, kv_heads, kv_heads)))
    causal = mask in ("causal", "both")
    visible = None
    if mask in ("visible", "both"):
        visible = random(2, 1, 7, 7, seed=3) > 0
        visible[:, :, range(7), range(7)] = True
        if not causal:
            visible[:, :, 2:4] = False  # two queries that see nothing
    fused, plain = cp.block(q, k, v, causal, visible), cp.plain_block(q, k, v, causal, visible)
    for a, b in zip(fused, plain):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)  # -inf included
    if mask == "visible":
        assert (fused[1][:, :, 2:4] == -math.inf).all() and (fused[0][:, :, 2:4] == 0).all()
    out, lse = cp.merge(*plain, random(2, 6, 7, 8, seed=4), random(2, 6, 7, seed=5))
    dout = random(2, 6, 7, 8, seed=6)
    fused = cp.block_backward(dout, q, k, v, out, lse, causal, visible)
    plain = cp.plain_block_backward(dout, q, k, v, out, lse, causal, visible)
    assert all(error(a, b) < 1e-14 for a, b in zip(fused, plain))
    if mask == "visible":
        assert (fused[0][:, :, 2:4] == 0).all()


def test_the_written_out_block_against_autograd():
    q, k, v = (random(2, h, 7, 8, seed=h).requires_grad_() for h in (4, 2, 3))
    v = v[:, :2].detach().requires_grad_()
    out = written_out(q, k, v)
    dout = random(2, 4, 7, 8, seed=9)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v = q.detach(), k.detach(), v.detach()
    mine, lse = cp.plain_block(q, k, v, True)
    assert error(mine, out.detach()) < 1e-14
    grads = cp.plain_block_backward(dout, q, k, v, mine, lse, True)
    assert all(error(a, b) < 1e-14 for a, b in zip(grads, expected))


def test_flash_kernels_of_cuda_take_our_arguments(monkeypatch):
    """No GPU here: their shape functions, on the meta device."""
    monkeypatch.setattr(cp, "on_flash", lambda q, visible: True)
    q = torch.empty(2, 8, 64, 16, dtype=BF16, device="meta")
    k = torch.empty(2, 2, 64, 16, dtype=BF16, device="meta")
    out, lse = cp.block(q, k, k, True)
    assert out.shape == q.shape and lse.shape == (2, 8, 64) and lse.dtype == F32
    dq, dk, dv = cp.block_backward(out, q, k, k, out, lse, True)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


# --- Who holds what, who sees whom -------------------------------------------------------------


def test_zigzag_of_two_ranks():
    tokens = torch.arange(8)
    assert cp.part(tokens, 0, 0, 2).tolist() == [0, 1, 6, 7]
    assert cp.part(tokens, 0, 1, 2).tolist() == [2, 3, 4, 5]
    assert cp.part(tokens, 0, 1, 2, zigzag=False).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_parts_make_the_whole(n, zigzag):
    x = torch.arange(3 * 4 * n * 2).view(3, 4 * n, 2)
    parts = [cp.part(x, 1, rank, n, zigzag) for rank in range(n)]
    assert all(p.shape == (3, 4, 2) for p in parts)
    assert torch.equal(cp.whole(parts, 1, zigzag), x)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_each_visible_pair_is_computed_once(n, zigzag):
    T = 6 * n
    C = T // n
    computed = torch.zeros(T, T, dtype=torch.int64)
    for rank in range(n):
        before = computed.sum()
        for source in range(n):
            at, their = (cp.part(torch.arange(T), 0, r, n, zigzag) for r in (rank, source))
            for queries, keys, causal in cp.blocks(rank, source, C, zigzag):
                block = torch.ones(len(at[queries]), len(their[keys]), dtype=torch.int64)
                block = block.tril() if causal else block
                computed[at[queries][:, None], their[keys][None]] += block
        assert cp.pairs(rank, n, C, zigzag) == computed.sum() - before
    assert torch.equal(computed, torch.ones(T, T, dtype=torch.int64).tril())


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_work_is_equal_with_zigzag_and_2n_minus_1_to_1_without(n):
    C = 4096
    zigzag = [cp.pairs(rank, n, C, True) for rank in range(n)]
    plain = [cp.pairs(rank, n, C, False) for rank in range(n)]
    assert len(set(zigzag)) == 1
    assert sum(zigzag) == sum(plain) == n * C * (n * C + 1) // 2
    for rank in range(n):  # the share (2i + 1) / n², but for the diagonal
        assert plain[rank] / sum(plain) == pytest.approx((2 * rank + 1) / n**2, rel=1e-3)


def test_the_picture():
    assert cp.picture(3, 6) == [
        "          plain    work    zigzag",
        "  rank 0   ◣ · ·  12.3%    ◣ ▄ ▄  33.3%",
        "  rank 1   ◣ █ ·  33.3%    ◣ ▌ ▄  33.3%",
        "  rank 2   ◣ █ █  54.4%    ◣ ▌ ▌  33.3%",
    ]


@pytest.mark.parametrize("T, n, near", [(15, 2, "12 or 16"), (15, 4, "8 or 16"), (3, 4, "8")])
def test_lengths_that_do_not_divide_are_refused(T, n, near):
    with pytest.raises(ValueError, match=f"{T} tokens .* the nearest are {near}$"):
        cp.part(torch.arange(T), 0, 0, n)
    args = combined.parse(["--cp", str(n), "--seq", str(T)])
    assert any(f"nearest are {near}" in rule for rule in combined.violations(args, n))


def test_rules_of_09_on_cp():
    args = combined.parse(["--cp", "6", "--cp-kind", "ulysses", "--seq", "100"])
    rules = combined.violations(args, 4)
    assert len(rules) == 3
    assert "the layout cp 6 needs 6" in rules[0]
    assert "2 x cp 6 = 12: the nearest are 96 or 108" in rules[1]
    assert "--cp 6 does not divide the 8 heads" in rules[2] and "4 or 8" in rules[2]
    args = combined.parse(["--cp-kind", "ulises", "--seq", "101"])
    assert combined.violations(args, 1) == ["--cp-kind ulises: did you mean ulysses?"]


# --- Attention on ranks against the textbook ---------------------------------------------------


SHAPES = [  # B, T, H, K, h
    (2, 24, 12, 4, 8),  # GQA
    (1, 24, 12, 1, 8),  # MQA: fewer kv heads than ranks
    (2, 48, 12, 12, 4),
    (1, 24, 24, 2, 2),  # T = H: an axis mistaken for another still fits
    (1, 24, 12, 6, 24),  # T = h
]


def cuts_of_documents(B, T):
    """Documents of 11, 2 and 7 tokens, again and again: none ends where a chunk does for long."""
    lengths = torch.tensor([11, 2, 7] * T).cumsum(0)
    return torch.bucketize(torch.arange(B * T), lengths, right=True).view(B, T)


def every_case(group):
    for shape in SHAPES:
        for kind in cp.KINDS:
            for zigzag in (True, False):
                for documents in (None, cuts_of_documents(*shape[:2])):
                    yield shape, kind, zigzag, documents


def attention_errors(group):
    """out, dq, dk, dv of this rank against the textbook: their errors by case."""
    n, rank, errors = dist.get_world_size(group), dist.get_rank(group), {}
    for (B, T, H, K, h), kind, zigzag, documents in every_case(group):
        mine = partial(cp.part, rank=rank, n=n, zigzag=zigzag)
        whole = [random(B, heads, T, h, seed=i) for i, heads in enumerate((H, K, K))]
        dout = random(B, H, T, h, seed=3)
        qkv = [x.clone().requires_grad_() for x in whole]
        expected = written_out(*qkv, documents)
        expected = [expected.detach(), *torch.autograd.grad(expected, qkv, dout)]
        qkv = [mine(x, 2).clone().requires_grad_() for x in whole]
        theirs = None if documents is None else mine(documents, 1)
        out = cp.KINDS[kind](*qkv, None, theirs, group=group, zigzag=zigzag)
        ours = [out.detach(), *torch.autograd.grad(out, qkv, mine(dout, 2))]
        found = [error(a, mine(b, 2)) for a, b in zip(ours, expected)]
        errors[T, H, K, kind, zigzag, documents is not None] = found
    return errors


def attention_worker():
    return attention_errors(dist.group.WORLD)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_attention_of_every_kind(n):
    results = dp.launch(attention_worker, n, timeout=20)
    assert len(results) == n
    for errors in results:
        assert len(errors) == 5 * 3 * 2 * 2 and all(len(e) == 4 for e in errors.values())
        assert max(max(e) for e in errors.values()) < 1e-13


def subgroup_worker():
    """Groups that are not the world: {0, 2} and {1, 3}. The second talks long after the first."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = groups[dist.get_rank() % 2]
    if dist.get_rank() % 2 == 0:
        errors = attention_errors(mine)
    dist.barrier()
    if dist.get_rank() % 2 == 1:
        errors = attention_errors(mine)
    return dist.get_world_size(mine), max(max(e) for e in errors.values())


def test_the_group_is_an_argument():
    for size, worst in dp.launch(subgroup_worker, 4, timeout=20):
        assert size == 2 and worst < 1e-13


def scaled_worker(factor):
    """fp32 with scores far apart, the query of every rank's first token most of all."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    q, k, v = random(1, 2, 16, 8) * factor, random(1, 1, 16, 8, seed=1), random(1, 1, 16, 8, seed=2)
    expected = written_out(q, k, v)
    mine = [cp.part(x.float(), 2, rank, n).requires_grad_() for x in (q, k, v)]
    worst = {}
    for kind in ("ring", "allgather"):
        out = cp.KINDS[kind](*mine, None, group=group)
        grads = torch.autograd.grad(out.sum(), mine)
        finite = all(g.isfinite().all() for g in grads)
        worst[kind] = finite, error(out.detach().double(), cp.part(expected, 2, rank, n))
    return worst


def test_scores_hundreds_apart():
    """B114's case: lse of the blocks differ by more than exp can hold in fp32."""
    scores = random(1, 2, 16, 8) * 50 @ random(1, 1, 16, 8, seed=1).mT / math.sqrt(8)
    assert scores.max() - scores.min() > 200
    for worst in dp.launch(scaled_worker, 2, 50.0, timeout=20):
        assert all(finite and gap < 1e-4 for finite, gap in worst.values())


def refused_worker():
    x = torch.zeros(1, 8, 4, 2)
    with pytest.raises(ValueError, match="each of 3 ranks H/3 heads, but H is 8"):
        cp.ulysses(x, x, x, None, group=dist.group.WORLD)
    return True


def test_ulysses_refuses_heads_that_do_not_divide():
    assert dp.launch(refused_worker, 3, timeout=20) == [True] * 3


class Order(TorchDispatchMode):
    """Notes the sends and the kernels, in the order of their launch."""

    def __init__(self):
        super().__init__()
        self.events, self.pairs = [], 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # as in dp.Wire

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        if name == "c10d::send":
            self.events.append("send")
        elif name.startswith("aten::_scaled_dot_product_flash"):
            backward = name.endswith("backward")
            self.events.append("backward" if backward else "forward")
            q, k = args[1:3] if backward else args[0:2]
            causal = any(a is True for a in args)  # a last argument is left out if it is False
            size = q.shape[2] * k.shape[2]
            self.pairs += (size + q.shape[2]) // 2 if causal else size
        return op(*args, **(kwargs or {}))


def order_worker(zigzag):
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    q, k = random(1, 4, 12, 8).requires_grad_(), random(1, 2, 12, 8).requires_grad_()
    with Order() as forward:
        out = cp.ring(q, k, k, None, group=group, zigzag=zigzag)
    with Order() as backward:
        out.sum().backward()
    by_formula = cp.attention_flops(1, 4, 8, rank, n, 12, zigzag)
    executed = 2 * 2 * 4 * 8 * forward.pairs + 4 * 2 * 4 * 8 * backward.pairs
    return forward.events, backward.events, executed, by_formula


def test_keys_move_on_before_the_block_is_computed():
    results = dp.launch(order_worker, 3, True, timeout=20)
    for forward, backward, executed, by_formula in results:
        assert forward == ["send", "forward", "send", "forward", "forward"]
        # The first send is of keys, the second too; dk and dv follow what was computed for them.
        assert backward == ["send", "backward", "send", "backward", "send", "backward", "send"]
        assert executed == by_formula
    assert len({executed for _, _, executed, _ in results}) == 1
    plain = dp.launch(order_worker, 3, False, timeout=20)
    assert [len([e for e in forward if e == "forward"]) for forward, *_ in plain] == [1, 2, 3]
    assert all(executed == by_formula for _, _, executed, by_formula in plain)


# --- The whole model ---------------------------------------------------------------------------


def batch_of(T, B=2, documents=False):
    """Tokens, labels (some of them valid), positions that restart at documents, document ids."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(SMALL.vocab, (2, B, T), generator=generator)
    labels[:, T // 3 : T // 2] = dp.IGNORE
    labels[0, T // 2 :] = dp.IGNORE
    if not documents:
        return tokens, labels, torch.arange(T), None
    ids = cuts_of_documents(B, T)
    first = (ids[:, None, :] == ids[:, :, None]).int().argmax(-1)  # where its document begins
    return tokens, labels, torch.arange(T) - first, ids


def one_device(T, documents):
    """Loss and gradients of the whole batch, by 01 alone."""
    tokens, labels, positions, ids = batch_of(T, documents=documents)
    dense = memory.build(SMALL, dtype=F64)
    loss = dense.loss(dense(tokens, positions, ids), labels) / (labels >= 0).sum()
    loss.backward()
    return loss, dp.gradients(dense)


def model_errors(kind, zigzag, T, documents, dense_loss, reference):
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    tokens, labels, positions, ids = batch_of(T, documents=documents)
    mine = partial(cp.part, rank=rank, n=n, zigzag=zigzag)
    labels = mine(labels, 1)
    N = dp.count_valid([(tokens, labels)], group)
    model = memory.build(SMALL, dtype=F64)
    cp.use(model, group, kind, zigzag)
    ids = None if ids is None else mine(ids, 1)
    loss = model.loss(model(mine(tokens, 1), mine(positions, -1), ids), labels) / N
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    dp.sum_gradients(model.named_parameters(), group)
    worst, name = dp.worst_error(dp.gradients(model), reference)
    return len(reference), worst, name, abs(loss - dense_loss).item()


def model_worker(T):
    return {
        (kind, zigzag, documents): model_errors(kind, zigzag, T, documents, *expected)
        for documents in (False, True)
        for expected in [one_device(T, documents)]
        for kind in cp.KINDS
        for zigzag in (True, False)
    }


@pytest.mark.parametrize("n, T", [(1, 9), (2, 16), (3, 48), (4, 24)])
def test_model_gradient_by_gradient(n, T):
    """At n = 2 documents of 11 tokens lie across chunks of 4; at n = 3 T is the model's width."""
    for cases in dp.launch(model_worker, n, T, timeout=20):
        assert len(cases) == 12
        for case, (count, worst, name, loss_gap) in cases.items():
            assert count == 21 and worst < 1e-12 and loss_gap < 1e-12, (case, name)


def recomputed_worker(kind):
    """A recomputed layer communicates again in backward, on all ranks in the same order."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    group = dist.new_group(range(n), group_desc="cp")
    tokens, labels, positions, ids = batch_of(24, documents=True)
    mine = partial(cp.part, dim=-1, rank=rank, n=n)
    for mode in ("none", "selective", "full", "full:1"):
        model = memory.build(SMALL, dtype=F64)
        memory.recompute(model, mode)
        cp.use(model, group, kind)
        with dp.Wire() as wire:
            model.loss(model(mine(tokens), mine(positions), mine(ids)), mine(labels)).backward()
        measured = Counter()
        for _, name in wire.calls:
            measured[name, "calls"] = wire.calls["cp", name]
            measured[name, "bytes"] = wire.bytes["cp", name]
        found[mode] = measured, dp.gradients(model)
    exact = all(
        torch.equal(g, found["none"][1][name])
        for _, gradients in found.values()
        for name, g in gradients.items()
    )
    return {mode: measured for mode, (measured, _) in found.items()}, exact


@pytest.mark.parametrize("kind", cp.KINDS)
def test_recomputation(kind):
    again = {"none": 0, "selective": 0, "full": 2, "full:1": 1}  # of the two layers
    shape = kind, 2, 24, SMALL.heads, SMALL.kv_heads, SMALL.head_dim, 3, F64, True
    for found, exact in dp.launch(recomputed_worker, 3, kind, timeout=20):
        assert exact
        for mode, measured in found.items():
            expected = Counter()
            for layer in range(2):
                layer_sent = cp.sent(*shape, forwards=2 if layer < again[mode] else 1)
                for name, (calls, size) in layer_sent.items():
                    expected[name, "calls"] += calls
                    expected[name, "bytes"] += size
            assert measured == expected, mode


def padding_worker():
    """Seven tokens and a pad, over two ranks; the one device sees seven."""
    rank, group = dist.get_rank(), dist.group.WORLD
    tokens, labels, positions, _ = batch_of(7, B=1)
    labels[:, -1] = 3  # the last valid token counts
    dense = memory.build(SMALL, dtype=F64)
    (dense.loss(dense(tokens), labels) / (labels >= 0).sum()).backward()
    tokens = torch.cat((tokens, torch.full((1, 1), 60)), 1)
    labels = torch.cat((labels, torch.full((1, 1), dp.IGNORE)), 1)
    tokens, labels, positions = (cp.part(x, -1, rank, 2) for x in (tokens, labels, torch.arange(8)))
    results = []
    for kind in cp.KINDS:
        model = memory.build(SMALL, dtype=F64)
        cp.use(model, group, kind)
        N = dp.count_valid([(tokens, labels)], group)
        (model.loss(model(tokens, positions), labels) / N).backward()
        dp.sum_gradients(model.named_parameters(), group)
        results.append((N.item(), *dp.worst_error(dp.gradients(model), dp.gradients(dense))))
    return results


def test_a_length_that_does_not_divide_padded_by_hand():
    for results in dp.launch(padding_worker, 2, timeout=20):
        assert len(results) == 3
        for valid, worst, name in results:
            assert valid == 3 and worst < 1e-12, name


def bf16_worker(narrow):
    """The error of 8 layers in bf16 against float64, of the gradients summed over the ring."""
    n, rank, group, T = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, 128
    c = memory.Config(vocab=64, dim=64, layers=8, heads=4, kv_heads=2, ffn=96)
    if narrow:  # what the test is to notice: sums over blocks kept in bf16
        merge = cp.merge
        cp.merge = lambda *both: [x.to(BF16).to(F32) for x in merge(*both)]
    model = memory.build(c, dtype=BF16)
    for p in model.parameters():
        p.grad_dtype = F64
    cp.use(model, group)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(c.vocab, (2, 1, T), generator=generator)
    mine = partial(cp.part, rank=rank, n=n)
    loss = model.loss(model(mine(tokens, 1), mine(torch.arange(T), 0)), mine(labels, 1)) / T
    loss.backward()
    dp.sum_gradients(model.named_parameters(), group)
    if rank:
        return None
    exact = memory.build(c, dtype=F64)
    exact.load_state_dict(model.state_dict())
    (exact.loss(exact(tokens), labels) / T).backward()
    gradients = dp.gradients(exact)
    ours = dp.gradients(model)
    squares = [dp.relative_error(ours[name], g) ** 2 for name, g in gradients.items()]
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 8), pytest.param((1, 2, 4, 8), marks=pytest.mark.full)])
def test_bf16_error_does_not_grow_with_the_ring(sizes):
    errors = {n: dp.launch(bf16_worker, n, False, timeout=20)[0] for n in sizes}
    assert max(errors.values()) < 1.1 * errors[1], errors
    assert dp.launch(bf16_worker, 8, True, timeout=20)[0] > 1.3 * errors[1]


# --- Bytes and FLOPs beside their formulas -----------------------------------------------------


COSTS = [  # B, T, H, K, h, dtype
    (1, 24, 12, 4, 8, F32),
    (2, 48, 12, 1, 16, BF16),
    (3, 24, 24, 8, 4, F64),
    (1, 240, 12, 12, 8, BF16),
]


class AtAllToAll(TorchDispatchMode):
    """What is alive when the first all-to-all is under way."""

    def __init__(self, live):
        super().__init__()
        self.live, self.total = live, None

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if self.total is None and op._schema.name == "c10d::alltoall_base_":
            self.total = self.live.total
        return op(*args, **(kwargs or {}))


def attention_bytes(kind, B, T, H, K, h, dtype, n, group, documents=False, C=None):
    """Of one attention: kept, peak of forward, alive at the first all-to-all, calls, bytes sent."""
    C = C or T // n
    leaves = [random(B, heads, C, h, dtype=dtype).requires_grad_() for heads in (H, K, K)]
    ids = torch.zeros(B, C, dtype=torch.int64) if documents else None
    with dp.Wire() as wire, memory.Live() as live, AtAllToAll(live) as at:
        q, k, v = (x.clone() for x in leaves)
        inputs = live.total
        out = cp.KINDS[kind](q, k, v, None, ids, group=group)
        del q, k, v
        kept, peak = live.total, live.peak
        out.sum().backward()
    return kept, peak, (at.total or 0) - inputs, dict(wire.calls), dict(wire.bytes)


def bytes_of_every_kind(group, documents=False):
    n = dist.get_world_size(group)
    return {
        (kind, *cost): attention_bytes(kind, *cost, n, group, documents)
        for cost in COSTS
        for kind in cp.KINDS
    }


def assert_sent(n, case, calls, sizes, documents):
    kind, B, T, H, K, h, dtype = case
    measured = {name: (calls[g, name], sizes[g, name]) for g, name in calls}
    assert measured == cp.sent(kind, B, T, H, K, h, n, dtype, documents), case


def bytes_worker():
    return [bytes_of_every_kind(dist.group.WORLD, documents) for documents in (False, True)]


def test_bytes_on_real_ranks():
    results = dp.launch(bytes_worker, 3, timeout=20)
    assert len(results) == 3
    for both in results:
        for documents, found in enumerate(both):
            assert len(found) == 12
            for case, (*_, calls, sizes) in found.items():
                assert_sent(3, case, calls, sizes, bool(documents))


@contextlib.contextmanager
def fake_world(rank, n):
    """This process as one rank of n; its collectives return at once, without others' values.

    What real ranks free a moment later, when gloo's threads let go of it, is free at once.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("n", [2, 3, 4, 6, 12])
def test_bytes_are_those_of_the_formulas(n):
    with fake_world(0, 1) as group:  # what the blocks need for themselves, with C tokens
        alone = {c: attention_bytes("ring", *c, 1, group, C=c[1] // n)[1] for c in COSTS}
    buffers = Counter()
    for rank in (0, n - 1):
        with fake_world(rank, n) as group:
            found = bytes_of_every_kind(group)
        for case, (kept, peak, in_swap, calls, sizes) in found.items():
            kind, *cost = case
            shape = *case[:-1], n, case[-1]
            assert kept == cp.held(*shape)[0], case
            assert_sent(n, case, calls, sizes, False)
            more = in_swap if kind == "ulysses" else peak - alone[tuple(cost)]
            # Rank 0 computes half its queries when its buffers are full; the others all.
            buffers[case] = max(buffers[case], more)
    assert len(buffers) == 12
    for case, size in buffers.items():
        kind, B, T, H, K, h, dtype = case
        if kind == "ulysses" and K % n:  # besides, the repeated k and v themselves
            size -= 2 * B * math.lcm(K, n) * (T // n) * h * dtype.itemsize
        assert size == cp.held(*case[:-1], n, dtype)[1], case


def test_one_rank_sends_nothing():
    with fake_world(0, 1) as group:
        for *_, sizes in bytes_of_every_kind(group).values():
            assert sum(sizes.values()) == 0
    for kind in cp.KINDS:
        assert sum(b for _, b in cp.sent(kind, 1, 24, 12, 4, 8, 1, F32).values()) == 0


def peak(kind, C, rank, n):
    """Of forward and backward."""
    with fake_world(rank, n) as group, memory.Live() as live:
        q, k, v = (random(1, heads, C, 16, dtype=F32).requires_grad_() for heads in (4, 2, 2))
        cp.KINDS[kind](q, k, v, None, group=group).sum().backward()
    return live.peak


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_peak_is_linear_in_the_length(n, rank):
    peaks = {(kind, C): peak(kind, C, rank, n) for kind in cp.KINDS for C in (64, 128, 256)}
    for kind in cp.KINDS:
        once = peaks[kind, 128] - peaks[kind, 64]
        assert peaks[kind, 256] - peaks[kind, 128] == 2 * once > 0, kind
        assert peaks[kind, 256] == pytest.approx(2 * peaks[kind, 128], rel=1e-3), kind
    assert peak("ring", 128, 1, 16) == peak("ring", 128, 1, 4)  # whatever the size of the ring
    assert peak("allgather", 128, 1, 16) > 2 * peak("allgather", 128, 1, 4)


def test_scores_in_memory_would_not_be_linear():
    peaks = []
    for T in (256, 512):
        q = random(1, 4, T, 16, dtype=F32).requires_grad_()
        with memory.Live() as live:
            written_out(q, q, q).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] > 3.5 * peaks[0]


def resident_worker():
    """Growth of the process, kernels' own memory included, from one attention of 8,192 tokens."""
    q = random(1, 1, 8192, 16, dtype=F32).requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cp.ring(q, q, q, None, group=dist.group.WORLD).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_the_kernels_hold_no_scores():
    grown = dp.launch(resident_worker, 1, timeout=20)[0]  # in KiB
    assert grown < 8192 * 8192 * 4 / 1024 / 4  # a quarter of the scores


def live_bytes(kind, B, T, n, dtype):
    """What a rank of n holds after the forward pass of the whole model."""
    tokens, labels, positions, _ = batch_of(T, B)
    with fake_world(1, n) as group:
        tokens, labels, positions = (cp.part(x, -1, 1, n) for x in (tokens, labels, positions))
        model = memory.build(SMALL, dtype=dtype)
        cp.use(model, group, kind)
        batch = [tokens, labels, positions]
        with memory.Live(parameters=model.parameters, batch=lambda: batch) as live:
            loss = model.loss(model(tokens, positions), labels)
            found = live.bytes()["activations"]
        loss.backward()
    return found


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("n, dtype", [(2, F32), (4, BF16), (3, F64), (12, F32)])
def test_live_bytes_are_01s_over_cp(kind, n, dtype):
    B, T, c = 2, 48, SMALL
    one = sum(memory.kept_bytes(c, B, T, dtype).values())
    scalar = memory.at_least_fp32(dtype).itemsize  # the loss itself is not divided
    heads = c.heads, c.kv_heads, c.head_dim
    extra = cp.held(kind, B, T, *heads, n, dtype)[0] - cp.held("ring", B, T, *heads, n, dtype)[0]
    assert (extra > 0) == (kind == "ulysses")
    assert live_bytes(kind, B, T, n, dtype) == (one - scalar) / n + scalar + c.layers * extra


def test_overlap_condition():
    """exposed() = bytes of a step / bandwidth over FLOPs of a step / speed, from sent and pairs."""
    B, H, K, h, n, C, flops, width = 1, 32, 8, 128, 8, 4096, 989e12, 50e9
    # Of kv, kv and dkv (twice as wide) the forward pass sends the first.
    forward_bytes = cp.sent("ring", B, n * C, H, K, h, n, BF16)["send"][1] / 4
    for zigzag in (True, False):
        (queries, keys, _), = cp.blocks(2, 1, C, zigzag)  # fmt: skip
        size = (queries.stop - queries.start) * (keys.stop - keys.start)
        step = forward_bytes / (n - 1) / width / (4 * B * H * h * size / flops)
        assert cp.exposed(H, K, C, 2, flops, width, zigzag) == pytest.approx(step)
    # The playbook's corrected condition, (h_kv/h)·F·cp/(s·B), and twice that for zigzag.
    playbook = K / H * flops * n / (n * C * width)
    assert cp.exposed(H, K, C, 2, flops, width, False) == pytest.approx(playbook)
    assert cp.exposed(H, K, C, 2, flops, width, True) == pytest.approx(2 * playbook)
    # The docstring's number: the length from which on it is hidden.
    assert cp.exposed(4, 1, 9890, 2, 989e12, 50e9) == pytest.approx(1, rel=1e-4)
    assert "9,890 tokens at 989 TFLOP/s, 50 GB/s, K/H = 1/4" in cp.__doc__


def test_flops_of_all_ranks_are_01s():
    c, T, B, n = memory.PRESETS["llama3-8b"], 8192, 2, 8
    for zigzag in (True, False):
        ranks = [cp.attention_flops(B, c.heads, c.head_dim, r, n, T // n, zigzag) for r in range(n)]
        causal_half = 6 * c.heads * c.head_dim * T * (B * T)  # 01 counts T / 2 keys a query
        assert sum(ranks) == pytest.approx(causal_half, rel=2 / T)


# --- 09 ----------------------------------------------------------------------------------------


def train(*flags, world):
    args = combined.parse([*flags, "--dtype", "float64", "--seq", "48", "--steps", "2"])
    assert combined.violations(args, world) == []
    dp.standard_library()  # read before the fork, for all ranks
    return dp.launch(combined.train, world, args, timeout=30)


@pytest.mark.parametrize("kind", cp.KINDS)
def test_09_with_cp_is_one_device(kind, capfd):
    ways = 2 if kind == "ring" else 1
    flags = f"--dp {ways} --cp 2 --cp-kind {kind} --batch 4 --micro-batch 1".split()
    assert train(*flags, "--check", "2", world=2 * ways) == [0] * 2 * ways
    out = capfd.readouterr().out
    assert f"world {2 * ways} = {'dp 2 · ' if ways > 1 else ''}cp 2   " in out
    assert out.count("the model writes") == 1 and out.strip().endswith("09_combined_5d OK")
    assert any(line.split()[:2] == ["gradient", "78"] for line in out.splitlines())


def inactive_worker(args):
    cp.use = lambda *_: None
    return combined.train(args)


def test_09_notices_an_axis_that_is_not_active(capfd):
    """The model keeps 01's attention: every rank attends to its own part alone."""
    args = combined.parse(["--cp", "2", "--batch", "2", "--steps", "1", "--seq", "48"])
    assert dp.launch(inactive_worker, 2, args, timeout=30) == [1, 1]
    said = "09_combined_5d FAIL: cp send: sent 0 calls, 0 bytes, by formula"
    assert said in capfd.readouterr().out


def count_worker(dp_size, cp_size):
    """Valid tokens, loss and gradient norm of one step of 09, documents of uneven length."""
    args = combined.parse(["--dp", str(dp_size), "--cp", str(cp_size), "--batch", "4",
                           "--seq", "24", "--dtype", "float64", "--micro-batch", "1"])  # fmt: skip
    groups = combined.make_groups(args, combined.layout(args))
    sample = dp.uneven(dp.Samples(dp.open_tokens(), 24, 0), 24)
    job = combined.compose(args, groups, "cpu")
    batches = combined.my_batches(args, groups, sample, 0, "cpu")
    tokens = sum(t.numel() for t, _ in batches)
    positions = combined.my_positions(args, groups, "cpu")
    N = dp.count_valid(batches, groups["tokens"]).item()
    stats = combined.train_step(job, groups, batches, positions, 1e-3)
    loss, norm, *_ = stats.tolist()
    return tokens, N, loss, norm


def test_counts_losses_and_norms_do_not_depend_on_the_layout():
    results = {}
    dp.standard_library()  # read before the fork, for all ranks
    for layout in [(1, 1), (2, 2), (1, 4)]:
        ranks = dp.launch(count_worker, *[math.prod(layout)], *layout, timeout=20)
        assert sum(tokens for tokens, *_ in ranks) == 4 * 24
        assert len({tuple(rest) for _, *rest in ranks}) == 1
        results[layout] = ranks[0][1:]
    N, loss, norm = results[1, 1]
    assert N == sum(7 * i % 24 + 1 for i in range(4))
    for layout, (their_N, their_loss, their_norm) in results.items():
        assert their_N == N, layout
        assert their_loss == pytest.approx(loss, rel=1e-13), layout
        assert their_norm == pytest.approx(norm, rel=1e-13), layout


def dry_runs(kinds, queue):
    torch.set_num_threads(1)
    for kind in kinds:
        flags = "--dry-run --dp 4 --cp 8 --batch 8 --micro-batch 1 --rank 13 --dtype bfloat16"
        code = combined.main([*flags.split(), "--cp-kind", kind])
        queue.put((kind, code))
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "kinds", [["ring"], pytest.param(["allgather", "ulysses"], marks=pytest.mark.full)]
)
def test_09_dry_run_with_cp(kinds, capfd):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=dry_runs, args=(kinds, queue))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert [queue.get() for _ in kinds] == [(kind, 0) for kind in kinds]
    assert "rank 13 of 32 = pp 1 · dp 4 · cp 8 · tp 1" in capfd.readouterr().out
