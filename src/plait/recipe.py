"""Reading recipes: a TOML file or a packaged one by name, with --set overrides, made a checked configuration.

Everything that is wrong is reported at once, as one ConfigError. Torch-free.
"""

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from plait.config import AlgorithmConfig, RunConfig, SftConfig
from plait.errors import ConfigError, Violation
from plait.recipe_errors import show, unknown_key, violations_of
from plait.schema import Spec, expected, keys_of
from plait.section import Section

_PATH_KEYS = re.compile(r"tasks\.\d+\.(path|eval_path)|data\.path")
"""Files that are named in a recipe, relative to its folder."""
_MODEL_KEYS = re.compile(r"model\.path|algorithm\.critic\.path|reward_models\.\d+\.path")
_POSITION = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as far as it could be read.

    config: None where a field is wrong. sections: those whose fields are all right. violations: of fields.
    directory: the recipe's folder.
    """

    root: type[Section]
    config: Any
    sections: dict[str, Any]
    violations: tuple[Violation, ...]
    directory: Path


def packaged_recipes() -> dict[str, str]:
    """Names of the recipes that ship with the package, each with its first comment line."""
    found = {}
    for entry in sorted(files("plait.recipes").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            first = entry.read_text(encoding="utf-8").partition("\n")[0]
            found[entry.name.removesuffix(".toml")] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def recipe_path(recipe: str) -> Path:
    """The file of a recipe: a path as given, or a packaged recipe by its name. Raises ConfigError."""
    path = Path(recipe)
    is_path = path.suffix in (".toml", ".json") or path.name != recipe
    if not is_path:
        packaged = Path(str(files("plait.recipes") / f"{recipe}.toml"))
        if packaged.is_file():
            return packaged
    if path.is_file():
        return path
    names = list(packaged_recipes())
    near = difflib.get_close_matches(path.stem, names, 1, 0.6)
    hint = f'Did you mean "{near[0]}"? ' if near else ""
    known = f"Packaged recipes: {', '.join(names) or 'none'}; or give the path of a .toml file"
    kind = "file" if is_path else "packaged recipe or file"
    raise ConfigError([Violation("recipe", f'there is no {kind} "{recipe}"', hint + known)])


def recipe_directory(recipe: str) -> Path:
    """The folder to which a recipe's relative paths refer."""
    return recipe_path(recipe).resolve().parent


def read_recipe(path: Path) -> dict[str, Any]:
    """The tables of a TOML (or JSON) file. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Violation(str(path), f"not UTF-8 at byte {error.start}", "Save it as UTF-8")]) from error
    except OSError as error:
        raise ConfigError(
            [Violation(str(path), f"cannot be read: {error.strerror}", "Give a readable file")]
        ) from error
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_toml_violation(path, text, str(error))]) from error
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise ConfigError([Violation(where, f"not valid JSON: {error.msg}", "Correct that line")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Violation(str(path), "expected a JSON object", "Write sections and their keys")])
    return data


def _toml_violation(path: Path, text: str, message: str) -> Violation:
    position = _POSITION.search(message)
    what = f"not valid TOML: {_POSITION.sub('', message)}"
    if position is None:
        return Violation(str(path), what, "Correct the end of the file; a bracket or a quote may be open")
    number, column = int(position[1]), int(position[2])
    line = text.splitlines()[number - 1].strip() if number <= len(text.splitlines()) else ""
    change = f"Correct this line: {line}" if line else "Correct that line"
    quotes = " (text needs quotes)" if "Invalid value" in message else ""
    return Violation(f"{path}, line {number}, column {column}", what, change + quotes)


def parse_override(text: str) -> tuple[str, Any]:
    """Split "a.b=c" into its key and its value: a TOML value where it is one, else text; None for null.

    Raises ConfigError where there is no "=".
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        rule = f'"{text}" is not of the form key=value'
        raise ConfigError([Violation("--set", rule, "Write for example --set optimizer.learning_rate=3e-4")])
    raw = raw.strip()
    if raw == "null":
        return key, None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return key, raw
    # A line break in the text would smuggle in further keys.
    return (key, parsed["value"]) if parsed.keys() == {"value"} else (key, raw)


def put_overrides(data: dict[str, Any], overrides: Sequence[str], root: type[Section]) -> list[Violation]:
    """Change `data` in place, in order; a later override of a key wins. Returns what could not be applied.

    a.b=null takes a key out, so that its default applies.
    """
    found: list[Violation] = []
    for text in overrides:
        try:
            key, value = parse_override(text)
        except ConfigError as error:
            found += error.violations
            continue
        problem = _put(data, key, value, root)
        found += [problem] if problem is not None else []
    return found


