"""pair: two answers to one prompt, the first better than the second. A pair is a Group of these two samples."""

import numpy as np

from plait.algorithm_config import AlgorithmConfig
from plait.batch import Group, Sample, Verdict
from plait.data.stream import EncodedPrompt
from plait.stages.advantage import is_trained


def best_and_worst(groups: list[Group], algorithm: AlgorithmConfig) -> list[Group]:
    """The pair of each group, in order; of equal samples the first. A group whose rewards are all equal has none."""
    pairs = []
    for group in groups:
        samples = [sample for sample in group.samples if is_trained(sample, algorithm)]
        if not samples:
            continue
        best, worst = max(samples, key=_reward), min(samples, key=_reward)
        if best.reward > worst.reward:
            pairs.append(Group(group.prompt, [best, worst]))
    return pairs


def _reward(sample: Sample) -> float:
    return sample.reward


def given_pair(encoded: EncodedPrompt, version: int) -> Group:
    """The pair of a row. Nothing sampled these answers: their log-probabilities under an engine are NaN."""
    assert encoded.answers is not None, f"prompt {encoded.prompt.id} comes without a chosen and a rejected answer"
    assert encoded.prompt.preference is not None, "the answers are those of the prompt's row"
    kinds = (("chosen", 1.0, "correct"), ("rejected", 0.0, "wrong"))
    samples = []
    for (kind, score, detail), ids, text in zip(kinds, encoded.answers, encoded.prompt.preference, strict=True):
        samples.append(
            Sample(
                id=f"{encoded.prompt.id}#{kind}",
                prompt=encoded.prompt,
                prompt_ids=encoded.ids,
                response_ids_R=np.array(ids, dtype=np.int32),
                rollout_logprobs_R=np.full(len(ids), np.nan, dtype=np.float32),
                versions_R=np.full(len(ids), version, dtype=np.int32),
                response_mask_R=np.ones(len(ids), dtype=bool),
                finish="stop",
                seed=0,
                text=text,
                verdict=Verdict("scored", score, detail=detail),
            )
        )
    return Group(encoded.prompt, samples)
