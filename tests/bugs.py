"""Real faults of this field (facts/bugs.md of the project's notes, ids B2 to B167) and what holds each.

An id maps to the tests that try its case here, or to one sentence why the fault cannot be expressed
in this code. Run by pytest: an id of a written chapter without an entry fails, and so does a name
that is no test. `python tests/bugs.py` prints the counts.
"""

import re
from pathlib import Path

import pytest

IDS = {
    "01": "2 3 4 6 7 8 9 10",
    "02": "12 14 15 16 17 18 20 21 22 23 24 25 26 27 28 29",
    "03": "30 31 33 34 35 37 38 39 40 41 42 43 45 46 47 48 49 50 51 52 53 55",
    "04": "56 58 60 61 62 63 64 65 66 67 68 69 70 71 72",
    "05": "73 75 77 78 79 81 82 83 85 86 87 88 89 90 91 92 93 94",
    "06": "96 97 98 100 101 103 104 105 106 107 108 110 111 112 113",
    "07": "114 116 118 119 120 122 123 124 125 126 127 128 129 130",
    "08": "131 134 135 137 138 139 140 141 142 143",
    "09": "145 146 148 149 150 151 152 153",
    "X": "156 157 158 159 161 162 163 164 165 166 167",
}
WRITTEN = []  # chapters whose every id has to be mapped

TESTS = {}  # id: names of tests, "file::test"

NOT_EXPRESSIBLE = {}  # id: why this code cannot have the fault


def ids(chapter):
    return [int(i) for i in IDS[chapter].split()]


def unmapped():
    return [i for c in WRITTEN for i in ids(c) if i not in TESTS and i not in NOT_EXPRESSIBLE]


def test_every_fault_of_a_written_chapter_is_mapped():
    assert unmapped() == []
    assert not TESTS.keys() & NOT_EXPRESSIBLE.keys()
    assert all(len(why) > 20 for why in NOT_EXPRESSIBLE.values())


@pytest.mark.parametrize("bug", TESTS)
def test_the_tests_named_exist(bug):
    for name in TESTS[bug].split():
        file, test = name.split("::")
        text = (Path(__file__).parent / f"{file}.py").read_text()
        assert re.search(rf"^def {test}\(", text, re.M), name


def test_the_list_of_ids_is_complete():
    """Held against the notes, where they lie beside the repository."""
    notes = Path(__file__).resolve().parents[2] / "shared" / "facts" / "bugs.md"
    if notes.exists():
        listed = [int(i) for i in re.findall(r"^\| B(\d+) ", notes.read_text(), re.M)]
        assert sorted(listed) == sorted(i for c in IDS for i in ids(c))


def counts():
    for chapter in IDS:
        tested = sum(i in TESTS for i in ids(chapter))
        reasoned = sum(i in NOT_EXPRESSIBLE for i in ids(chapter))
        yield f"{chapter:>3}: {len(ids(chapter)):3} faults, {tested:3} tested, {reasoned:3} cannot occur"


def test_counts(capsys):
    with capsys.disabled():
        print("\n" + "\n".join(counts()))


if __name__ == "__main__":
    print("\n".join(counts()))
