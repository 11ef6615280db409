"""README says nothing that the files do not: its lines, commands, numbers, links and picture."""

import re
import shlex
from importlib import import_module

import pytest
from conftest import ROOT, run_script
from test_forget import NUMBER, paragraph

combined = import_module("09_combined_5d")
pp = import_module("05_pp_1f1b")

README = (ROOT / "README.md").read_text()

def quoted():
    """{command: lines of its output} for every `$ command` with the lines below it."""
    result = {}
    for block in re.findall(r"^ *```\n(.*?)^ *```$", README, re.M | re.S):
        margin = len(block) - len(block.lstrip(" "))
        text = "".join(f"{line[margin:]}\n" for line in block.splitlines())
        for part in re.split(r"^(?=\$ )", text, flags=re.M):
            if part.startswith("$ python "):
                head, *lines = part.rstrip("\n").split("\n")
                command = re.split(r" {3,}", head.removeprefix("$ python "))[0]
                result.setdefault(command, []).extend(line for line in lines if line.strip())
    return result


def holds(line, output):
    """Is the line in the output? Where README has …, the rest of the line is left out."""
    start = line.removesuffix("…").rstrip()
    return any(
        printed.rstrip() == start or line.endswith("…") and printed.startswith(start)
        for printed in output.splitlines()
    )


QUOTED = quoted()
SCRIPTS = {command: lines for command, lines in QUOTED.items() if " " not in command}  # no flags


def test_what_is_quoted():
    assert len(QUOTED) >= 8 and sum(map(len, QUOTED.values())) >= 25
    # test_book.py runs each chapter once and holds these lines to what it printed.
    assert {f"{path.name}" for path in ROOT.glob("[0-9]*.py")} >= SCRIPTS.keys()


def check_quoted(command, output):
    """Of a command that README quotes: every line is there."""
    missing = [line for line in QUOTED.get(command, ()) if not holds(line, output)]
    assert not missing, f"README says that python {command} prints {missing}"


@pytest.mark.full
@pytest.mark.parametrize("command", sorted(QUOTED.keys() - SCRIPTS.keys()))
def test_commands_with_flags(command):
    out = run_script(*shlex.split(command))
    assert out.returncode == 0, out.stdout + out.stderr
    check_quoted(command, out.stdout)


def test_corrections():
    out = run_script("tests/corrections.py")
    assert out.returncode == 0 and out.stdout.count("\n") > 10, out.stderr
    assert out.stdout in README, "copy what tests/corrections.py prints"


def test_errors_are_those_of_the_docstrings():
    text = " ".join(README.split())
    for name, what in (("04_tp_sp.py", "gradient is"), ("02_dp.py", "gradients are")):
        (number,) = re.findall(rf"{what} off by ([\d.]+\d)", text)
        assert number == re.search(NUMBER, paragraph((ROOT / name).read_text(), "Forget"))[1]


def commands():
    """Every command line of README that starts a chapter, `\\` and line end taken away."""
    text = re.sub(r"\\\n *", " ", README)
    for line in re.findall(r"^(?:\+ |\$ )?((?:python|torchrun|srun) .*)$", text, re.M):
        script = re.search(r"(\d\d_\w+\.py)(.*?)(?: {3,}|$|…)", line)
        if script:
            yield script[1], shlex.split(script[2])
    for line in re.findall(r"`(?:python|torchrun) ([^`]*)`", README):
        if script := re.search(r"(\d\d_\w+\.py)(.*)$", line):
            yield script[1], shlex.split(script[2])


def test_every_flag_exists_and_every_layout_fits():
    seen = list(commands())
    assert len(seen) > 12
    for script, flags in seen:
        text = (ROOT / script).read_text()
        for flag in flags:
            axis = 'f"--{axis}"' in text and flag in ("--dp", "--cp", "--tp", "--pp", "--ep")
            assert not flag.startswith("--") or f'"{flag}"' in text or axis, f"{script} {flag}"
        if script == "09_combined_5d.py" and len(flags) > 8:
            args = combined.parse([f for f in flags if f not in ("--data", "text.txt")])
            world = args.dp * args.cp * args.tp * args.pp
            assert combined.violations(args, world) == [], flags


def test_lines_of_the_map():
    for path in sorted(ROOT.glob("[0-9][0-9]_*.py")):
        (said,) = re.findall(rf"^{path.name} +([\d,]+)  ", README, re.M)
        lines = len(path.read_text().splitlines())
        assert abs(int(said.replace(",", "")) - lines) <= lines / 10, f"{path.name}: {lines} lines"


def test_the_mesh_as_drawn():
    axes = combined.mesh({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, "dp·cp", "dp·cp·tp")
    axes |= combined.expert_groups(axes["dp·cp·tp"], 4)
    for axis in ("tp", "cp", "dp", "pp", "dp·cp", "ep", "edp"):
        (drawn,) = re.findall(rf" {axis} +(\d+ \d+[\d |]*)\| …$", README, re.M)
        groups = [list(map(int, ranks.split())) for ranks in drawn.rstrip(" |").split("|")]
        assert len(groups) >= 2 and groups == axes[axis][: len(groups)], axis


def test_the_lines_that_go_before_a_copy():
    from test_snippets import PREAMBLE

    assert f"```\n{PREAMBLE}```" in README


def test_the_picture_is_what_05_draws(tmp_path):
    pp.write_svg(tmp_path / "now.svg", 4, 8)
    assert (tmp_path / "now.svg").read_text() == (ROOT / "images/pipeline.svg").read_text()


def test_width_and_files():
    assert [line for line in README.splitlines() if len(line) > 100] == []
    for name in re.findall(r"`((?:tests/)?\w+\.(?:py|sh|txt|md))`", README):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
