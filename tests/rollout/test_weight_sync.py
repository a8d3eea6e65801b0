"""What the engine holds is compared with what the trainer published."""

import copy

import pytest
import torch

from plait.config import SamplingConfig
from plait.errors import WeightSyncError
from plait.models.fingerprint import fingerprint
from plait.rollout.engine import Engine
from plait.rollout.scheduler import Request
from plait.weight_sync.in_process import publish


def test_b11_stale_weights_are_found_at_the_publication(make_model):
    trainer = make_model()
    engine = Engine(trainer, end_token_ids=(1,), num_slots=2, max_sequence_tokens=8)
    publish(trainer, engine, 1)
    assert engine.version == 1
    engine.model = copy.deepcopy(trainer)  # from here on the engine keeps what it had
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.001)
    with pytest.raises(WeightSyncError, match="version 2"):
        publish(trainer, engine, 2)
    assert engine.version == 1


def test_an_update_of_any_parameter_changes_the_fingerprint(make_model):
    model = make_model()
    seen = {fingerprint(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.01)
        seen.add(fingerprint(model))
    assert len(seen) == 1 + sum(1 for _ in model.parameters())


def test_sampling_does_not_start_on_weights_that_nobody_published(make_model):
    """The engine decodes with fused copies, which a change of the module alone does not reach."""
    model = make_model()
    engine = Engine(model, end_token_ids=(1,), num_slots=2, max_sequence_tokens=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(WeightSyncError, match="nobody published"):
        list(engine.generate([Request("x", (5,), 0, 3)], SamplingConfig()))
    publish(model, engine, 1)
    (completion,) = engine.generate([Request("x", (5,), 0, 3)], SamplingConfig())
    assert set(completion.versions_R.tolist()) == {1}
