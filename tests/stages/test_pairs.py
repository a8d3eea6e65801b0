"""Pairs: which two answers, kept together, and a loss that is the published one. Expected values: hand and numpy."""

import json

import numpy as np
import pytest
import torch

from plait.batch import Group, Prompt, Sample, Verdict
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.data.stream import EncodedPrompt, PromptStream
from plait.errors import DataError
from plait.plan import BatchCounts
from plait.roles.policy import Policy
from plait.roles.reference import Reference
from plait.stages.logprob import group_logprobs
from plait.stages.packing import TokenSequence, pack
from plait.stages.pair import best_and_worst, given_pair
from plait.stages.update import UpdateInputs, UpdateSettings, update_policy

SGD = {"name": "sgd", "learning_rate": 0.5, "betas": (0.0, 0.0), "max_grad_norm": 1e9}


def sample(name, reward, *, length=3, finish="stop", kind="scored", generator=None):
    generator = generator or np.random.default_rng(0)
    return Sample(
        id=name,
        prompt=Prompt("p", "task", (), None, "answer"),
        prompt_ids=(5, 6),
        response_ids_R=generator.integers(3, 48, length).astype(np.int32),
        rollout_logprobs_R=-np.ones(length, dtype=np.float32),
        versions_R=np.zeros(length, dtype=np.int32),
        response_mask_R=np.ones(length, dtype=bool),
        finish=finish,
        seed=0,
        text=name,
        verdict=Verdict(kind, reward),
    )


def group(*samples):
    return Group(samples[0].prompt, list(samples))


def algorithm(**settings):
    return AlgorithmConfig.model_validate_json(json.dumps({"name": "iterative_dpo", **settings}))


def names(pairs):
    return [[s.id for s in pair.samples] for pair in pairs]


def test_the_best_against_the_worst_and_the_first_of_equals():
    groups = [
        group(sample("a0", 0.5), sample("a1", 1.0), sample("a2", 0.0), sample("a3", 1.0), sample("a4", 0.0)),
        group(sample("b0", 0.0), sample("b1", 0.0)),
        group(sample("c0", 0.2), sample("c1", 0.1)),
    ]
    assert names(best_and_worst(groups, algorithm())) == [["a1", "a2"], ["c0", "c1"]]


def test_who_is_not_counted_is_in_no_pair():
    one = group(
        sample("failed", 5.0, kind="failed"),
        sample("empty", 3.0, length=0),
        sample("good", 1.0),
        sample("cut", -1.0, finish="length"),
        sample("bad", 0.0),
    )
    assert names(best_and_worst([one], algorithm())) == [["good", "cut"]]
    assert names(best_and_worst([one], algorithm(filters={"overlong": True}))) == [["good", "bad"]]
    alone = group(sample("failed", 5.0, kind="failed"), sample("good", 1.0))
    assert best_and_worst([alone, group(sample("f", 1.0, kind="failed"))], algorithm()) == []


def test_shaping_counts():
    first, second = sample("long", 1.0), sample("short", 1.0)
    first.shaping = {"overlong": -0.5}
    assert names(best_and_worst([group(first, second)], algorithm())) == [["short", "long"]]


class Words:
    """Encodes a prompt as its id's number, an answer as the numbers written in it and the end token 1."""

    def __init__(self, *prompts):
        self._prompts = prompts

    def prompt(self, number):
        return self._prompts[number % len(self._prompts)]

    def encode_prompt(self, prompt):
        return (int(prompt.id),)

    def encode_answer(self, text):
        return (*map(int, text.split()), 1)


def row(number, chosen, rejected):
    return Prompt(str(number), "task", (), None, "answer", preference=(chosen, rejected))


def stream(*prompts, stops=False):
    words = Words(*prompts)
    return PromptStream(words, words, max_prompt_tokens=4, max_answer_tokens=3, stop_on_overlong=stops)


def test_a_row_becomes_a_pair_of_samples():
    (encoded,) = stream(row(7, "8 9", "10")).draw(1)
    pair = given_pair(encoded, 4)
    chosen, rejected = pair.samples
    assert [(s.id, s.prompt_ids, s.response_ids_R.tolist()) for s in pair.samples] == [
        ("7#chosen", (7,), [8, 9, 1]),
        ("7#rejected", (7,), [10, 1]),
    ]
    assert (chosen.reward, rejected.reward, chosen.is_counted) == (1.0, 0.0, True)
    assert np.isnan(chosen.rollout_logprobs_R).all()
    assert chosen.versions_R.tolist() == [4, 4, 4]


