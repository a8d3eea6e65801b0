"""The embedded rollout engine: continuous batching over KV slots, one random stream per sample."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from plait.batch import FinishReason
from plait.config import SamplingConfig
from plait.errors import WeightSyncError
from plait.models.fingerprint import fingerprint
from plait.rollout.experts import ExpertRecorder
from plait.rollout.prompts import PrefilledPass, PromptStore, fill_slots
from plait.rollout.runner import ModelRunner
from plait.rollout.sampler import sample_tokens
from plait.rollout.scheduler import Request, Running, Scheduler


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request. R sampled tokens, the end token included where one was sampled.

    experts_TLK: for a mixture of experts, where asked for, the experts chosen at each of the T = prompt + R - 1 tokens
    that the model has seen (the last sampled one was never an input).
    """

    request: Request
    token_ids_R: NDArray[np.int32]
    logprobs_R: NDArray[np.float32]
    versions_R: NDArray[np.int32]
    finish: FinishReason
    experts_TLK: NDArray[np.int16] | None = None


class Engine:
    """Samples completions from a model; `version` is the policy version of the weights it holds.

    Serves the verbs of an executor: submit, next_completed, pause, resume, and new weights between two tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: tuple[int, ...],
        num_slots: int,
        max_sequence_tokens: int,
        record_experts: bool = False,
        fuses: bool = True,
    ):
        """fuses: decode with fused operators where the architecture is known (`plait.rollout.fused`)."""
        self.version = 0
        self._held = fingerprint(model)
        self._is_paused = False
        self._finished: deque[Completion] = deque()
        self.model = model
        self._runner = ModelRunner(model, num_slots=num_slots, max_sequence_tokens=max_sequence_tokens, fuses=fuses)
        self._prompts = PromptStore(self._prefill)
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
        self._recorder = ExpertRecorder(model) if record_experts else None
        if self._recorder is not None:
            per_token = (self._recorder.num_layers, self._recorder.num_per_token)
            self._experts = torch.zeros((*shape, *per_token), dtype=torch.int16, device=self._device)

    @property
    def num_kv_bytes(self) -> int:
        """Memory of the KV slots, taken when the engine was made."""
        return self._runner.slots.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return self._scheduler.is_idle and not self._finished

    def generate(self, requests: Iterable[Request], sampling: SamplingConfig) -> Iterator[Completion]:
        """Sample every request; completions come as they finish."""
        self.use(sampling)
        self.submit(requests)
        while not self.is_idle:
            yield self.next_completed()

    def use(self, sampling: SamplingConfig) -> None:
        """Sampling settings of the requests to come; only between batches of requests.

        Raises WeightSyncError where the module was changed without `set_version`: fused copies would be stale.
        """
        assert self.is_idle, "requests with other sampling settings are still being decoded"
        if fingerprint(self.model) != self._held:
            raise WeightSyncError(
                f"the weights have changed since the engine took version {self.version}, and nobody published them"
            )
        self._sampling = sampling

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

    def next_completed(self) -> Completion:
        """Decode until a request finishes; of several that finish together, in the order of their slots."""
        assert not self._is_paused, "the engine is paused, so nothing can complete; resume it first"
        assert not self.is_idle, "nothing was submitted, so nothing can complete"
        while not self._finished:
            self._finished.extend(self.step())
        return self._finished.popleft()

    def pause(self) -> None:
        """Produce no more tokens; unfinished requests keep their slots and what they have."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on where `pause` stopped, token for token, unless the weights have changed."""
        self._is_paused = False

    def set_version(self, version: int, *, recompute_kv: bool) -> None:
        """The module's weights are now those of this policy version; every later token carries it.

        recompute_kv: compute the keys and values of unfinished requests again with the new weights; otherwise the
        old ones are kept, and later tokens attend to keys and values of older versions.
        """
        self.version = version
        self._runner.refresh()
        self._held = fingerprint(self.model)
        self._prompts.clear()
        if recompute_kv and self._scheduler.running:
            # The newest token of each has no keys and values yet: the next decode computes them. What is on record
            # of experts stays, since it is what the sampled tokens came from.
            sequences = [
                (*running.request.prompt_ids, *self._tokens[slot, : self._num_made(running) - 1].tolist())
                for slot, running in enumerate(self._scheduler.running)
            ]
            places = self._prompts.places(sequences, ())
            fill_slots(self._runner.slots, [(slot, places[sequence]) for slot, sequence in enumerate(sequences)])
            self._prompts.clear()

    def close(self) -> None:
        """Stop listening to the model's routers; nothing to do for a dense model."""
        if self._recorder is not None:
            self._recorder.close()

    @staticmethod
    def _num_made(running: Running) -> int:
        return running.num_tokens - len(running.request.prompt_ids)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Fill free slots, then sample one token in every occupied one; returns what finished."""
        finished = self._admit()
        if running := self._scheduler.running:
            num_tokens = [r.num_tokens for r in running]
            positions_n = torch.tensor(num_tokens, device=self._device) - 1
            made_n = torch.tensor([self._num_made(r) for r in running], device=self._device)
            rows_n = torch.arange(len(running), device=self._device)
            if self._recorder is not None:
                self._recorder.start()
            logits_nV = self._runner.decode(self._tokens[rows_n, made_n - 1], positions_n, max(num_tokens))
            if self._recorder is not None:
                self._experts[rows_n, positions_n] = self._recorder.take()[: len(running)]
            finished += self._sample(logits_nV, rows_n, made_n)
        return finished

    def _admit(self) -> list[Completion]:
        """Start admitted requests from their prompts, each computed once for its group, and sample first tokens."""
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        for slot, request in admitted:
            stream = torch.Generator().manual_seed(request.seed)
            self._uniform[slot, : request.max_tokens] = torch.rand(request.max_tokens, generator=stream)
        places = self._prompts.places((r.prompt_ids for _, r in admitted), self._scheduler.waiting_prompts())
        logits_nV = fill_slots(self._runner.slots, [(slot, places[r.prompt_ids]) for slot, r in admitted])
        if self._recorder is not None:
            for slot, request in admitted:
                done, row = places[request.prompt_ids]
                assert done.experts is not None, "a pass over prompts recorded no experts"
                self._experts[slot, : len(request.prompt_ids)] = done.experts[row]
        self._prompts.keep(self._scheduler.waiting_prompts())
        rows_n = torch.tensor([slot for slot, _ in admitted], device=self._device)
        return self._sample(logits_nV, rows_n, torch.zeros_like(rows_n))

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> PrefilledPass:
        if self._recorder is None:
            return self._runner.prefill(prompts)
        self._recorder.start()
        done = self._runner.prefill(prompts)
        chosen_TLK = self._recorder.take()[: sum(map(len, prompts))]
        return replace(done, experts=list(chosen_TLK.split([len(prompt) for prompt in prompts])))

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
            num_made = self._num_made(running)
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
            experts_TLK=self._chosen_experts(slot),
        )

    def _chosen_experts(self, slot: int) -> NDArray[np.int16] | None:
        if self._recorder is None:
            return None
        return self._experts[slot, : self._scheduler.running[slot].num_tokens - 1].cpu().numpy().copy()

    def _move(self, source: int, target: int) -> None:
        self._runner.slots.move(source, target, self._scheduler.running[target].num_tokens)
        buffers = [self._uniform, self._tokens, self._logprobs, self._versions]
        for buffer in buffers if self._recorder is None else [*buffers, self._experts]:
            buffer[target] = buffer[source]
