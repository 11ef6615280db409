"""
02 · Data parallelism, and the tools every later chapter uses

Idea      Every rank holds the whole model and its own part of the batch. The gradient of a sum is
          the sum of the gradients: add them over the ranks, and all take the same step.
Picture   rank 0   batch[0:3] ─ forward ─ backward ─ grad ─┐
          rank 1   batch[3:6] ─ forward ─ backward ─ grad ─┼─ sum ─ the same grad everywhere
          rank 2   batch[6:9] ─ forward ─ backward ─ grad ─┘
Cost      held: everything, on every rank. Sent per rank and step: 2·(N-1)/N of the gradients' bytes
          (a ring all-reduce), in one call a parameter.
Pays      as long as the model fits one device and there is enough batch to divide.
Forget    the tokens that count. The loss is a sum divided by the number of valid tokens of the
          *global* batch. Divide by this rank's own number, and with documents of different
          lengths every gradient is off (relative error 3.59 in this demo); nothing crashes.
Run       torchrun --nproc-per-node 4 02_dp.py      (or python 02_dp.py: it starts 4 ranks itself)
Read      PyTorch Distributed (2006.15704), Horovod (1802.05799)

Letters as in 01. N is the number of ranks of a group.
"""

import argparse
import functools
import multiprocessing
import os
import pickle
import socket
import sys
import sysconfig
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from fractions import Fraction
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# An import statement can't name a module that starts with a digit, so we ask importlib.
memory = import_module("01_memory")

IGNORE = -100  # a label that counts nothing


# --- 1. Ranks ----------------------------------------------------------------------------------
#
# A rank is a process. torchrun starts them and tells each its number by environment variables.
# Started as plain `python`, we do the same on this machine.


class RankFailed(SystemExit):
    """A rank raised or died. `rank` and `trace` are those of the first; the exit code is 1."""

    def __init__(self, rank, trace):
        super().__init__(1)
        self.rank, self.trace = rank, trace


