"""What every test file relies on: the chapters can be imported, and what --full adds.

`./run.sh test` runs every test function of a chapter, but of its cases at most CASES, spread over
the list, and none that is marked `full`. `./run.sh test full` runs all of them. What takes an hour
by itself is marked `campaign`: `./run.sh test campaign`. Each starts pytest twice: the two share a
folder, and of each test the first who comes to it notes there that it has it.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # recomputation and torch.optim import it when first used: not in every rank

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # ranks are forked from here; see 02's run_rank


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the long tests too (an hour at most)")
    parser.addoption("--campaign", action="store_true", help="the campaigns alone: hours")
    parser.addoption("--share", metavar="DIR", help="run what no other with this folder has begun")


def pytest_configure(config):
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


def run_script(*argv, torchrun=0, folder=ROOT, timeout=120):
    """Start a chapter as a user does: python, or torchrun with so many ranks."""
    start = []
    if torchrun:  # standalone: on a free port, as another test may start one, too
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    return subprocess.run(
        [sys.executable, *start, *map(str, argv)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def script():
    return run_script
