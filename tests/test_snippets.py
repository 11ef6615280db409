"""What a chapter's docstring says to copy is copied out of it, into a file of its own, and used.

The paragraph Copy is a list of clauses "names: what for." The snippet is exactly these
definitions, in the order of the file, after PREAMBLE and what stands under "Imports". Each `use_…`
takes it as a stranger would, on two ranks, and compares what it computes with one process.

    torchrun --nproc-per-node 2 tests/test_snippets.py     all of them under torchrun
"""

import ast
import builtins
import dis
import importlib.util
import os
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, run_script
from test_forget import paragraph
from torch import nn

dp = import_module("02_dp")

PREAMBLE = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
"""
CHAPTERS = {path.stem: path.read_text() for path in sorted(ROOT.glob("[0-9][0-9]_*.py"))}


# --- Copying --------------------------------------------------------------------------------------


def clauses(text):
    """[(names, what for)] of a chapter's paragraph Copy."""
    words = " ".join(paragraph(text, "Copy").split())
    pairs = [clause.split(": ", 1) for clause in re.split(r"\.(?: |$)", words.split("(All")[0])]
    return [pair for pair in pairs if len(pair) == 2]


def defined(node):
    """The names that a statement at the top of a file binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return [n.id for target in getattr(node, "targets", ()) for n in ast.walk(target)
            if isinstance(n, ast.Name)]  # fmt: skip


def source(text, node):
    first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", ())])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def import_of(tree, name):
    """The chapter's own import of a name, alone on its line."""
    for node in tree.body:
        for alias in getattr(node, "names", ()):
            if (alias.asname or alias.name) == name:
                start = f"from {node.module} " if hasattr(node, "module") else ""
                return f"{start}import {name}"
    raise AssertionError(f"Imports names {name}, which the chapter does not import")


def snippet(stem):
    """The text that a reader copies."""
    text, pieces, imports, here = CHAPTERS[stem], [], [], []
    for names, what in clauses(text):
        if names == "Imports":
            imports += [import_of(ast.parse(text), name) for name in what.split(", ")]
        elif names.startswith("From "):
            (other,) = [s for s in CHAPTERS if s.startswith(names.removeprefix("From "))]
            pieces += pick(CHAPTERS[other], what.split(", "))
        else:
            here += names.split(", ")
    return "\n\n\n".join([PREAMBLE + "\n".join(imports), *pieces, *pick(text, here)]) + "\n"


def pick(text, names):
    """The definitions of these names, each statement once, in the order of the file."""
    nodes = [node for node in ast.parse(text).body if set(defined(node)) & set(names)]
    missing = set(names) - {name for node in nodes for name in defined(node)}
    assert not missing, f"Copy names {sorted(missing)}, which the chapter does not define"
    return [source(text, node) for node in nodes]


