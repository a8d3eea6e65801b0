"""generate: sample completions of prompts and record them as they were sampled."""

from collections.abc import Callable, Sequence

import numpy as np

from plait.batch import Group, Sample
from plait.config import SamplingConfig
from plait.data.stream import EncodedPrompt, stream_seed
from plait.models.load import Tokenizer
from plait.rollout.engine import Completion, Engine
from plait.rollout.scheduler import Request


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[EncodedPrompt],
    *,
    num_samples: int,
    max_completion_tokens: int,
    sampling: SamplingConfig,
    seed_key: tuple[int | str, ...],
    on_sample: Callable[[Sample], None] | None = None,
) -> list[Group]:
    """num_samples completions of each prompt, grouped, in the order of the prompts.

    Each sample has a seed of its own, derived from seed_key, its prompt's id and its index. on_sample is told of each
    as soon as it is finished, while others are still being decoded.
    """
    requests, prompt_of = [], {}
    for encoded in prompts:
        for index in range(num_samples):
            sample_id = f"{encoded.prompt.id}#{index}"
            seed = stream_seed(*seed_key, encoded.prompt.id, index)
            requests.append(Request(sample_id, encoded.ids, seed, max_completion_tokens))
            prompt_of[sample_id] = encoded
    assert len(prompt_of) == len(requests), "two prompts of one step have the same id"
    samples = {}
    for completion in engine.generate(requests, sampling):
        sample = _sample(completion, prompt_of[completion.request.id], tokenizer)
        samples[sample.id] = sample
        if on_sample is not None:
            on_sample(sample)
    return [Group(e.prompt, [samples[f"{e.prompt.id}#{index}"] for index in range(num_samples)]) for e in prompts]


def _sample(completion: Completion, encoded: EncodedPrompt, tokenizer: Tokenizer) -> Sample:
    return Sample(
        id=completion.request.id,
        prompt=encoded.prompt,
        prompt_ids=encoded.ids,
        response_ids_R=completion.token_ids_R,
        rollout_logprobs_R=completion.logprobs_R,
        versions_R=completion.versions_R,
        response_mask_R=np.ones(len(completion.token_ids_R), dtype=bool),
        finish=completion.finish,
        seed=completion.request.seed,
        text=tokenizer.decode(completion.token_ids_R.tolist()),
        experts_TLK=completion.experts_TLK,
    )
