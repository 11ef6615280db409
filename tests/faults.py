"""09 under faults: kill it, starve it, feed it rubbish, and lose nothing.

    python tests/faults.py kills 200        kill a random rank at a random moment, resume, compare
    python tests/faults.py inputs 500       arguments, data files, checkpoints; right and wrong ones
    python tests/faults.py long --minutes 30    a run whose memory has to stay flat
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
lattice = import_module("lattice")
combined = lattice.combined
dp, zero, pp = combined.dp, combined.zero, combined.pp

fork = multiprocessing.get_context("fork")


def job(argv, out, extra=None, arrange=None):
    """Start 09 with these arguments in a process of its own, as a shell would; its output in a file.

    arrange() is called there first: what it changes, the ranks inherit.
    """

    def run():
        os.setpgid(0, 0)  # so that whatever it leaves behind can be found
        stream = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        combined.MODELS |= lattice.MODELS
        if arrange:
            arrange()
        code = 1
        try:
            code = combined.main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    process = fork.Process(target=run)
    process.start()
    return process


def members(group):
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return found


def finish(process, seconds):
    """Its exit code, "hung", or "orphans" if it left processes behind; nothing of it lives on."""
    process.join(seconds)
    verdict = "hung" if process.exitcode is None else process.exitcode
    end = time.monotonic() + 10  # a rank notices within a second that its launcher is gone
    while verdict != "hung" and members(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    if verdict != "hung" and members(process.pid):
        verdict = "orphans"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return verdict


# --- The long run ---------------------------------------------------------------------------------


def memory_of(pids):
    """Bytes that these processes hold for themselves: anonymous memory, not mapped files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024
    return total


def every_checkpoint(directory):
    """How many there are, all of them whole: checksums, and every element of every tensor."""
    folders = sorted(Path(directory).glob("step-*[0-9]"))
    for folder in folders:
        zero.verify(folder, 0, 1)
        for t in zero.read_index(folder)["tensors"]:
            shape = tuple(t["shape"])
            whole = torch.empty(int(np.prod(shape)), dtype=getattr(torch, t["dtype"]))
            box = tuple((0, n) for n in shape)
            piece = zero.Piece(t["name"], t["kind"], shape, box, 0, len(whole), whole, True)
            zero.load(folder, [piece])
            assert whole.isfinite().all(), (folder, t["name"])
    return len(folders)


def long(minutes, every=300, argv=()):
    """Train for so long on two ranks; returns {minute: bytes}, the exit code and the checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        words = "--dp 2 --zero 1 --batch 4 --seq 64 --steps 1000000 --lr 1e-4 --timeout 300".split()
        words += ["--ckpt", f"{folder}/c", "--save-every", every, "--csv", f"{folder}/loss.csv", *argv]
        process = job(words, f"{folder}/out")
        begin, seen = time.monotonic(), {}
        while (now := (time.monotonic() - begin) / 60) < minutes and process.is_alive():
            seen[round(now, 2)] = memory_of(members(process.pid))
            time.sleep(min(15.0, minutes * 2))
        os.kill(process.pid, signal.SIGTERM)
        code = finish(process, 120)
        lines = Path(folder, "out").read_text().splitlines()
        rows = Path(folder, "loss.csv").read_text().splitlines()[1:]
        count = every_checkpoint(f"{folder}/c")
        said = next((line for line in lines if line.startswith("SIGTERM")), lines[-1])
        return seen, code, count, said, len(rows)


def show_long(minutes):
    seen, code, count, said, rows = long(minutes)
    for minute in (1, 5, 10, 15, 20, 25, 30):
        near = min(seen, key=lambda m: abs(m - minute))
        if abs(near - minute) < 1:
            print(f"minute {near:5.1f}: {seen[near]:13,} bytes in launcher and ranks")
    print(f"{rows} steps, {count} checkpoints, all loadable; exit code {code}; {said}")
    late = [size for minute, size in seen.items() if minute >= min(5, minutes / 2)]
    growth = max(late) / late[0] - 1
    print(f"from minute {min(5, minutes / 2)} on the memory grew by {growth:.2%} at the most")
    return 0 if code == 0 and growth < 0.01 else 1


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["kills", "inputs", "long"])
    parser.add_argument("count", type=int, nargs="?", default=20)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.what == "long":
        return show_long(args.minutes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
