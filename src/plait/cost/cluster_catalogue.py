"""Clusters by their short spelling ("8xH100", "4x8xH200") or from a user's TOML file. Torch-free.

A file, for example:

    name = "lab"
    num_nodes = 2
    devices_per_node = 4
    device = "H100"            # a shipped device

    [change]                   # what is different here; any field of specs/clusters/devices.toml
    memory_bytes = 94e9
    price_per_hour = [2.1, "our contract"]
    matmul_share = [0.4, 0.6, 0.75]

A value may carry its source as a second entry. A device that is not shipped changes everything it needs, under its own
name and without a shipped one.
"""

import difflib
import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plait.cost.cluster import Cluster, Curve, Device, Interval, Link
from plait.errors import ConfigError, Violation

NUMBERS = ("bf16_flop_per_s", "memory_bytes", "memory_bytes_per_s", "scale_up_bytes_per_s", "scale_up_half_bytes",
           "network_bytes_per_s", "network_half_bytes", "host_bytes_per_s")  # fmt: skip
INTERVALS = ("matmul_share", "memory_share", "op_latency_s", "scale_up_share", "scale_up_base_s", "scale_up_hop_s",
             "network_share", "network_base_s", "network_hop_s")  # fmt: skip
OPTIONAL = ("fp8_flop_per_s", "fp32_flop_per_s", "price_per_hour", "cpu_cores", "scale_up_size")
_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x(.+)")
Table = dict[str, Any]


