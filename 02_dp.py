"""
02 · Data parallelism, and the tools every later chapter uses

Idea      Every rank holds the whole model and its own part of the batch. The gradient of a sum is
          the sum of the gradients: add them over the ranks, and all take the same step. Backward
          finishes the last layer first, so its sum can travel while the first layer still computes.
Picture   rank 0   batch[0:3] ─ forward ─ backward ─ grad ─┐
          rank 1   batch[3:6] ─ forward ─ backward ─ grad ─┼─ sum ─ the same grad everywhere
          rank 2   batch[6:9] ─ forward ─ backward ─ grad ─┘
          after    forward ─ backward of layers 3 2 1 0 ─ sum 3 2 1 0 ─ step
          buckets  forward ─ backward of layers 3 2 1 0 ─ step
                                          sum     3 2 1 0
Cost      held: everything, on every rank. Sent per rank and step: 2·(N-1)/N of the gradients' bytes
          (a ring all-reduce), in one call a parameter or a bucket, however many micro-batches;
          buckets also ask which parameters were used, a byte each.
Pays      as long as the model fits one device, there is enough batch to divide, and the last
          micro-batch is long enough to hide the sum behind its backward (section 8).
Forget    the tokens that count. The loss is a sum divided by the number of valid tokens of the
          *global* batch. Divide by this rank's own number, and with documents of different
          lengths every gradient is off (relative error 3.59 in this demo); nothing crashes.
Run       torchrun --nproc-per-node 4 02_dp.py      (or python 02_dp.py: it starts 4 ranks itself)
          python 02_dp.py --trace dp.json           (then open the file in ui.perfetto.dev)
Copy      assign, plain, Bucket, Buckets: gradients summed while backward goes on, for any model.
          _bytes, _all_to_all_single, SENT, _group, Wire: what any code sends. Imports: itertools,
          Counter, deque, Fraction, TorchDispatchMode.
Read      PyTorch Distributed (2006.15704), Horovod (1802.05799), deep gradient compression
          (1712.01887), the Ultra-Scale Playbook's chapter on data parallelism

Letters as in 01. N is the number of ranks of a group. Global batch = micro-batch · micro-batches a
rank accumulates · N; how it is split changes nothing but the order of additions.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import pickle
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections import Counter, deque
from datetime import timedelta
from fractions import Fraction
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


OP_TYPES = {  # torch gives the kind of a collective under way as a number
    0: "broadcast", 1: "all_reduce", 4: "all_gather", 5: "all_gather", 9: "reduce_scatter",
    10: "all_to_all", 11: "all_to_all", 12: "send", 13: "recv", 16: "reduce_scatter",
}  # fmt: skip


class Stranded(SystemExit):
    """This rank waited in vain. The text says in which collective, and for whom."""


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
    rank, wait = int(os.environ["RANK"]), timedelta(seconds=timeout)
    store = store or meeting_place(rank, world, wait)
    try:
        dist.init_process_group(
            "nccl" if nccl else "gloo", store=store, rank=rank, world_size=world, timeout=wait
        )
        result = worker(*args)
        dist.barrier()  # nobody leaves while another still needs the store
    except Exception as error:
        if words := explain(error, store, rank, world, patience=1 + timeout / 10):
            raise Stranded(words) from None
        raise
    dist.destroy_process_group()
    return result


def meeting_place(rank, world, wait):
    """torchrun's store."""
    store = next(dist.rendezvous("env://", rank, world, timeout=wait))[0]
    # Of one machine it is kept when the ranks are restarted, with the addresses of those that died.
    # Several machines (c10d) get a new one, and there each has a count of restarts of its own.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def explain(error, store, rank, world, patience):
    """Which rank left this one waiting, and in what; None if the error is this rank's own.

    A rank that waits in vain learns only that its neighbour is gone or silent, and that may be one
    who waits in vain too. So whoever fails says so in the store; who stays silent died or hangs.
    """
    where, others = collective_of(error), {r: f"failed/{r}" for r in range(world) if r != rank}
    own, end = "an error of its own", time.monotonic() + patience
    store.set(f"failed/{rank}", where or own)
    if not where:
        return None
    while True:
        said = {r: store.get(key).decode() for r, key in others.items() if store.check([key])}
        silent = sorted(others.keys() - said.keys())
        cause = [r for r in said if said[r] == own]
        if cause or len(silent) < 2 or time.monotonic() > end:
            break
        time.sleep(0.05)
    ranks = ", ".join(f"rank {r}" for r in cause or silent) or "nobody: the ranks' calls differ"
    why = "failed" if cause else "died or hangs" if silent else "all wait"
    reason = str(error).split("] ", 1)[-1].split(". ")[0]
    return f"rank {rank} waited in {where} for {ranks} ({why}): {reason}\n"


