"""Packed equals padded equals one by one."""

import numpy as np
import pytest
import torch

from plait.roles.model import sequence_logprobs
from plait.stages.packing import TokenSequence, pack_rows, plan_microbatches

GENERATOR = np.random.default_rng(5)


def sequences(lengths):
    made = []
    for length in lengths:
        mask = GENERATOR.random(length) < 0.6
        mask[0] = False
        made.append(TokenSequence(GENERATOR.integers(3, 48, length), mask))
    return made


def reference_logprobs(model, sequence):
    """By transformers' own eager attention, one sequence, no packing."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logprobs = model(torch.from_numpy(sequence.ids_T)[None]).logits[0].log_softmax(-1)
    finally:
        model.set_attn_implementation("plait")
    positions = np.flatnonzero(sequence.loss_mask_T)
    return logprobs[positions - 1, sequence.ids_T[positions]]


@pytest.mark.parametrize("max_tokens", [40, 64, 1000])
def test_packed_equals_one_by_one_in_transformers(make_model, max_tokens):
    model = make_model()
    batch = sequences([7, 1, 33, 12, 12, 40, 2, 19])
    packed = sequence_logprobs(model, batch, temperature=1.0, max_tokens=max_tokens)
    for sequence, logprobs in zip(batch, packed, strict=True):
        assert logprobs.numpy() == pytest.approx(reference_logprobs(model, sequence).numpy(), abs=1e-5)


def test_a_sequence_does_not_see_its_neighbours(make_model):
    model = make_model()
    target, others = sequences([20])[0], sequences([30, 25])
    alone = sequence_logprobs(model, [target], temperature=1.0, max_tokens=100)[0]
    between = sequence_logprobs(model, [others[0], target, others[1]], temperature=1.0, max_tokens=100)[1]
    assert between.numpy() == pytest.approx(alone.numpy(), abs=1e-5)


def test_rows_respect_the_budget_and_lose_nothing():
    lengths = [int(n) for n in GENERATOR.integers(1, 60, 200)]
    rows = plan_microbatches(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 64


def test_first_fit_decreasing_by_hand():
    assert plan_microbatches([10, 20, 40, 20, 30], 60) == [[2, 1], [4, 3, 0]]


def test_too_long_a_sequence_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="65 tokens"):
        plan_microbatches([65], 64)


def test_b34_no_gradient_on_tokens_that_the_model_did_not_write(make_model):
    """A tool's answer of 40 tokens between two turns: its logits get no gradient, the turns' do."""
    from plait.roles.model import score_tokens
    from plait.stages.packing import pack

    model = make_model()
    mask = np.array([False] * 5 + [True] * 6 + [False] * 40 + [True] * 4)
    sequence = TokenSequence(GENERATOR.integers(3, 48, len(mask)), mask)
    (microbatch,) = pack([sequence], 128, "cpu")
    seen = []

    def watch(module, inputs, logits):
        logits.register_hook(seen.append)

    handle = model.lm_head.register_forward_hook(watch)
    scores = score_tokens(model, microbatch, 1.0)
    assert len(scores.logprobs_R) == 10
    scores.logprobs_R.sum().backward()
    handle.remove()
    assert microbatch.predict_R.tolist() == [*range(4, 10), *range(50, 54)]
    assert (seen[0][0, 10:] == 0).all()  # the filling up to a round shape
    assert (seen[0][0, :10] != 0).any(-1).all()


def test_chunked_scores_and_gradients_equal_those_of_all_logits_at_once(make_model, monkeypatch):
    from plait.roles import model as scoring
    from plait.stages.packing import pack

    (microbatch,) = pack(sequences([200, 180, 150]), 600, "cpu")
    assert len(microbatch.predict_R) > 256

    def gradients():
        model = make_model()
        scores = scoring.score_tokens(model, microbatch, 0.7, entropy_needs_grad=True)
        (scores.logprobs_R.sum() + 0.1 * scores.entropy_R.sum()).backward()
        return scores, torch.cat([p.grad.flatten() for p in model.parameters()])

    whole, whole_gradient = gradients()
    largest = []
    monkeypatch.setattr(scoring, "MAX_LOGITS_PER_CHUNK", 128 * 48)
    reduce = scoring.reduce_logits
    monkeypatch.setattr(
        scoring, "reduce_logits", lambda logits, *rest: largest.append(logits.numel()) or reduce(logits, *rest)
    )
    chunked, chunked_gradient = gradients()
    assert max(largest) == 128 * 48
    assert torch.allclose(whole.logprobs_R, chunked.logprobs_R, atol=1e-6)
    assert torch.allclose(whole.entropy_R, chunked.entropy_R, atol=1e-6)
    assert (whole_gradient - chunked_gradient).abs().max() <= 1e-5 * whole_gradient.abs().max()


def test_rows_are_filled_up_to_one_length(make_model):
    from plait.roles.model import score_tokens

    batch, model = sequences([90, 50, 7]), make_model()
    made = pack_rows(batch, [[0, 1], [2], []], "cpu")
    assert [m.ids_1T.shape[1] for m in made] == [256, 256, 256]
    assert [(m.sequences, m.num_tokens) for m in made] == [((0, 1), 140), ((2,), 7), ((), 0)]
    assert all(len(part) == 0 for part in (made[2].predict_R, made[2].targets_R, made[2].sequence_R, made[2].last_B))
    for microbatch in made[:2]:
        scored = score_tokens(model, microbatch, 1.0).logprobs_R
        expected = np.concatenate([reference_logprobs(model, batch[i]).numpy() for i in microbatch.sequences])
        assert scored.detach().numpy() == pytest.approx(expected, abs=1e-5)
    # Filling sees itself alone: other ids in it, and what stands before it, change nothing.
    changed = made[1].ids_1T.clone()
    changed[0, 7:] = 5
    hidden = [
        model.base_model(input_ids=ids, position_ids=made[1].context.position_ids_1T, context=made[1].context)[0]
        for ids in (made[1].ids_1T, changed)
    ]
    assert torch.equal(hidden[0][0, :7], hidden[1][0, :7])
