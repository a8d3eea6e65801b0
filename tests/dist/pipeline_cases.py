"""What the ranks of the pipeline tests run; each function returns plain numbers and tensors."""

import sys
from pathlib import Path

import torch
from models import TEMPERATURE, make_model, make_sequences, make_streams, rl_loss
from ranks import mesh

from plait.parallel.pipeline import Pipeline
from plait.parallel.pipeline_orders import num_microbatches_run
from plait.parallel.pipeline_stages import split_stages
from plait.roles.model import score_tokens, sequence_logprobs
from plait.stages.packing import pack, pack_rows, plan_microbatches

sys.path.append(str(Path(__file__).parents[1] / "cost" / "issued"))
from record import Recorder  # noqa: E402

MAX_TOKENS = 64


def score(model, microbatch, hidden_1TD):
    return score_tokens(model, microbatch, TEMPERATURE, entropy_needs_grad=True, hidden_1TD=hidden_1TD)


def streams_of(model, sequences):
    return make_streams(sequences, sequence_logprobs(model, sequences, temperature=TEMPERATURE, max_tokens=300))


def unsharded(kind, lengths=(23, 5, 40, 17, 31, 9, 12, 28), **changes):
    """(loss, gradients by name, log-probabilities) of one process."""
    model, sequences = make_model(kind, **changes), make_sequences(lengths)
    streams = streams_of(model, sequences)
    loss_of, total = rl_loss(streams), 0.0
    for microbatch in pack(sequences, 300, "cpu"):
        loss = loss_of(microbatch, score(model, microbatch, None))
        loss.backward()
        total += loss.item()
    logprobs = sequence_logprobs(model, sequences, temperature=TEMPERATURE, max_tokens=300)
    return total, {name: p.grad for name, p in model.named_parameters()}, logprobs


def _pipeline(layout, model, group):
    stages = split_stages(model, layout, group.rank())
    return Pipeline(stages, layout, group, "cpu", hidden_size=model.config.hidden_size, dtype=torch.float32)


def _rows(layout, sequences, max_tokens=MAX_TOKENS):
    rows = plan_microbatches([len(s.ids_T) for s in sequences], max_tokens)
    return rows + [[]] * (num_microbatches_run(layout.pp_schedule, layout.pp, len(rows)) - len(rows))


def run(rank, world_size, layout, kind, lengths, changes, num_passes=1):
    """One process's part of passes over the same sequences; gradients of the last, without the tied copy."""
    group = mesh(layout).group("pp")
    model, sequences = make_model(kind, **changes), make_sequences(lengths)
    loss_of = rl_loss(streams_of(model, sequences))
    pipeline = _pipeline(layout, model, group)
    microbatches = pack_rows(sequences, _rows(layout, sequences), "cpu")
    losses = []

    def tallied(microbatch, scores):
        loss = loss_of(microbatch, scores)
        losses.append(loss.item())
        return loss

    for _ in range(num_passes):
        for stage in pipeline.stages:
            stage.zero_grad()
        losses.clear()
        pipeline.train_pass(microbatches, tallied, score)
    order = [(slot.stage, slot.microbatch, slot.kind) for slot in pipeline.slots]
    with Recorder() as again:
        pipeline.train_pass(microbatches, lambda microbatch, scores: scores.logprobs_R.sum() * 0.0, score)
    with Recorder() as tied:
        pipeline.sum_tied([p.grad for p in pipeline.tied_parameters()])
    copies = [p.grad.clone() for p in pipeline.tied_parameters()]
    with Recorder() as inference:
        logprobs = pipeline.logprobs(microbatches, score)
    by_sequence = [None] * len(sequences)
    for microbatch, values in zip(microbatches, logprobs, strict=True):
        for index in microbatch.sequences:
            by_sequence[index] = values[microbatch.sequence_R == index]
    return {
        "loss": sum(losses),
        "gradients": {n: p.grad for stage in pipeline.stages for n, p in stage.owned_parameters().items()},
        "order": order,
        "forward_order": [(slot.stage, slot.microbatch, slot.kind) for slot in pipeline.slots],
        "logprobs": by_sequence,
        "copies": copies,
        "calls": again.calls,
        "tied_calls": tied.calls,
        "inference_calls": inference.calls,
        "num_microbatches": len(microbatches),
        "num_tokens": microbatches[0].ids_1T.shape[1],
        "parameters": sum(p.numel() for stage in pipeline.stages for p in stage.parameters()),
    }