def collective_of(error):
    """What an error of the transport interrupted, such as "all_reduce over dp"; else None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        if frame.f_globals["__name__"] == dist.distributed_c10d.__name__:
            group = frame.f_locals.get("group")
            over = getattr(group, "group_desc", None) or "all ranks"
            return f"{frame.f_code.co_name} over {over}" if _of_transport(error) else None
    if not _of_transport(error):
        return None
    works = [v for frame in frames for v in frame.f_locals.values() if isinstance(v, dist.Work)]
    names = [frame.f_code.co_name for frame in frames if "wait" not in frame.f_code.co_name]
    kind = works[-1]._get_op_type() if works else None
    return f"{OP_TYPES.get(kind, 'a collective')}, awaited in {names[-1]}(),"


def _of_transport(error):
    return isinstance(error, dist.DistError) or re.search("gloo|NCCL|Timed out", str(error))


def leave_with(parent):
    """A rank whose launcher is gone leaves too: nobody would ever stop it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _child(rank, world, door, worker, args, timeout, pipe, parent):
    """One rank that `launch` has started: sends (when, trace or None, result) through the pipe."""
    host, port = door
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    try:
        store = dist.TCPStore(host, port, world, False, timedelta(seconds=timeout))
        message = (time.monotonic(), None, run_rank(worker, args, timeout, store))
    except Stranded as stranded:
        message = (time.monotonic(), stranded.code, None)
    except BaseException:
        message = (time.monotonic(), traceback.format_exc(), None)
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(message))
    os._exit(1 if message[1] else 0)  # no clean-up: after a failure it could wait for dead ranks


def launch(worker, world, *args, timeout=60.0):
    """Run worker(*args) on `world` ranks and return what they returned, by rank.

    Under torchrun this process is one rank already: the list holds its own result alone, and a rank
    that raises leaves it to torchrun to end the others. Started here, it takes the others down at
    once, its traceback printed. `timeout` (seconds) is how long a collective waits for its ranks.
    SIGTERM is passed on to the ranks.
    """
    if "RANK" in os.environ:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is our parent
            threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
        return [run_rank(worker, args, timeout)]
    # A forked rank starts in milliseconds; a process that uses CUDA must not be forked.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    door = socket.create_server(("127.0.0.1", 0))  # opened before the fork: the port is ours
    sys.stdout.flush()
    ranks, pipes, before, store = [], {}, signal.getsignal(signal.SIGTERM), None
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, world, door.getsockname(), worker, args, timeout, theirs, os.getpid())
            ranks.append(context.Process(target=_child, args=job, daemon=True))
            ranks[-1].start()
            theirs.close()  # the rank's end is now its own: if it dies, ours reads end of file
            pipes[ours] = rank
        # The ranks find each other through a store. If one of them kept it and hung, all would
        # hang. Made after the fork, for it has a thread, and those do not survive one.
        host, port = door.getsockname()
        store = dist.TCPStore(host, port, world, True, wait_for_workers=False,
                              master_listen_fd=door.detach())  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
        return _results(ranks, pipes)
    finally:
        signal.signal(signal.SIGTERM, before)
        door.close()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        del store


def _results(ranks, pipes):
    """What the ranks returned; if one failed, raises RankFailed with the first one's trace."""
    results, failures = [None] * len(ranks), []
    # After a failure listen a moment longer: who failed first is not always who we hear first.
    # If all we know of died without a word, wait until another says in what it was left waiting.
    moment = None
    while pipes and (ready := wait(list(pipes), timeout=moment)):
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                when, trace, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:  # it died without a word, so before all who could complain about it
                ranks[rank].join()
                when, trace = 0.0, f"died with exit code {ranks[rank].exitcode}\n"
            if trace:
                failures.append((when, rank, trace))
                moment = 0.3 if any(when for when, _, _ in failures) else 2.0
    if failures:
        (when, rank, trace), *others = sorted(failures)  # the others only lost the connection to it
        witness = "" if when else "".join(words for _, _, words in others[:1])
        print(f"rank {rank} of {len(ranks)} failed: {trace}{witness}", end="", file=sys.stderr)
        raise RankFailed(rank, trace)
    return results


