"""02 and DistributedDataParallel: gradients of a step. The rows are in bench.py."""

from importlib import import_module

import torch
import torch.distributed as dist

memory = import_module("01_memory")
dp = import_module("02_dp")

T = 32  # short, so that communication weighs
CONFIG = memory.Config(vocab=256, dim=256, layers=4, heads=8, kv_heads=4, ffn=768)
MIB = 4  # of a bucket, for both


def batches_and_model(micro):
    rank, world = dist.get_rank(), dist.get_world_size()
    sample = dp.Samples(dp.open_tokens(), T, seed=0)
    batches = dp.micro_batches(sample, dp.my_samples(0, 6 * world, rank, world), micro, "cpu")
    return batches, 6 * world * T, memory.build(CONFIG)


def buckets(micro, group):
    batches, N, model = batches_and_model(micro)
    ours = dp.Buckets(model.named_parameters(), group, MIB * 2**20)

    def step():
        ours.start(passes=len(batches))
        dp.accumulate_gradients(model, batches, N)
        ours.finish()

    return step, lambda: dp.gradients(model)


def ddp(micro, group, **options):
    batches, N, model = batches_and_model(micro)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=MIB, **options
    )

    def step():
        wrapped.zero_grad()
        scale = group.size() / N  # it averages over the ranks
        with wrapped.no_sync():
            for tokens, labels in batches[:-1]:
                (model.loss(wrapped(tokens), labels) * scale).backward()
        tokens, labels = batches[-1]
        (model.loss(wrapped(tokens), labels) * scale).backward()

    return step, lambda: dp.gradients(model)
