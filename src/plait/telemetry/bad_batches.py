"""bad_batches/: the batch of a step with an update that was not applied, kept so that the update can be made again.

`step-K.json` is for reading (samples, verdicts, what was found) and holds the token ids; `step-K.npz` beside it holds
the numbers that text would round. The JSON is written last: a batch is kept where it is there.
"""

import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.batch import Group, Prompt, Sample, Verdict
from plait.errors import PlaitError
from plait.telemetry.files import describe_free_space, encode_json, write_atomically
from plait.telemetry.run_dir import to_plain
from plait.telemetry.samples import sample_record

MAX_KEPT = 3
"""Newest batches that stay. After max_nonfinite_updates in a row (3 by default) a run stops, so the first of them is
among the kept; and the weights of old steps take long to make again."""

_NAME = re.compile(r"step-([1-9][0-9]*)\.json")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the updates of one step read.

    streams: name -> sample id -> numbers, one per loss token.
    kl_coefficient: the one that held in this step.
    found: what the run saw, for people: norms of the gradients, parameter names.
    """

    step: int
    groups: list[Group]
    streams: dict[str, dict[str, NDArray[np.floating]]]
    kl_coefficient: float
    found: dict[str, Any]


class BadBatches:
    """The kept batches of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps whose batch is kept, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def keep(self, batch: StepBatch) -> Path:
        """Write a batch, and remove the oldest beyond MAX_KEPT. Returns the JSON file.

        PlaitError where it cannot be written.
        """
        path = self._json(batch.step)
        arrays = io.BytesIO()
        np.savez(arrays, **_arrays(batch))  # type: ignore[arg-type]
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomically(self._npz(batch.step), arrays.getvalue())
            write_atomically(path, encode_json(_record(batch), indent=1))
            for step in self.steps()[:-MAX_KEPT]:
                self._remove(step)
        except OSError as error:
            raise PlaitError(
                f"{path}: the batch of an update that is not finite cannot be kept: {error.strerror}. "
                f"{describe_free_space(self.folder.parent)} Make room or give write permission, then resume the run."
            ) from error
        return path

    def drop_after(self, step: int) -> None:
        """Remove the batches of later steps: a resumed run makes those steps again."""
        for kept in self.steps():
            if kept > step:
                self._remove(kept)

    def load(self, step: int) -> StepBatch:
        """A kept batch, number for number. PlaitError where it is missing or damaged."""
        path = self._json(step)
        try:
            record = json.loads(path.read_bytes())
            with np.load(io.BytesIO(self._npz(step).read_bytes()), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return _batch(record, arrays)
        except OSError as error:
            raise PlaitError(f"{path} or the .npz beside it cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise PlaitError(
                f"{path} or the .npz beside it is damaged, or was written by another version of Plait ({error}). "
                "Restore them, or remove both and make the step again with --rerun"
            ) from error

    def _json(self, step: int) -> Path:
        return self.folder / f"step-{step}.json"

    def _npz(self, step: int) -> Path:
        return self.folder / f"step-{step}.npz"

    def _remove(self, step: int) -> None:
        self._json(step).unlink()
        self._npz(step).unlink(missing_ok=True)


def _samples(batch: StepBatch) -> list[Sample]:
    return [sample for group in batch.groups for sample in group.samples]


def _record(batch: StepBatch) -> dict[str, Any]:
    """The readable part: the lines of samples.jsonl, with what a verifier needs to judge again."""
    samples = []
    for sample in _samples(batch):
        prompt = sample.prompt
        given = {"verifier": prompt.verifier, "answer": prompt.answer, "payload": prompt.payload}
        shown = {name: _shown(values[sample.id]) for name, values in batch.streams.items() if sample.id in values}
        samples.append(
            sample_record(batch.step, sample)
            | {"prompt_id": prompt.id, "to_verify": {key: _plain(value) for key, value in given.items()}}
            | {"score": to_plain(sample.score)}
            | shown
        )
    found = to_plain(batch.found)
    return {"step": batch.step, "kl_coefficient": batch.kl_coefficient, "found": found, "samples": samples}


def _plain(value: Any) -> Any:
    """As JSON where it can be; a user's object is shown as Python does."""
    try:
        return to_plain(value)
    except TypeError:
        return repr(value)


def _shown(values: NDArray[np.floating]) -> Any:
    """Infinities and NaN by name, since they are what one looks for here."""
    return [value if np.isfinite(value) else str(value) for value in values.tolist()]


def _arrays(batch: StepBatch) -> dict[str, NDArray[Any]]:
    """Numbers of all samples, one after the other; "NAME/length" tells them apart, -1 where a sample has none."""
    samples = _samples(batch)
    arrays: dict[str, NDArray[Any]] = {
        "rollout_logprobs": _joined([sample.rollout_logprobs_R for sample in samples], np.float32),
        "response_mask": _joined([sample.response_mask_R for sample in samples], np.bool_),
    }
    for name, values in batch.streams.items():
        lengths = [len(values[sample.id]) if sample.id in values else -1 for sample in samples]
        arrays[f"{name}/length"] = np.array(lengths, dtype=np.int64)
        arrays[name] = _joined([values[sample.id] for sample in samples if sample.id in values], np.float32)
    return arrays


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """dtype: where there are no parts."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _batch(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> StepBatch:
    rows = record["samples"]
    ends = np.cumsum([len(row["response_ids"]) for row in rows])[:-1]
    logprobs, masks = (np.split(arrays[name], ends) for name in ("rollout_logprobs", "response_mask"))
    groups: dict[str, Group] = {}
    for row, rollout_logprobs_R, response_mask_R in zip(rows, logprobs, masks, strict=True):
        given = row["to_verify"]
        prompt = Prompt(row["prompt_id"], row["task"], (), given["answer"], given["verifier"], given["payload"])
        group = groups.setdefault(prompt.id, Group(prompt, []))
        group.samples.append(_sample(row, group.prompt, rollout_logprobs_R, response_mask_R))
    streams = {}
    for name in (key.removesuffix("/length") for key in arrays if key.endswith("/length")):
        lengths = arrays[f"{name}/length"]
        present = [row["id"] for row, length in zip(rows, lengths, strict=True) if length >= 0]
        ends = np.cumsum(lengths[lengths >= 0])[:-1]
        streams[name] = dict(zip(present, np.split(arrays[name], ends), strict=True)) if present else {}
    return StepBatch(record["step"], list(groups.values()), streams, record["kl_coefficient"], record["found"])


def _sample(
    row: Mapping[str, Any],
    prompt: Prompt,
    rollout_logprobs_R: NDArray[np.float32],
    response_mask_R: NDArray[np.bool_],
) -> Sample:
    verdict, runs = row["verdict"], row["versions"]
    ids_R = np.array(row["response_ids"], dtype=np.int32)
    versions_R = np.zeros(len(ids_R), dtype=np.int32)
    for first, version in runs:
        versions_R[first:] = version
    return Sample(
        id=row["id"],
        prompt=prompt,
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids_R=ids_R,
        rollout_logprobs_R=rollout_logprobs_R,
        versions_R=versions_R,
        response_mask_R=response_mask_R,
        finish=row["finish"],
        seed=row["seed"],
        text=row["completion"],
        verdict=Verdict(verdict["kind"], float(row["score"]), verdict["reason"], verdict["detail"]),
    )
