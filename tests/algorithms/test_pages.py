"""docs/algorithms against the named files: every setting that a page states is the one that the name gives."""

import json
import re
from pathlib import Path

import pytest

from plait.algorithm_config import AlgorithmConfig
from plait.algorithms.named import algorithm_names, named_algorithm

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
ON_ANOTHER_PAGE = {"iterative_dpo": "dpo"}


def page_of(name):
    return (PAGES / f"{ON_ANOTHER_PAGE.get(name, name)}.md").read_text(encoding="utf-8")


def stated(name):
    """(key, value) of every `key = value` in the page's settings; `a = b = 1` states two."""
    settings = page_of(name).partition("## Settings")[2].partition("\n## ")[0]
    if name in ON_ANOTHER_PAGE or name in ON_ANOTHER_PAGE.values():
        settings = next(line for line in settings.splitlines() if line.startswith(f"`{name}`:"))
    for code in re.findall(r"`([^`]*=[^`]*)`", settings):
        *keys, value = (part.strip() for part in code.split(" = "))
        yield from ((key, json.loads(value)) for key in keys)


def value_of(config, key):
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("name", algorithm_names())
def test_what_a_page_states_is_what_the_name_gives(name):
    config = AlgorithmConfig(name=name).model_dump(mode="json")
    found = list(stated(name))
    assert len(found) >= 3
    for key, value in found:
        assert value_of(config, key) == value, key


@pytest.mark.parametrize("name", algorithm_names())
def test_a_page_names_its_paper_and_has_every_part(name):
    page = page_of(name)
    papers = re.findall(r"\d{4}\.\d{5}", named_algorithm(name).paper)
    assert all(paper in page for paper in papers)
    parts = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert parts == ["Equations", "Settings", "Details that matter", "Metrics", "Elsewhere"]
