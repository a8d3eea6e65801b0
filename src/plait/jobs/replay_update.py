"""The part of a batch replay that needs torch: the update again, then each of its samples alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from plait.batch import Sample
from plait.config import RunConfig
from plait.errors import ConfigError, NonFiniteError
from plait.executor.inline import update_inputs
from plait.executor.workers import update_settings
from plait.jobs.kept_batch import state_of
from plait.jobs.nonfinite import PassWatch, first_bad, shown
from plait.jobs.replay import OTHER_DTYPE
from plait.jobs.replay_batch import BatchReplay, Finding, Kind, SampleGradient, UpdateAgain
from plait.jobs.replay_weights import (
    ReplayedRun,
    Weights,
    batch_again,
    cost_of,
    masters_of,
    put,
    start_for,
    version_notes,
    weights_of,
)
from plait.jobs.setup import LoadedModel, load, resolve_model
from plait.models.load import Tokenizer
from plait.models.optimizer import UpdateResult
from plait.models.value_head import ValueHead
from plait.plan import Plan
from plait.roles.model import TokenScores, score_tokens
from plait.roles.policy import Policy
from plait.stages.advantage import is_trained
from plait.stages.packing import Microbatch, TokenSequence, pack
from plait.stages.update import UpdateInputs, UpdateSettings, minibatches, samples_with_pass, update_policy
from plait.telemetry.bad_batches import StepBatch

_INPUTS: tuple[Kind, ...] = ("advantage", "old log-probability", "reference log-probability", "value", "return")


def replay_update(
    run_dir: Path,
    config: RunConfig,
    recipe_dir: Path,
    step: int,
    kept: StepBatch | None,
    *,
    rerun: bool,
    say: Callable[[str], None],
) -> BatchReplay:
    """See `plait.jobs.replay_batch.replay_batch`. kept: the step's batch, where the run kept it."""
    pretraining = config.algorithm.critic.pretraining_steps
    if step <= pretraining:
        raise ConfigError(
            f"step {step} trained the critic alone (algorithm.critic.pretraining_steps is {pretraining}), and updates "
            "of the policy are replayed. Choose a later step"
        )
    config = config.model_copy(update={"model": resolve_model(config.model)})
    run = ReplayedRun(run_dir, config, recipe_dir, say)
    if kept is None and not rerun:
        start, origin = start_for(run, step)
        raise ConfigError(
            f"the batch of step {step} is not kept: a run keeps those of updates that are not finite. Add --rerun to "
            f"make {cost_of(run, start + 1, step)} again from {origin} in a temporary folder"
        )
    weights = weights_of(run, step - 1, rerun=rerun, instead="choose a step that follows one of these versions")
    batch, notes = (kept, ()) if kept is not None else batch_again(run, step, weights)
    chosen = _choose_update(run, batch, weights)
    dtype = config.model.compute_dtype
    return BatchReplay(
        run_dir=run_dir,
        step=step,
        update=chosen.number + 1,
        num_updates=chosen.num_updates,
        weights=weights.source,
        batch="kept by the run" if kept is not None else "made again",
        recorded=tuple(batch.found["grad_norms"]) if "grad_norms" in batch.found else (),
        runs=(_again(run, chosen, dtype), _again(run, chosen, OTHER_DTYPE[dtype])),
        notes=(*weights.notes, *notes, *_critic_notes(batch), *version_notes(run_dir)),
    )


def _critic_notes(batch: StepBatch) -> list[str]:
    if "critic_nonfinite_in" not in batch.found or not batch.found["critic_nonfinite_in"]:
        return []
    return [
        f"The critic's update was not finite, first in {batch.found['critic_nonfinite_in']}. It is not made again "
        "here; the values and returns that it read are looked at"
    ]


@dataclass(frozen=True, slots=True)
class _Update:
    """One update of a step, from 0. masters, head (of a shared trunk): before it.

    inputs: its minibatch only. settings: for just this update.
    """

    number: int
    num_updates: int
    step: int
    masters: dict[str, Tensor]
    head: dict[str, Tensor]
    inputs: UpdateInputs
    settings: UpdateSettings


def _copies(state: dict[str, dict[str, Tensor]], role: str) -> dict[str, Tensor]:
    return {name: master.clone() for name, master in state[role].items()} if role in state else {}


def _value_head(run: ReplayedRun, loaded: LoadedModel) -> ValueHead | None:
    """Of a trunk that policy and critic share."""
    if run.config.algorithm.critic.kind != "shared_trunk":
        return None
    return ValueHead(loaded.model.config.hidden_size, run.config.model.device)


