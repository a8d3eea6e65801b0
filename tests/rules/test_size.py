"""Size budget: a function has at most 80 lines, a file at most 400 (or says why in its first comment or docstring)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
MAX_FUNCTION, MAX_FILE = 80, 400


def test_files():
    for path in FILES:
        text = path.read_text()
        lines = text.count("\n")
        head = "\n".join(text.splitlines()[:12]).lower()
        assert lines <= MAX_FILE or "longer than" in head or "400 lines" in head, f"{path} has {lines} lines"


def test_functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= MAX_FUNCTION, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_no_grab_bags():
    names = {part for path in FILES for part in path.relative_to(ROOT).parts}
    assert not names & {
        "utils",
        "common",
        "experimental",
        "helpers",
        "misc",
        "utils.py",
        "common.py",
        "helpers.py",
    }