def test_answers_over_the_limit_are_dropped_and_counted_or_stop_the_run():
    drawn = stream(row(1, "2 3 4", "5"), row(2, "3", "4 5 6"), row(3, "4 5", "6"))
    assert [e.prompt.id for e in drawn.draw(2)] == ["3", "3"]
    assert (drawn.num_dropped, drawn.cursor) == (4, 6)
    with pytest.raises(DataError, match=r"an answer to prompt 1 has 4 tokens, more than rollout.max_completion_tokens"):
        stream(row(1, "2 3 4", "5"), stops=True).draw(1)


def test_a_pair_is_never_parted():
    generator = np.random.default_rng(3)
    lengths = generator.integers(2, 30, 20).tolist()
    sequences = [TokenSequence(np.full(n, 5), np.arange(n) > 0) for n in lengths]
    made = pack(sequences, 64, "cpu", together=2)
    for microbatch in made:
        assert microbatch.num_tokens <= 64
        assert all(second == first + 1 for first, second in zip(*[iter(microbatch.sequences)] * 2, strict=True))
        assert all(first % 2 == 0 for first in microbatch.sequences[::2])
    assert sorted(i for microbatch in made for i in microbatch.sequences) == list(range(20))
    with pytest.raises(AssertionError, match="no multiple of 2"):
        pack(sequences[:3], 64, "cpu", together=2)


# --- the loss of an update --------------------------------------------------------------------------------


def make_pairs(count=4, seed=1):
    generator = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        prompt = Prompt(str(number), "task", (), None, "answer", preference=("", ""))
        ids = tuple(generator.integers(3, 48, generator.integers(2, 6)).tolist())
        answers = tuple(tuple(generator.integers(3, 48, generator.integers(1, 9)).tolist()) for _ in range(2))
        pairs.append(given_pair(EncodedPrompt(prompt, ids, answers), 0))
    return pairs


def settings(pairs, *, max_tokens=1000, **factors):
    total = 2 * len(pairs)
    return UpdateSettings(
        algorithm=AlgorithmConfig.model_validate_json(json.dumps({"name": "dpo", **factors})),
        counts=BatchCounts(len(pairs), 2, total, total, 1, max_tokens),
        num_epochs=1,
        temperature=1.0,
        max_completion_tokens=20,
        num_updates=100,
        seed=1,
    )


def updated(model, pairs, config, reference):
    policy = Policy(model, OptimizerConfig(**SGD))
    tally = update_policy(policy, UpdateInputs(pairs, {}, None, reference), config, step=1)
    return torch.cat([p.detach().flatten() for p in policy.state()["policy"].values()]), tally


def another(make_model, seed=7):
    """The same architecture, other weights: a reference from which the policy differs."""
    model = make_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def plain_sums(model, pairs):
    """Log-probability of each answer by transformers alone, one after the other, in float64; and tokens of each."""
    model = model.double()
    model.set_attn_implementation("eager")
    sums, numbers = [], []
    for one in (s for pair in pairs for s in pair.samples):
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids_R.tolist()]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        places = torch.arange(len(one.prompt_ids) - 1, ids.shape[1] - 1)
        sums.append(logprobs[places, ids[0, places + 1]].sum())
        numbers.append(len(places))
    return torch.stack(sums), np.array(numbers)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_loss(kind, sums, reference, numbers):
    """The published objectives, in numpy: arXiv 2305.18290, 2310.12036, 2405.14734."""
    chosen, rejected, ref_chosen, ref_rejected = sums[::2], sums[1::2], reference[::2], reference[1::2]
    log_ratio = chosen - ref_chosen - rejected + ref_rejected
    if kind == "dpo":
        return np.mean(-0.9 * np.log(sigmoid(0.3 * log_ratio)) - 0.1 * np.log(sigmoid(-0.3 * log_ratio)))
    if kind == "ipo":
        return np.mean((log_ratio - 1 / (2 * 0.3)) ** 2)
    return np.mean(-np.log(sigmoid(2.0 * (chosen / numbers[::2] - rejected / numbers[1::2]) - 0.7)))


FACTORS = {
    "dpo": {"pairwise_loss": "dpo", "pairwise": {"beta": 0.3, "label_smoothing": 0.1}},
    "ipo": {"pairwise_loss": "ipo", "pairwise": {"beta": 0.3}},
    "simpo": {"pairwise_loss": "simpo", "pairwise": {"beta": 2.0, "margin": 0.7}},
}


