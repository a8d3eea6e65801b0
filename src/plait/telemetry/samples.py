"""samples.jsonl: what the model wrote and what the verifier said of it, with the tokens to compute it again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.batch import Prompt, Sample
from plait.errors import PlaitError
from plait.telemetry.files import JsonLinesFile, iterate_json_lines
from plait.telemetry.run_dir import to_plain


class SamplesLog:
    """Writes samples.jsonl, one record per sample, flushed per record. Steps do not fall."""

    def __init__(self, path: Path, *, _continued: int | None = None):
        """Begin a new file; PlaitError if there is one (`reopen` continues it)."""
        self._last_step = -1
        if _continued is None:
            self._file = JsonLinesFile(path, exclusive=True)
        else:
            self._file = JsonLinesFile.reopen(path, lambda record: _step_of(path, record) <= _continued, self._seen)

    @classmethod
    def reopen(cls, path: Path, last_step: int) -> "SamplesLog":
        """Continue after a resume: records after `last_step` and a torn last line are dropped atomically.

        A missing file is begun anew. PlaitError where a line before the last is damaged.
        """
        return cls(path, _continued=last_step)

    def _seen(self, record: Mapping[str, Any]) -> None:
        self._last_step = record["step"]

    def write(self, step: int, samples: Iterable[Sample]) -> None:
        """Write samples that were scored. PlaitError where the file cannot be written."""
        assert step >= self._last_step, f"samples of step {step} after those of step {self._last_step}"
        self._last_step = step
        for sample in samples:
            self._file.append(sample_record(step, sample))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "SamplesLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _step_of(path: Path, record: Mapping[str, Any]) -> int:
    if "step" in record and isinstance(record["step"], int):
        return record["step"]
    raise PlaitError(f"{path}: a line has no step; it is not a samples file of Plait.")


def sample_record(step: int, sample: Sample) -> dict[str, Any]:
    """One line of samples.jsonl: what a person reads first, then the tokens, from which `plait replay` works.

    policy_version: the oldest among its tokens, null without tokens. reward_parts: where the reward is more than the
    verifier's score: that score, what reward models said, and what shaping added.
    rollout_logprobs: 7 significant digits, which is within 1e-7 of the value's size.
    """
    verdict = sample.verdict
    assert verdict is not None, f"sample {sample.id} was not scored yet"
    versions = sample.versions_R
    parts = {**sample.reward_scores, **{f"shaping/{kind}": value for kind, value in sample.shaping.items()}}
    more = {"reward_parts": to_plain({"verifier": sample.score, **parts})} if parts else {}
    return {
        "id": sample.id,
        "step": step,
        "task": sample.prompt.task,
        "prompt": prompt_text(sample.prompt),
        "completion": sample.text,
        "reward": to_plain(sample.reward),
        **more,
        "verdict": {"kind": verdict.kind, "detail": verdict.detail, "reason": verdict.reason},
        "parts": to_plain(verdict.parts),
        "policy_version": int(versions.min()) if versions.size else None,
        "response_tokens": sample.num_response_tokens,
        "finish": sample.finish,
        "seed": sample.seed,
        "versions": version_runs(versions.tolist()),
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": sample.response_ids_R.tolist(),
        "rollout_logprobs": to_plain([float(f"{value:.7g}") for value in sample.rollout_logprobs_R.tolist()]),
    }


def version_runs(versions: Sequence[int]) -> list[list[int]]:
    """Policy versions of successive tokens, shortened to [index of the first token, version] of each run of equals."""
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    return [[i, versions[i]] for i in starts]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """The tokens of a line of samples.jsonl. rollout_logprobs: of the response ids; None where it was not finite.

    versions: see `version_runs`.
    """

    id: str
    step: int
    seed: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float | None, ...]
    versions: tuple[tuple[int, int], ...]


def read_samples(path: Path) -> list[StoredSample]:
    """Every stored sample, also of a run that is still writing. PlaitError where they cannot be read."""
    try:
        return [_stored(path, record) for _, record in iterate_json_lines(path)]
    except OSError as error:
        raise PlaitError(
            f"{path} cannot be read: {error.strerror}. It is begun with the run; check the run's name."
        ) from error


def _stored(path: Path, record: Mapping[str, Any]) -> StoredSample:
    try:
        return StoredSample(
            id=record["id"],
            step=record["step"],
            seed=record["seed"],
            prompt_ids=tuple(record["prompt_ids"]),
            response_ids=tuple(record["response_ids"]),
            rollout_logprobs=tuple(record["rollout_logprobs"]),
            versions=tuple((first, version) for first, version in record["versions"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlaitError(
            f"{path}: a sample has no usable {error}: it was written by another version of Plait, or changed since. "
            "Replay it with the version that wrote it."
        ) from error


def prompt_text(prompt: Prompt) -> str:
    """The chat for reading: a lone message as it is, several with their roles; then the prefilled text."""
    if len(prompt.messages) == 1:
        text = prompt.messages[0].content
    else:
        text = "\n\n".join(f"{message.role}: {message.content}" for message in prompt.messages)
    return f"{text}\n\nassistant: {prompt.prefix}" if prompt.prefix else text