def _put(data: dict[str, Any], key: str, value: Any, root: type[Section]) -> Violation | None:
    parts = key.split(".")
    place: Any = data
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth]) or "recipe"
        is_last = depth == len(parts) - 1
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                rule = f'"{part}" is not one of its {len(place)} items'
                return Violation(where, rule, f"Number them from 0 to {len(place) - 1}, as in --set {where}.0...")
            if is_last and value is None:
                del place[int(part)]
            elif is_last:
                place[int(part)] = value
            else:
                place = place[int(part)]
        elif not isinstance(place, dict):
            return Violation(where, f"it is a value, and --set {key} takes it for a table", f"Set {where} itself")
        elif is_last and value is None:
            if part not in place and not _is_known(root, parts):
                return unknown_key(root, key, None)[0]
            place.pop(part, None)
        elif is_last:
            place[part] = value
        else:
            place = place.setdefault(part, {})
    return None


def _is_known(root: type[Section], parts: list[str]) -> bool:
    spec: Spec | None = Spec(root)
    for part in parts:
        if spec is not None and spec.kinds:
            spec = next((s for kind in spec.kinds.values() if (s := Spec(kind).child(part)) is not None), None)
        elif spec is not None:
            spec = None if spec.is_list and not part.isdecimal() else spec.child(part)
    return spec is not None


def draft(root: type[Section], recipe: str, overrides: Sequence[str]) -> Draft:
    """Read a recipe and its overrides. Raises ConfigError only where the file itself cannot be read."""
    path = recipe_path(recipe)
    data, directory = read_recipe(path), path.resolve().parent
    if path.suffix == ".json":
        read = draft_of(root, data, (), directory)
        if read.config is None:
            return read
        data = _as_written(read.config)
    return draft_of(root, data, overrides, directory)


def _as_written(config: Section) -> dict[str, Any]:
    """The settings that a person wrote: a resolved configuration spells out every default as well."""
    written = config.model_dump(mode="json", exclude_defaults=True)
    if isinstance(config, RunConfig):
        # Its defaults are those of the named algorithm, which may differ from the fields' own.
        named = AlgorithmConfig(name=config.algorithm.name).model_dump(mode="json") | {"name": None}
        written["algorithm"] = _difference(config.algorithm.model_dump(mode="json"), named)
    return written


