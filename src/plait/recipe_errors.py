"""From what is wrong with a recipe to sentences: the value, what was expected, what to change. Torch-free."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from annotated_types import Ge, Gt, Le

from plait.config import SftConfig
from plait.errors import Violation
from plait.schema import Spec, expected, keys_of, locate
from plait.section import Section

NEAR = 0.75
"""Similarity (difflib) from which a known name is offered for an unknown one."""
MAX_SHOWN = 60
"""Characters of a value that are shown."""

_VAGUE = {"enabled", "enable", "name", "path", "estimator", "seed", "strategy", "backend", "device", "logger"}
"""Last parts of foreign keys that mean something only together with the part before."""
_SFT_NAMES = {
    "batch.num_sequences_per_minibatch": "train.num_sequences_per_update",
    "batch.num_tokens_per_microbatch": "train.num_tokens_per_microbatch",
    "train.num_steps": "train.num_updates",
    "rollout.max_prompt_tokens": "max_sequence_tokens",
    "rollout.max_completion_tokens": "max_sequence_tokens",
    "tasks.0.path": "data.path",
}
"""Where supervised training has another name for the same thing."""


@cache
def foreign_keys() -> dict[str, Any]:
    """The table of other frameworks' names: {"keys": [...], "values": [...], "sources": {...}}."""
    return json.loads((files("plait.specs") / "foreign_keys.json").read_text())


def violations_of(
    root: type[Section], errors: Sequence[Any], data: dict[str, Any], overridden: frozenset[str] = frozenset()
) -> list[Violation]:
    """One violation (or more, for a table of unknown keys) per error that pydantic found.

    errors: of `ValidationError.errors()`. overridden: keys that were given with --set.
    """
    found: list[Violation] = []
    for error in errors:
        location = tuple(error["loc"])
        where, spec, parent = locate(root, location)
        if error["type"] == "extra_forbidden":
            found += unknown_key(root, where, error["input"], parent)
        elif error["type"] == "missing" and not parent.is_list:
            found.append(_missing(where, spec))
        elif error["type"] == "missing":
            found.append(_wrong_value(where.rpartition(".")[0], error["input"], parent, set()))
        elif error["type"] == "union_tag_not_found":
            found.append(_no_source(where, error["input"]))
        elif error["type"] == "union_tag_invalid":
            assert spec is not None
            found.append(_wrong_value(f"{where}.source", error["input"]["source"], _sources(spec), set()))
        elif error["type"] == "unknown_algorithm":
            found.append(unknown_algorithm(where, error["input"], error["ctx"]["known"].split(", ")))
        elif error["type"] == "too_short" and error["input"]:
            continue  # the items are wrong, and each has its own error
        elif spec is not None:
            found.append(_wrong_value(where, error["input"], spec, overridden))
        else:
            found.append(Violation(where or "recipe", error["msg"], "Correct it"))
    return list(dict.fromkeys(found))


def unknown_algorithm(where: str, name: str, known: list[str]) -> Violation:
    """The answer to the name of an algorithm that does not exist."""
    near = difflib.get_close_matches(_plain(name), known, 1, 0.6)
    hint = f'Did you mean "{near[0]}"? ' if near else ""
    for entry in foreign_keys()["values"]:
        if entry["key"] == "algorithm.name" and entry["value"] == name.lower():
            hint = f"{entry['change']}. "
    change = f"{hint}Algorithms: {', '.join(known)}; or the path of a .toml file like theirs"
    return Violation(where, f"there is no algorithm {show(name)}", change)


def _sources(spec: Spec) -> Spec:
    return Spec(Literal[tuple(spec.kinds)])


def _missing(where: str, spec: Spec | None) -> Violation:
    section, _, name = where.rpartition(".")
    if spec is not None and spec.section is not None:
        needed = [n for n, field in spec.section.model_fields.items() if field.is_required()]
        return Violation(where, "this section is required and missing", f"Add [{where}] with {', '.join(needed)}")
    if name == "tasks":
        return Violation(where, "at least one task is required", 'Add [[tasks]] with source = "reasoning_gym" and task')
    if spec is not None and spec.kinds:
        return Violation(where, "this section is required and missing", f"Add [{where}], {expected(spec)}")
    what = expected(spec) if spec is not None else "a value"
    place = f" under [{section}]" if section and not any(p.isdigit() for p in section.split(".")) else ""
    return Violation(where, f"required and missing, expected {what}", f"Add {name}{place}")


