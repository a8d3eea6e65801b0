"""Routers: fp32, replay of recorded experts, balance loss, against formulas written here."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from plait.models import attention
from plait.models.routing import NO_EXPERT, Balance, Routing, balance_loss, find_routers, prepare_routers
from plait.roles.model import score_tokens
from plait.rollout.experts import ExpertRecorder
from plait.stages.packing import TokenSequence, pack

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
KINDS = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 6, "sliding_window": None},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


def make_model(kind, dtype=torch.float32):
    attention.register()
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    prepare_routers(model)
    return model.to(dtype).eval()


def make_sequences(model, experts=None):
    generator = np.random.default_rng(0)
    made = []
    for length in (11, 7):
        mask = np.arange(length) >= 3
        made.append(TokenSequence(generator.integers(0, 40, length), mask))
    if experts is not None:
        made = [TokenSequence(s.ids_T, s.loss_mask_T, e) for s, e in zip(made, experts, strict=True)]
    return made


def run(model, sequences):
    """(sum of log-probabilities, experts chosen [T, L, K])."""
    recorder = ExpertRecorder(model)
    recorder.start()
    (microbatch,) = pack(sequences, 64, "cpu")
    total = score_tokens(model, microbatch, 1.0).logprobs_R.sum()
    chosen = recorder.take()
    recorder.close()
    return total, chosen


def perturbed(model):
    """A copy whose routers choose otherwise."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in find_routers(other):
            router.weight.add_(0.3 * torch.randn(router.weight.shape, generator=generator))
    return other


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_replay_routes_as_recorded_and_gradients_flow(kind):
    model = make_model(kind)
    _, chosen = run(model, make_sequences(model))
    recorded = [
        chosen[:10].numpy(),
        chosen[11:17].numpy(),
    ]  # the last token of a sequence was not seen when it was made
    other = perturbed(model)
    _, own = run(other, make_sequences(other))
    assert (own != chosen)[:17].any(), "the other model must route otherwise"
    total, replayed = run(other, make_sequences(other, recorded))
    for tokens in (slice(0, 10), slice(11, 17)):
        assert torch.equal(replayed[tokens], chosen[tokens])
    total.backward()
    # Against a central difference along a random direction of all router weights; routing stays as recorded.
    generator = torch.Generator().manual_seed(6)
    routers = find_routers(other)
    directions = [torch.randn(router.weight.shape, generator=generator) for router in routers]
    slope = sum(float((r.weight.grad * d).sum()) for r, d in zip(routers, directions, strict=True))
    values = []
    for step in (2e-3, -2e-3):
        moved = copy.deepcopy(other)
        with torch.no_grad():
            for router, direction in zip(find_routers(moved), directions, strict=True):
                router.weight.add_(step * direction)
            values.append(float(run(moved, make_sequences(moved, recorded))[0]))
    assert abs(slope) > 0.1
    assert slope == pytest.approx((values[0] - values[1]) / 4e-3, rel=0.02)


def test_routers_choose_where_nothing_was_recorded():
    model = make_model("mixtral")
    _, chosen = run(model, make_sequences(model))
    free = np.full((5, 3, 2), NO_EXPERT, dtype=np.int16)
    _, again = run(model, make_sequences(model, [free, None]))
    assert torch.equal(again, chosen)


def test_replay_keeps_groups_of_experts_and_sigmoid_scores():
    """DeepSeek-V3's router: scores are sigmoids of the forced experts, normalised and scaled."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=8, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = DeepseekV3TopkRouter(config)

        def forward(self, hidden):
            return self.gate(hidden)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        @property
        def base_model(self):
            return self

    model = Model()
    nn.init.normal_(model.layers[0].gate.weight)
    prepare_routers(model)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    forced = torch.tensor([[0, 7], [3, 1], [6, 2], [5, 4], [1, 0]])
    routing = Routing(torch.zeros(5, dtype=torch.int64), torch.tensor([5]), forced[:, None])
    _, weights, chosen = model.layers[0](hidden, routing=routing)
    scores = (hidden @ model.layers[0].gate.weight.T).sigmoid().gather(1, forced)
    assert torch.equal(chosen, forced)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(1, keepdim=True))


def test_routers_of_a_bf16_model_compute_in_fp32():
    model = make_model("qwen3_moe", torch.bfloat16)
    router, seen = find_routers(model)[0], []
    router.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0], *outputs)))
    (microbatch,) = pack(make_sequences(model), 64, "cpu")
    score_tokens(model, microbatch, 1.0)
    hidden, logits, _, _ = seen[0]
    assert hidden.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    expected = hidden.view(-1, 32).double() @ router.weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())


def test_balance_loss_by_hand():
    """weight x sum over sequences and experts of f_e P_e, token by token; filling does not count."""
    generator = torch.Generator().manual_seed(1)
    sequence, lengths = torch.tensor([0, 0, 0, 1, 1, -1, -1]), [3, 2]
    scores = torch.rand(7, 4, generator=generator).softmax(-1).requires_grad_()
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    loss = balance_loss(scores, chosen, Routing(sequence, torch.tensor(lengths), None, Balance(0.3)))
    expected = 0.0
    for number, n in enumerate(lengths):
        tokens = [t for t in range(7) if sequence[t] == number]
        for expert in range(4):
            frequency = 4 / (2 * n) * sum(int((chosen[t] == expert).any()) for t in tokens)
            expected += 0.3 * frequency * sum(float(scores.detach()[t, expert]) for t in tokens) / n
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert not scores.grad[5:].any()


def test_balance_loss_reaches_the_routers_as_part_of_any_loss():
    """Gradients of a pass with the loss are those of the pass plus those of the loss alone."""
    model = make_model("qwen3_moe")
    (microbatch,) = pack(make_sequences(model), 64, "cpu")
    weight = find_routers(model)[-1].weight  # what comes after it does not route, so its gradient is linear

    def gradient(balance):
        model.zero_grad()
        object.__setattr__(microbatch, "routing", Routing(*_parts(microbatch.routing), None, balance))
        score_tokens(model, microbatch, 1.0).logprobs_R.sum().backward()
        return weight.grad.clone()

    seen = []
    handle = find_routers(model)[-1].register_forward_hook(lambda _, inputs, outputs: seen.append(outputs))
    balance = Balance(0.5)
    with_it, without = gradient(balance), gradient(None)
    handle.remove()
    logits, _, chosen = seen[0]
    loss = balance_loss(logits.softmax(-1), chosen, Routing(*_parts(microbatch.routing), None, Balance(0.5)))
    (alone,) = torch.autograd.grad(_again(model, microbatch, 0.5), weight)
    assert float(loss.detach()) == pytest.approx(balance.by_layer[1], rel=1e-5)
    torch.testing.assert_close(with_it - without, alone, rtol=1e-3, atol=1e-6)
    assert float(alone.norm()) > 1e-4


def _parts(routing):
    return routing.sequence_T, routing.num_tokens_B


def _again(model, microbatch, weight):
    """The balance loss of the last routing layer alone, through the model's own logits."""
    seen = []
    handle = find_routers(model)[-1].register_forward_hook(lambda _, inputs, outputs: seen.append(outputs))
    object.__setattr__(microbatch, "routing", Routing(*_parts(microbatch.routing)))
    score_tokens(model, microbatch, 1.0)
    handle.remove()
    logits, _, chosen = seen[0]
    return balance_loss(logits.softmax(-1), chosen, Routing(*_parts(microbatch.routing), None, Balance(weight)))
