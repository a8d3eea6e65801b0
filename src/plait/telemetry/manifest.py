"""The manifest of a checkpoint: what every file of it must be, to the byte."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
ADVICE = "Resume from another checkpoint of the run, or copy this one again from where it is whole."


@dataclass(frozen=True, slots=True)
class FileEntry:
    """sha256: of the whole content, in hexadecimal."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """sequence: rises with each checkpoint saved in a run; the highest was saved last."""

    step: int
    sequence: int
    files: tuple[FileEntry, ...]

    def encode(self) -> bytes:
        """JSON with a SHA-256 of its own content."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "sequence": self.sequence,
            "files": [asdict(file) for file in self.files],
        }
        return _encode(body)


def _encode(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """CheckpointError where the manifest is missing, damaged in any byte, or of another format."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): the checkpoint is incomplete. {ADVICE}"
        ) from error
    try:
        body = json.loads(data)
        del body["sha256"]
        is_whole = _encode(body) == data
        format_number = body["format"]
        files = tuple(FileEntry(**file) for file in body["files"])
        manifest = Manifest(body["step"], body["sequence"], files)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). {ADVICE}") from error
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its content does not match its SHA-256. {ADVICE}")
    if format_number != FORMAT:
        raise CheckpointError(
            f"{path} has format {format_number}; this version of Plait reads format {FORMAT}. "
            "Resume with the version that wrote it."
        )
    return manifest


def describe_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file as it is now. OSError where it cannot be read."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.name, path.stat().st_size, digest)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """CheckpointError naming the first file that is missing, too short, too long or altered."""
    for expected in manifest.files:
        path = folder / expected.name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != expected.size_bytes:
                raise CheckpointError(
                    f"{path} has {size_bytes} bytes; its manifest says {expected.size_bytes}. {ADVICE}"
                )
            actual = describe_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {ADVICE}") from error
        if actual != expected:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of its manifest. {ADVICE}")
