"""What the settings are, read off their types: every dotted key, and what a value must be. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.fields import FieldInfo

from plait.section import Section


@dataclass(frozen=True, slots=True)
class Spec:
    """The type of one setting and the bounds of its value."""

    annotation: Any
    bounds: tuple[Any, ...] = ()

    @classmethod
    def of(cls, annotation: Any, metadata: tuple[Any, ...] = ()) -> "Spec":
        """Unwrap Annotated and `| None`, collecting the bounds on the way."""
        bounds = [item for item in metadata if isinstance(item, Ge | Gt | Le | MinLen)]
        for item in metadata:
            if isinstance(item, FieldInfo):
                bounds += item.metadata
        if get_origin(annotation) is Annotated:
            inner, *extra = get_args(annotation)
            return cls.of(inner, (*bounds, *extra))
        if get_origin(annotation) in (Union, UnionType):
            members = [member for member in get_args(annotation) if member is not NoneType]
            if len(members) == 1:
                return cls.of(members[0], tuple(bounds))
        return cls(annotation, tuple(bounds))

    @property
    def section(self) -> type[Section] | None:
        """The section that this setting is, if it is one."""
        is_section = isinstance(self.annotation, type) and issubclass(self.annotation, Section)
        return self.annotation if is_section else None

    @property
    def kinds(self) -> dict[str, type[Section]]:
        """For a choice of sections by `source`: each value of `source` and its section."""
        if get_origin(self.annotation) not in (Union, UnionType):
            return {}
        members = [member for member in get_args(self.annotation) if "source" in member.model_fields]
        return {get_args(member.model_fields["source"].annotation)[0]: member for member in members}

    @property
    def is_list(self) -> bool:
        return get_origin(self.annotation) is tuple

    @property
    def is_table(self) -> bool:
        return get_origin(self.annotation) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    def child(self, key: str | int) -> "Spec | None":
        """The setting below this one; None where there is none of that name."""
        if self.section is not None:
            fields = self.section.model_fields
            if str(key) not in fields:
                return None
            return Spec.of(fields[str(key)].annotation, tuple(fields[str(key)].metadata))
        if self.is_table:
            return Spec.of(get_args(self.annotation)[1])
        if self.is_list:
            members = [member for member in get_args(self.annotation) if member is not Ellipsis]
            return Spec.of(members[min(int(key), len(members) - 1)])
        return None


def expected(spec: Spec) -> str:
    """What a value must be, for example "an integer >= 1"."""
    if spec.choices:
        shown = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in spec.choices]
        return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    if spec.kinds:
        return f"a table with source = {' or '.join(map(_quoted, spec.kinds))}"
    if spec.section is not None or spec.is_table:
        return "a table"
    if spec.is_list:
        members = [m for m in get_args(spec.annotation) if m is not Ellipsis]
        inner = expected(Spec.of(members[0]))
        return f"a list, each {inner}" if len(members) == 1 else f"a list of {len(members)}, each {inner}"
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "any value"}
    return words[spec.annotation] + _bounds(spec)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _bounds(spec: Spec) -> str:
    low = [f">= {_number(b.ge)}" for b in spec.bounds if isinstance(b, Ge)]
    low += [f"> {_number(b.gt)}" for b in spec.bounds if isinstance(b, Gt)]
    high = [f"<= {_number(b.le)}" for b in spec.bounds if isinstance(b, Le)]
    parts = low + high
    return f" {' and '.join(parts)}" if parts else ""


def _number(value: Any) -> str:
    return f"{value:g}"


def keys_of(root: type[Section]) -> dict[str, Spec]:
    """Every dotted key below a section, sections included; items of a list are numbered 0."""
    found: dict[str, Spec] = {}
    for dotted, spec in _walk(Spec(root), ""):
        found.setdefault(dotted, spec)
    return found


def _walk(spec: Spec, prefix: str) -> Iterator[tuple[str, Spec]]:
    sections = [spec.section] if spec.section is not None else list(spec.kinds.values())
    for section in sections:
        for name in section.model_fields:
            child = Spec(section).child(name)
            assert child is not None
            yield f"{prefix}{name}", child
            yield from _walk(child, f"{prefix}{name}.")
    if spec.is_list:
        item = spec.child(0)
        assert item is not None
        yield from _walk(item, f"{prefix}0.")


def locate(root: type[Section], location: tuple[str | int, ...]) -> tuple[str, Spec | None, Spec]:
    """Follow pydantic's location of an error: (dotted key, its spec if known, spec of what it lies in).

    pydantic puts the value of `source` into the location; it is no part of the key.
    """
    spec: Spec | None = Spec(root)
    parent = Spec(root)
    path: list[str] = []
    for key in location:
        if spec is not None and str(key) in spec.kinds:
            spec = Spec(spec.kinds[str(key)])
            continue
        path.append(str(key))
        if spec is not None:
            parent, spec = spec, spec.child(key)
    return ".".join(path), spec, parent
