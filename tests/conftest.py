"""What every test file relies on: the chapters can be imported, and `full` marks the long tests."""

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


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]


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
