"""The embedded rollout engine: continuous batching over KV slots, one random stream per sample."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from plait.batch import FinishReason
from plait.config import SamplingConfig
from plait.rollout.runner import ModelRunner
from plait.rollout.sampler import sample_tokens
from plait.rollout.scheduler import Request, Scheduler


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request. R sampled tokens, the end token included where one was sampled."""

    request: Request
    token_ids_R: NDArray[np.int32]
    logprobs_R: NDArray[np.float32]
    versions_R: NDArray[np.int32]
    finish: FinishReason


class Engine:
    """Samples completions from a model; `version` is the policy version of the weights it holds."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: tuple[int, ...],
        num_slots: int,
        max_sequence_tokens: int,
    ):
        self.version = 0
        self.model = model
        self._runner = ModelRunner(model, num_slots=num_slots, max_sequence_tokens=max_sequence_tokens)
        self._scheduler = Scheduler(num_slots)
        self._sampling = SamplingConfig()
        self._max_sequence_tokens = max_sequence_tokens
        self._device = next(model.parameters()).device
        self._end_ids = torch.tensor(end_token_ids, device=self._device)
        shape = (num_slots, max_sequence_tokens)
        self._uniform = torch.zeros(shape, device=self._device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(shape, device=self._device)
        self._versions = torch.zeros(shape, dtype=torch.int32, device=self._device)

    def generate(self, requests: Iterable[Request], sampling: SamplingConfig) -> Iterator[Completion]:
        """Sample every request; completions come as they finish."""
        assert self._scheduler.is_idle, "requests with other sampling settings are still being decoded"
        self._sampling = sampling
        self.submit(requests)
        while not self._scheduler.is_idle:
            yield from self.step()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Prompt and limit together must fit a slot."""
        requests = list(requests)
        for request in requests:
            needed = len(request.prompt_ids) + request.max_tokens
            assert request.prompt_ids, f"request {request.id} has an empty prompt"
            assert needed <= self._max_sequence_tokens, (
                f"request {request.id} may need {needed} tokens, and a slot holds {self._max_sequence_tokens}"
            )
        self._scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Fill free slots, then sample one token in every occupied one; returns what finished."""
        finished = self._admit()
        if running := self._scheduler.running:
            num_tokens = [r.num_tokens for r in running]
            positions_n = torch.tensor(num_tokens, device=self._device) - 1
            made_n = torch.tensor([r.num_tokens - len(r.request.prompt_ids) for r in running], device=self._device)
            rows_n = torch.arange(len(running), device=self._device)
            logits_nV = self._runner.decode(self._tokens[rows_n, made_n - 1], positions_n, max(num_tokens))
            finished += self._sample(logits_nV, rows_n, made_n)
        return finished

    def _admit(self) -> list[Completion]:
        """Prefill admitted requests, each distinct prompt once, and sample their first tokens."""
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, request in admitted:
            slots_of.setdefault(request.prompt_ids, []).append(slot)
            stream = torch.Generator().manual_seed(request.seed)
            self._uniform[slot, : request.max_tokens] = torch.rand(request.max_tokens, generator=stream)
        logits_pV = self._runner.prefill(list(slots_of), list(slots_of.values()))
        rows = [(slot, prompt) for prompt, slots in enumerate(slots_of.values()) for slot in slots]
        rows_n = torch.tensor([slot for slot, _ in rows], device=self._device)
        prompt_n = torch.tensor([prompt for _, prompt in rows], device=self._device)
        return self._sample(logits_pV[prompt_n], rows_n, torch.zeros_like(rows_n))

    def _sample(self, logits_nV: Tensor, rows_n: Tensor, made_n: Tensor) -> list[Completion]:
        """Sample and record token number made_n of the slots rows_n; free and return those that finished."""
        sampled = sample_tokens(logits_nV, self._uniform[rows_n, made_n], self._sampling)
        self._tokens[rows_n, made_n] = sampled.tokens_n
        self._logprobs[rows_n, made_n] = sampled.logprobs_n
        self._versions[rows_n, made_n] = self.version
        ended = torch.isin(sampled.tokens_n, self._end_ids).tolist()
        finished: dict[int, Completion] = {}
        for slot, has_ended in zip(rows_n.tolist(), ended, strict=True):
            running = self._scheduler.running[slot]
            running.num_tokens += 1
            num_made = running.num_tokens - len(running.request.prompt_ids)
            if has_ended or num_made == running.request.max_tokens:
                finished[slot] = self._completion(slot, running.request, num_made, "stop" if has_ended else "length")
        for source, target in self._scheduler.release(finished):
            self._move(source, target)
        return [finished[slot] for slot in sorted(finished)]

    def _completion(self, slot: int, request: Request, num_made: int, finish: FinishReason) -> Completion:
        return Completion(
            request=request,
            token_ids_R=self._tokens[slot, :num_made].cpu().numpy().astype(np.int32),
            logprobs_R=self._logprobs[slot, :num_made].cpu().numpy().copy(),
            versions_R=self._versions[slot, :num_made].cpu().numpy().copy(),
            finish=finish,
        )

    def _move(self, source: int, target: int) -> None:
        self._runner.slots.move(source, target, self._scheduler.running[target].num_tokens)
        for buffer in (self._uniform, self._tokens, self._logprobs, self._versions):
            buffer[target] = buffer[source]