# --- 2. The collectives --------------------------------------------------------------------------
#
# A collective is a call that all ranks of a group make together, in the same order; a rank that
# leaves one out lets the others wait. Everything in these chapters is made of the ones below.


def collectives(group, device):
    """What each of them leaves on this rank, if rank r starts with the numbers 10·r, 10·r + 1, …"""
    n, me = group.size(), group.rank()
    start = 10 * me + torch.arange(n, device=device)  # one number for every rank
    left = {"(start)": start}

    left["broadcast"] = start.clone()  # everyone gets what rank 0 has
    dist.broadcast(left["broadcast"], group_src=0, group=group)
    left["reduce"] = start.clone()  # rank 0 gets the sum; elsewhere what is left means nothing
    dist.reduce(left["reduce"], group_dst=0, group=group)
    left["all_reduce"] = start.clone()  # everyone gets the sum
    dist.all_reduce(left["all_reduce"], group=group)

    left["gather"] = torch.empty_like(start)  # rank 0 gets one number of each
    slots = list(left["gather"].split(1))
    dist.gather(start[:1], slots if me == 0 else None, group_dst=0, group=group)
    left["all_gather"] = torch.empty_like(start)  # everyone does
    dist.all_gather(list(left["all_gather"].split(1)), start[:1], group=group)

    left["scatter"] = torch.empty_like(start[:1])  # rank r gets number r of rank 0
    numbers = list(start.split(1))
    dist.scatter(left["scatter"], numbers if me == 0 else None, group_src=0, group=group)
    left["reduce_scatter"] = torch.empty_like(start[:1])  # rank r gets the sum of all numbers r
    dist.reduce_scatter(left["reduce_scatter"], numbers, group=group)
    left["all_to_all"] = torch.empty_like(start)  # rank r gets everyone's number r: a transpose
    dist.all_to_all_single(left["all_to_all"], start, group=group)

    if me != 0:
        left["reduce"] = left["gather"] = start[:0]
    begin = time.perf_counter()
    time.sleep(0.02 * me)
    dist.barrier(group)  # nobody goes on before the last has come, 20 ms after the one before it
    left["barrier, ms"] = torch.tensor([1000 * (time.perf_counter() - begin)]).int()
    return {name: x.tolist() for name, x in left.items()}


def ring_all_reduce(x, group):
    """Sum the contiguous tensor x over the ranks, in place, by sends to the next rank alone.

    x is N chunks. Reduce-scatter: N - 1 times everyone passes a partial sum on and adds its own
    part to the one that arrives; then rank r has chunk r + 1 in full. All-gather: N - 1 times
    everyone passes a finished chunk on. Each chunk takes 2·(N - 1) hops: a rank sends 2·(N-1)/N
    of x, hardly more with 1,000 ranks than with 10.
    """
    n, me = group.size(), group.rank()
    chunks = x.view(-1).tensor_split(n)  # a length that N does not divide: some are one longer
    for step in range(2 * (n - 1)):
        give, take = chunks[(me - step) % n], chunks[(me - step - 1) % n]
        arrived = torch.empty_like(take)
        jobs = [
            dist.P2POp(dist.isend, give, group=group, group_peer=(me + 1) % n),
            dist.P2POp(dist.irecv, arrived, group=group, group_peer=(me - 1) % n),
        ]
        for job in dist.batch_isend_irecv(jobs):
            job.wait()
        if step < n - 1:
            take += arrived  # reduce-scatter
        else:
            take.copy_(arrived)  # all-gather


# --- 3. What goes over the wire ----------------------------------------------------------------


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


# --- 4. What a chapter prints ------------------------------------------------------------------


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
    """‖ours - reference‖ / ‖reference‖ in float64; inf if shapes differ or it is no number."""
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


# --- 5. The text, and the batch as a function of the step ----------------------------------------


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
    Raises ValueError (or OSError) with one line that says what is wrong with the file.
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
        try:
            tokens = np.lib.format.open_memmap(path, mode="r")  # np.load would open archives too
        except Exception as error:  # a damaged header raises whatever its parser does
            raise ValueError(f"--data {path}: no .npy file ({error})") from None
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


# --- 6. Data parallelism: after backward, and during ----------------------------------------------
#
# Four forms of one sum:
#   after backward      sum_gradients: one call a parameter, the network idle until backward ends
#   hooks               Buckets with size=1: each gradient travels as soon as it is finished
#   buckets             Buckets: the same in few, larger messages, as every call has a latency
#   with accumulation   Buckets.start(passes=M): a gradient is finished after M micro-batches


