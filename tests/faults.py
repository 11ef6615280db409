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
from dataclasses import replace
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


def job(argv, out, arrange=None):
    """Start 09 with these arguments in its own process, as a shell would; its output in a file.

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
        combined.MODELS |= lattice.MODELS | MODELS
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


# --- Kills ----------------------------------------------------------------------------------------

STEPS = 4
MODELS = {  # as small as three stages and a head for each of two ranks allow
    "small": replace(lattice.DENSE, layers=3, dim=8, ffn=8),
    "small-moe": replace(lattice.MODELS["tied-moe"], layers=3, dim=8, experts=4),
}
LAYOUTS = {  # by what has to be the same for a run to go on: model and precision
    "dense": [
        "--dp 1", "--dp 2", "--dp 3 --zero 3", "--dp 4 --zero 2 --hybrid 2", "--tp 2 --zero 1",
        "--cp 2 --zero 3", "--pp 2", "--pp 2 --schedule zb-v --tp 2",
        "--pp 2 --dp 2 --schedule interleaved --zero 1",
    ],
    "moe": [
        "--dp 1", "--dp 2 --ep 2 --zero 1", "--tp 2 --ep 2 --zero 2",
        "--pp 2 --dp 2 --ep 2 --zero 3", "--cp 2 --pp 2 --schedule zb-h1",
    ],
    "fp8": ["--dp 2 --fp8 delayed", "--dp 2 --zero 2 --fp8 delayed --fp8-optimizer"],
}  # fmt: skip
# Where a process can be hit: before or after the n-th call of these, for n up to the last number.
HITS = [
    (zero, "write_pieces", 2), (zero.Piece, "_asdict", 90), (zero, "write_index", 2),
    (zero, "sync", 4), (Path, "rename", 2), (Path, "mkdir", 2), (dist, "all_reduce", 12),
    (dist, "all_gather_object", 9),
    (zero.Optimizer, "step", 3), (pp.Pipeline, "step", 3), (pp.Pipeline, "forward", 4),
    (zero, "load", 1), (zero, "verify", 1), (combined, "compose", 1), (dist, "new_group", 8),
]  # fmt: skip
MOMENTS = [  # what of the stack tells the moment; the first that matches
    ("resuming", {"resume", "restore", "newest", "verify", "load"}),
    ("writing a file", {"write_pieces", "write_index", "publish", "prepare"}),
    ("saving, in a collective", {"save", "together"}),
    ("in a collective", {"all_reduce", "wait", "sum_gradients", "count_valid", "all_to_all",
                         "batch_isend_irecv"}),
    ("backward", {"backward", "input_grad", "weight_grads"}),
    ("forward", {"forward"}),
    ("optimizer", {"_step", "spread", "scale", "squares"}),
    ("elsewhere in a step", {"train_step"}),
    ("start", {"make_groups", "compose", "describe"}),
]  # fmt: skip


def moment_of(thread):
    frame, names = sys._current_frames()[thread], set()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return next((moment for moment, known in MOMENTS if names & known), "between steps")


def hit(plan, note):
    """In a rank: do to it what the plan says, now, and write down in which moment."""
    moment = moment_of(threading.main_thread().ident)
    with open(note, "a") as file:
        file.write(moment + "\n")
    victim = os.getppid() if plan["who"] == "launcher" else os.getpid()
    os.kill(victim, signal.SIGSTOP if plan["who"] == "stall" else signal.SIGKILL)
    time.sleep(5)  # a launcher has died; its ranks have to notice


def arm(plan, note):
    """In the victim: hit it after some seconds, from another thread, or at a call."""
    if "seconds" in plan:
        timer = threading.Timer(plan["seconds"], hit, (plan, note))
        timer.daemon = True
        timer.start()
        return
    owner, name, _ = HITS[plan["place"]]
    before, calls = getattr(owner, name), itertools.count(1)

    def watched(*args, **kwargs):
        n = next(calls)
        if n == plan["call"] and not plan["after"]:
            hit(plan, note)
        result = before(*args, **kwargs)
        if n == plan["call"]:
            hit(plan, note)
        return result

    setattr(owner, name, watched)


def quiet_train(plan=None, note=None, clock=None):
    """What a run changes in 09: no text at its end, and the victim armed."""
    train = combined.train
    combined.show_text = lambda *args, **kwargs: None

    def wrapped(args):
        if plan and dist.get_rank() == plan["rank"]:
            arm(plan, note)
        begin = time.perf_counter()
        code = train(args)
        if clock and dist.get_rank() == 0:
            Path(clock).write_text(str(time.perf_counter() - begin))
        return code

    combined.train = wrapped


def words(family, layout, folder, timeout=30):
    model = "small-moe" if family == "moe" else "small"
    dtype = "float32" if family == "fp8" else "float64"
    argv = f"--model {model} --dtype {dtype} --batch 12 --seq 16 --steps {STEPS} {layout}"
    args = combined.parse(layout.split())
    argv += f" --micro-batch {12 // args.dp // (2 * args.pp if args.pp > 1 else 1)}"
    argv += f" --data {Path(folder).parent}/text.bin --ckpt {folder}/c --save-every 2"
    return [*argv.split(), "--csv", f"{folder}/loss.csv", "--timeout", timeout, "--resume"]


def ranks(layout):
    args = combined.parse(layout.split())
    return args.dp * args.cp * args.tp * args.pp


def contents(folder):
    """All that a checkpoint holds: {(name, kind): the whole tensor}."""
    found = {}
    for t in zero.read_index(folder)["tensors"]:
        whole = torch.zeros(int(np.prod(t["shape"])), dtype=getattr(torch, t["dtype"]))
        box = tuple((0, n) for n in t["shape"])
        piece = zero.Piece(t["name"], t["kind"], tuple(t["shape"]), box, 0, len(whole), whole, True)
        zero.load(folder, [piece])
        found[t["name"], t["kind"]] = whole
    return found


def losses(folder):
    lines = Path(folder, "loss.csv").read_text().splitlines()[1:]
    return [line.split(",")[:4] for line in lines]


def difference(folder, expected, bitwise):
    """Why the end of a run is not that of the uninterrupted one; "" if it is."""
    ours = contents(folder / "c" / f"step-{STEPS:06d}"), losses(folder)
    theirs = contents(expected / "c" / f"step-{STEPS:06d}"), losses(expected)
    if bitwise:
        bits = [
            {k: t.reshape(-1).view(torch.uint8) for k, t in side[0].items()}
            for side in (ours, theirs)
        ]
        if bits[0].keys() != bits[1].keys():
            return "other tensors"
        if wrong := [k for k in bits[0] if not torch.equal(bits[0][k], bits[1][k])]:
            return f"{len(wrong)} tensors differ, as {wrong[0]}"
        return "" if ours[1] == theirs[1] else "losses differ"
    error, where = dp.worst_error(
        *({str(k): t for k, t in side[0].items()} for side in (ours, theirs))
    )
    rows = [np.array(side[1], dtype=float) for side in (ours, theirs)]
    if rows[0].shape != rows[1].shape or not np.allclose(*rows, rtol=1e-10, atol=0):
        return "losses differ"
    return "" if error < 1e-10 else f"{where}: relative error {error:.1e}"


def whole_files_only(directory):
    """What is wrong under the final names after a kill; "" if all is good."""
    for path in sorted(Path(directory).glob("*")) if Path(directory).exists() else []:
        if re.fullmatch(r"step-\d+", path.name):
            try:
                zero.verify(path, 0, 1)
            except (OSError, ValueError, KeyError, TypeError) as error:
                return f"{path.name}: {error}"
        elif not re.fullmatch(r"step-\d+\.(tmp|old)", path.name):
            return f"{path.name} is nobody's"
    return ""


def uninterrupted(family, layout, root):
    """Run it once; returns its folder, and how long train() took."""
    folder = Path(root, re.sub(r"\W+", "-", family + layout))
    if not folder.exists():
        folder.mkdir()
        arrange = lambda: quiet_train(clock=folder / "clock")
        code = finish(job(words(family, layout, folder), folder / "out", arrange=arrange), 300)
        assert code == 0, (folder / "out").read_text()
    return folder, float((folder / "clock").read_text())


def draw_plan(draw, layout, seconds):
    plan = {"who": draw.choices(("rank", "launcher", "stall"), (17, 2, 1))[0]}
    plan["rank"] = draw.randrange(ranks(layout))
    if ranks(layout) == 1 and plan["who"] == "stall":
        plan["who"] = "rank"  # nobody waits for a single rank
    if draw.random() < 0.55:
        return plan | {"seconds": draw.uniform(0, 0.7 * seconds)}
    place = draw.randrange(len(HITS))
    return plan | {
        "place": place,
        "call": draw.randint(1, HITS[place][2]),
        "after": draw.random() < 0.5,
    }


def survive(draw, root, number):
    """Kill a run, once or twice, then let it finish; [(layout, moment, outcome)] for each kill."""
    family = draw.choices(list(LAYOUTS), (6, 4, 1))[0]
    layout = draw.choices(LAYOUTS[family], [4 / ranks(layout) for layout in LAYOUTS[family]])[0]
    expected, seconds = uninterrupted(family, layout, root)
    folder, same, kills = Path(root, f"run-{number}"), True, []
    folder.mkdir()
    here = layout
    for _ in range(draw.choice((1, 2, 3, 3))):
        plan, note = draw_plan(draw, here, seconds), folder / "note"
        timeout = 4 if plan["who"] == "stall" else 30
        if plan["who"] == "stall" and "seconds" in plan:
            plan["seconds"] += 0.2
        process = job(words(family, here, folder, timeout), folder / "out",
                      arrange=lambda: quiet_train(plan, note))  # fmt: skip
        code = finish(process, 120)
        moment = (
            note.read_text().split("\n")[-2] if note.exists() else "not hit: it was done before"
        )
        if note.exists():
            note.unlink()
        who = {"rank": "", "launcher": ", launcher killed", "stall": ", stalled"}[plan["who"]]
        wrong = whole_files_only(folder / "c")
        if code in ("hung", "orphans"):
            wrong = code
        elif moment.startswith("not hit"):
            wrong = wrong or ("" if code == 0 else f"exit code {code}")
        elif code == 0:
            wrong = "exit code 0 after a kill"
        elif plan["who"] != "launcher":
            said = (folder / "out").read_text()
            if not re.search(
                rf"rank {plan['rank']} of \d+ failed|for (rank \d+, )*rank {plan['rank']}\b", said
            ):
                wrong = wrong or "nobody names the rank"
        kills.append([here, moment + who * (not moment.startswith("not")), wrong])
        if family != "fp8" and draw.random() < 0.25:
            here = draw.choice(LAYOUTS[family])
            same = same and here == layout
    code = finish(job(words(family, here, folder), folder / "out", arrange=quiet_train), 120)
    wrong = f"exit code {code}" if code else difference(folder, expected, same)
    for kill in kills:
        kill[2] = kill[2] or wrong or ("the same bits" if same else "other layout, 1e-10")
        if kill[2] not in ("the same bits", "other layout, 1e-10"):
            shutil.copy(folder / "out", f"{root}/failed-{number}")
            print(
                f"run {number}: {family} {kill}", (folder / "out").read_text()[-3000:], flush=True
            )
    shutil.rmtree(folder)
    return [(f"{family} {where}", moment, outcome) for where, moment, outcome in kills]


def print_table(title, counts, columns):
    rows = sorted({row for row, _ in counts})
    print(f"\n{title:42}" + "".join(f"{c[:20]:>21}" for c in columns))
    for row in rows:
        print(f"{row:42}" + "".join(f"{counts[row, c]:21}" for c in columns))


def kills(count, seed=0, minutes=60, report=print):
    """At least so many kills; [(layout, moment, outcome)], those that came too late included."""
    draw, done, begin = random.Random(seed), [], time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        data = np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint16)
        data.tofile(f"{root}/text.bin")
        for number in itertools.count():
            done += survive(draw, root, number)
            hits = sum(not moment.startswith("not") for _, moment, _ in done)
            report(f"{time.monotonic() - begin:6.0f} s  {hits:4} kills  {done[-1]}", flush=True)
            if hits >= count or time.monotonic() - begin > 60 * minutes:
                return done


def show_kills(count, seed, minutes):
    done = kills(count, seed, minutes)
    outcomes = sorted({outcome for *_, outcome in done})
    print_table("moment", Counter((moment, outcome) for _, moment, outcome in done), outcomes)
    print_table("layout", Counter((layout, outcome) for layout, _, outcome in done), outcomes)
    hits = [kill for kill in done if not kill[1].startswith("not")]
    good = sum(outcome in ("the same bits", "other layout, 1e-10") for *_, outcome in hits)
    print(f"\n{len(hits)} kills, {good} survived without loss")
    return 0 if good == len(hits) else 1


# --- Inputs ---------------------------------------------------------------------------------------

WRONG = [  # each breaks a rule by itself
    "--dp 0", "--dp -3", "--dp 1000000000", "--dp two", "--dp 1.5", "--tp 3", "--tp 64", "--pp 9",
    "--cp 5", "--ep 2", "--zero 4", "--zero -1", "--hybrid 3", "--hybrid -1", "--schedule zbv",
    "--chunks 0", "--chunks 999", "--cp-kind rings", "--recompute half", "--recompute full:x",
    "--batch 7", "--batch 0", "--batch 99999999999999999999", "--micro-batch 5", "--micro-batch 0",
    "--seq 0", "--seq -16", "--seq 100000", "--seq 1073741825", "--steps 0", "--steps -1",
    "--steps 1e3", "--lr 0", "--lr nan", "--lr -1", "--lr inf", "--lr fast", "--optimizer adam",
    "--dtype fp16", "--seed -1", "--seed 4294967296", "--model smal", "--model x",
    "--data /no/such", "--data /", "--check -1", "--save-every 2", "--save-every -1", "--resume",
    "--ckpt {text}", "--csv /no/such/x.csv", "--csv /", "--csv {text}", "--trace /no/such/t",
    "--timeout 0", "--timeout -1", "--timeout nan", "--timeout 0.001", "--on-nonfinite ignore",
    "--fp8 e4m3", "--world 4", "--nonsense 1", "extra",
]  # fmt: skip
RIGHT = [
    "", "--recompute full", "--recompute selective", "--recompute full:1", "--optimizer sgd",
    "--dtype float64", "--dtype bfloat16", "--seed 4294967295", "--lr 1e-6", "--on-nonfinite skip",
    "--ckpt {new}/c", "--ckpt {new}/c --save-every 1", "--ckpt {new}/c --resume",
    "--csv {new}/x.csv", "--check 1 --dtype float64", "--seq 32", "--timeout 60", "--fp8 delayed",
    "--trace {new}/t.json",
]  # fmt: skip
WILD = {
    "dp cp tp pp ep zero hybrid chunks micro-batch save-every check": [
        -(10**18), -1, 0, 1, 1, 2, 2, 3, 4, 7, 1000, 10**9, 10**18, "", "x", "2.5", "0x2", "1e3"],
    "batch": [-1, 0, 1, 2, 4, 8, 12, 12, 24, 10**18, "x"],
    "seq": [-1, 0, 1, 2, 7, 8, 16, 32, 48, 10**6, 10**18],
    "steps": [-1, 0, 1, 2, 3, 10**18, "ten"],
    "schedule": ["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "", "1F1B"],
    "recompute": ["none", "full", "selective", "full:0", "full:99", "full:-1", "FULL"],
    "cp-kind": ["ring", "allgather", "ulysses", "gather"],
    "lr": [1e-3, 1e-9, 0.1, "1e-400", "1e400", "-0.0"],
    "dtype": ["float32", "float64", "bfloat16", "float8"],
    "timeout": [30, 1e9, "inf", "1e-9"],
}  # fmt: skip


def argument_case(draw, kind, folder):
    """(argv, expected exit codes, words of which one must be said)"""
    text, new = f"{folder.parent}/text.bin", str(folder)
    argv = f"--model small --batch 12 --seq 16 --steps 2 --data {text}".split()
    if kind == "right":
        family = draw.choice(("dense", "moe"))
        layout = draw.choices(LAYOUTS[family], [4 / ranks(lay) for lay in LAYOUTS[family]])[0]
        more = draw.choice(RIGHT).format(new=new, text=text).split()
        argv += ["--model", "small" if family == "dense" else "small-moe", *layout.split(), *more]
        return argv, {0}, [""]
    if kind == "wrong":
        more = [
            w.format(new=new, text=text).split()
            for w in draw.sample(WRONG, draw.choice((1, 1, 2, 3)))
        ]
        return argv + sum(more, ["--dp", "2"]), {2}, [words[0].strip("-") for words in more]
    names = [(name, values) for many, values in WILD.items() for name in many.split()]
    for name, values in draw.sample(names, draw.randint(1, 4)):
        argv += [f"--{name}", str(draw.choice(values))]
    return argv, {0, 2}, [""]


def mutated(draw, data, most=3):
    """Some bytes of it changed, cut off, doubled or put in."""
    data = bytearray(data)
    for _ in range(draw.randint(1, most)):
        at = draw.randrange(len(data) or 1)
        how = draw.choice(("flip", "cut", "double", "insert", "set"))
        if how == "flip" and data:
            data[at] ^= 1 << draw.randrange(8)
        elif how == "set" and data:
            data[at] = draw.choice((0, 32, 127, 255, draw.randrange(256)))
        elif how == "cut":
            del data[at:]
        elif how == "double":
            data[at:at] = data[at : at + 64]
        else:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
    return bytes(data)


def data_case(draw, right, folder):
    ids, kind = np.random.default_rng(draw.randrange(2**32)), draw.choice(("bin", "npy", "txt"))
    length = draw.choice((17, 18, 33, 100, 1000, 12 * 16 + 1))
    tokens = ids.integers(0, 61, length)
    path = folder / f"tokens.{kind}"
    codes = {0} if right else {2}
    if kind == "npy":
        np.save(path, tokens.astype(draw.choice((np.int64, np.uint16, np.int32, np.uint8, ">u2"))))
    else:
        tokens.astype(np.uint16 if kind == "bin" else np.uint8).tofile(path)
    if not right:
        wrong = {
            "short": lambda: np.save(path, tokens[:16]) if kind == "npy"
            else path.write_bytes(path.read_bytes()[: 32 if kind == "bin" else 16]),
            "empty": lambda: path.write_bytes(b""),
            "gone": path.unlink,
            "folder": lambda: (path.unlink(), path.mkdir()),
            "beyond": lambda: np.save(path, tokens + 60) if kind == "npy"
            else path.write_bytes(b"\xff" * 2 * length),
        }  # fmt: skip
        wrong |= {"odd": lambda: path.write_bytes(path.read_bytes()[:-1])} if kind == "bin" else {}
        if kind == "npy":
            zipped = {"zip": lambda: np.savez(path.open("wb"), tokens)}
            wrong |= zipped | {
                "negative": lambda: np.save(path, tokens - 61),
                "float": lambda: np.save(path, tokens / 2),
                "table": lambda: np.save(path, tokens[None]),
                "object": lambda: np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True),
                "mutated": lambda: path.write_bytes(
                    mutated(draw, path.read_bytes()[:128]) + path.read_bytes()[128:]
                ),
            }
        name = draw.choice(list(wrong))
        if name == "mutated":
            codes = {0, 2}
        wrong[name]()
    argv = f"--model small --batch 12 --seq 16 --steps 1 --data {path}".split()
    return argv, codes, [str(path)] if codes == {2} else [""]


def checkpoint_case(draw, folder, good):
    """Damage in the newest checkpoint, or in all: then the one before is taken, or none."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    steps = sorted((folder / "c").iterdir())
    broken = steps[-1:] if draw.random() < 0.7 else steps
    for step in broken:
        file = draw.choice(sorted(step.iterdir()) if draw.random() < 0.5 else [step / "index.json"])
        how = draw.choice(("mutate", "mutate", "mutate", "remove", "empty", "swap", "folder"))
        if how == "mutate":
            file.write_bytes(mutated(draw, file.read_bytes()))
        elif how == "remove":
            file.unlink()
        elif how == "empty":
            file.write_bytes(b"")
        elif how == "folder":
            file.unlink()
            file.mkdir()
        else:
            others = sorted(step.iterdir())
            one, two = others[0].read_bytes(), others[-1].read_bytes()
            others[0].write_bytes(two)
            others[-1].write_bytes(one)
    argv = words("dense", "--dp 2", folder)
    if draw.random() < 0.15:
        return argv + ["--seed", "5"], {1}, ["is of another run: seed 5", "is good"]
    if len(broken) < len(steps):
        return argv, {0}, ["is damaged", "resumed from"]
    return argv, {0, 1}, ["is good", "resumed from"]


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(folder).rglob("*"))
        if path.name != "out"
    }