def _choose_update(run: ReplayedRun, batch: StepBatch, weights: Weights) -> _Update:
    """Make the step's updates again as the run did: the first that is not finite, else that with the largest gradient.

    Later updates of a step train weights that no checkpoint holds, so they have to be made from the first one on.
    """
    loaded = load(run.config.model, run.config.rollout.stop_tokens)
    masters_of(weights, loaded.model)  # also refuses another model's
    policy = Policy(loaded.model, run.config.optimizer, max_nonfinite_updates=1, value_head=_value_head(run, loaded))
    if weights.checkpoint is not None:
        policy.load_state(weights.checkpoint.tensors)
    settings = update_settings(run.config, Plan.from_config(run.config))
    inputs = update_inputs(state_of(batch, policy.device), settings)
    per_step, pretraining = settings.counts.num_updates_per_step, settings.algorithm.critic.pretraining_steps
    one = replace(
        settings,
        num_epochs=1,
        counts=replace(settings.counts, num_updates_per_step=1),
        num_updates=settings.num_updates - pretraining * (per_step - 1),
    )
    parts = list(minibatches(batch.groups, settings, batch.step))
    first = (batch.step - 1 - pretraining) * per_step + pretraining
    chosen, largest = None, -math.inf
    for number, groups in enumerate(parts):
        update = _Update(
            number=number,
            num_updates=len(parts),
            step=first + number + 1,
            masters=_copies(policy.state(), "policy"),
            head=_copies(policy.state(), "value_head"),
            inputs=replace(inputs, groups=groups),
            settings=one,
        )
        try:
            tally = update_policy(policy, update.inputs, one, step=update.step)
        except NonFiniteError:
            return update
        if tally.grad_norms and tally.grad_norms[0] > largest:
            chosen, largest = update, tally.grad_norms[0]
    if chosen is None:
        raise ConfigError(
            f"step {batch.step} made no update: no sample of it had an advantage other than 0. Choose another step"
        )
    return chosen


class _Pass:
    """What one microbatch gave: scores and, after the backward pass, the gradients of the loss by them."""

    def __init__(self, microbatch: Microbatch, scores: TokenScores):
        self.microbatch, self.scores = microbatch, scores
        self.loss = math.nan
        for tensor in scores:
            if tensor is not None and tensor.requires_grad:
                tensor.retain_grad()

    def upstream_of(self, index: int) -> list[Tensor | None]:
        """Gradients of the loss by log-probabilities, entropies and values of a sequence; None where unused."""
        parts = (self.scores.logprobs_R, self.scores.entropy_R, self.scores.values_R)
        rows = self.rows_of(index)
        return [part.grad[rows] if part is not None and part.grad is not None else None for part in parts]

    def rows_of(self, index: int) -> Tensor:
        """Which loss tokens are those of a sequence."""
        return self.microbatch.sequence_R == index


class _Probe(Policy):
    """A policy that writes down what an update gives, and stays as it is."""

    def __init__(self, run: ReplayedRun, dtype: str, update: _Update):
        model_config = run.config.model.model_copy(update={"compute_dtype": dtype})
        loaded = load(model_config, run.config.rollout.stop_tokens)
        put(loaded.model, update.masters, "the policy")
        head = _value_head(run, loaded)
        if head is not None:
            head.load_state_dict({name.removeprefix("value_head."): master for name, master in update.head.items()})
        super().__init__(loaded.model, run.config.optimizer, max_nonfinite_updates=2, value_head=head)
        self.tokenizer = loaded.tokenizer
        self.passes: list[_Pass] = []

    def token_scores(
        self, microbatch: Microbatch, temperature: float, *, entropy_needs_grad: bool = False
    ) -> TokenScores:
        scores = super().token_scores(microbatch, temperature, entropy_needs_grad=entropy_needs_grad)
        self.passes.append(_Pass(microbatch, scores))
        return scores

    def backward(self, loss: Tensor) -> None:
        self.passes[-1].loss = float(loss.detach())
        super().backward(loss)

    def apply(self, rate: float) -> UpdateResult:
        # At rate 0 nothing moves; the norm and what is not finite are found as in the run.
        return super().apply(0.0)


def _again(run: ReplayedRun, update: _Update, dtype: str) -> UpdateAgain:
    """The chosen update in one dtype."""
    probe = _Probe(run, dtype, update)
    tally = update_policy(probe, update.inputs, update.settings, step=update.step)
    weights = _first_bad_weight(probe)
    alone = []
    members = _members(update)
    for one in probe.passes:
        alone += [_sample_alone(probe, one, i, members[i], update) for i in one.microbatch.sequences]
    found = [sample.first for sample in alone if sample.first is not None]
    order = get_args(Kind)
    first = weights or min(found, key=lambda finding: order.index(finding.kind), default=None)
    if first is None and tally.num_nonfinite:
        is_one = tally.nonfinite_in in dict(probe.model.named_parameters())
        kind: Kind = "summed gradient of a parameter" if is_one else "gradient norm"
        first = Finding(kind, tally.nonfinite_in if is_one else "", "", "", str(tally.grad_norms[0]))
    alone.sort(key=lambda sample: (sample.first is None, -sample.grad_norm if math.isfinite(sample.grad_norm) else 0.0))
    return UpdateAgain(dtype, tuple(one.loss for one in probe.passes), tally.grad_norms[0], first, tuple(alone))


def _first_bad_weight(policy: Policy) -> Finding | None:
    for name, parameter in policy.model.named_parameters():
        index = first_bad(parameter)
        if index is not None:
            return Finding("weights", name, "", "", shown(parameter, index))
    return None


