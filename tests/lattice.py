"""Every layout of 09 against one device: gradients, weights, losses and bytes sent, in float64.

    python tests/lattice.py              the lattice {dp, tp, pp, cp} in {1, 2}⁴ × models × ZeRO × …
    python tests/lattice.py random 200   random layouts over all options

Each cell is three steps with plain SGD, of four micro-batches, and three with AdamW, of two: what
the optimizer adds does not depend on their number. A launch runs all cells that share their groups;
one device is computed once a launch and optimizer. Three layers: stages of a pipeline are uneven.
"""

import contextlib
import itertools
import math
import random
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
combined = import_module("09_combined_5d")
dp, memory, ep, pp = combined.dp, combined.memory, combined.ep, combined.pp

STEPS = 3
BOUNDS = {"gradient": 1e-11, "clipped": 1e-11, "weight": 1e-10, "loss": 1e-12, "norm": 1e-11}
DENSE = memory.Config(vocab=61, dim=16, layers=3, heads=4, kv_heads=2, ffn=24, tied=True)
MOE = ep.Config(
    61, 16, 3, 4, 2, 8, experts=8, top_k=2, shared=1, balance=0.5, z=0.05, bias_rate=0.01
)
MODELS = {
    "dense": DENSE,
    "untied": replace(DENSE, tied=False),
    "moe": MOE,
    "tied-moe": replace(MOE, tied=True, shared=0, score="sigmoid", scale=1.5),
}


class Text(dp.Samples):
    """Bytes made small enough for the vocabulary; documents of uneven length, at least two tokens.

    Where one token alone has a label, or all are blanks, attention is no choice: gradients of q and
    k are zero but for rounding. So each byte is moved on by its place.
    """

    def __call__(self, i):
        tokens, labels = super().__call__(i)
        place = torch.arange(len(labels))
        valid = place < 5 * i % len(labels) + 2
        return (tokens + place) % 61, torch.where(valid, (labels + place + 1) % 61, dp.IGNORE)


def cell(args, groups, sample, expected):
    """Train three steps; what is wrong, and the worst error of each kind (on rank 0)."""
    job = combined.compose(args, groups, "cpu")
    positions = combined.my_positions(args, groups, "cpu")
    ours, wrong = {"gradient": {}, "clipped": {}, "loss": {}, "norm": {}}, []
    for step in range(STEPS):
        gradients, loads, wire = [], [], dp.Wire()
        with wire if step == 0 else contextlib.nullcontext():
            batches = combined.my_batches(args, groups, sample, step, "cpu")
            stats = combined.train_step(
                job, groups, batches, positions,
                combined.learning_rate(step, args), gradients, loads)  # fmt: skip
        loss, norm, auxiliary, *_ = stats.double()
        key = f"step {step + 1}"
        ours["loss"][key], ours["norm"][key] = loss, norm
        if combined.has_experts(args):
            ours["loss"][f"auxiliary, {key}"] = auxiliary
        if step == 0:  # later ones show in the weights
            for kind, shards in zip(("gradient", "clipped"), gradients):
                whole = combined.as_one_device(args, job.optimizer.gathered(shards), groups)
                ours[kind] = {f"{name}, {key}": g for name, g in whole.items()}
            wrong += miscounted(wire, combined.sent(args, job.optimizer, groups, loads))
    own = combined.own_weights(args, job)
    ours["weight"] = combined.as_one_device(args, own, groups)
    differing = combined.replicas_differ(own, combined.boxes(args, groups))
    wrong += [f"{name} differs between ranks" for name in differing]
    errors = {}
    if dist.get_rank() == 0:
        for kind, bound in BOUNDS.items():
            right = expected[kind]
            if kind in ("gradient", "clipped"):
                right = {name: g for name, g in right.items() if name.endswith("step 1")}
            errors[kind], where = dp.worst_error(ours[kind], right)
            if not errors[kind] < bound:
                wrong.append(f"{where}, {kind}: relative error {errors[kind]:.3g}")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    return sorted({w for rank in everyone for w in rank}), errors


def miscounted(wire, formulas):
    """Collectives whose calls and bytes are not those of the formulas; barriers have no bytes."""
    return [
        f"{key}: {wire.calls[key], wire.bytes[key]}, by formula {formulas.get(key)}"
        for key in {*formulas, *wire.bytes}
        if (wire.calls[key], wire.bytes[key]) != formulas.get(key, (wire.calls[key], 0))
    ]


def parse(argv):
    return combined.parse(["--seq", "16", *argv, "--dtype", "float64", "--steps", str(STEPS)])


