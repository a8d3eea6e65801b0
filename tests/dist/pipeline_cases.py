"""What the ranks of the pipeline tests run; each function returns plain numbers and tensors."""

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from ranks import mesh
from torch.distributed.fsdp import fully_shard

from models import TEMPERATURE, make_model, make_sequences, make_streams, rl_loss
from plait.parallel.pipeline import Pipeline
from plait.parallel.pipeline_orders import num_microbatches_run
from plait.parallel.pipeline_stages import Absent, split_stages
from plait.parallel.recompute import recompute_layers
from plait.roles import model as scoring
from plait.roles.model import score_tokens, sequence_logprobs
from plait.stages.packing import pack, pack_rows, plan_microbatches

sys.path.append(str(Path(__file__).parents[1] / "cost" / "issued"))
from record import Recorder

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


def _over(stages, layout, group):
    size = stages[0].model.config.hidden_size
    return Pipeline(stages, layout, group, "cpu", hidden_size=size, dtype=torch.float32)


def _by_sequence(microbatches, scores):
    """Log-probabilities by index of the sequence, where the last stage is."""
    found = {}
    for microbatch, one in zip(microbatches if scores else (), scores, strict=True):
        found |= {i: one.logprobs_R[microbatch.sequence_R == i] for i in microbatch.sequences}
    return found


def _rows(layout, sequences, max_tokens=MAX_TOKENS):
    rows = plan_microbatches([len(s.ids_T) for s in sequences], max_tokens)
    return rows + [[]] * (num_microbatches_run(layout.pp_schedule, layout.pp, len(rows)) - len(rows))


def run_recomputed(rank, world_size, layout, kind, lengths, changes, max_logits=None):
    """Gradients of one pass with activation recomputation in each layer. max_logits: at once, on the last stage."""
    group = mesh(layout).group("pp")
    model, sequences = make_model(kind, **changes), make_sequences(lengths)
    loss_of = rl_loss(streams_of(model, sequences))
    stages = split_stages(model, layout, group.rank())
    for stage in stages:
        recompute_layers(_layers(stage), layout.recompute)
    microbatches = pack_rows(sequences, _rows(layout, sequences, max(lengths) + MAX_TOKENS), "cpu")
    with patch.object(scoring, "MAX_LOGITS_PER_CHUNK", max_logits or scoring.MAX_LOGITS_PER_CHUNK):
        _over(stages, layout, group).train_pass(microbatches, loss_of, score)
    return {name: p.grad for stage in stages for name, p in stage.owned_parameters().items()}


def run(rank, world_size, layout, kind, lengths, changes, num_passes=1):
    """One process's part of passes over the same sequences; gradients of the last, without the tied copy."""
    group = mesh(layout).group("pp")
    model, sequences = make_model(kind, **changes), make_sequences(lengths)
    loss_of = rl_loss(streams_of(model, sequences))
    pipeline = _over(split_stages(model, layout, group.rank()), layout, group)
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
        scores = pipeline.scores(microbatches, score)
    return {
        "loss": sum(losses),
        "gradients": {n: p.grad for stage in pipeline.stages for n, p in stage.owned_parameters().items()},
        "order": order,
        "forward_order": [(slot.stage, slot.microbatch, slot.kind) for slot in pipeline.slots],
        "logprobs": _by_sequence(microbatches, scores),
        "copies": copies,
        "calls": again.calls,
        "tied_calls": tied.calls,
        "inference_calls": inference.calls,
        "num_microbatches": len(microbatches),
        "num_tokens": microbatches[0].ids_1T.shape[1],
        "parameters": sum(p.numel() for stage in pipeline.stages for p in stage.parameters()),
    }


def _layers(stage):
    return [layer for layer in stage.model.base_model.layers if not isinstance(layer, Absent)]


def _shard(stage, data_mesh, zero):
    """FSDP as `plait.parallel.data` applies it: one unit per layer, and the stage itself as the outermost."""
    layers = _layers(stage)
    for module in (*layers, stage):
        fully_shard(module, mesh=data_mesh, reshard_after_forward=zero == 3 and module is not stage)
    for module in (*layers, stage):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def run_sharded(rank, world_size, layout, kind, lengths, changes):
    """As `run`, where the stages are wrapped by FSDP after they are cut; each data-parallel rank has its sequences."""
    made = mesh(layout)
    model, sequences = make_model(kind, **changes), make_sequences(lengths)
    loss_of = rl_loss(streams_of(model, sequences))
    stages = split_stages(model, layout, made.place("pp"))
    for stage in stages:
        _shard(stage, made.data_shard, layout.zero)
    pipeline = _over(stages, layout, made.group("pp"))
    owned = {name: p for stage in pipeline.stages for name, p in stage.owned_parameters().items()}
    mine = range(made.place("dp_shard"), len(sequences), layout.dp_shard)
    rows = [[index] for index in mine]
    rows += [[]] * (num_microbatches_run(layout.pp_schedule, layout.pp, len(rows)) - len(rows))
    microbatches = pack_rows(sequences, rows, "cpu")
    with Recorder() as recorder:
        for _ in range(2):
            for stage in pipeline.stages:
                stage.zero_grad()
            pipeline.train_pass(microbatches, loss_of, score)
    pipeline.sum_tied([p.grad for p in pipeline.tied_parameters()])
    with Recorder() as inference:
        scores = pipeline.scores(microbatches, score)
    return {
        "gradients": {name: p.grad.full_tensor() for name, p in owned.items()},
        "logprobs": _by_sequence(microbatches, scores),
        "num_scattered": sum(call[0] == "reduce_scatter" for call in recorder.calls),
        "num_gathered": [sum(call[0] == "all_gather" for call in calls) for calls in (recorder.calls, inference.calls)],
        "num_units": sum(len(_layers(stage)) + (stage.is_first or stage.is_last) for stage in stages),
    }
