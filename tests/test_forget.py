"""Each chapter names the line people forget. Delete it: the chapter must notice, as it says.

The line carries the comment `# forget`; the docstring's paragraph Forget tells what deleting it
does, with a number (error 0.31). Here the line is really deleted and the chapter's own command run.
"""

import re
import shlex
import shutil

import pytest
from conftest import ROOT, run_script

CHAPTERS = sorted(ROOT.glob("0[0-9]_*.py"))  # 10 trains nothing
QUICK = "07"  # the others with --full
COMMAND = r"python (\d\d_\w+\.py(?: --[\w-]+(?: \w+)?)*)"
NUMBER = r"error (\d[\d.]*(?:e[+-]?\d+)?)"


def paragraph(text, word):
    """The docstring's paragraph that starts with `word` in the margin."""
    docstring = text.split('"""')[1]
    return re.search(rf"^{word} +(.*?)(?=^\S|\Z)", docstring, re.M | re.S).group(1)


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (path.stem[:2] != QUICK))
        for path in CHAPTERS
    ],
)
def test_forget(chapter, tmp_path):
    text = chapter.read_text()
    lines = text.splitlines(keepends=True)
    marked = [i for i, line in enumerate(lines) if line.rstrip().endswith("# forget")]
    assert len(marked) == 1, "exactly one line of a chapter carries # forget"
    claimed = float(re.search(NUMBER, paragraph(text, "Forget")).group(1))
    command = shlex.split(re.search(COMMAND, paragraph(text, "Run")).group(1))

    for other in CHAPTERS:
        shutil.copy(other, tmp_path)
    del lines[marked[0]]
    (tmp_path / chapter.name).write_text("".join(lines))
    out = run_script(*command, folder=tmp_path)

    last = out.stdout.splitlines()[-1]
    assert out.returncode == 1 and last.startswith(f"{chapter.stem} FAIL: "), (
        out.stdout + out.stderr
    )
    assert re.search(r"\w+\.\w+", last.split("FAIL: ")[1]), "the message names a parameter"
    measured = float(re.search(NUMBER, last).group(1))
    assert abs(measured - claimed) <= 0.1 * claimed, f"docstring {claimed}, measured {measured}"
