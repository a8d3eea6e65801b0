"""Work, depth and products of whole models: against torch's FLOP counter and against the graph that torch runs."""

import numpy as np
import pytest
import torch
from small_models import ALL, DENSE, SPARSE, build, small_config
from torch.utils.flop_counter import FlopCounterMode
from traced_graph import Trace

from plait.cost import model_costs
from plait.cost.layers import Division
from plait.cost.model_catalogue import find_model
from plait.cost.model_config import model_spec
from plait.cost.tokens import attended_pairs, decode_tokens, packed_tokens, uniform_tokens

FUSED_ACTIVATIONS = sorted(set(ALL) - {"gpt2", "gpt_oss"})
"""gelu_new and gpt-oss's clamped gate are about eight operations in eager mode; the formulas count one or two."""


@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize("shape", [(2, 24), (1, 61)])
def test_flop_is_what_the_counter_counts(kind, shape):
    torch.manual_seed(1)
    config = small_config(kind)
    model, spec = build(config).train(), model_spec(config.to_dict())
    ids = torch.randint(0, 96, shape)
    with FlopCounterMode(display=False) as forward:
        total = model(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        total.backward()
    tokens = uniform_tokens(*shape, spec.windows, mode="square")
    assert model_costs.forward(spec, tokens, 4, implementation="eager").flop == pytest.approx(
        forward.get_total_flops(), rel=5e-3
    )
    assert model_costs.backward(spec, tokens, 4, implementation="eager").flop == pytest.approx(
        backward.get_total_flops(), rel=5e-3
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_recomputing_everything_is_one_more_forward_pass_of_the_layers(kind):
    torch.manual_seed(1)
    config = small_config(kind)
    model, spec = build(config).train(), model_spec(config.to_dict())
    model.activation_checkpointing_enable()
    ids = torch.randint(0, 96, (2, 24))
    total = model(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        total.backward()
    tokens = uniform_tokens(2, 24, spec.windows, mode="square")
    predicted = model_costs.backward(spec, tokens, 4, implementation="eager", recompute="full").flop
    assert backward.get_total_flops() == pytest.approx(predicted, rel=5e-3)


def _traced(kind, shape, num_layers):
    config = small_config(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": num_layers})
    torch.manual_seed(1)
    model, spec = build(config).eval(), model_spec(config.to_dict())
    combined = spec.experts.num_experts_per_token if spec.experts else 1
    ids = torch.randint(0, 96, shape)
    with Trace(combined) as trace:
        logits = model(input_ids=ids, use_cache=False).logits
        forward = (trace.depth, trace.work, trace.flop)
        logits.backward(torch.ones_like(logits))
    after = (trace.depth, trace.work, trace.flop)
    return spec, forward, tuple(b - a for a, b in zip(forward, after, strict=True))


@pytest.mark.parametrize("kind", FUSED_ACTIVATIONS)
@pytest.mark.parametrize(("shape", "num_layers"), [((2, 24), 3), ((1, 64), 5)])
def test_depth_is_the_longest_path_and_work_the_sum(kind, shape, num_layers):
    spec, forward, backward = _traced(kind, shape, num_layers)
    tokens = uniform_tokens(*shape, spec.windows, mode="square")
    predicted = model_costs.forward(spec, tokens, 4, implementation="eager")
    if kind in DENSE:
        assert predicted.depth == forward[0]
    else:
        # Softmax and choice of experts, and DeepSeek's groups, in at most five steps more or less per layer.
        assert abs(predicted.depth - forward[0]) <= 5 * num_layers
    assert predicted.flop == forward[2]
    # What is left out: masks, and cosines and sines of positions.
    assert predicted.work - predicted.flop == pytest.approx(forward[1] - forward[2], rel=0.02)
    predicted = model_costs.backward(spec, tokens, 4, implementation="eager")
    assert abs(predicted.depth - backward[0]) <= 4 * num_layers + 2
    assert predicted.flop == backward[2]
    if kind in DENSE:
        # Eager experts add up a gradient of all experts for each of them, which grouped products do not.
        assert predicted.work - predicted.flop == pytest.approx(backward[1] - backward[2], rel=0.02)


def test_depth_of_a_dense_layer_by_the_published_form():
    # 2608.27046 per layer, without norms and softmax: 4 log D + log F + log x - log N; norms add 2 log D and softmax
    # 2 log x; and 30 single steps. Llama-3-8B: D 4096, F 14336, N 32, 2048 keys.
    spec = find_model("Llama-3-8B")
    tokens = uniform_tokens(1, 2048)
    with_layers = model_costs.forward(spec, tokens, 2).depth
    rest = (12 + 6) + (12 + 1)
    per_layer = 4 * 12 + 14 + 11 - 5 + 2 * 12 + 2 * 11 + 30
    assert with_layers == 32 * per_layer + rest


def test_published_flop_per_token():
    # GFLOP per token of Llama-3-8B's forward pass at 2k, 8k, 32k and 128k, and the share of attention.
    spec = find_model("Llama-3.1-8B")
    for length, gflop, share in ((2048, 15.5, 0.035), (8192, 17.2, 0.125), (32768, 23.6, 0.36), (131072, 49.4, 0.70)):
        tokens = uniform_tokens(1, length)
        flop = model_costs.forward(spec, tokens, 2).flop
        assert flop / length / 1e9 == pytest.approx(gflop, rel=5e-3)
        core = 32 * 4 * 32 * 128 * length * (length + 1) / 2
        assert core / flop == pytest.approx(share, abs=5e-3)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 64])
def test_pairs_by_counting(window):
    for s in (1, 2, 5, 6, 17, 40):
        counted = sum(1 for q in range(s) for k in range(s) if k <= q and (window is None or q - k < window))
        assert attended_pairs(s, window) == counted
        assert attended_pairs(s, window, "square") == s * s
    lengths = np.array([3, 17, 1, 40])
    packed = packed_tokens(lengths, (window,))
    sequence = np.repeat(np.arange(4), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    seen = (sequence[:, None] == sequence) & (position[:, None] >= position)
    if window is not None:
        seen &= position[:, None] - position < window
    assert packed.pairs[window] == seen.sum()
    assert (packed.num_tokens, packed.num_head_tokens, packed.longest) == (61, 61, 40)


def test_torch_agrees_on_the_window_that_transformers_masks():
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = small_config("gpt_oss")
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=torch.zeros(1, 20, 64), attention_mask=None, cache=None
    )
    assert attended_pairs(20, 8) == (mask == 0).sum()


def test_one_decode_step_is_the_last_row_of_a_pass():
    for kind in ("llama", "qwen2", "gpt_oss"):
        spec = model_spec(small_config(kind).to_dict())
        longer = model_costs.forward(spec, uniform_tokens(1, 30, spec.windows), 2).flop
        shorter = model_costs.forward(spec, uniform_tokens(1, 29, spec.windows), 2).flop
        assert model_costs.forward(spec, decode_tokens(1, 30, spec.windows), 2).flop == pytest.approx(longer - shorter)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_ranks_share_the_products(kind):
    spec = model_spec(small_config(kind, num_attention_heads=8, num_key_value_heads=8).to_dict())
    tokens = uniform_tokens(2, 32, spec.windows)
    whole = model_costs.forward(spec, tokens, 2)
    for division in (Division(tp=2), Division(cp=2), Division(tp=4, sp=True), Division(tp=2, cp=2, sp=True)):
        part = model_costs.forward(spec, tokens, 2, division)
        ways = division.tp * division.cp
        assert part.depth == whole.depth
        if kind == "llama":
            assert part.flop * ways == pytest.approx(whole.flop)
        # Routers and low-rank down-projections are whole on every tensor-parallel rank.
        assert whole.flop <= part.flop * ways * (1 + 1e-9)
        assert part.flop * division.cp < whole.flop or ways == division.cp
    parts = [spec.pipeline_stage(index, 3) for index in range(3)]
    assert sum(model_costs.forward(part, tokens, 2).flop for part in parts) == pytest.approx(whole.flop)
    assert sum(model_costs.forward(part, tokens, 2).depth for part in parts) == whole.depth


def test_experts_touched_are_the_published_shares():
    # 8 of 128 experts: 6, 40, 87 and nearly 100 % of them are read by 1, 8, 32 and 128 tokens.
    from plait.cost.operators import expected_experts

    for num_tokens, share in ((1, 0.0625), (8, 0.40), (32, 0.87), (128, 1.0)):
        assert expected_experts(num_tokens, 128, 8) / 128 == pytest.approx(share, abs=0.005)


def test_every_sparse_architecture_is_among_those_compared():
    assert set(SPARSE) - {"gpt_oss"} <= set(FUSED_ACTIVATIONS)