def device():
    """This rank's device: its GPU where there are GPUs, otherwise the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def run_rank(worker, args, timeout, store=None):
    """Be one rank: join the world, work, leave.

    Who we are comes by the environment; where the ranks meet too (torchrun), or as a store.
    """
    torch.set_num_threads(1)  # ranks share the cores; and a forked rank would hang without
    here, world = device(), int(os.environ["WORLD_SIZE"])
    if here.type == "cuda":
        torch.cuda.set_device(here)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # NCCL wants a GPU for each rank; ranks that share one have to speak gloo.
    nccl = here.type == "cuda" and local_world <= torch.cuda.device_count()
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    result = worker(*args)
    dist.barrier()  # nobody leaves while another still needs the store
    dist.destroy_process_group()
    return result


def _child(rank, world, door, worker, args, timeout, pipe):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    try:
        host, port = door.getsockname()
        wait = timedelta(seconds=timeout)
        if rank == 0:  # the ranks find each other through a store, which rank 0 keeps
            store = dist.TCPStore(host, port, world, True, wait, master_listen_fd=door.detach())
        else:
            store = dist.TCPStore(host, port, world, False, wait)
        message = (time.monotonic(), None, run_rank(worker, args, timeout, store))
    except BaseException:
        message = (time.monotonic(), traceback.format_exc(), None)
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(message))
    os._exit(1 if message[1] else 0)  # no clean-up: after a failure it could wait for dead ranks


def launch(worker, world, *args, timeout=60.0):
    """Run worker(*args) on `world` ranks and return what they returned, by rank.

    Under torchrun this process is one rank already: the list holds its own result alone. A rank
    that raises takes the others down at once, its traceback printed. `timeout` (seconds) is how
    long a collective waits for its ranks.
    """
    if "RANK" in os.environ:
        return [run_rank(worker, args, timeout)]
    # A forked rank starts in milliseconds; a process that uses CUDA must not be forked.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    door = socket.create_server(("127.0.0.1", 0))  # opened before the fork: the port is ours
    sys.stdout.flush()
    ranks, pipes = [], {}
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, world, door, worker, args, timeout, theirs)
            ranks.append(context.Process(target=_child, args=job, daemon=True))
            ranks[-1].start()
            theirs.close()  # the rank's end is now its own: if it dies, ours reads end of file
            pipes[ours] = rank
        return _results(ranks, pipes)
    finally:
        door.close()
        for rank in ranks:
            rank.kill()
            rank.join()


def _results(ranks, pipes):
    results, failures = [None] * len(ranks), []
    # After a failure listen a moment longer: who failed first is not always who we hear first.
    while pipes and (ready := wait(list(pipes), timeout=0.2 if failures else None)):
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                when, trace, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:  # it died without a word, so before all who could complain about it
                ranks[rank].join()
                when, trace = 0.0, f"died with exit code {ranks[rank].exitcode}\n"
            if trace:
                failures.append((when, rank, trace))
    if failures:
        _, rank, trace = min(failures)  # the others only lost their connection to it
        print(f"rank {rank} of {len(ranks)} failed: {trace}", end="", file=sys.stderr)
        raise RankFailed(rank, trace)
    return results


# --- 2. What goes over the wire ----------------------------------------------------------------


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(t) for t in tensors)


def _all_to_all_single(n, me, output, input, group, output_splits, input_splits, *_):
    if not input_splits:
        return Fraction((n - 1) * _bytes(input), n)
    return _bytes(input) - _bytes(input[:1]) * input_splits[me]


# What one rank of n sends, from the arguments of torch's operator. The algorithms are the ring's;
# where one rank sends all (broadcast) or one receives all (reduce), the average over the ranks.
SENT = {
    "allreduce_": ("all_reduce", lambda n, me, x, *_: Fraction(2 * (n - 1) * _bytes(x), n)),
    "broadcast_": ("broadcast", lambda n, me, x, *_: Fraction((n - 1) * _bytes(x), n)),
    "reduce_": ("reduce", lambda n, me, x, *_: Fraction((n - 1) * _bytes(x), n)),
    "allgather_": ("all_gather", lambda n, me, out, x, *_: (n - 1) * _bytes(x)),
    "_allgather_base_": ("all_gather", lambda n, me, out, x, *_: (n - 1) * _bytes(x)),
    "reduce_scatter_": (
        "reduce_scatter",
        lambda n, me, out, x, *_: Fraction((n - 1) * _bytes(x), n),
    ),
    "_reduce_scatter_base_": (
        "reduce_scatter",
        lambda n, me, out, x, *_: Fraction((n - 1) * _bytes(x), n),
    ),
    "alltoall_": ("all_to_all", lambda n, me, out, x, *_: _bytes(x) - _bytes(x[me])),
    "alltoall_base_": ("all_to_all", _all_to_all_single),
    "gather_": ("gather", lambda n, me, out, x, g, root, *_: _bytes(x) if me != root else 0),
    "scatter_": (
        "scatter",
        lambda n, me, out, x, g, root, *_: _bytes(x) - _bytes(x[0][me]) if me == root else 0,
    ),
    "send": ("send", lambda n, me, x, *_: _bytes(x)),
    "barrier": ("barrier", lambda n, me, *_: 0),
}


class Wire(TorchDispatchMode):
    """Counts what this rank sends inside the `with` block, forward and backward.

    calls and bytes are Counters over (group, collective), the group by its `group_desc`. It sees
    the operators that torch.distributed dispatches and knows nothing of who called them or why.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # we never compile; True would import the compiler in every rank (1.6 s)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            self._count(op._schema.name.removeprefix("c10d::"), args)
        return op(*args, **(kwargs or {}))

    def _count(self, op, args):
        if op in ("recv_", "recv_any_source_", "monitored_barrier_"):
            return  # receiving is not sending
        if op not in SENT:
            raise NotImplementedError(f"the wire meter has no rule for c10d::{op}")
        group = next(g for a in args if (g := _group(a)) is not None)
        name, sent = SENT[op]
        self.calls[group.group_desc, name] += 1
        self.bytes[group.group_desc, name] += sent(group.size(), group.rank(), *args)


