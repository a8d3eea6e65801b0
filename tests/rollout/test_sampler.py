"""Sampling from logits; expected values: field cases N36, N37 and hand calculation."""

import math

import pytest
import torch

from plait.config import SamplingConfig
from plait.rollout.sampler import sample_tokens

PROBS = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor([PROBS]).log()


def draw(uniforms, **settings):
    logits = LOGITS.expand(len(uniforms), -1)
    return sample_tokens(logits, torch.tensor(uniforms), SamplingConfig(**settings))


def test_inverts_the_cumulative_distribution():
    assert draw([0.0, 0.49, 0.51, 0.79, 0.81, 0.96]).tokens_n.tolist() == [0, 0, 1, 1, 2, 3]


def test_logprob_is_that_of_the_token():
    sampled = draw([0.0, 0.6, 0.9, 0.99])
    assert sampled.logprobs_n.exp().tolist() == pytest.approx(PROBS, abs=1e-6)


def test_n37_temperature_is_in_the_logprob():
    sampled = sample_tokens(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0]), SamplingConfig(temperature=0.5))
    assert sampled.logprobs_n.item() == pytest.approx(-0.14293163, abs=1e-6)


def test_n36_truncation_leaves_the_trainers_logprob_and_names_the_kept_mass():
    sampled = draw([0.0], top_p=0.8)
    assert sampled.logprobs_n.item() == pytest.approx(-0.69314718, abs=1e-6)
    assert sampled.kept_logmass_n.exp().item() == pytest.approx(0.8, abs=1e-6)
    assert (sampled.logprobs_n - sampled.kept_logmass_n).item() == pytest.approx(-0.47000363, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.5}, {0, 1}),
    ],
)
def test_truncations_keep_what_they_should(settings, kept):
    uniforms = torch.linspace(0, 0.9999, 400).tolist()
    assert set(draw(uniforms, **settings).tokens_n.tolist()) == kept


def test_temperature_zero_is_greedy_at_the_logprob_of_temperature_one():
    sampled = draw([0.99], temperature=0.0)
    assert sampled.tokens_n.tolist() == [0]
    assert sampled.logprobs_n.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_impossible_tokens_are_never_sampled():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, -1)
    tokens = sample_tokens(logits, torch.tensor([0.0, 0.5, 1 - 2**-24]), SamplingConfig()).tokens_n
    assert tokens.tolist() == [1, 3, 3]


def test_frequencies_follow_the_distribution():
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).tolist()
    counts = torch.bincount(draw(uniforms).tokens_n, minlength=4) / 20_000
    # Standard error is at most sqrt(0.25 / 20000) = 0.0035; four of them.
    assert counts.tolist() == pytest.approx(PROBS, abs=0.014)