def globals_used(code):
    """The names that compiled code looks up outside its functions."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_used(constant)


def write(stem, folder):
    path = Path(folder, f"snippet_{stem[:2]}.py")
    path.write_text(snippet(stem))
    return path


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Using: on two ranks, against one process -----------------------------------------------------


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(ours, expected, what):
    error = dp.relative_error(ours, expected)
    assert expected.norm() > 0 and error < 1e-12, f"{what}: relative error {error:.3g}"


def use_01(s, rank, n):
    x, w = draw(3, 5, 4).requires_grad_(), nn.Parameter(draw(6, 4, seed=1))
    labels = torch.tensor([[0, 1, 2, 3, -100]] * 3)
    live = s.Live()
    with live:
        logits = s.linear(s.NormFunction.apply(x, torch.ones(4), 0.0), w)
        s.summed_cross_entropy(logits, labels).backward()
    ours = x.grad, w.grad
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    loss = F.cross_entropy((normed @ w.T).flatten(0, 1), labels.flatten(), reduction="sum")
    for name, mine, grad in zip("xw", ours, torch.autograd.grad(loss, (x, w))):
        same(mine, grad, name)
    keep = [torch.zeros(1000, dtype=torch.float32)]
    with live:
        before = live.total
        keep.append(keep[0] + 1)
        assert live.total - before == 4000


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)]).double()


def summed(model, x, y):
    """A loss that is a sum over samples, divided by the number of the global batch."""
    return (model(x) - y).square().sum() / 8


def use_02(s, rank, n):
    x, y, model, dense = draw(8, 7), draw(8, 7, seed=1), mlp(), mlp()
    buckets = s.Buckets(model.named_parameters(), dist.group.WORLD, size=700)
    assert len(buckets.buckets) > 2
    mine = slice(rank * 4, rank * 4 + 4)
    with s.Wire() as wire:
        buckets.start(passes=2)
        for xs, ys in zip(x[mine].chunk(2), y[mine].chunk(2)):
            summed(model, xs, ys).backward()
        buckets.finish()
    summed(dense, x, y).backward()
    for p, right in zip(model.parameters(), dense.parameters()):
        same(p.grad, right.grad, "gradient")
    gradients = sum(8 * p.numel() for p in model.parameters())
    ((key, sent),) = [item for item in wire.bytes.items() if item[0][1] == "all_reduce"]
    assert sent == gradients + 6, key  # 2·(n-1)/n of each; and a byte a parameter, was it used?


def adamw(matrices, vectors):
    return torch.optim.AdamW([*matrices, *vectors], lr=0.1, weight_decay=0, fused=True)


def use_03(s, rank, n):
    x, y = draw(8, 7), draw(8, 7, seed=1)
    dense, mine = mlp(), slice(rank * 4, rank * 4 + 4)
    right = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=0)
    for _ in range(3):
        summed(dense, x, y).backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        right.step()
        right.zero_grad()
    for stage in (1, 2, 3):
        model = mlp()
        cuts = {name: (dist.group.WORLD, ()) for name, _ in model.named_parameters()}
        optimizer = s.Optimizer(model, [[unit] for unit in model], cuts, stage, adamw)
        for _ in range(3):
            optimizer.begin(1)
            summed(model, x[mine], y[mine]).backward()
            optimizer.sum_gradients()
            optimizer.scale(s.clip_factor(optimizer, 0.1, dist.group.WORLD))
            optimizer.step(0.1)
        weights = optimizer.gathered([flat.shard for flat in optimizer.flats])
        for name, p in dense.named_parameters():
            same(weights[name], p.detach(), f"{name} at stage {stage}")
        assert sum(flat.master.numel() for flat in optimizer.flats) == 3 * 56 // n


def use_04(s, rank, n):
    group, B, T, D, V = dist.group.WORLD, 2, 4, 6, 10
    x, w1, b1 = draw(B, T, D), draw(8, D, seed=1), draw(8, seed=2)
    w2, b2, table = draw(D, 8, seed=3), draw(D, seed=4), draw(V, D, seed=5)
    labels = torch.tensor([[1, 9, -100, 4], [0, 5, 6, 7]])

    def whole(x, w1, b1, w2, b2, table):
        h = x + F.linear(F.silu(F.linear(x, w1, b1)), w2, b2)
        return F.cross_entropy((h @ table.T).flatten(0, 1), labels.flatten(), reduction="sum")

    def cut(x, w1, b1, w2, b2, table):
        h = x + s.row_parallel(F.silu(s.column_parallel(x, w1, b1, group)), w2, b2, group)
        logits = s.enter(h, group) @ table.T  # (B, T, V/tp)
        columns = dict(first=rank * V // n, columns=V // n)
        return s.vocab_parallel_cross_entropy(logits, labels, group=group, **columns)

    tensors = [x, w1, b1, w2, b2, table]
    where = [1, 0, 0, 1, None, 0]  # x along the sequence, b2 on every rank
    leaves = [t.clone().requires_grad_() for t in tensors]
    loss = whole(*leaves)
    parts = [t if d is None else t.chunk(n, d)[rank] for t, d in zip(tensors, where)]
    mine = [t.clone().requires_grad_() for t in parts]
    ours = cut(*mine)
    same(ours, loss, "loss")
    grads = list(torch.autograd.grad(ours, mine))
    dist.all_reduce(grads[4])  # partial: of this rank's tokens only
    for i, right in enumerate(torch.autograd.grad(loss, leaves)):
        right = right if where[i] is None else right.chunk(n, where[i])[rank]
        same(grads[i], right, f"gradient {i}")
    rows = s.lookup_own(labels.clamp(min=0), parts[5], rank * V // n)
    dist.all_reduce(rows)
    same(rows, table[labels.clamp(min=0)], "embedding")


class Half(nn.Module):
    """A stage of a toy: an embedding, or a head with its loss."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(first)
        self.layer = (nn.Embedding(11, 6) if first else nn.Linear(6, 11)).double()

    def forward(self, x, positions):
        return self.layer(x) + positions[:, None]

    def loss(self, y, labels):
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")