def _group(argument):
    """The ProcessGroup in a script object, if it is one."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)


# --- 3. What a chapter prints ------------------------------------------------------------------


def log(*words):
    """Print on rank 0; in a dry run (backend "fake"), on the only rank there is."""
    if not dist.is_initialized() or dist.get_rank() == 0 or dist.get_backend() == "fake":
        print(*words, flush=True)


def header(title, layout, extra=""):
    """The first line: what runs, on how many ranks, on what."""
    where = f"{device().type}/{dist.get_backend()}"
    log(f"{title}   {layout}   {where}   torch {torch.__version__}{extra}")


def table(head, rows):
    """Print rows under a head, numbers to the right, words to the left."""

    def text(cell):
        if isinstance(cell, Fraction):
            cell = int(cell) if cell.denominator == 1 else float(cell)
        if isinstance(cell, float):
            return f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell:.3g}"
        return f"{cell:,}" if isinstance(cell, int) else str(cell)

    lines = [head] + [[text(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    words = [all(isinstance(row[i], str) for row in rows) for i in range(len(head))]
    for line in lines:
        cells = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, words))
        log("  ".join(cells).rstrip())


def relative_error(ours, reference):
    """‖ours - reference‖ / ‖reference‖, in float64; 0 if both are zero, inf if shapes differ."""
    if ours is None or ours.shape != reference.shape:
        return float("inf")
    ours, reference = ours.double(), reference.double()
    gap, size = (ours - reference).norm().item(), reference.norm().item()
    if gap == 0:
        return 0.0
    return gap / size if size > 0 and gap == gap else float("inf")


def worst_error(ours, reference):
    """The largest relative error over dicts of tensors by name: (error, name)."""
    if ours.keys() != reference.keys():
        return float("inf"), "names " + " ".join(sorted(ours.keys() ^ reference.keys()))
    return max((relative_error(ours[name], reference[name]), name) for name in reference)


def verdict(chapter, failures):
    """Print the last line, `chapter OK` or `chapter FAIL: why`; return the exit code.

    Every rank calls it with its own list of failures; a failure on any rank counts.
    """
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failures)
    failures = [f for rank in everyone for f in rank]
    log(f"{chapter} FAIL: {failures[0]}" if failures else f"{chapter} OK")
    return 1 if failures else 0


# --- 4. The text, and the batch as a function of the step ----------------------------------------


@functools.cache
def standard_library():
    """The source of Python's standard library as bytes (V = 256): text that needs no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "__pycache__"}
    files = [*root.glob("*.py"), *root.glob("*/*.py")]
    files = sorted(f for f in files if f.parent.name not in skip)
    return np.frombuffer(b"".join(f.read_bytes() for f in files), dtype=np.uint8)


def open_tokens(path=None):
    """Token ids from a file, not read until used: a 1-d integer array.

    nanoGPT's .bin (uint16), .npy, or any other file as bytes; without a path the standard library.
    Raises ValueError or OSError with one line that says what is wrong.
    """
    if path is None:
        tokens = standard_library()
    elif not Path(path).is_file():
        raise ValueError(f"--data {path}: no such file")
    elif Path(path).stat().st_size == 0:
        raise ValueError(f"--data {path}: the file is empty")
    elif path.endswith(".bin") and Path(path).stat().st_size % 2:
        raise ValueError(f"--data {path}: {Path(path).stat().st_size} bytes are no uint16 tokens")
    elif path.endswith(".bin"):
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
    elif path.endswith(".npy"):
        tokens = np.load(path, mmap_mode="r")
    else:
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(f"--data {path}: {tokens.dtype} {tokens.shape} is no list of token ids")
    return tokens


def token_range(tokens, piece=1 << 24):
    """Smallest and largest id, read piece by piece."""
    ends = [
        (int(part.min()), int(part.max()))
        for part in (tokens[i : i + piece] for i in range(0, len(tokens), piece))
    ]
    return min(low for low, _ in ends), max(high for _, high in ends)