def cells(argvs):
    """Run all these, which share model, batch and groups; -> [(wrong, errors)] on rank 0."""
    combined.MODELS.update(MODELS)
    results, groups, expected = [], None, {}
    for argv in argvs:
        args = parse(argv)
        sample = Text(dp.open_tokens(), args.seq, args.seed)
        groups = groups or combined.make_groups(args, combined.layout(args))
        if dist.get_rank() == 0 and args.optimizer not in expected:
            expected[args.optimizer] = combined.reference(args, sample, STEPS, torch.float64, "cpu")
        results.append(cell(args, groups, sample, expected.get(args.optimizer)))
    return results


def lattice():
    """{key of a launch: [argv of its cells]}"""
    launches = {}
    for d, t, p, c in itertools.product((1, 2), repeat=4):
        layout = f"--dp {d} --tp {t} --pp {p} --cp {c} --micro-batch {2 // d}"
        models = [("dense", 1)]
        models += [("moe", e) for e in (1, 2, 4, 8) if d * c * t % e == 0]
        for model, e in models:
            key = f"{layout} --model {model} --ep {e}"
            launches[key] = [
                f"{key} --zero {zero} --schedule {schedule} {optimizer}".split()
                for zero in range(4)
                for schedule in (pp.schedules() if p > 1 else ["1f1b"])
                for optimizer in ("--optimizer sgd --batch 8", "--optimizer adamw --batch 4")
            ]
    return launches


def random_layout(draw, ranks=16):
    """Options drawn at random; most of them fit together, and 09 says of the others why not."""
    sizes = dict.fromkeys(("dp", "pp", "cp", "tp"), 3)
    while math.prod(sizes.values()) > ranks:  # 16 is what two cores carry
        sizes = {axis: draw.choice((1, 1, 2, 2, 3)) for axis in sizes}
        sizes["tp"] = draw.choice((1, 2, 4))
    model, micro = draw.choice(list(MODELS)), draw.choice((1, 2))
    batch = sizes["dp"] * micro * draw.choice((1, 2, 3, 4, 6, 6))
    stage = sizes["dp"] * sizes["cp"] * sizes["tp"]
    degrees = [n for n in (1, 2, 4, 8) if stage % n == 0] if "moe" in model else [1]
    options = {
        **sizes, "model": model, "batch": batch, "micro-batch": micro,
        "ep": draw.choice(degrees), "zero": draw.randrange(4),
        "schedule": draw.choice(list(pp.schedules())), "chunks": draw.choice((1, 2)),
        "cp-kind": draw.choice(("ring", "allgather", "ulysses")),
        "recompute": draw.choice(("none", "none", "selective", "full", "full:2")),
        "optimizer": draw.choice(("sgd", "adamw")), "seed": draw.randrange(100), "seq": 48,
    }  # fmt: skip
    if options["zero"] and draw.random() < 0.3:
        options["hybrid"] = draw.choice((1, 2))
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def run(launches, report=print):
    """Run them one after the other; returns (cells, failures, worst errors)."""
    count, failures, worst, begin = 0, [], dict.fromkeys(BOUNDS, 0.0), time.perf_counter()
    for key, argvs in launches.items():
        args = combined.parse(argvs[0])
        world = args.dp * args.cp * args.tp * args.pp
        results = dp.launch(cells, world, argvs, timeout=600)[0]
        for argv, (wrong, errors) in zip(argvs, results):
            count += 1
            failures += [f"{' '.join(argv)}: {w}" for w in wrong]
            worst = {kind: max(worst[kind], errors[kind]) for kind in worst}
        bad = sum(bool(wrong) for wrong, _ in results)
        took = time.perf_counter() - begin
        report(f"{took:6.0f} s  {len(results):3} cells, {bad} wrong  {key}", flush=True)
    return count, failures, worst


def fitting(argvs):
    """Those that 09 takes, and the rules that the others break."""
    combined.MODELS.update(MODELS)
    good, refused = {}, []
    for argv in argvs:
        args = parse(argv)
        args.dry_run = True  # the text is another one than 09's, made to fit the vocabulary
        rules = combined.violations(args, args.dp * args.cp * args.tp * args.pp)
        if rules:
            refused.append(rules)
        else:
            good[" ".join(argv)] = [argv]
    return good, refused


def main(argv):
    if argv[:1] == ["random"]:
        draw = random.Random(int(argv[2]) if len(argv) > 2 else 0)
        launches, refused = fitting([random_layout(draw) for _ in range(int(argv[1]))])
        for rules in refused:
            print("refused:", "; ".join(rules))
        print(f"{len(launches)} run, {len(refused)} refused")
    else:
        launches = lattice()
    count, failures, worst = run(launches)
    print("\n".join(failures))
    print(f"{count} cells, {len(failures)} failures; worst relative errors:",
          ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