def use_05(s, rank, n):
    m, tokens = 4, torch.arange(40).view(4, 2, 5) % 11
    batches = [(x, x.flip(1)) for x in tokens]
    halves, positions = [Half(True), Half(False)], torch.arange(5.0).double()
    for make in (s.afab, s.one_f_one_b):
        stage = Half(rank == 0)
        lowered = s.lower(make(n, m))
        s.check(lowered)
        pipe = s.Pipeline({rank: stage}, lowered, dist.group.WORLD, lambda x: (*x.shape, 6))
        loss = pipe.step(batches, 40, positions)
        dist.all_reduce(loss)
        for half in halves:
            half.zero_grad()
        y = halves[1](halves[0](tokens.flatten(0, 1), positions), positions)
        right = halves[1].loss(y, tokens.flatten(0, 1).flip(1)) / 40
        right.backward()
        same(loss, right.detach(), "loss")
        for (name, p), other in zip(stage.named_parameters(), halves[rank].parameters()):
            same(p.grad, other.grad, name)


def use_06(s, rank, n):
    E, k, D, tokens = 4, 2, 5, 6
    c = SimpleNamespace(score="softmax", most_nodes=0, top_k=k, renormalise=True, scale=1.0)
    x, w = draw(n, tokens, D), draw(E, D, D, seed=1)  # an expert is a matrix here
    logits = draw(n, tokens, E, seed=2)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    right = 0
    weights, experts, _ = s.route(logits, torch.zeros(E), c)
    for e in range(E):
        gate = ((experts == e) * weights).sum(-1, keepdim=True)
        right = right + gate * (leaves[0] @ leaves[1][e].T)
    right.square().sum().backward()

    mine = x[rank].clone().requires_grad_(), w.chunk(n)[rank].clone().requires_grad_()
    pairs = experts[rank].flatten()
    trip, order = s.plan(s.count(pairs, E), dist.group.WORLD), pairs.argsort(stable=True)
    rows = s.dispatch(s.Pick.apply(mine[0], order, k), trip, dist.group.WORLD)
    rows = torch.cat([part @ m.T for part, m in zip(rows.split(trip.sizes), mine[1])])
    rows = s.Place.apply(s.combine(rows, trip, dist.group.WORLD), order, tokens * k)
    out = (weights[rank][..., None] * rows.view(tokens, k, D)).sum(1)
    out.square().sum().backward()
    same(out, right[rank], "output")
    same(mine[0].grad, leaves[0].grad[rank], "gradient of tokens")
    same(mine[1].grad, leaves[1].grad.chunk(n)[rank], "gradient of experts")