def sum_gradients(named_parameters, group):
    """Add up every gradient over the ranks of `group`: data parallelism, whole."""
    for name, p in named_parameters:
        if p.requires_grad:
            if p.grad is None:
                raise RuntimeError(f"{name} has no gradient on rank {dist.get_rank()}")
            dist.all_reduce(p.grad, group=group)


def assign(sizes, limit):
    """Cut a list of sizes into buckets of at most `limit`, a larger one alone: lists of indices."""
    buckets, room = [], 0
    for i, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(i)
        room -= size
    return buckets


class Bucket:
    """Gradients of a few parameters in one flat buffer, each a view into it."""

    def __init__(self, parameters, dtype):
        self.parameters, self.views, start = parameters, {}, 0
        length = sum(p.numel() for p in parameters)
        self.flat = torch.empty(length, dtype=dtype, device=parameters[0].device)
        for p in parameters:
            # Dense, the dimensions in the order p has them in memory, as fused optimizers want it.
            strides = torch.empty_like(p, device="meta").stride()
            self.views[p] = self.flat.as_strided(p.shape, strides, start)
            start += p.numel()


def plain(flat, group):
    """The reduction of a bucket: an all-reduce. At a `yield` backward goes on; see section 7."""
    yield dist.all_reduce(flat, group=group, async_op=True)


class Buckets:
    """Data parallelism with overlap: gradients are summed over `group` while backward goes on.

        buckets = Buckets(model.named_parameters(), group)
        every step:  buckets.start(passes=M); M times loss.backward(); buckets.finish()

    Then p.grad is the sum, in at least fp32, or None if no rank used p. Unlike DDP it is a sum, and
    no mean: divide each loss by the tokens of the global batch (count_valid). Micro-batches before
    the last send nothing (DDP's no_sync). Weights are never sent: all ranks have to start with the
    same, as from 01's build.

    The layout depends on the parameters alone: in reverse order of registration, which is about the
    order in which backward finishes them. Buckets start in this order on every rank, whatever the
    order of arrival: one that is full early waits for those before it, or ranks would add different
    buckets up.

    on_finished(p, hook) calls hook(p) when p.grad is complete. Autograd's own word is the default;
    it comes too early for a deferred weight gradient (05), then 01's has to be given.
    """

    def __init__(
        self,
        named_parameters,
        group,
        size=25 * 2**20,
        reduce=plain,
        on_finished=torch.Tensor.register_post_accumulate_grad_hook,
    ):
        self.group, self.reduce, self.passes = group, reduce, None
        self.names, self.frozen = {}, {}
        for name, p in named_parameters:  # by identity: a shared parameter has one gradient
            (self.names if p.requires_grad else self.frozen).setdefault(p, name)
        if not self.names:
            raise ValueError("no parameter needs a gradient")
        self._compare(size)
        order = {p: i for i, p in enumerate(reversed(self.names))}
        dtypes = {p: torch.promote_types(p.dtype, torch.float32) for p in order}
        self.buckets = []
        for dtype in dict.fromkeys(dtypes.values()):
            ps = [p for p in order if dtypes[p] == dtype]
            for ids in assign([p.numel() * dtype.itemsize for p in ps], size):
                self.buckets.append(Bucket([ps[i] for i in ids], dtype))
        self.buckets.sort(key=lambda bucket: order[bucket.parameters[-1]])  # as they fill up
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for p in self.names:
            p.grad_dtype = dtypes[p]
            p.register_post_accumulate_grad_hook(self._passed)  # first: _finished reads the count
            on_finished(p, self._finished)

    def _compare(self, size):
        """Raise if this rank's parameters are not those of the group's first rank."""
        if dist.get_backend(self.group) == "fake":
            return  # a dry run is alone
        mine = [f"{name} {tuple(p.shape)} {p.dtype}" for p, name in self.names.items()]
        first = [[*mine, f"a bucket size of {size}"]]
        dist.broadcast_object_list(first, group_src=0, group=self.group)
        for ours, theirs in itertools.zip_longest([*mine, f"a bucket size of {size}"], first[0]):
            if ours != theirs:
                raise ValueError(
                    f"buckets differ: {ours} on rank {dist.get_rank()}, {theirs} on the first rank"
                )

    def start(self, passes):
        """Drop the gradients there are; a step of `passes` backward passes (micro-batches) begins.

        A bucket starts when its parameters have had so many, or in finish() if some never do. So
        a number too high costs the overlap alone, one too low is an error.
        """
        if self.passes is not None:
            raise RuntimeError("start() again before finish(): gradients were not summed")
        for p, name in self.frozen.items():
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the buckets were made and is no longer")
        self.passes, self.running, self.queue = passes, [], deque(self.buckets)
        self.count = dict.fromkeys(self.names, 0)
        self.ready = Counter()
        for p in self.names:
            p.grad = None

    def _passed(self, p):
        """Autograd's word that a backward pass went by p, though its gradient may be deferred."""
        if self.passes is not None:
            self.count[p] += 1
            if self.count[p] > self.passes:
                raise RuntimeError(
                    f"{self.names[p]}: backward pass {self.count[p]} in a step of {self.passes}"
                )

    def _finished(self, p):
        """The word that p.grad is complete for all passes so far; autograd adds the next to it."""
        if self.passes is None:
            return
        if getattr(p, "waiting", 0):
            raise RuntimeError(f"{self.names[p]}: deferred, so Buckets needs memory.on_finished")
        bucket = self.bucket_of[p]
        if p.grad is not bucket.views[p]:
            bucket.views[p].copy_(p.grad)
            p.grad = bucket.views[p]
        self.ready[bucket] += self.count[p] == self.passes
        while self.queue and self.ready[self.queue[0]] == len(self.queue[0].parameters):
            self._launch()

    def _launch(self):
        bucket = self.queue.popleft()
        for p in bucket.parameters:
            if p.grad is None:
                bucket.views[p].zero_()  # not used here: adds nothing to what the others have
        steps = self.reduce(bucket.flat, self.group)
        self.running.append((next(steps), steps))

    def finish(self):
        """Start what has not started, and wait for all of it."""
        if self.passes is None:
            raise RuntimeError("finish() without start()")
        for p, name in self.names.items():
            if getattr(p, "waiting", 0):
                raise RuntimeError(f"{name}: a deferred weight gradient has not been computed")
        while self.queue:
            self._launch()
        # Who was used anywhere? All ranks ask; only one that misses a gradient needs the answer.
        here = [p.grad is not None for p in self.names]
        used = torch.tensor(here, dtype=torch.uint8, device=self.buckets[0].flat.device)
        self.asked = dist.all_reduce(used, dist.ReduceOp.MAX, self.group, async_op=True)
        for work, steps in self.running:
            work.wait()
            for work in steps:
                work.wait()
        if not all(here):
            self.asked.wait()
            for p, anywhere in zip(self.names, used.tolist()):
                if anywhere:
                    p.grad = self.bucket_of[p].views[p]
        self.passes, self.running = None, []


