"""05 beside torch.distributed.pipelining. The rows are in bench.py.

Both run the same stages of the same Llama. Only where torch splits the backward, its stages get
F.linear in place of 01's linear, which would compute both gradients in both halves.
"""

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

memory = import_module("01_memory")
dp = import_module("02_dp")
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

    return step, lambda: gradients(mine)


def theirs(name, schedule, group):
    mine, n = stages(name, group)
    for stage in mine.values() if name.startswith("zb") else ():
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

    return step, lambda: gradients(mine)


SCHEDULES = {  # ours and theirs
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
