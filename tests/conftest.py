"""What every test file relies on: the chapters can be imported, and what --full adds.

`./run.sh test` runs every test function of a chapter, but of its cases at most CASES, spread over
the list, and none that is marked `full`. `./run.sh test full` runs all of them. What takes an hour
by itself is marked `campaign`: `./run.sh test campaign`. Each starts pytest twice: the two share a
folder, and of each test the first who comes to it notes there that it has it.

To take five minutes, the short form also saves what a user's run has and its tests do not look at:
a fresh interpreter for every script, a thread for every group, 160 letters at the end of each run
of 09. `test full` is as users have it.
"""

import gc
import hashlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch._dynamo  # recomputation and torch.optim import it when first used: not in every rank
import torch.distributed.distributed_c10d as c10d

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # ranks are forked from here; see 02's run_rank
AS_USERS = True  # not in the short form


class OneThread(c10d.ProcessGroupGloo):
    """Gloo, but the groups of a rank share one thread. Each would have its own, which wakes many
    times a second to look for messages: with 16 ranks of many groups that adds up.
    """

    threads = {}  # by process: a forked one has none of its parent's

    def __init__(self, store, rank, size, timeout):
        if os.getpid() not in self.threads:
            self.threads[os.getpid()] = self.create_default_device()
        options = self._Options()
        options._devices, options._timeout = [self.threads[os.getpid()]], timeout
        super().__init__(store, rank, size, options)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the long tests too (an hour at most)")
    parser.addoption("--campaign", action="store_true", help="the campaigns alone: hours")
    parser.addoption("--share", metavar="DIR", help="run what no other with this folder has begun")


def pytest_configure(config):
    global AS_USERS
    AS_USERS = config.getoption("--full") or config.getoption("--campaign")
    if not AS_USERS:
        c10d.ProcessGroupGloo = OneThread
    config.addinivalue_line("markers", "full: runs with --full only")
    config.addinivalue_line("markers", "campaign: runs with --campaign only, and nothing else then")


CASES = 2


def a_few_cases(items):
    """Of each test function of a chapter the first, the last, and what CASES leaves between."""
    cases, keep = {}, set()
    for item in items:
        cases.setdefault((item.path, item.originalname), []).append(item)
    for (path, _), group in cases.items():
        step = max(1, (len(group) - 1) / (CASES - 1)) if path.name.startswith("test_0") else 1
        keep |= {group[round(i * step)] for i in range(len(group)) if round(i * step) < len(group)}
    return keep


def pytest_collection_modifyitems(config, items):
    campaign = config.getoption("--campaign")
    keep = {item for item in items if bool(item.get_closest_marker("campaign")) == campaign}
    if not campaign and not config.getoption("--full"):
        keep = a_few_cases([i for i in items if i in keep and not i.get_closest_marker("full")])
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = [item for item in items if item in keep]


def pytest_collection_finish():
    """Done here, ranks need not do it again: read the text, look through all this for garbage."""
    import_module("02_dp").standard_library()
    gc.collect()
    gc.freeze()


def pytest_runtestloop(session):
    """With --share, pytest's own loop, less the tests that another process has."""
    folder = session.config.getoption("--share")
    if not folder or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own
    for item in session.items:
        try:
            Path(folder, hashlib.sha1(item.nodeid.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            continue
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    return True


# To import torch takes seconds. One process does only that, and each script is a fork of it.
READY = multiprocessing.get_context("forkserver")
READY.set_forkserver_preload(["torch", "torch._dynamo"])


def run_script(*argv, torchrun=0, folder=ROOT, timeout=120):
    """Start a chapter as a user does: python, or torchrun with so many ranks."""
    argv, env = list(map(str, argv)), {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torchrun and not AS_USERS:
        return run_forked(argv, folder, env, timeout)
    start = [sys.executable]
    if torchrun:  # standalone: on a free port, as another test may start one, too
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    return subprocess.run(
        [*start, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )


def run_forked(argv, folder, env, timeout):
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = READY.Process(target=as_main, args=(argv, folder, env, out.name, err.name))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(argv, timeout)
        return subprocess.CompletedProcess(argv, process.exitcode, out.read(), err.read())


def as_main(argv, folder, env, *files):
    """What `python` does with a script and its arguments; what it prints goes to two files."""
    for stream, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY), stream)
    os.environ |= env
    os.chdir(folder)
    sys.argv, sys.path[0] = argv, str(Path(folder, argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


@pytest.fixture(autouse=True)
def few_letters(monkeypatch):
    """At the end of a run 09 lets the model write 160 letters, longer than a test's run takes."""
    if not AS_USERS:
        combined = import_module("09_combined_5d")
        monkeypatch.setattr(combined, "show_text", partial(combined.show_text, length=8))


@pytest.fixture
def script():
    return run_script
