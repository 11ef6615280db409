"""09 on dp 2 x tp 2 x pp 2, beside FSDP2, DTensor and torch's pipelining put together.

The same layout (pp outermost, tp innermost), stages, 1F1B and micro-batches; whole training steps
with clipping and AdamW. With a pipeline, both gather weights and reduce gradients once a step: 09
by ZeRO-1, FSDP2 by not resharding until the last backward. The row is in bench.py.
"""

import logging
import warnings
from importlib import import_module

import torch
import torch.distributed as dist

import bench_04

memory = import_module("01_memory")
pp = import_module("05_pp_1f1b")
combined = import_module("09_combined_5d")

CONFIG = memory.Config(vocab=512, dim=256, layers=4, heads=8, kv_heads=4, ffn=768)
FLAGS = "--model bench --dp 2 --tp 2 --pp 2 --zero 1 --batch 16 --micro-batch 2 --seq 256"
combined.MODELS["bench"] = CONFIG


def layout_and_data():
    """Arguments, groups, and this rank's micro-batches."""
    args = combined.parse(FLAGS.split())
    groups = combined.make_groups(args, combined.layout(args))
    sample = combined.dp.Samples(combined.dp.open_tokens(), args.seq, args.seed)
    return args, groups, combined.my_batches(args, groups, sample, 0, "cpu")


def ours(group):
    args, groups, batches = layout_and_data()
    job = combined.compose(args, groups, "cpu")
    positions = combined.my_positions(args, groups, "cpu")

    def step():
        combined.train_step(job, groups, batches, positions, args.lr)

    def results():
        weights = job.optimizer.gathered([flat.shard for flat in job.optimizer.flats])
        return combined.whole_tensors(args, weights, groups)

    return step, results


class Stage(bench_04.Llama):
    """A stage of the Llama from torch's modules: it may lack its ends, and sees T/tp tokens."""

    def __init__(self, T, layers, first, last):
        super().__init__(CONFIG)
        self.T = T
        self.load_state_dict(memory.build(CONFIG).state_dict())
        for name in self.layers.keys() - layers:
            del self.layers[name]
        if not first:
            self.embed_tokens = None
        if not last:
            self.norm = self.lm_head = None

    def forward(self, x):
        rope = memory.rope_angles(self.config, torch.arange(self.T), torch.float32)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, rope)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def sharded(stage, mesh):
    """DTensor over tp, then FSDP2 over dp."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    first = stage.embed_tokens is not None
    missing = ("norm", "lm_head") if first else ("embed_tokens",)
    rules = {name: rule for name, rule in bench_04.plan().items() if name not in missing}
    parallelize_module(stage, mesh["tp"], rules)
    ends = stage.embed_tokens if first else [stage.norm, stage.lm_head]
    for part in [ends, *stage.layers.values(), stage]:
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)


def clip(parameters, group):
    """By the norm of all stages' gradients."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, combined.MAX_NORM, squares.sqrt())


def theirs(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import loss_parallel

    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    args, groups, batches = layout_and_data()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    rank, m = mesh["pp"].get_local_rank(), combined.count_micro_batches(args)
    counts = combined.layers_by_stage(args)
    numbers = range(sum(counts[:rank]), sum(counts[: rank + 1]))
    stage = Stage(args.seq, set(map(str, numbers)), rank == 0, rank == 1)
    sharded(stage, mesh)
    parameters = list(stage.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
    optimizer = combined.torch_optimizer(args, matrices, vectors)

    def loss_of(logits, labels):  # over dp the gradients are averaged
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return loss * args.dp / (args.batch * args.seq)

    pipe = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipe, m, loss_fn=loss_of, scale_grads=False)
    tokens, labels = (torch.cat(column) for column in zip(*batches))

    def step():
        with loss_parallel():
            schedule.step(*[tokens] * (rank == 0), **{"target": labels} if rank == 1 else {})
        clip(parameters, mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: {n: p.detach().full_tensor() for n, p in stage.named_parameters()}
