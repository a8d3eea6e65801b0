"""House rules that can be read off the source."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))


def test_every_module_says_what_it_is():
    for path in FILES:
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_public_functions_are_documented_and_typed():
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                # A rule of plait.rules and a command say what they are in their message and help.
                is_spared = path.name == "cli.py" or path.parent.name == "rules"
                assert is_spared or ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"
                assert node.returns is not None, f"{path}:{node.lineno} {node.name} does not say what it returns"


def test_broad_except_says_why():
    for path in FILES:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"except(\s*:|\s+(Base)?Exception)", line):
                around = " ".join(lines[max(0, number - 3) : number + 2])
                assert "noqa: BLE001" in line, f"{path}:{number + 1}: broad except"
                assert around.count("#") >= 2, f"{path}:{number + 1}: a broad except needs a comment that says why"


def test_no_getattr_with_default_and_no_left_overs():
    for path in FILES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                is_default = node.func.id == "getattr" and len(node.args) == 3
                is_guess = is_default or node.func.id == "hasattr"
                assert not is_guess, f"{path}:{node.lineno} guesses an attribute"
        assert not re.search(r"\b(TODO|FIXME|XXX)\b|NotImplementedError", text), f"{path} has left-overs"


def test_configuration_is_strict_and_frozen():
    from plait import config
    from plait.config import Section

    sections = [c for c in vars(config).values() if isinstance(c, type) and issubclass(c, Section)]
    assert len(sections) > 15
    for section in sections:
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
        assert section.model_config["strict"]


def test_every_recipe_has_a_test():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for recipe in (ROOT / "src" / "plait" / "recipes").glob("*.toml"):
        assert f'"{recipe.stem}"' in tests, f"no test names the recipe {recipe.stem}"


def test_nothing_large_is_tracked():
    for path in (ROOT / "src").rglob("*"):
        assert path.is_dir() or path.stat().st_size <= 15 * 2**20, f"{path} is over 15 MiB"


def test_license_and_glossary():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for word in (
        "policy",
        "reference",
        "verifier",
        "StepGraph",
        "plan",
        "layout",
        "placement",
        "schedule",
        "staleness",
    ):
        assert word in glossary, f"docs/glossary.md does not explain {word}"
