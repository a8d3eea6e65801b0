"""Names of the reasoning-gym tasks and of their parameters, read from data: importing the package costs a second."""

import difflib
import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources
from typing import TypedDict


class CatalogueEntry(TypedDict):
    """One reasoning-gym task. params: names of its keyword arguments, without those that the run sets."""

    category: str
    params: list[str]


@lru_cache(maxsize=1)
def known_tasks() -> dict[str, CatalogueEntry]:
    """Every task by name, in alphabetical order."""
    text = resources.files("plait.specs").joinpath("reasoning_gym_tasks.json").read_text(encoding="utf-8")
    return json.loads(text)


def closest(wanted: str, names: Iterable[str]) -> list[str]:
    """Up to three names that look like `wanted`, the most similar first."""
    return difflib.get_close_matches(wanted, list(names), n=3, cutoff=0.55)


def suggest(name: str) -> list[str]:
    """Up to three task names that look like `name`, or contain it, the most similar first."""
    close = closest(name, known_tasks())
    contained = [task for task in known_tasks() if name and name in task and task not in close]
    return (close + contained)[:3]
