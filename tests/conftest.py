"""What every test file relies on: the chapters can be imported, and what --full adds.

`./run.sh test` runs every test function of a chapter, but of its cases at most CASES, spread over
the list, and none that is marked `full`. `./run.sh test full` runs all of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # ranks are forked from here; see 02's run_rank


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the long tests too (an hour at most)")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full only")


CASES = 2


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    cases = {}
    for item in items:
        if not item.get_closest_marker("full"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    keep = set()
    for (path, _), group in cases.items():
        step = max(1, (len(group) - 1) / (CASES - 1)) if path.name.startswith("test_0") else 1
        keep |= {group[round(i * step)] for i in range(len(group)) if round(i * step) < len(group)}
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = [item for item in items if item in keep]


def run_script(*argv, torchrun=0, folder=ROOT, timeout=120):
    """Start a chapter as a user does: python, or torchrun with so many ranks. stdout and stderr apart."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
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