@pytest.mark.parametrize("kind", sorted(FACTORS))
def test_the_loss_of_the_job_is_the_published_one(make_model, kind):
    """Value and gradient: the weights after one SGD step are those that autograd through plain transformers gives."""
    pairs = make_pairs()
    other = another(make_model)
    config = settings(pairs, **FACTORS[kind])
    reference = group_logprobs(Reference(other), pairs, temperature=1.0, max_tokens=100) if kind != "simpo" else None
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    weights, tally = updated(make_model(), pairs, config, reference)

    plain = make_model()
    sums, numbers = plain_sums(plain, pairs)
    ref_sums = plain_sums(other, pairs)[0].detach().numpy()
    value = expected_loss(kind, sums.detach().numpy(), ref_sums, numbers)
    assert tally.policy_loss == pytest.approx(value, rel=1e-5)
    # d loss / d sum by central differences of the numpy objective, then through the model.
    slope = np.zeros(len(sums))
    for index in range(len(sums)):
        step = np.zeros(len(sums))
        step[index] = 1e-5
        high, low = (expected_loss(kind, sums.detach().numpy() + sign * step, ref_sums, numbers) for sign in (1, -1))
        slope[index] = (high - low) / 2e-5
    (torch.tensor(slope) * sums).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert gradient.abs().max() > 1e-2
    assert ((start - weights) / 0.5).double().numpy() == pytest.approx(gradient.numpy(), abs=1e-4)


@pytest.mark.parametrize("kind", sorted(FACTORS))
def test_microbatches_change_nothing(make_model, kind):
    pairs = make_pairs(6)
    reference = group_logprobs(Reference(another(make_model)), pairs, temperature=1.0, max_tokens=100)
    reference = None if kind == "simpo" else reference
    whole, tally = updated(make_model(), pairs, settings(pairs, **FACTORS[kind]), reference)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    moved = float((whole - start).abs().max())
    assert moved > 1e-2
    for max_tokens in (30, 60):
        split, again = updated(make_model(), pairs, settings(pairs, max_tokens=max_tokens, **FACTORS[kind]), reference)
        assert (split - whole).abs().max() < 1e-6 * max(moved, 1.0)
        assert again.pairs.num_right == tally.pairs.num_right


def test_what_is_logged_by_hand(make_model):
    """Policy and reference equal: every reward is 0, the loss log 2, and no pair counts as told apart."""
    pairs = make_pairs()
    reference = group_logprobs(Reference(make_model()), pairs, temperature=1.0, max_tokens=1000)
    _, tally = updated(make_model(), pairs, settings(pairs), reference)
    assert tally.policy_loss == pytest.approx(np.log(2), abs=1e-6)
    assert tally.pairs.num_pairs == 4
    assert tally.pairs.chosen_reward_sum == pytest.approx(0.0, abs=1e-5)
    sums = plain_sums(make_model(), pairs)[0].detach()
    assert tally.pairs.chosen_logprob_sum == pytest.approx(float(sums[::2].sum()), rel=1e-5)
    assert tally.pairs.rejected_logprob_sum == pytest.approx(float(sums[1::2].sum()), rel=1e-5)
    assert tally.gaps == []  # nothing was sampled
    # Against a reference that finds the rejected answers likelier, every pair is told apart.
    tilted = {
        s.id: values + (0.5 if s.id.endswith("rejected") else -0.5)
        for pair in pairs
        for s, values in ((s, reference[s.id]) for s in pair.samples)
    }
    _, tally = updated(make_model(), pairs, settings(pairs), tilted)
    tokens = sum(s.num_loss_tokens for pair in pairs for s in pair.samples)
    assert tally.pairs.num_right == 4
    assert tally.pairs.chosen_reward_sum - tally.pairs.rejected_reward_sum == pytest.approx(
        0.1 * 0.5 * tokens, abs=1e-5
    )


def test_the_likelihood_of_chosen_answers_may_be_raised_too(make_model):
    """Mean over the tokens of correct answers, here the chosen ones."""
    pairs = make_pairs()
    reference = group_logprobs(Reference(make_model()), pairs, temperature=1.0, max_tokens=1000)
    _, tally = updated(make_model(), pairs, settings(pairs, positive_nll_coefficient=0.5), reference)
    sums, numbers = plain_sums(make_model(), pairs)
    expected = -sums[::2].sum().item() / numbers[::2].sum()
    assert tally.example_loss == pytest.approx(expected, rel=1e-5)
    assert tally.total_loss == pytest.approx(np.log(2) + 0.5 * expected, rel=1e-5)


def test_without_pairs_no_update_is_made(make_model):
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    weights, tally = updated(make_model(), [], settings(make_pairs()), {})
    assert torch.equal(weights, start)
    assert (tally.num_applied, tally.pairs.num_pairs) == (0, 0)