def _members(update: _Update) -> list[Sample]:
    """The samples that the update gave a pass, in its order."""
    algorithm = update.settings.algorithm
    counted = [s for group in update.inputs.groups for s in group.samples if is_trained(s, algorithm)]
    return [sample for sample, _ in samples_with_pass(counted, update.inputs, update.settings)]


def _sample_alone(probe: _Probe, one: _Pass, index: int, sample: Sample, update: _Update) -> SampleGradient:
    """What a sample adds: its own values first, then its own forward and backward pass."""
    advantage = None
    if sample.id in update.inputs.advantages:
        advantages_R = update.inputs.advantages[sample.id]
        # The largest of its tokens: most algorithms give all of them one.
        advantage = float(advantages_R[advantages_R.abs().argmax()])
    rows, upstream = one.rows_of(index), one.upstream_of(index)
    first = _bad_input(probe.tokenizer, sample, update.inputs)
    seen, grad_norm = _pass_alone(probe, sample, upstream, update.settings.temperature)
    if first is None and seen is not None and not seen.kind.startswith("gradient"):
        first = seen
    if first is None:
        first = _bad_loss(probe.tokenizer, one, rows, sample, update.inputs, upstream) or seen
    return SampleGradient(sample.id, sample.num_response_tokens, advantage, grad_norm, first)


def _bad_input(tokenizer: Tokenizer, sample: Sample, inputs: UpdateInputs) -> Finding | None:
    """What came into the update not finite, as the trainer's fp32 sees it."""
    streams = (inputs.advantages, inputs.old_logprobs, inputs.ref_logprobs, inputs.values, inputs.returns)
    for kind, values in zip(_INPUTS, streams, strict=True):
        index = first_bad(values[sample.id]) if values is not None and sample.id in values else None
        if values is not None and index is not None:
            return Finding(kind, "", sample.id, _place(tokenizer, sample, index), shown(values[sample.id], index))
    return None


def _bad_loss(
    tokenizer: Tokenizer, one: _Pass, rows: Tensor, sample: Sample, inputs: UpdateInputs, upstream: list[Tensor | None]
) -> Finding | None:
    """Between log-probabilities and their gradient: the ratio, the loss, its slope."""

    def found(kind: Kind, values: Tensor) -> Finding | None:
        index = first_bad(values)
        if index is None:
            return None
        return Finding(kind, "", sample.id, _place(tokenizer, sample, index), shown(values, index))

    logprobs_R = one.scores.logprobs_R.detach()[rows]
    bad = found("log-probability", logprobs_R)
    if bad is None and inputs.old_logprobs is not None:
        bad = found("ratio", (logprobs_R - inputs.old_logprobs[sample.id]).exp())
    for gradient in upstream:
        if bad is None and gradient is not None:
            bad = found("gradient of the loss" if math.isfinite(one.loss) else "loss", gradient)
    return bad


def _pass_alone(
    probe: _Probe, sample: Sample, upstream: list[Tensor | None], temperature: float
) -> tuple[Finding | None, float]:
    """The sample's own pass, with the gradient that the update's loss had for it. Returns (finding, gradient norm)."""
    sequence = TokenSequence.from_sample(sample)
    (microbatch,) = pack([sequence], len(sequence.ids_T), probe.device)
    probe.model.zero_grad()
    with PassWatch(probe.model, microbatch.num_tokens, len(microbatch.predict_R)) as watch:
        scores = score_tokens(
            probe.model,
            microbatch,
            temperature,
            entropy_needs_grad=upstream[1] is not None,
            value_head=probe.value_head,
        )
        parts = (scores.logprobs_R, scores.entropy_R, scores.values_R)
        pairs = [(p, slope) for p, slope in zip(parts, upstream, strict=True) if p is not None and slope is not None]
        torch.autograd.backward([part for part, _ in pairs], [slope for _, slope in pairs])
    gradients = [p.grad.double() for p in probe.model.parameters() if p.grad is not None]
    grad_norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in gradients))
    probe.model.zero_grad()
    if watch.first is None:
        return None, grad_norm
    kind, name, row, value = watch.first
    if row is None:
        place = ""
    elif probe.model.get_submodule(name) is probe.model.get_output_embeddings():
        place = _place(probe.tokenizer, sample, row)
    else:
        place = _place(probe.tokenizer, sample, row - len(sample.prompt_ids), is_position=True)
    return Finding(kind, name, sample.id, place, value), grad_norm


def _place(tokenizer: Tokenizer, sample: Sample, index: int, *, is_position: bool = False) -> str:
    """A token in words. index: among the loss tokens; is_position: among the response's, negative in the prompt."""
    if is_position and index < 0:
        number = len(sample.prompt_ids) + index
        return f"prompt token {number} {_text(tokenizer, sample.prompt_ids[number])}"
    number = index if is_position else int(sample.response_mask_R.nonzero()[0][index])
    return f"response token {number} {_text(tokenizer, int(sample.response_ids_R[number]))}"


def _text(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.backend.decode([token]))
