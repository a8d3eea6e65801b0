"""`plait doctor`: what this machine has, what it measures, and what it can run."""

import importlib.util
import os
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plait.jobs.machine import usable_cores
from plait.models.cpu_features import bf16_flags
from plait.models.dtype import faster_dtype
from plait.models.folder import ModelFolderError, model_folder, read_model_facts

if TYPE_CHECKING:
    from rich.console import RenderableType

_PACKAGES = ("plait", "torch", "transformers", "tokenizers", "reasoning-gym", "numpy", "pydantic")
_OPTIONAL = {"tensorboard": "logging.tensorboard", "pyarrow": "row files in Parquet"}
_MATRIX = 1024
"""Side of the matrices that are multiplied, on a CPU; a GPU gets four times the side."""
_MEASURE_S = 0.3
_CLEAR = 1.1
"""Ratio from which a measurement is taken to say anything."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device: its measured rates, the dtype that compute_dtype = "auto" takes, and the faster one."""

    name: str
    kind: str
    memory_bytes: int
    float32_flop_per_s: float
    bfloat16_flop_per_s: float
    auto_dtype: str
    measured_dtype: str

    @property
    def ratio(self) -> float:
        """How many times as fast bf16 is as fp32."""
        return self.bfloat16_flop_per_s / self.float32_flop_per_s

    @property
    def agrees(self) -> bool:
        """Whether flags and measurement name the same dtype, or the measurement is a tie."""
        return self.auto_dtype == self.measured_dtype or max(self.ratio, 1 / self.ratio) < _CLEAR


@dataclass(frozen=True, slots=True)
class DoctorReport:
    os: str
    python: str
    cpu: str
    cores: int
    memory_bytes: int
    free_disk_bytes: int
    bf16_flags: tuple[str, ...]
    versions: dict[str, str]
    optional: dict[str, bool]
    devices: tuple[Device, ...]
    starter: str
    can_run: tuple[str, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> "RenderableType":
        return _render(self)


def doctor() -> DoctorReport:
    """Look at this machine; a few seconds of measurement. Raises nothing for what is merely missing."""
    devices = [_device("cpu", _cpu_model(), _memory_bytes())]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(_device(f"cuda:{index}", properties.name, properties.total_memory))
    starter, problem = _starter()
    problems = [problem] if problem else []
    problems += [
        f"{device.name}: the flags say {device.auto_dtype}, and {device.measured_dtype} measured faster "
        f'({device.ratio:.2f} x). Set model.compute_dtype = "{device.measured_dtype}" to go by that'
        for device in devices
        if not device.agrees
    ]
    can_run = ["plait train in one process on the CPU"]
    can_run += ["plait train in one process on one GPU"] if len(devices) > 1 else []
    return DoctorReport(
        os=f"{platform.system()} {platform.release()} ({platform.machine()})",
        python=platform.python_version(),
        cpu=_cpu_model(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        bf16_flags=bf16_flags(),
        versions={name: _version(name) for name in _PACKAGES},
        optional={name: importlib.util.find_spec(name) is not None for name in _OPTIONAL},
        devices=tuple(devices),
        starter=starter,
        can_run=tuple(can_run),
        problems=tuple(problems),
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _device(kind: str, name: str, memory_bytes: int) -> Device:
    rates = {dtype: _matmul_flop_per_s(kind, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return Device(
        name=name,
        kind=kind,
        memory_bytes=memory_bytes,
        float32_flop_per_s=rates[torch.float32],
        bfloat16_flop_per_s=rates[torch.bfloat16],
        auto_dtype=faster_dtype(kind),
        measured_dtype="bfloat16" if rates[torch.bfloat16] > rates[torch.float32] else "float32",
    )


def _matmul_flop_per_s(device: str, dtype: torch.dtype) -> float:
    """Median rate of square matrix products over a short while."""
    is_cuda = device.startswith("cuda")
    side = _MATRIX * 4 if is_cuda else _MATRIX
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds: list[float] = []
    left @ right  # the first product of a type prepares its kernel
    deadline = time.perf_counter() + _MEASURE_S
    while len(seconds) < 3 or time.perf_counter() < deadline:
        if is_cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        left @ right
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / sorted(seconds)[len(seconds) // 2]


def _starter() -> tuple[str, str]:
    """(what became of the starter model, problem or "")."""
    try:
        read_model_facts("starter")
    except ModelFolderError as error:
        return "missing", f"the starter model is not complete: {error}; install plait again"
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(model_folder("starter"), local_files_only=True)
    except (OSError, ValueError) as error:
        return "does not load", f"the starter model does not load: {error}; install plait again"
    return f"loads ({sum(p.numel() for p in model.parameters()):,} parameters)", ""


def _render(report: DoctorReport) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    machine = Table("this machine", "", title_justify="left")
    rows = [
        ("system", report.os),
        ("python", report.python),
        ("processor", f"{report.cpu}, {report.cores} usable cores"),
        ("memory", f"{report.memory_bytes / 2**30:.1f} GiB"),
        ("free disk here", f"{report.free_disk_bytes / 2**30:.1f} GiB"),
        ("bf16 in hardware", ", ".join(report.bf16_flags) or "no AVX512_BF16 and no AMX"),
        ("CUDA devices", str(len(report.devices) - 1)),
        ("starter model", report.starter),
        *((name, found) for name, found in report.versions.items()),
        *(
            (name, f"{'there' if found else 'not installed'} ({_OPTIONAL[name]})")
            for name, found in report.optional.items()
        ),
    ]
    for row in rows:
        machine.add_row(*map(Text, row))
    rates = Table("device", "fp32", "bf16", "bf16 / fp32", '"auto" takes', "agree")
    for device in report.devices:
        rates.add_row(
            f"{device.kind} ({device.name})",
            f"{device.float32_flop_per_s / 1e9:,.0f} GFLOP/s",
            f"{device.bfloat16_flop_per_s / 1e9:,.0f} GFLOP/s",
            f"{device.ratio:.2f} x",
            device.auto_dtype,
            "yes" if device.agrees else "no",
        )
    lines = [Text(f"Can run: {what}", style="green") for what in report.can_run]
    lines += [Text(problem, style="yellow") for problem in report.problems]
    return Group(machine, rates, *lines)
