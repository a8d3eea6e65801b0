"""Named algorithms: one data file each, `<name>.toml` in this folder. Nothing else lists their names. Torch-free.

    title = "DAPO"
    paper = "arXiv 2503.14476"
    summary = "One sentence."

    [settings]                      # of the section [algorithm]; what is not named keeps its general default
    clip_high = { value = 0.28, source = "the paper: clip-higher" }
    dynamic_sampling.enabled = { value = true, source = "the paper" }

Settings of other sections (minibatches, epochs, samples per prompt) belong to a recipe: they say how much data a run
uses and how often, under whatever objective.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, Violation


@dataclass(frozen=True, slots=True)
class NamedAlgorithm:
    """settings: nested as in [algorithm]. sources: of each, by dotted key."""

    name: str
    title: str
    paper: str
    summary: str
    settings: dict[str, Any]
    sources: dict[str, str]


def algorithm_names() -> tuple[str, ...]:
    """Names of the algorithms that ship with the package, in alphabetical order."""
    entries = (entry.name for entry in files("plait.algorithms.named").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def is_known(name: str) -> bool:
    """Whether this names a packaged algorithm, or a file of one."""
    return name in algorithm_names() or (name.endswith(".toml") and Path(name).is_file())


def _file_of(name: str) -> Path:
    return Path(name) if name.endswith(".toml") else Path(str(files("plait.algorithms.named") / f"{name}.toml"))


@cache
def named_algorithm(name: str) -> NamedAlgorithm:
    """Read an algorithm's file. Raises ConfigError where it cannot be read or lacks something."""
    path = _file_of(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([Violation("algorithm.name", f'"{path}" cannot be read: {error}', "Correct it")]) from error
    missing = sorted({"title", "paper", "summary", "settings"} - data.keys())
    leaves = [] if missing else list(_leaves(data["settings"], ""))
    missing += [f"value and source of {key}" for key, leaf in leaves if not _is_leaf(leaf)]
    if missing:
        change = 'Write for example clip_high = { value = 0.28, source = "the paper" } under [settings]'
        raise ConfigError([Violation("algorithm.name", f'"{path}" lacks {", ".join(missing)}', change)])
    return NamedAlgorithm(
        name=path.stem,
        title=data["title"],
        paper=data["paper"],
        summary=data["summary"],
        settings=_values(data["settings"]),
        sources={key: leaf["source"] for key, leaf in leaves},
    )


def _is_leaf(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.keys() == {"value", "source"}


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, entry in table.items():
        if isinstance(entry, Mapping) and not entry.keys() & {"value", "source"}:
            yield from _leaves(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry["value"] if _is_leaf(entry) else _values(entry) for key, entry in table.items()}