def _no_source(where: str, value: Any) -> Violation:
    guess = "rows" if isinstance(value, dict) and "path" in value else "reasoning_gym"
    return Violation(f"{where}.source", "every task names its source, and this one does not", f'Add source = "{guess}"')


def show(value: Any) -> str:
    """A value as it would be written in a recipe, with its kind, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 3] + "..."
    kinds = {str: "text", bool: "true or false", int: "integer", float: "number", list: "list", dict: "table"}
    return f"{text} ({kinds[type(value)]})" if type(value) in kinds else text


def _wrong_value(where: str, value: Any, spec: Spec, overridden: Iterable[str]) -> Violation:
    rule = f"expected {expected(spec)}, got {show(value)}"
    return Violation(where, rule, _advice(where, value, spec, where in set(overridden)))


def _advice(where: str, value: Any, spec: Spec, is_override: bool) -> str:
    if spec.choices:
        return _choice_advice(where, value, spec)
    if isinstance(value, str) and spec.annotation in (int, float, bool):
        return _unquoted_advice(value, spec)
    if isinstance(value, float) and value.is_integer() and spec.annotation is int:
        return f"Write {int(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool) and spec.annotation in (int, float):
        return _bound_advice(value, spec)
    if spec.annotation is str and not isinstance(value, list | dict):
        text = "true" if value is True else "false" if value is False else str(value)
        return f"Write --set '{where}=\"{text}\"'" if is_override else f'Write it in quotes: "{text}"'
    item = spec.child(0) if spec.is_list else None
    if item is not None and item.kinds and not isinstance(value, list):
        return f"Write [[{where}]] with two brackets, once per item"
    if item is not None and not isinstance(value, list):
        return f"Write it in brackets: [{json.dumps(value)}]"
    if (spec.section is not None or spec.is_table) and not isinstance(value, dict):
        fields = ", ".join(spec.section.model_fields) if spec.section is not None else "names and values"
        return f"Write a table [{where}] with {fields}"
    return f"Change it to {expected(spec)}"


def _choice_advice(where: str, value: Any, spec: Spec) -> str:
    for entry in foreign_keys()["values"]:
        if entry["key"] == where and str(value).lower() == entry["value"]:
            return entry["change"]
    words = [choice for choice in spec.choices if isinstance(choice, str)]
    near = difflib.get_close_matches(str(value).lower().replace("_", "-"), words, 1, 0.6)
    near = near or difflib.get_close_matches(str(value).lower(), words, 1, 0.6)
    return f'Did you mean "{near[0]}"?' if near else "Choose one of them"


def _unquoted_advice(value: str, spec: Spec) -> str:
    if spec.annotation is bool:
        words = {"true": "true", "yes": "true", "on": "true", "1": "true"}
        words |= {"false": "false", "no": "false", "off": "false", "0": "false"}
        return f"Write {words[value.lower()]}, without quotes" if value.lower() in words else "Write true or false"
    try:
        number = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return f"Write {expected(spec)}, without quotes"
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return f"Write {number}, without quotes" if is_number else f"Write {expected(spec)}, without quotes"


def _bound_advice(value: float, spec: Spec) -> str:
    for bound in spec.bounds:
        if isinstance(bound, Ge) and value < bound.ge:  # type: ignore[operator]
            return f"Set it to {bound.ge:g} or more"
        if isinstance(bound, Gt) and value <= bound.gt:  # type: ignore[operator]
            return f"Set it to a value above {bound.gt:g}"
        if isinstance(bound, Le) and value > bound.le:  # type: ignore[operator]
            return f"Set it to {bound.le:g} or less"
    return "Write a whole number" if spec.annotation is int else "Write a finite number"


def unknown_key(root: type[Section], where: str, value: Any, parent: Spec | None = None) -> list[Violation]:
    """The answer to a key that does not exist: where it belongs, or what it is called here.

    An unknown table that resembles no section is answered key by key.
    """
    name = where.rpartition(".")[2]
    siblings = list(parent.section.model_fields) if parent is not None and parent.section is not None else []
    change = _near_sibling(where, name, siblings)
    if change is None and isinstance(value, dict) and value:
        return [v for key, inner in value.items() for v in unknown_key(root, f"{where}.{key}", inner)]
    if change is None:
        change = _elsewhere(root, where, name, siblings)
    return [Violation(where, f"unknown key {name}", change)]


def _near_sibling(where: str, name: str, siblings: list[str]) -> str | None:
    """A known key of the same section that is nearly the same, unless another framework uses the name."""
    near = difflib.get_close_matches(_plain(name), siblings, 1, 0.8)
    if not near or _foreign(where, 2):
        return None
    section = where.rpartition(".")[0]
    return f"Did you mean {section}.{near[0]}?" if section else f"Did you mean {near[0]}?"


def _elsewhere(root: type[Section], where: str, name: str, siblings: list[str]) -> str:
    known = keys_of(root)
    if specific := _translate(root, _foreign(where, 2)):
        return specific
    same = [key for key in known if key.rpartition(".")[2] == _plain(name)]
    translated = _translate(root, _foreign(where, 1))
    # Where another framework means something else by a name of ours, its meaning is said too.
    is_included = all(key in translated for key in same)
    if same and not is_included:
        return f"It belongs elsewhere: write {' or '.join(same)}"
    if task_parameter := _task_parameter(where, name):
        return task_parameter
    if translated:
        return translated
    # Of keys with the same last part the shallowest is meant, and of those the first.
    names: dict[str, str] = {}
    for key in sorted(known, key=lambda key: key.count(".")):
        names.setdefault(key.rpartition(".")[2], key)
    near = difflib.get_close_matches(_plain(name), names, 1, NEAR)
    if near:
        return f"Did you mean {names[near[0]]}?"
    section = where.rpartition(".")[0]
    if siblings:
        return f"Known keys of {f'[{section}]' if section else 'a recipe'}: {', '.join(siblings)}"
    return f"Sections of a recipe: {', '.join(root.model_fields)}"


def _task_parameter(where: str, name: str) -> str | None:
    parts = where.split(".")
    if len(parts) == 3 and parts[0] == "tasks" and parts[1].isdigit():
        from plait.data.catalogue import known_tasks

        if any(name in entry["params"] for entry in known_tasks().values()):
            return f"Parameters of the data set go into its params: tasks.{parts[1]}.params.{name}"
    return None


def _plain(name: str) -> str:
    return name.strip("-+").replace("-", "_").lower()


def _foreign(where: str, min_parts: int) -> list[dict[str, Any]]:
    """Entries whose last parts agree with a dotted key, those that agree longest; at least min_parts of them.

    A foreign name of one part always agrees in full.
    """
    asked = [_plain(part) for part in where.split(".")]
    best: list[dict[str, Any]] = []
    longest = min_parts
    for entry in foreign_keys()["keys"]:
        theirs = [_plain(part) for part in entry["key"].split(".")]
        count = 0
        while count < min(len(asked), len(theirs)) and asked[-1 - count] == theirs[-1 - count]:
            count += 1
        if count == 1 and len(theirs) > 1 and theirs[-1] in _VAGUE:
            continue
        if count > longest:
            best, longest = [], count
        if count == longest:
            best.append(entry)
    return best


def _translate(root: type[Section], entries: list[dict[str, Any]]) -> str:
    """One sentence per distinct answer, with the frameworks that use the name."""
    known = keys_of(root)
    answers: dict[str, list[str]] = {}
    for entry in entries:
        use = [_SFT_NAMES[key] if root is SftConfig and key in _SFT_NAMES else key for key in entry["use"]]
        use = [key for key in dict.fromkeys(use) if key in known]
        if entry["use"] and not use:
            continue
        text = f"write {' and '.join(use)}" if use else "there is no such setting"
        note = f": {entry['note']}" if entry["note"] else ""
        answers.setdefault(text + note, []).append(entry["framework"])
    sentences = []
    for text, frameworks in answers.items():
        named = [name for name in dict.fromkeys(frameworks) if name != "other spellings"]
        origin = f" (a name of {' and '.join(named)})" if named else ""
        sentences.append(f"{text[0].upper()}{text[1:]}{origin}")
    return ". ".join(sentences)