@cache
def _tables() -> dict[str, Table]:
    """Fields of every shipped device, each [value, source]."""
    text = files("plait.specs").joinpath("clusters", "devices.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    sources = tables.pop("sources")
    return {name: {key: [value, sources[source]] for key, (value, source) in table.items()}
            for name, table in tables.items()}  # fmt: skip


@cache
def shipped_devices() -> dict[str, Device]:
    """Every device of specs/clusters/devices.toml by its name."""
    return {name: device_of(name, table) for name, table in _tables().items()}


def find_device(name: str) -> Device:
    """A shipped device in any case. Raises ConfigError with the nearest names."""
    devices = shipped_devices()
    by_fold = {known.casefold(): known for known in devices}
    if name.casefold() in by_fold:
        return devices[by_fold[name.casefold()]]
    near = difflib.get_close_matches(name.casefold(), by_fold, 3, 0.4)
    hint = f"Nearest: {', '.join(by_fold[n] for n in near)}. " if near else ""
    change = f"{hint}Known: {', '.join(devices)}; or write a cluster file with your own device"
    raise ConfigError([Violation("cluster.device", f'there is no device "{name}"', change)])


def find_cluster(text: str) -> Cluster:
    """Read "8xH100" (devices of one node), "4x8xH200" (nodes x devices), "cpu" (one device) or the path of a file.

    Raises ConfigError with everything that is wrong.
    """
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    match = _SHORT.fullmatch(text)
    if match is None:
        return Cluster(text, find_device(text), 1, 1)
    nodes, devices = int(match[1] or 1), int(match[2])
    if nodes < 1 or devices < 1:
        rule = f'"{text}" has {nodes} nodes of {devices} devices'
        raise ConfigError([Violation("cluster", rule, "Write at least one of each, for example 4x8xH200")])
    return Cluster(text, find_device(match[3]), nodes, devices)


def read_cluster(path: Path) -> Cluster:
    """A cluster from a TOML file. Raises ConfigError with everything that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f'"{path}" cannot be read: {error}') from error
    except ValueError as error:
        raise ConfigError(f'"{path}" is not TOML: {error}') from error
    table = {"name": path.stem, "change": {}} | table
    violations: list[Violation] = []
    for key in sorted(set(table) - {"name", "num_nodes", "devices_per_node", "device", "change"}):
        known = "name, num_nodes, devices_per_node, device, change"
        violations.append(Violation(f"cluster.{key}", "unknown key", f"Known: {known}"))
    counts = {key: _count(table, key, violations) for key in ("num_nodes", "devices_per_node")}
    device = _device(table, path.stem, violations)
    if violations or device is None:
        raise ConfigError(violations)
    return Cluster(str(table["name"]), device, counts["num_nodes"], counts["devices_per_node"])


def _count(table: Table, key: str, violations: list[Violation]) -> int:
    value = table.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    shown = f"is {value!r}" if key in table else "is missing"
    violations.append(Violation(f"cluster.{key}", f"{key} {shown}", "Write a whole number of at least 1"))
    return 1


def _device(table: Table, stem: str, violations: list[Violation]) -> Device | None:
    change = table["change"]
    base: Table = {}
    name = stem
    if "device" in table:
        try:
            name = find_device(str(table["device"])).name
            base = _tables()[name]
        except ConfigError as error:
            violations += error.violations
            return None
    try:
        return device_of(name, base | change)
    except ConfigError as error:
        violations += error.violations
        return None


def device_of(name: str, table: Table) -> Device:
    """A device from its fields, each a value or [value, source].

    Raises ConfigError with everything that is missing, unknown or wrong.
    """
    values, origins, violations = dict[str, Any](), dict[str, str](), list[Violation]()
    for key, entry in table.items():
        value, source = entry, "given by the user"
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            value, source = entry
        values[key], origins[key] = value, source
    for key in sorted(set(values) - {*NUMBERS, *INTERVALS, *OPTIONAL}):
        near = difflib.get_close_matches(key, (*NUMBERS, *INTERVALS, *OPTIONAL), 1)
        change = f"Did you mean {near[0]}?" if near else f"Known: {', '.join((*NUMBERS, *INTERVALS, *OPTIONAL))}"
        violations.append(Violation(f"device.{key}", "unknown field", change))
    for key in (*NUMBERS, *INTERVALS):
        if key not in values:
            rule = f"{key} is missing"
            violations.append(Violation(f"device.{key}", rule, "Write it under [change], or name a shipped device"))
    for key, value in values.items():
        is_right = _is_interval(value) if key in INTERVALS else _is_number(value)
        if not is_right:
            wanted = "one number above 0, or three that rise" if key in INTERVALS else "a number above 0"
            violations.append(Violation(f"device.{key}", f"{key} is {value!r}", f"Write {wanted}"))
    if violations:
        raise ConfigError(violations)
    return _build(name, values, origins)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_interval(value: Any) -> bool:
    if not isinstance(value, list):
        return _is_number(value)
    return len(value) == 3 and all(_is_number(part) for part in value) and value == sorted(value)


def _interval(value: Any) -> Interval:
    return Interval(*value) if isinstance(value, list) else Interval(value, value, value)


def _build(name: str, values: Table, origins: dict[str, str]) -> Device:
    def link(kind: str) -> Link:
        share = _interval(values[f"{kind}_share"])
        curve = Curve(values[f"{kind}_bytes_per_s"], share, values[f"{kind}_half_bytes"])
        return Link(curve, _interval(values[f"{kind}_base_s"]), _interval(values[f"{kind}_hop_s"]))

    rates = {p: values[f"{p}_flop_per_s"] for p in ("bf16", "fp8", "fp32") if f"{p}_flop_per_s" in values}
    optional = {key: values[key] for key in ("price_per_hour", "cpu_cores", "scale_up_size") if key in values}
    return Device(
        name=name,
        flop_per_s=rates,
        memory_bytes=values["memory_bytes"],
        memory_bytes_per_s=values["memory_bytes_per_s"],
        matmul_share=_interval(values["matmul_share"]),
        memory_share=_interval(values["memory_share"]),
        op_latency_s=_interval(values["op_latency_s"]),
        scale_up=link("scale_up"),
        network=link("network"),
        host_bytes_per_s=values["host_bytes_per_s"],
        sources=origins,
        **optional,
    )
