"""The models whose specs ship with the package, found by name. Torch-free."""

import difflib
import json
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plait.cost.model_config import model_spec
from plait.cost.model_spec import ModelSpec
from plait.errors import ConfigError, Violation

STARTER = "starter"


@cache
def shipped_models() -> dict[str, dict[str, Any]]:
    """Config fields of every shipped model by its name; "source" is where they were published."""
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted(files("plait.specs").joinpath("models").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            found |= tomllib.loads(entry.read_text(encoding="utf-8"))
    starter = files("plait.assets").joinpath(STARTER, "config.json")
    found[STARTER] = json.loads(starter.read_text(encoding="utf-8"))
    return found


@cache
def _shipped_spec(name: str) -> ModelSpec:
    return model_spec(shipped_models()[name], name)


def find_model(name: str) -> ModelSpec:
    """A shipped model by its name (in any case, with or without the organisation), or any by its folder or config.json.

    Raises ConfigError with the nearest names, or with everything that is wrong in the config.json.
    """
    models = shipped_models()
    by_fold = {known.casefold(): known for known in models}
    wanted = name.casefold().rpartition("/")[2]
    if wanted in by_fold:
        return _shipped_spec(by_fold[wanted])
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        return model_spec(_read(config), path.name)
    near = difflib.get_close_matches(wanted, by_fold, 3, 0.4)
    hint = f"Nearest: {', '.join(by_fold[n] for n in near)}. " if near else ""
    change = f"{hint}Known: {', '.join(models)}; or give a folder with a config.json"
    raise ConfigError([Violation("model", f'there is no model "{name}"', change)])


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f'"{path}" cannot be read as JSON: {error}') from error
    if not isinstance(data, dict):
        raise ConfigError(f'"{path}" does not hold a JSON object')
    return data