def held(gradients):
    """Bytes of gradients on every rank, however many ranks: the buckets, and nothing twice."""
    return sum(gradients)


def sent(gradients, n, size=None):
    """What a rank of n sends: (calls, bytes), for gradients given by their sizes in bytes.

    One call a parameter; with `size` one a bucket, the gradients in order of registration.
    """
    calls = len(gradients) if size is None else len(assign(gradients[::-1], size))
    return calls, Fraction(2 * (n - 1) * sum(gradients), n)


def sent_used(parameters, n):
    """(calls, bytes) of asking which of so many parameters were used: a byte each."""
    return 1, Fraction(2 * (n - 1) * parameters, n)


# --- 7. Other reductions of a bucket -------------------------------------------------------------
#
# A reduction yields each transfer that it has begun, and is resumed when the transfer is over. Its
# first runs behind backward. In the end `flat` holds the sum, the same bits on every rank.


def bf16_on_the_wire(flat, group):
    """Half of fp32's bytes: addends travel as bf16, are added in `flat`'s dtype, the sum as bf16.

    So each number is rounded twice, whatever N is. An all-reduce of a bf16 tensor would add in
    bf16, where 256 + 1 = 256.
    """
    n = group.size()
    addends = F.pad(flat, (0, -len(flat) % n)).bfloat16()
    parts = torch.empty_like(addends)
    yield dist.all_to_all_single(parts, addends, group=group, async_op=True)
    mine = parts.view(n, -1).to(flat.dtype).sum(0).bfloat16()
    yield dist.all_gather(list(addends.chunk(n)), mine, group=group, async_op=True)
    flat.copy_(addends[: len(flat)])


