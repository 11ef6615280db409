"""04 against published runs: what it costs to let tp leave the node (Ultra-Scale Playbook).

Pairs of runs on 16 nodes of 8 H100s that differ in tp alone, 8 (inside a node) or 16 (over two):
same model, micro-batch, batch; dp makes up for it. 04 says why: with 8 ranks on 450 GB/s the
gathers take less time than the products they feed, with 16 on 50 GB/s much more.
"""

import csv
import re
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
dp = import_module("02_dp")
tp = import_module("04_tp_sp")

WIDTHS = {"1B": (2048, 8192), "3B": (3072, 8192)}  # D and F of the playbook's models


def chapter_04(facts):
    """Print the drops beside the formula's ratios; returns the failures."""
    with open(Path(facts) / "playbook_runs.csv") as file:
        runs = [r for r in csv.DictReader(file) if (r["status"], r["nodes"]) == ("ok", "16")]
    runs = [r for r in runs if (r["pp"], r["zero"]) == ("1", "0")]
    speed = {(r["family"], int(r["mbs"]), r["tp"]): float(r["tok_s_gpu"]) for r in runs}
    table, drops, failures = [], [], []
    for family, micro, degree in sorted(speed):
        if degree == "8" and (family, micro, "16") in speed:
            inside, across = speed[family, micro, "8"], speed[family, micro, "16"]
            drops.append(1 - across / inside)
            ratios = [
                tp.transfer_to_compute(2 * WIDTHS[family][1], n, 989e12, bandwidth, 2)
                for n, bandwidth in ((8, 450e9), (16, 50e9))
            ]
            if not ratios[0] < 1 < ratios[1]:
                failures.append(f"04 {family}: transfer / products {ratios}")
            table.append([family, micro, inside, across, f"{-drops[-1]:.0%}", *ratios])
    print("04 tp 8 inside a node and 16 over two, tokens/s/GPU; transfer / products by formula")
    head = ["", "micro-batch", "tp 8", "tp 16", "drop", "tp 8, formula", "tp 16, formula"]
    dp.table(head, table)
    said = re.search(r"(\d+) to (\d+) % fewer tokens", (ROOT / "04_tp_sp.py").read_text()).groups()
    if [f"{min(drops):.0%}", f"{max(drops):.0%}"] != [f"{n}%" for n in said] or len(drops) < 10:
        failures.append(f"04 says {' to '.join(said)} %, the runs {min(drops)} to {max(drops)}")
    return failures


if __name__ == "__main__":
    failures = chapter_04(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "shared" / "facts")
    print("validate " + (f"FAIL: {failures[0]}" if failures else "OK"))
    raise SystemExit(1 if failures else 0)