def judge(code, out, codes, said, untouched):
    """Why an input was not treated well; "" if it was."""
    lines = [line for line in out.splitlines() if line.strip()] or [""]
    if "Traceback" in out or "Error:" in out.replace("CheckpointError:", ""):
        return "a bare traceback"
    if code not in codes:
        return f"exit code {code}, not {codes}"
    if not any(word in out for word in said):
        return f"says nothing of {said}"
    if code == 2 and not any(
        "error:" in line or line.startswith("09_combined_5d: ") for line in lines
    ):
        return "refused without a word"
    if code != 2 and not lines[-1].startswith(
        "09_combined_5d " + ("OK" if code == 0 else "FAIL: ")
    ):
        return f"last line {lines[-1]}"
    return "" if code == 0 or untouched else "something was written"


def inputs(count, seed=0, minutes=60, report=print):
    """Feed it so many inputs; [(kind, exit code, what is wrong)]"""
    draw, done, begin = random.Random(seed), [], time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        root = Path(root)
        np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint16).tofile(root / "text.bin")
        good, _ = uninterrupted("dense", "--dp 2", root)
        (good / "out").unlink()
        (good / "clock").unlink()
        expected = losses(good)
        weights = {"arguments, wrong": 45, "arguments, right": 12, "arguments, wild": 10,
                   "data, wrong": 16, "data, right": 4, "checkpoint, damaged": 13}  # fmt: skip
        for number in range(count):
            kind = draw.choices(list(weights), list(weights.values()))[0]
            folder = root / f"case-{number}"
            folder.mkdir()
            what, how = kind.split(", ")
            if what == "arguments":
                argv, codes, said = argument_case(draw, how, folder)
            elif what == "data":
                argv, codes, said = data_case(draw, how == "right", folder)
            else:
                argv, codes, said = checkpoint_case(draw, folder, good)
            before = snapshot(folder)
            code = finish(job(argv, folder / "out", arrange=quiet_train), 120)
            out = (folder / "out").read_text(errors="replace")
            wrong = judge(code, out, codes, said, snapshot(folder) == before)
            if what == "checkpoint" and code == 0 and losses(folder) != expected:
                wrong = wrong or "other losses"
            done.append((kind, code, wrong))
            if wrong:
                report(
                    f"case {number}: {wrong}: {' '.join(map(str, argv))}\n{out[-1500:]}", flush=True
                )
            shutil.rmtree(folder)
            if number % 25 == 24:
                report(f"{time.monotonic() - begin:6.0f} s  {number + 1:4} inputs", flush=True)
            if time.monotonic() - begin > 60 * minutes:
                break
    return done


def show_inputs(count, seed, minutes):
    done = inputs(count, seed, minutes)
    results = Counter(
        (kind, f"exit code {code}" if not wrong else wrong[:20]) for kind, code, wrong in done
    )
    print_table("inputs", results, sorted({column for _, column in results}))
    bad = sum(bool(wrong) for *_, wrong in done)
    print(
        f"\n{len(done)} inputs, {sum(code == 0 for _, code, _ in done)} of them worked,"
        f" {bad} not treated well"
    )
    return 1 if bad else 0


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
    """Train for so long on two ranks; returns {minute: bytes}, the exit code, the checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        words = "--dp 2 --zero 1 --batch 4 --seq 64 --steps 1000000 --lr 1e-4 --timeout 300".split()
        words += [
            "--ckpt", f"{folder}/c", "--save-every", every, "--csv", f"{folder}/loss.csv", *argv,
        ]  # fmt: skip
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
    parser.add_argument(
        "--minutes", type=float, default=30, help="of the long run; at most, of kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.what == "long":
        return show_long(args.minutes)
    show = show_inputs if args.what == "inputs" else show_kills
    return show(args.count, args.seed, args.minutes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
