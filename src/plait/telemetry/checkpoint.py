"""Checkpoints that are whole or not there: what is needed to resume a run, on disk.

`step-N/` holds one safetensors file per group of tensors, `state.json`, and `manifest.json`, written last,
with the size and the SHA-256 of every file and of itself. A checkpoint becomes visible by one rename.

A rename cannot replace a folder that is not empty, so saving step N again first moves the old one aside as
`.replaced-step-N-...`; `latest` knows it, and the next save puts it back if the new one did not arrive.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.errors import CheckpointError
from plait.telemetry.files import (
    PARTIAL_PREFIX,
    describe_free_space,
    format_bytes,
    fsync_directory,
    write_atomically,
    write_synced,
)
from plait.telemetry.manifest import ADVICE, MANIFEST, Manifest, describe_file, read_manifest, verify_files

STATE = "state.json"
BEST = "best.json"
TENSORS_SUFFIX = ".safetensors"
_REPLACED_PREFIX = ".replaced-"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_REPLACED_STEP = re.compile(r"\.replaced-(step-(?:0|[1-9][0-9]*))-[0-9a-f]{8}")
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved. tensors: file stem -> name -> tensor on the CPU. state: as JSON gives it back.

    folder: where it lies, for what ranks have written into it themselves.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    folder: Path


class CheckpointRef(NamedTuple):
    """A complete checkpoint."""

    step: int
    path: Path


class PassedOver(NamedTuple):
    """A folder that is not a complete checkpoint, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Latest:
    """newest: the checkpoint to resume from, None without any. passed_over: to be shown to the user."""

    newest: CheckpointRef | None
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint with the highest accuracy (share of 1) in an evaluation."""

    step: int
    accuracy: float


class CheckpointStore:
    """The checkpoints of one run. One process writes; the run's lock sees to that.

    "Newest" means saved last: after a resume from an older step, what is saved then outranks the later
    steps of the abandoned attempt.
    """

    def __init__(self, root: Path, keep: int):
        """keep: newest checkpoints kept; the best by `mark_best` is kept beside them."""
        assert keep >= 1, f"keep is {keep}; at least 1 was expected"
        self.root = root
        self.keep = keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        write_more: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """Write a checkpoint, then remove those that need not be kept. Returns its folder.

        tensors: file stem -> name -> tensor. Tensors that share memory are stored once each.
        state: JSON; tuples come back as lists and keys as text. TypeError for what JSON cannot hold.
        write_more: writes files of its own into the folder before it counts; OSError where it cannot.
        CheckpointError where it cannot be written; earlier checkpoints are untouched then.
        """
        assert step >= 0, f"step is {step}; a step is not negative"
        assert all(_STEM.fullmatch(stem) for stem in tensors), f"file stems {list(tensors)} are not file names"
        state_data = json.dumps(state).encode()  # before any file is made: it can raise TypeError
        num_bytes = len(state_data) + sum(t.nbytes for named in tensors.values() for t in named.values())
        target = self.root / f"step-{step}"
        partial = self.root / f"{PARTIAL_PREFIX}{target.name}-{secrets.token_hex(4)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._clean_up()
            partial.mkdir()
            for stem, named in tensors.items():
                _write_tensors(partial / f"{stem}{TENSORS_SUFFIX}", named)
            write_more(partial)
            write_synced(partial / STATE, state_data)
            files = tuple(describe_file(path) for path in sorted(partial.iterdir()))
            write_synced(partial / MANIFEST, Manifest(step, self._next_sequence(), files).encode())
            fsync_directory(partial)
            self._publish(partial, target)
        except (OSError, SafetensorError) as error:
            self._give_up(partial)
            raise CheckpointError(
                f"{target}: the checkpoint cannot be written: {_reason(error)}. It needs "
                f"{format_bytes(num_bytes)}. {describe_free_space(_existing_parent(self.root))} "
                "Make room, lower checkpoint.keep, or run on another disk, then resume: "
                "earlier checkpoints are untouched."
            ) from error
        self._retain()
        return target

    def _publish(self, partial: Path, target: Path) -> None:
        if target.exists():
            replaced = self.root / f"{_REPLACED_PREFIX}{target.name}-{secrets.token_hex(4)}"
            os.rename(target, replaced)
            try:
                os.rename(partial, target)
            except OSError:
                os.rename(replaced, target)
                raise
            fsync_directory(self.root)
            self._discard(replaced)
        else:
            os.rename(partial, target)
            fsync_directory(self.root)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint that a saved one makes superfluous."""
        # Renamed first, so that a crash half-way leaves no folder that looks like a checkpoint.
        doomed = self.root / f"{PARTIAL_PREFIX}old-{path.name}-{secrets.token_hex(4)}"
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(
                f"{path}: this old checkpoint cannot be removed: {_reason(error)}. The new one is saved. "
                "Give write permission on the folder, then resume."
            ) from error

    def _give_up(self, partial: Path) -> None:
        try:
            if partial.exists():
                shutil.rmtree(partial)
        except OSError:
            return  # the first error is the one to report; the next save removes what is left

    def _clean_up(self) -> None:
        """Remove what an interrupted save left, and put back a checkpoint that it had moved aside."""
        for path in sorted(self.root.iterdir()):
            if path.name.startswith(PARTIAL_PREFIX):
                _remove(path)
            elif match := _REPLACED_STEP.fullmatch(path.name):
                target = self.root / match[1]
                if target.exists():
                    shutil.rmtree(path)
                else:
                    os.rename(path, target)

    def _candidates(self) -> list[Path]:
        """Folders that may be checkpoints; one moved aside counts only while its place is empty."""
        if not self.root.is_dir():
            return []
        paths = sorted(self.root.iterdir())
        present = {path.name for path in paths}
        steps = [path for path in paths if _STEP.fullmatch(path.name)]
        for path in paths:
            match = _REPLACED_STEP.fullmatch(path.name)
            if match and match[1] not in present:
                steps.append(path)
        return steps

    def _manifests(self) -> list[tuple[Path, Manifest]]:
        """Checkpoints with a sound manifest, the one saved last first; their files are not looked at."""
        found = []
        for path in self._candidates():
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError:
                continue  # damaged: `latest` reports it, and nothing removes it
        return sorted(found, key=lambda item: item[1].sequence, reverse=True)

    def _next_sequence(self) -> int:
        return max((manifest.sequence for _, manifest in self._manifests()), default=0) + 1

    def latest(self) -> Latest:
        """The checkpoint saved last that is complete, every byte checked, and what was passed over for it."""
        passed_over = []
        if self.root.is_dir():
            for path in sorted(self.root.iterdir()):
                if path.name.startswith(PARTIAL_PREFIX):
                    passed_over.append(PassedOver(path.name, "its writing was interrupted"))
        ranked = self._manifests()
        sound = {path for path, _ in ranked}
        for path in self._candidates():
            if path not in sound:
                passed_over.append(PassedOver(path.name, _damage(path)))
        for path, manifest in ranked:
            try:
                verify_files(path, manifest)
            except CheckpointError as error:
                passed_over.append(PassedOver(path.name, str(error)))
                continue
            return Latest(CheckpointRef(manifest.step, path), tuple(passed_over))
        return Latest(None, tuple(passed_over))

    def complete(self) -> list[CheckpointRef]:
        """Checkpoints with a sound manifest, by step; `load` checks their files."""
        return sorted(CheckpointRef(manifest.step, path) for path, manifest in self._manifests())

    def load(self, path: Path) -> Checkpoint:
        """Read a checkpoint after checking every byte. CheckpointError names the file that is damaged."""
        manifest = read_manifest(path)
        verify_files(path, manifest)
        tensors = {}
        for file in manifest.files:
            if file.name.endswith(TENSORS_SUFFIX):
                tensors[file.name.removesuffix(TENSORS_SUFFIX)] = _read_tensors(path / file.name)
        try:
            state = json.loads((path / STATE).read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / STATE} cannot be read: {error}. {ADVICE}") from error
        return Checkpoint(manifest.step, tensors, state, path)

    def mark_best(self, step: int, accuracy: float) -> bool:
        """Note that the checkpoint of `step` reached this accuracy; True if it is the best now.

        A higher accuracy replaces the record, and so does any of the same step. CheckpointError where there
        is no such checkpoint or the record cannot be written.
        """
        assert 0 <= accuracy <= 1, f"accuracy is {accuracy}; a share was expected"
        if not (self.root / f"step-{step}").is_dir():
            raise CheckpointError(f"{self.root}: step {step} cannot be the best: it has no checkpoint. Save it first.")
        best = self.best()
        if best is not None and best.step != step and accuracy <= best.accuracy:
            return False
        path = self.root / BEST
        try:
            write_atomically(path, json.dumps({"step": step, "accuracy": accuracy}).encode())
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {_reason(error)}. {describe_free_space(self.root)} "
                "Make room or give write permission, then resume."
            ) from error
        return True

    def best(self) -> Best | None:
        """The best checkpoint so far. CheckpointError where its record is damaged."""
        path = self.root / BEST
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_bytes())
            return Best(int(data["step"]), float(data["accuracy"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). Delete it; the next evaluation writes it anew."
            ) from error

    def _retain(self) -> None:
        """Remove the complete checkpoints beyond the newest `keep`, but never the best."""
        best = self.best()
        for path, manifest in self._manifests()[self.keep :]:
            if best is None or manifest.step != best.step:
                self._discard(path)


def _damage(path: Path) -> str:
    try:
        read_manifest(path)
    except CheckpointError as error:
        return str(error)
    raise AssertionError(f"{path} was damaged a moment ago")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _reason(error: OSError | SafetensorError) -> str:
    # safetensors reports a full disk as its own error, with the system's words in the text
    return str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    save_file(_separate(named), path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU without shared memory, which safetensors does not accept."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        own = tensor.detach().to("cpu").contiguous()
        if own.numel():
            address = own.untyped_storage().data_ptr()
            if address in seen:
                own = own.clone()
            seen.add(own.untyped_storage().data_ptr())
        result[name] = own
    return result


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}. {ADVICE}") from error
    assert all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())
    return loaded
