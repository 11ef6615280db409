"""What holds for every chapter: as a user starts it, how it is written, what it may import."""

import ast
import re

import pytest
from conftest import ROOT, run_script
from test_readme import check_quoted

CHAPTERS = sorted(ROOT.glob("[0-9][0-9]_*.py"))
EACH = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
OWN = {"main", "demo", "held", "sent"}  # every chapter has its own of these
OWN |= {"build", "train", "train_step", "report", "save", "resume", "use"}  # of several


def tree(chapter):
    return ast.parse(chapter.read_text())


@EACH
def test_the_chapter_as_a_user_starts_it(chapter):
    out = run_script(chapter.name)
    lines = out.stdout.splitlines()
    assert out.returncode == 0 and lines[-1] == f"{chapter.stem} OK", out.stdout + out.stderr
    assert out.stderr == "", "no warnings, no noise"
    check_quoted(chapter.name, out.stdout)
    assert [line for line in lines if len(line) > 80] == []


@EACH
def test_importing_it_runs_nothing(chapter):
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    *body, last = tree(chapter).body
    assert ast.unparse(last).startswith("if __name__ == '__main__'")
    for node in body[1:]:  # the first is the docstring
        assert isinstance(node, allowed), f"line {node.lineno} runs at import"


@EACH
def test_it_imports_lower_chapters_only(chapter):
    for name in re.findall(r'import_module\("(\d\d_\w+)"\)', chapter.read_text()):
        assert name < chapter.stem and (ROOT / f"{name}.py").exists()


@EACH
def test_packages_are_torch_and_numpy(chapter):
    import sys

    for node in ast.walk(tree(chapter)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.split(".")[0]
            assert top in ("torch", "numpy") or top in sys.stdlib_module_names, name


@EACH
def test_its_shape(chapter):
    text = chapter.read_text()
    docstring = text.split('"""')[1]
    for word in ("Idea", "Picture", "Cost", "Forget", "Run", "Read"):
        assert re.search(rf"^{word} ", docstring, re.M), f"the docstring lacks {word}"
    assert [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 100] == []


def test_helpers_that_stand_twice_are_equal():
    """So that a snippet is whole, a short helper may be written again, but not differently."""
    sources = {}
    for chapter in CHAPTERS:
        for node in tree(chapter).body:
            if isinstance(node, ast.FunctionDef) and node.name not in OWN:
                sources.setdefault(node.name, {})[chapter.stem] = ast.unparse(node)
    for name, places in sources.items():
        assert len(set(places.values())) == 1, f"{name} differs between {' and '.join(places)}"


# --- tests/questions.md: ten questions a chapter, and where they are answered ---------------------

BOOK = (ROOT / "tests" / "questions.md").read_text()
ANSWERS = {
    part.split("\n")[0]: re.findall(r"^\d+\. (.*)\n   (`.*`)$", part, re.M)
    for part in BOOK.split("\n## ")[1:]
}


def names_in(chapter):
    """Paragraphs of the docstring, sections, and what is defined at the top or in a class."""
    text, names = chapter.read_text(), set()
    names |= set(re.findall(r"^([A-Z]\w+) ", text.split('"""')[1], re.M))
    names |= {f"section {n}" for n in re.findall(r"^# --- (\d+)\. ", text, re.M)}
    for node in tree(chapter).body:
        for target in getattr(node, "targets", ()):
            names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            names |= {f"{node.name}.{f.name}" for f in getattr(node, "body", ())
                      if isinstance(f, ast.FunctionDef)}  # fmt: skip
    return names


@pytest.mark.parametrize("name", ANSWERS)
def test_ten_questions_and_where_they_are_answered(name):
    assert len(ANSWERS[name]) == 10
    assert len({question for question, _ in ANSWERS[name]}) == 10
    quoted = re.findall(r"`([^`]+)`", " ".join(answer for _, answer in ANSWERS[name]))
    missing = set(quoted) - names_in(ROOT / name)
    assert not missing, f"{name} has no {sorted(missing)}"


def test_every_chapter_has_questions():
    assert {path.name for path in CHAPTERS} == ANSWERS.keys()
