"""05 beside torch.distributed.pipelining: python tests/bench_05.py [--pairs N] [row …]

Both run the same stages of the same Llama. Theirs gets plain F.linear in place of 01's linear, as
01's would compute input and weight gradients in both halves of a backward that torch has split.
"""

import argparse
import sys
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import bench

dp, memory = bench.dp, bench.memory
pp = import_module("05_pp_1f1b")

CONFIG = memory.Config(vocab=256, dim=192, layers=8, heads=6, kv_heads=3, ffn=512)
B, T, M = 2, 64, 8


def stages(name, group):
    """This rank's stages of a new model, and how many there are."""
    p, v = group.size(), pp.schedules()[name].v
    counts = pp.split(CONFIG.layers, p * v)
    mine = [s for s, r in enumerate(pp.ranks_of_stages(name, p, v)) if r == group.rank()]
    model = memory.build(CONFIG)
    return pp.cut_stages(model, counts, mine), p * v


def batches():
    return dp.micro_batches(dp.Samples(dp.open_tokens(), T, 0), range(M * B), B, "cpu")


def gradients(stages):
    return {name: p.grad for name, p in pp.parameters(stages).items()}


def clear(stages):
    for p in pp.parameters(stages).values():
        p.grad = None


def ours(name, group):
    mine, _ = stages(name, group)
    lowered = pp.lower(pp.schedules()[name].make(group.size(), M))
    shape = lambda tokens: (*tokens.shape, CONFIG.dim)  # noqa: E731
    pipe = pp.Pipeline(mine, lowered, group, shape, memory.Later)
    data, positions = batches(), torch.arange(T)

    def step():
        clear(mine)
        pipe.step(data, M * B * T, positions)
        return gradients(mine)

    return step


def theirs(name, schedule, group):
    mine, n = stages(name, group)
    for stage in mine.values():
        for part in stage.modules():
            if isinstance(part, memory.Linear) and not isinstance(part, memory.Head):
                part.forward = lambda x, part=part: F.linear(x, part.weight)
        if stage.lm_head is not None:
            stage.lm_head.forward = lambda x, head=stage.lm_head: F.linear(x, head.weight)
    here = torch.device("cpu")
    pipes = [PipelineStage(stage, s, n, here, group=group) for s, stage in mine.items()]
    loss = lambda y, labels: memory.summed_cross_entropy(y, labels) / (M * B * T)  # noqa: E731
    single = schedule is Schedule1F1B
    run = schedule(pipes[0] if single else pipes, M, loss_fn=loss, scale_grads=False)
    tokens, labels = (torch.cat(x) for x in zip(*batches()))
    args = (tokens,) if 0 in mine else ()
    more = {"target": labels} if n - 1 in mine else {}

    def step():
        clear(mine)
        run.step(*args, **more)
        return gradients(mine)

    return step


def row(name, schedule, world=2):
    return bench.Row(partial(ours, name), partial(theirs, name, schedule), world, tolerance=1e-4)


ROWS = {
    "05 1f1b": row("1f1b", Schedule1F1B),
    "05 interleaved": row("interleaved", ScheduleInterleaved1F1B),
    "05 zb-h1 / zero bubble": row("zb-h1", ScheduleInterleavedZeroBubble),
    "05 zb-v / ZBV": row("zb-v", ScheduleZBVZeroBubble),
}


def main():
    parser = argparse.ArgumentParser(description="pipelines beside torch.distributed.pipelining")
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    failures = []
    print("ours / theirs; ratio of medians of pairs, 95 %, ms, peak MiB")
    for name, one in ROWS.items():
        if name.startswith(tuple(args.rows or [""])):
            cells, failure = bench.run(name, one, args.pairs)
            print(*cells, sep="   ", flush=True)
            failures += [failure] if failure else []
    print("bench_05 " + (f"FAIL: {failures[0]}" if failures else "OK"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