def sent_bf16(length, n):
    """(calls, bytes) for a bucket of so many numbers: n - 1 slices of it, there and back."""
    return 2, 2 * (n - 1) * -(-length // n) * 2


class TopK:
    """Send the largest `share` of a bucket's numbers; add the rest to the next step's gradient.

    Without this error feedback what is small would never be sent. With it, all that was ever sent
    and the rest kept here add up to the true sum of gradients. Sending 2 %, a toy run of the tests
    comes to loss 0.158 where everything sent gives loss 0.143; without error feedback loss 0.349.
    """

    def __init__(self, share):
        self.share, self.rest = share, {}

    def __call__(self, flat, group):
        rest = self.rest[flat] = self.rest.get(flat, 0) + flat  # one for each bucket
        index = rest.abs().topk(self.count(len(flat))).indices
        value = rest[index]
        rest[index] = 0
        values, indices = ([torch.empty_like(x) for _ in range(group.size())]
                           for x in (value, index.int()))  # fmt: skip
        yield dist.all_gather(values, value, group=group, async_op=True)
        yield dist.all_gather(indices, index.int(), group=group, async_op=True)
        flat.zero_()
        for i, v in zip(indices, values):
            flat.index_add_(0, i, v)

    def count(self, length):
        return max(1, round(self.share * length))

    def sent(self, length, element, n):
        """(calls, bytes) for a bucket: values, and int32 places."""
        return 2, (n - 1) * self.count(length) * (element + 4)


def hierarchical(inside, across):
    """A reduction for nodes of several ranks: `inside` the node, then `across` the nodes.

    Reduce-scatter inside, all-reduce of this rank's slice across, all-gather inside. Only 1/n of
    the bucket leaves each of a node's n ranks, so all its n network cards work; the ring through
    all ranks would push the whole bucket through the one card where it leaves the node.
    """

    def reduce(flat, group):
        n = inside.size()
        slices = list(F.pad(flat, (0, -len(flat) % n)).chunk(n))
        mine = torch.empty_like(slices[0])
        yield dist.reduce_scatter(mine, slices, group=inside, async_op=True)
        yield dist.all_reduce(mine, group=across, async_op=True)
        yield dist.all_gather(slices, mine, group=inside, async_op=True)
        flat.copy_(torch.cat(slices)[: len(flat)])

    return reduce


def sent_hierarchical(length, element, inside, across):
    """(calls, bytes) inside and across for a bucket of so many numbers; degrees inside, across."""
    part = -(-length // inside) * element
    return (2, 2 * (inside - 1) * part), (1, Fraction(2 * (across - 1) * part, across))


# --- 8. Overlap: when it is possible, and whether it happened -------------------------------------


def tokens_to_hide(n, flops, bandwidth, element):
    """Tokens a rank needs in its last micro-batch to hide the sum of the gradients behind backward.

    Backward takes 4·tokens·P / flops, the sum 2·(n-1)/n·P·element / bandwidth; P cancels. flops
    is what is reached, per rank and second, bandwidth what a rank sends per second. Only the last
    micro-batch counts: before it gradients are not finished. (989 TFLOP/s and 50 GB/s, an H100's
    peaks: 19,780 tokens for bf16 gradients and many ranks, twice as many for fp32.)
    """
    return Fraction(n - 1, 2 * n) * element * flops / bandwidth


class Trace:
    """Who did what when: spans (lane, name, begin, end) in seconds since all ranks met here.

    Host clocks: right for CPU ranks. NCCL's transfers run where the host does not see them; there
    use torch.profiler.
    """

    def __init__(self, group):
        self.group, self.lanes, self.spans = group, {}, []
        dist.barrier(group)
        clocks = [None] * dist.get_world_size(group)
        dist.all_gather_object(clocks, (platform.node(), time.perf_counter()), group=group)
        self.zero = dict(reversed(clocks))[platform.node()]  # a machine's ranks have one clock

    def now(self):
        return time.perf_counter() - self.zero

    @contextlib.contextmanager
    def span(self, name, lane="compute"):
        begin = self.now()
        yield
        self.spans.append((lane, name, begin, self.now()))

    def watch(self, reduce):
        """The reduction, with spans "sum" from issue to completion and "wait" while we are blocked.

        Its transfers must have futures (gloo's all-to-all has none).
        """

        def watched(flat, group):
            lane = f"bucket {self.lanes.setdefault(flat, len(self.lanes))}"
            for work in reduce(flat, group):
                issued, done = self.now(), []
                finished = functools.partial(lambda done, _: done.append(self.now()), done)
                work.get_future().add_done_callback(finished)

                def wait():
                    with self.span("wait"):
                        work.wait()
                    self.spans.append((lane, "sum", issued, done[0] if done else self.now()))

                yield SimpleNamespace(wait=wait)

        return watched

    def everyone(self):
        """The spans of all ranks, by rank."""
        ranks = [None] * self.group.size()
        dist.all_gather_object(ranks, self.spans, group=self.group)
        return ranks


def hidden(ranks):
    """Share of communication that hides: 1 - time blocked / time from issue to completion."""
    total = Counter()
    for _, name, begin, end in itertools.chain(*ranks):
        total[name] += end - begin
    return 1 - total["wait"] / total["sum"]


def write_trace(path, ranks):
    """One file, in Chrome's format: a process for every rank, a thread for every lane."""
    events = []
    for rank, spans in enumerate(ranks):
        lanes = sorted({lane for lane, *_ in spans}, key=lambda lane: (lane != "compute", lane))
        names = [("process_name", 0, f"rank {rank}")]
        names += [("thread_name", i, lane) for i, lane in enumerate(lanes)]
        for kind, i, name in names:
            events.append(dict(ph="M", pid=rank, tid=i, name=kind, args={"name": name}))
        for lane, name, begin, end in spans:
            event = dict(ph="X", pid=rank, tid=lanes.index(lane), name=name)
            events.append(event | dict(ts=begin * 1e6, dur=(end - begin) * 1e6))  # microseconds
    Path(path).write_text(json.dumps({"traceEvents": events}))


# --- 9. Check and measure ------------------------------------------------------------------------


def uneven(sample, length):
    """The samples, with sample i's labels valid in its first (7·i mod length) + 1 places only."""

    def shortened(i):
        tokens, labels = sample(i)
        valid = 7 * i % length + 1
        return tokens, torch.where(torch.arange(len(labels)) < valid, labels, IGNORE)

    return shortened


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def accumulate_gradients(model, batches, N, positions=None, span=contextlib.nullcontext):
    """Forward and backward of every micro-batch; returns this rank's share of the loss.

    span(name) is a context that times: Trace.span.
    """
    total = 0
    for tokens, labels in batches:
        with span("forward"):
            loss = model.loss(model(tokens, positions), labels) / N
        with span("backward"):
            loss.backward()
        total = total + loss.detach()
    return total


def node_groups(size, timeout=60):
    """This rank's groups (inside, across) if every `size` ranks in a row are a node."""
    grid, mine = torch.arange(dist.get_world_size()).view(-1, size), []
    for name, rows in (("inside", grid), ("across", grid.T)):
        for ranks in rows.tolist():
            group = dist.new_group(ranks, timedelta(seconds=timeout), group_desc=name)
            if dist.get_rank() in ranks:
                mine.append(group)
    return mine


def show_collectives(group, here):
    """Print what the collectives do, and hold the ring to torch's all-reduce; returns failures."""
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, collectives(group, here), group=group)
    shown = range(min(4, len(ranks)))
    table(
        ["", *(f"rank {r}" for r in shown)],
        [[name, *(" ".join(map(str, ranks[r][name][:4])) for r in shown)] for name in ranks[0]],
    )
    x = torch.arange(1003, device=here) * (group.rank() + 1)
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    with Wire() as wire:
        ring_all_reduce(x, group)
    together = torch.tensor(int(wire.bytes[group.group_desc, "send"]), device=here)
    dist.all_reduce(together, group=group)
    by_formula = 2 * (group.size() - 1) * x.numel() * x.element_size()
    log(f"\nring of sends: {together:,} bytes of all ranks together, 2·(N-1)·K {by_formula:,}")
    wrong = not torch.equal(x, expected) or together != by_formula
    return ["ring_all_reduce differs from all_reduce or its formula"] if wrong else []


def first_step(model, batches, group, limit, reduce):
    """A step's gradients in one form: (loss, (calls, bytes), trace of all ranks)."""
    trace, buckets = Trace(group), None
    if limit:
        watched = trace.watch(reduce) if reduce is plain else reduce
        named = model.named_parameters()
        buckets = Buckets(named, group, limit, watched, memory.on_finished)
    with Wire() as wire:
        N = count_valid(batches, dist.group.WORLD)
        if buckets:
            buckets.start(passes=len(batches))
        loss = accumulate_gradients(model, batches, N, span=trace.span)
        with trace.span("finish"):
            if buckets:
                buckets.finish()
            else:
                sum_gradients(model.named_parameters(), group)
        dist.all_reduce(loss)
    calls, size = (
        sum(c for (name, _), c in counter.items() if name in ("dp", "inside", "across"))
        for counter in (wire.calls, wire.bytes)
    )
    return loss, (calls, size), trace.everyone()


def forms(group, inside, across):
    """name, micro-batch, bytes of a bucket, reduction, its cost for k float64s, error allowed."""
    n, top = group.size(), TopK(0.1)

    def cost(k):
        return sent([8 * k], n)

    def levels(k):
        return map(sum, zip(*sent_hierarchical(k, 8, inside.size(), across.size())))

    return [
        ("after backward", 1, None, None, None, 1e-11),
        ("hooks: one each", 1, 1, plain, cost, 1e-11),
        ("buckets of 1 MiB", 2, 2**20, plain, cost, 1e-11),
        ("  2 micro-batches", 1, 2**20, plain, cost, 1e-11),
        ("  hierarchical", 1, 2**20, hierarchical(inside, across), levels, 1e-11),
        ("  bf16 on the wire", 1, 2**20, bf16_on_the_wire, lambda k: sent_bf16(k, n), 1e-2),
        ("  largest 10 %", 1, 2**20, top, lambda k: top.sent(k, 8, n), math.inf),
    ]


def formula(sizes, limit, bucket_cost, n):
    """(calls, bytes) of a step, for gradients of these bytes in order of registration."""
    if limit is None:
        return sent(sizes, n)
    sizes = sizes[::-1]
    buckets = [sum(sizes[i] for i in ids) // 8 for ids in assign(sizes, limit)]
    return tuple(map(sum, zip(sent_used(len(sizes), n), *map(bucket_cost, buckets))))


def demo(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    # gloo can't do all of this on a GPU
    here = device() if dist.get_backend() == "nccl" else torch.device("cpu")
    group = dist.new_group(range(world), timedelta(seconds=60), group_desc="dp")
    nodes = node_groups(2 if world % 2 == 0 else world)
    header("02 data parallelism", f"world {world} = dp {world}", "   float64")
    failures = show_collectives(group, here)

    config = memory.PRESETS["tiny"]
    batch, T = 2 * world, 64
    sample = uneven(Samples(open_tokens(), T, seed=0), T)
    log(f"\nllama {memory.parameter_count(config):,} parameters   batch {batch} x {T} tokens\n")
    dense = memory.build(config, dtype=torch.float64, device=here)
    tokens, labels = micro_batches(sample, range(batch), batch, here)[0]
    dense_loss = dense.loss(dense(tokens), labels) / (labels != IGNORE).sum()
    dense_loss.backward()

    sizes, rows = [p.numel() * p.element_size() for p in dense.parameters()], []
    for form, micro, limit, reduce, bucket_cost, bound in forms(group, *nodes):
        model = memory.build(config, dtype=torch.float64, device=here)
        batches = micro_batches(sample, my_samples(0, batch, rank, world), micro, here)
        loss, cost, spans = first_step(model, batches, group, limit, reduce)
        expected = formula(sizes, limit, bucket_cost, world)
        error, name = worst_error(gradients(model), gradients(dense))
        share = f"{hidden(spans):.0%}" if reduce is plain and here.type == "cpu" else ""
        rows.append([form, cost[0], expected[0], cost[1], expected[1], f"{error:.0e}", share])
        if not error < bound:
            failures.append(f"{name} gradient relative error {error:.3g} ({form.strip()})")
        if cost != expected:
            failures.append(f"{form.strip()} sent {cost} calls and bytes, by formula {expected}")
        if form.startswith("buckets") and args.trace and rank == 0:
            write_trace(args.trace, spans)
    table(["sent per rank", "calls", "formula", "bytes", "formula", "error", "hidden"], rows)
    log(f"\nerror    worst of {len(sizes)} gradients against one device")
    log("hidden   1 - time blocked / time from issue to completion, slow peers included")
    log(f"loss     one device {dense_loss:.6f}   dp {loss:.6f}")
    return verdict("02_dp", failures)


def main():
    parser = argparse.ArgumentParser(description="data parallelism against one process")
    parser.add_argument("--dp", type=int, default=4, help="ranks, when started as plain python")
    parser.add_argument("--trace", metavar="FILE", help="write what each rank did when, in buckets")
    args = parser.parse_args()
    return launch(demo, args.dp, args)[0]


if __name__ == "__main__":
    raise SystemExit(main())