def fingerprint(tokens, piece=1 << 20, pieces=64):
    """A number that differs for different data: ranks on other machines must have the same."""
    every = max(piece, len(tokens) // pieces)
    crc = zlib.crc32(f"{tokens.dtype} {len(tokens)}".encode())
    for i in range(0, len(tokens), every):
        crc = zlib.crc32(tokens[i : i + piece].tobytes(), crc)
    return crc


def agree(number, what, group):
    """Raise on every rank unless all ranks have the same number (an int below 2^63)."""
    both = torch.tensor([number, -number], device=device())
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if both[0] != -both[1]:
        raise ValueError(f"{what} is not the same on all ranks")


class Samples:
    """Sample number i, for i = 0, 1, 2, …: tokens (T,) and labels (T,), the next token of each.

    A pure function of i, the seed and the data. An epoch is every window of T tokens once, in an
    order of its own. So the step number is all that a run has to remember of its data, and every
    layout sees the same batches.
    """

    def __init__(self, tokens, T, seed):
        self.tokens, self.T, self.seed = tokens, T, seed
        self.windows = (len(tokens) - 1) // T

    @functools.lru_cache(maxsize=2)
    def _order(self, epoch):
        return np.random.default_rng((self.seed, epoch)).permutation(self.windows)

    def __call__(self, i):
        epoch, place = divmod(i, self.windows)
        start = int(self._order(epoch)[place]) * self.T
        window = torch.from_numpy(self.tokens[start : start + self.T + 1].astype(np.int64))
        return window[:-1], window[1:]  # shifted here, before anyone cuts the sequence


def my_samples(step, batch, part, parts):
    """The sample numbers of step `step` for part `part` of `parts` of a global batch."""
    share = batch // parts
    first = step * batch + part * share
    return range(first, first + share)


def micro_batches(sample, numbers, size, device):
    """The samples with these numbers, `size` at a time: a list of tokens and labels (B, T)."""
    pairs = [sample(i) for i in numbers]
    return [
        tuple(torch.stack(column).to(device) for column in zip(*pairs[i : i + size]))
        for i in range(0, len(pairs), size)
    ]


def count_valid(batches, group):
    """How many tokens of the *global* batch have a label: the N that every loss is divided by."""
    valid = sum((labels != IGNORE).sum() for _, labels in batches)
    dist.all_reduce(valid, group=group)  # forget
    return valid.clamp(min=1)


# --- 5. Data parallelism: sum the gradients after backward ---------------------------------------


def sum_gradients(named_parameters, group):
    """Add up every gradient over the ranks of `group`: data parallelism, whole."""
    for name, p in named_parameters:
        if p.requires_grad:
            if p.grad is None:
                raise RuntimeError(f"{name} has no gradient on rank {dist.get_rank()}")
            dist.all_reduce(p.grad, group=group)


def sent(gradients, n):
    """What a rank of n sends: (calls, bytes), for gradients given by their sizes in bytes."""
    return len(gradients), Fraction(2 * (n - 1) * sum(gradients), n)


# --- 6. Check and measure ------------------------------------------------------------------------


def uneven(sample, length):
    """The samples, with sample i's labels valid in its first (7·i mod length) + 1 places only."""

    def shortened(i):
        tokens, labels = sample(i)
        valid = 7 * i % length + 1
        return tokens, torch.where(torch.arange(len(labels)) < valid, labels, IGNORE)

    return shortened


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def accumulate_gradients(model, batches, N, positions=None):
    """Forward and backward of every micro-batch; returns this rank's share of the loss."""
    total = 0
    for tokens, labels in batches:
        loss = model.loss(model(tokens, positions), labels) / N
        loss.backward()
        total = total + loss.detach()
    return total


def demo(args):
    rank, world, here = dist.get_rank(), dist.get_world_size(), device()
    group = dist.new_group(range(world), group_desc="dp")
    header("02 data parallelism", f"world {world} = dp {world}", "   float64")
    config = memory.PRESETS["tiny"]
    batch, T = 2 * world, 64
    sample = uneven(Samples(open_tokens(), T, seed=0), T)
    log(f"llama {memory.parameter_count(config):,} parameters   batch {batch} x {T} tokens\n")

    model = memory.build(config, dtype=torch.float64, device=here)
    with Wire() as wire:
        batches = micro_batches(sample, my_samples(0, batch, rank, world), 1, here)
        N = count_valid(batches, dist.group.WORLD)
        loss = accumulate_gradients(model, batches, N)
        sum_gradients(model.named_parameters(), group)
    dist.all_reduce(loss)

    dense = memory.build(config, dtype=torch.float64, device=here)
    tokens, labels = micro_batches(sample, range(batch), batch, here)[0]
    dense_loss = dense.loss(dense(tokens), labels) / (labels != IGNORE).sum()
    dense_loss.backward()

    calls, size = sent([p.numel() * p.element_size() for p in model.parameters()], world)
    table(
        ["sent per rank", "calls", "formula", "bytes", "formula"],
        [["gradients", wire.calls["dp", "all_reduce"], calls, wire.bytes["dp", "all_reduce"], size]],
    )
    error, name = worst_error(gradients(model), gradients(dense))
    log(f"\nloss       dense {dense_loss:.6f}   dp {loss:.6f}   valid tokens {N}")
    log(f"gradient   worst relative error of {len(gradients(dense))} tensors {error:.1e}   {name}")
    failures = []
    if not error < 1e-11:
        failures.append(f"{name} gradient relative error {error:.3g}")
    if (wire.calls["dp", "all_reduce"], wire.bytes["dp", "all_reduce"]) != (calls, size):
        failures.append("bytes sent differ from the formula")
    return verdict("02_dp", failures)


def main():
    parser = argparse.ArgumentParser(description="data parallelism against one process")
    parser.add_argument("--dp", type=int, default=4, help="ranks, when started as plain python")
    args = parser.parse_args()
    return launch(demo, args.dp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