def _difference(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entries of `values` that are not those of `defaults`, section by section."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            made |= {key: inner} if (inner := _difference(value, defaults[key])) else {}
        elif value != defaults[key]:
            made[key] = value
    return made


def draft_of(root: type[Section], data: dict[str, Any], overrides: Sequence[str], directory: Path) -> Draft:
    """Validate a recipe's tables, field by field."""
    if wrong_kind := _wrong_kind(root, data):
        return Draft(root, None, {}, (wrong_kind,), directory)
    # Paths of the file are relative to its folder, those typed with --set to the current one.
    _resolve_paths(data, directory)
    violations = put_overrides(data, overrides, root)
    _resolve_paths(data, Path.cwd())
    violations += _coerced_values(root, data)
    typed = frozenset(text.partition("=")[0].strip() for text in overrides)
    try:
        config = root.model_validate_json(json.dumps(data))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        violations += violations_of(root, errors, data, typed)
        failed = {str(e["loc"][0]) for e in errors if e["loc"]}
        return Draft(root, None, _valid_sections(root, data, failed), tuple(violations), directory)
    sections = {name: config.__dict__[name] for name in root.model_fields}
    return Draft(root, None if violations else config, sections, tuple(violations), directory)


def _valid_sections(root: type[Section], data: dict[str, Any], failed: set[str]) -> dict[str, Any]:
    valid: dict[str, Any] = {}
    for name, field in root.model_fields.items():
        if name in failed:
            continue
        if name not in data:
            valid[name] = field.get_default(call_default_factory=True)
        else:
            valid[name] = TypeAdapter(field.rebuild_annotation()).validate_json(json.dumps(data[name]))
    return valid


def _wrong_kind(root: type[Section], data: dict[str, Any]) -> Violation | None:
    """A recipe of the other job would otherwise be answered with a page of unknown keys."""
    is_sft = "data" in data and "batch" not in data and "rollout" not in data
    is_run = "batch" in data or "rollout" in data
    if root is RunConfig and is_sft and isinstance(data["data"], dict) and "source" in data["data"]:
        return Violation("recipe", "this recipe has [data], so it is one of supervised training", "Run plait sft")
    if root is SftConfig and is_run and "data" not in data:
        return Violation("recipe", "this recipe has [batch], so it is one of reinforcement learning", "Run plait train")
    return None


def _entries(data: Any, prefix: str) -> Iterator[tuple[Any, Any, str, Any]]:
    """Every leaf: (container, key in it, dotted key, value)."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(data, dict):
        items = iter(list(data.items()))
    elif isinstance(data, list):
        items = iter(list(enumerate(data)))
    for key, value in items:
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict | list):
            yield from _entries(value, dotted)
        else:
            yield data, key, dotted, value


def _resolve_paths(data: dict[str, Any], base: Path) -> None:
    """Make the recipe's files absolute, so that config.json means the same from any folder."""
    for container, key, dotted, value in _entries(data, ""):
        if not isinstance(value, str) or not value or Path(value).is_absolute():
            continue
        # "starter" and hub names are no files; a model is made absolute only where its folder is found.
        is_model = _MODEL_KEYS.fullmatch(dotted) and value != "starter" and (base / value).is_dir()
        is_algorithm = dotted == "algorithm.name" and value.endswith(".toml") and (base / value).is_file()
        if is_model or is_algorithm or _PATH_KEYS.fullmatch(dotted):
            container[key] = str((base / value).resolve())


def _coerced_values(root: type[Section], data: dict[str, Any]) -> list[Violation]:
    """What pydantic would quietly turn into something else: dates into text, true into the choice 1."""
    known = keys_of(root)
    found = []
    for container, key, dotted, value in _entries(data, ""):
        choices = known[dotted].choices if dotted in known else ()
        if value in choices and type(value) is not type(choices[0]):
            number = choices[choices.index(value)]
            rule = f"expected {expected(known[dotted])}, got {show(value)}"
            found.append(Violation(dotted, rule, f"Write {number}"))
        if isinstance(value, datetime.date | datetime.time):
            container[key] = str(value)
            found.append(
                Violation(dotted, f"{value} is a date, and no setting is one", f'Write it in quotes: "{value}"')
            )
    return found


def load_run_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a run. Raises ConfigError with everything that is wrong."""
    return _finish(draft(RunConfig, recipe, overrides))


def load_sft_config(recipe: str, overrides: Sequence[str] = ()) -> SftConfig:
    """The checked configuration of supervised training. Raises ConfigError with everything that is wrong."""
    return _finish(draft(SftConfig, recipe, overrides))


def read_resolved_config(data: dict[str, Any]) -> RunConfig:
    """The content of a run's config.json as it stands: fields are checked, rules (do its files exist?) are not.

    Raises ConfigError.
    """
    full = draft_of(RunConfig, data, (), Path.cwd())
    if full.config is None:
        raise ConfigError(full.violations)
    return full.config


def load_resolved_config(data: dict[str, Any]) -> RunConfig:
    """Read the content of a run's config.json, strictly. Raises ConfigError."""
    return apply_overrides(read_resolved_config(data), ())


def apply_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A checked copy of a configuration with --set overrides applied. Raises ConfigError."""
    return _finish(draft_of(RunConfig, _as_written(config), overrides, Path.cwd()))


def config_for_model(model_or_run: str | None, recipe: str | None, overrides: Sequence[str]) -> tuple[RunConfig, Path]:
    """The configuration with which to look at a model, and the folder of its files and verifiers.

    That of the recipe if one is named, else the run's own, else the packaged starter's. Raises ConfigError.
    """
    run = Path(model_or_run) if model_or_run is not None else None
    if recipe is None and run is not None and (run / "config.json").is_file():
        data = read_recipe(run / "config.json")
        # A model folder has a config.json too, and no batch in it.
        if "batch" in data:
            config = apply_overrides(load_resolved_config(data), overrides)
            origin = read_recipe(run / "run.json") if (run / "run.json").is_file() else {}
            return config, Path(origin["recipe_dir"]) if "recipe_dir" in origin else run.resolve()
    name = "starter" if recipe is None else recipe
    return load_run_config(name, overrides), recipe_directory(name)


def resolved(config: Section) -> dict[str, Any]:
    """Every setting with its value, as written to config.json."""
    return config.model_dump(mode="json")


def _finish(read: Draft) -> Any:
    from plait.rules import section_violations

    violations = [*read.violations, *section_violations(read.root, read.sections)]
    if violations:
        raise ConfigError(violations)
    return read.config