def use_07(s, rank, n):
    T = 16
    whole = [draw(2, heads, T, 8, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    right = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    right.square().sum().backward()
    mine = [s.part(x.detach(), 2, rank, n).requires_grad_() for x in whole]
    out = s.ring(*mine, None, group=dist.group.WORLD)
    out.square().sum().backward()
    same(out, s.part(right, 2, rank, n), "output")
    for name, x, other in zip("qkv", mine, whole):
        same(x.grad, s.part(other.grad, 2, rank, n), f"gradient of {name}")
    parts = [torch.empty_like(out) for _ in range(n)]
    dist.all_gather(parts, out.detach())
    same(s.whole(parts, 2), right.detach(), "the sequence again")


def use_08(s, rank, n):
    x, w = draw(256, 96).float(), draw(64, 96, seed=1).float()
    codes = s.quantise(x, (1, 32))
    assert codes.codes.dtype == torch.float8_e4m3fn and codes.scale.shape == (256, 3)
    assert 0 < dp.relative_error(s.value(codes), x) < 2**-4
    results = []
    for group, weight in ((None, w), (dist.group.WORLD, w.chunk(n)[rank])):
        leaf, p = x.clone().requires_grad_(), nn.Parameter(weight.clone())
        y = s.linear(leaf, p, s.FP8(s.RECIPES["tensor"], group))
        y.sum().backward()
        results.append((y.detach(), p.grad))
    (y, dw), (mine, dw_mine) = results
    assert 0 < dp.relative_error(y, x @ w.T) < 2**-4
    assert torch.equal(mine, y.chunk(n, 1)[rank]), "one scale for the whole matrix"
    assert torch.equal(dw_mine, dw.chunk(n)[rank])


def use_09(s, rank, n):
    groups = s.mesh({"dp": 2, "cp": 2, "tp": 2}, "dp·cp")
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["dp·cp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert s.expert_groups([[0, 1, 2, 3]], 2) == {"ep": [[0, 1], [2, 3]], "edp": [[0, 2], [1, 3]]}
    for axis, expected in (("dp", 3.0), ("tp", 1.0 + rank)):
        for ranks in s.mesh({"dp": 2, "tp": 1})[axis]:
            group = dist.new_group(ranks)
            x = torch.tensor(1.0 + rank)
            if rank in ranks:
                dist.all_reduce(x, group=group)
                assert x == expected


def use_10(s, rank, n):
    h100, size = s.HARDWARE["h100"], 1e9
    near = s.transfer(h100, 1, size, 8, 1, 1, "all_gather")
    assert abs(near - (7 * s.HOP + size / (450e9 * h100.reached))) < 1e-12
    far = s.transfer(h100, 1, size, 16, 1, 2, "all_gather")  # two nodes of 8 cards of 50 GB/s
    assert abs(far - (7 * s.HOP + h100.hop + size / (8 * 50e9 * h100.reached))) < 1e-12
    alone = s.transfer(h100, 1, size, 2, 8, 2, "all_gather")  # one rank in each node
    assert abs(alone - (h100.hop + size / (50e9 * h100.reached))) < 1e-12
    assert s.transfer(s.HARDWARE["h100-efa"], 1, size, 8, 1, 1, "all_gather") > size / 249.9e9


# --- The tests ------------------------------------------------------------------------------------

USES = {name[4:]: f for name, f in list(globals().items()) if name.startswith("use_")}
NAMED = [stem for stem in CHAPTERS if re.search(r"^Copy ", CHAPTERS[stem].split('"""')[1], re.M)]


def use(paths):
    for path in paths:
        USES[path.stem[-2:]](loaded(path), dist.get_rank(), dist.get_world_size())
    return dist.get_world_size()


def test_every_chapter_says_what_to_copy():
    assert NAMED == [*CHAPTERS] and {stem[:2] for stem in NAMED} == USES.keys()


@pytest.mark.parametrize("stem", NAMED)
def test_the_snippet_needs_nothing_else(stem):
    text = snippet(stem)
    assert "import_module" not in text
    known = {name for node in ast.parse(text).body for name in defined(node)} | set(dir(builtins))
    known |= {alias.asname or alias.name for node in ast.parse(text).body
              for alias in getattr(node, "names", ())}  # fmt: skip
    used = set(globals_used(compile(text, stem, "exec"))) - {"__name__", "__annotations__"}
    assert used <= known, f"not copied: {sorted(used - known)}"


@pytest.mark.parametrize("stem", NAMED)
def test_the_snippet_works_on_two_ranks(stem, tmp_path):
    assert dp.launch(use, 2, [write(stem, tmp_path)], timeout=20) == [2, 2]


@pytest.mark.full
def test_all_of_them_under_torchrun():
    out = run_script("tests/test_snippets.py", torchrun=2)
    assert out.returncode == 0 and f"{len(NAMED)} snippets" in out.stdout, out.stdout + out.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (ranks,) = dp.launch(use, 2, [write(stem, folder) for stem in NAMED])
    if os.environ.get("RANK", "0") == "0":
        print(f"{len(NAMED)} snippets on {ranks} ranks")
