"""03 and ZeroRedundancyOptimizer or FSDP2: whole training steps. The rows are in bench.py."""

from importlib import import_module

import torch

memory = import_module("01_memory")
zero = import_module("03_zero")

CONFIG = memory.Config(vocab=512, dim=256, layers=6, heads=8, kv_heads=4, ffn=768)
B, T, LR = 4, 128, 1e-3


def build():
    model = memory.build(CONFIG)
    for p in model.parameters():
        p.grad_dtype = None  # as torch's own expect it; in fp32 it is the same
    return model


def tokens_and_labels(group):
    generator = torch.Generator().manual_seed(group.rank())
    return torch.randint(CONFIG.vocab, (2, B, T), generator=generator).unbind()


def adamw(matrices, vectors):
    return torch.optim.AdamW(matrices + vectors, lr=LR, fused=True)


def stage(number, group):
    model, (tokens, labels) = build(), tokens_and_labels(group)
    cut = {name: (group, ()) for name, _ in model.named_parameters()}
    units = zero.llama_units(model)
    if number == 1:  # as few transfers as DistributedDataParallel's buckets make of this model
        units = zero.merged(units, 2)
    optimizer = zero.Optimizer(model, units, cut, number, adamw, memory.on_finished)

    def step():
        optimizer.begin()
        (model.loss(model(tokens), labels) / (group.size() * B * T)).backward()
        optimizer.sum_gradients()
        optimizer.step(LR)

    return step, lambda: optimizer.gathered([flat.shard for flat in optimizer.flats])


def zero_redundancy(group):
    """DistributedDataParallel with ZeroRedundancyOptimizer, both with their buckets as views."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, (tokens, labels) = build(), tokens_and_labels(group)
    module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=LR,
        fused=True,
    )

    def step():
        (model.loss(module(tokens), labels) / (B * T)).backward()  # it averages over the ranks
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: {name: p.detach() for name, p in model.named_parameters()}


def fsdp2(group):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.device_mesh import DeviceMesh

    model, (tokens, labels) = build(), tokens_and_labels(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in [model.embed_tokens, *model.layers.values(), [model.norm, model.lm_head], model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step():
        (model.loss(model(tokens), labels) / (B * T)).backward()  # it averages over the ranks
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: {name: p.detach().full_tensor() for name, p in model.named_parameters()}
