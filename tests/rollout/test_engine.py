"""The engine samples from the very distribution that transformers computes, in whatever company."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from plait.batch import Message, Prompt
from plait.config import SamplingConfig
from plait.errors import ConfigError
from plait.models.attention import PackedAttention
from plait.roles.model import sequence_logprobs
from plait.rollout.engine import Engine
from plait.rollout.scheduler import Request
from plait.stages.packing import TokenSequence

END = (1, 2)


def some_requests(num_prompts=5, num_samples=3, max_tokens=20):
    generator = np.random.default_rng(3)
    prompts = [tuple(generator.integers(3, 48, generator.integers(1, 12)).tolist()) for _ in range(num_prompts)]
    return [
        Request(f"{p}#{g}", prompt, 100 * p + g, max_tokens)
        for p, prompt in enumerate(prompts)
        for g in range(num_samples)
    ]


def run(model, requests, num_slots=8, sampling=None, capacity=32):
    engine = Engine(model, end_token_ids=END, num_slots=num_slots, max_sequence_tokens=capacity)
    engine.version = 7
    return {c.request.id: c for c in engine.generate(requests, sampling or SamplingConfig())}


def as_sequences(completions):
    return [
        TokenSequence(
            np.array([*c.request.prompt_ids, *c.token_ids_R]),
            np.array([False] * len(c.request.prompt_ids) + [True] * len(c.token_ids_R)),
        )
        for c in completions
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_greedy_equals_transformers_generate(make_model, num_kv_heads):
    model = make_model(num_key_value_heads=num_kv_heads)
    requests = some_requests(num_samples=1)
    ours = run(model, requests, sampling=SamplingConfig(temperature=0.0))
    model.set_attn_implementation("eager")
    try:
        for request in requests:
            ids = torch.tensor([request.prompt_ids])
            theirs = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=list(END),
                pad_token_id=0,
            )
            assert ours[request.id].token_ids_R.tolist() == theirs[0, len(request.prompt_ids) :].tolist()
    finally:
        model.set_attn_implementation("plait")


def test_logprobs_equal_the_trainers(make_model):
    model = make_model()
    completions = list(run(model, some_requests(), sampling=SamplingConfig(temperature=0.7)).values())
    scored = sequence_logprobs(model, as_sequences(completions), temperature=0.7, max_tokens=64)
    for completion, logprobs in zip(completions, scored, strict=True):
        assert logprobs.numpy() == pytest.approx(completion.logprobs_R, abs=1e-4)


def test_bf16_logprobs_agree_to_rounding_on_the_starter():
    from plait.models.load import load_model, load_tokenizer

    model, tokenizer = load_model("starter", dtype=torch.bfloat16, device="cpu"), load_tokenizer("starter")
    question = "State the final answer to the following arithmetic problem: {} + {} ="
    prompts = [Prompt(str(i), "", (Message("user", question.format(9876 + i, 4321 - i)),), None, "") for i in range(40)]
    requests = [Request(p.id, tokenizer.encode_prompt(p), i, 80) for i, p in enumerate(prompts)]
    engine = Engine(model, end_token_ids=tokenizer.end_token_ids, num_slots=16, max_sequence_tokens=128)
    completions = list(engine.generate(requests, SamplingConfig()))
    scored = sequence_logprobs(model, as_sequences(completions), temperature=1.0, max_tokens=512)
    gaps = np.concatenate([np.abs(a.numpy() - c.logprobs_R) for a, c in zip(scored, completions, strict=True)])
    assert gaps.mean() < 1e-2


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_fused_decoding_equals_the_module(model_type):
    """fp32, random biases and norms, grouped heads: same tokens, same log-probabilities."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from plait.models import attention
    from plait.rollout.fused import can_fuse

    attention.register()
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(model_type, **shape, intermediate_size=64, max_position_embeddings=128, head_dim=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="plait", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    assert can_fuse(model)
    results = []
    for fuses in (True, False):
        engine = Engine(model, end_token_ids=END, num_slots=5, max_sequence_tokens=32, fuses=fuses)
        results.append({c.request.id: c for c in engine.generate(some_requests(), SamplingConfig())})
    for name, fused in results[0].items():
        assert fused.token_ids_R.tolist() == results[1][name].token_ids_R.tolist()
        assert fused.logprobs_R == pytest.approx(results[1][name].logprobs_R, abs=1e-4)


@pytest.mark.parametrize("num_slots", [1, 2, 5, 40])
def test_a_sample_does_not_depend_on_its_company(make_model, num_slots):
    requests = some_requests()
    reference = run(make_model(), requests, num_slots=8)
    other = run(make_model(), list(reversed(requests)), num_slots=num_slots)
    for name, completion in reference.items():
        assert completion.token_ids_R.tolist() == other[name].token_ids_R.tolist()


def test_finish_reasons_end_tokens_and_versions(make_model):
    completions = run(make_model(), some_requests(num_samples=8)).values()
    assert {c.finish for c in completions} == {"stop", "length"}
    for completion in completions:
        ids = completion.token_ids_R.tolist()
        if completion.finish == "stop":
            assert ids[-1] in END
            assert not set(ids[:-1]) & set(END)
        else:
            assert len(ids) == 20
            assert not set(ids) & set(END)
        assert completion.versions_R.tolist() == [7] * len(ids)


def test_seeds_decide_samples(make_model):
    requests = some_requests(num_prompts=1, num_samples=1)
    changed = [Request(r.id, r.prompt_ids, r.seed + 1, r.max_tokens) for r in requests]
    first, again, other = (run(make_model(), r)["0#0"].token_ids_R.tolist() for r in (requests, requests, changed))
    assert first == again != other


def test_a_request_that_cannot_fit_a_slot_is_refused_before_anything_runs(make_model):
    with pytest.raises(AssertionError, match="a slot holds 32"):
        run(make_model(), [Request("long", (5,) * 20, 0, 20)])


class Scripted(torch.nn.Module):
    """Says given tokens, whatever it is asked: logits that leave no choice."""

    def __init__(self, model, script):
        super().__init__()
        self.model, self.script, self.config = model, torch.tensor(script), model.config

    def forward(self, position_ids, **more):
        logits = self.model(position_ids=position_ids, **more).logits
        # One row of prompts in a prefill, one token per row in a decode: either way the kept logits come last.
        last = position_ids[0, :1] if position_ids.shape[1] > 1 else position_ids[:, 0]
        said = self.script[last].view(-1, 1, 1).expand(*logits.shape[:2], 1)
        return SimpleNamespace(logits=torch.full_like(logits, -1e9).scatter(-1, said, 0.0))


@pytest.mark.parametrize(
    ("script", "mask_length", "finish"),
    [
        ([11, 12, 2, 2, 2], 3, "stop"),
        ([11, 7, 2, 2, 2], 2, "stop"),
        ([11, 12, 13, 14, 15], 5, "length"),
        ([2, 2, 2, 2, 2], 1, "stop"),
    ],
)
def test_n38_the_first_stop_token_is_trained_and_nothing_after_it(make_model, script, mask_length, finish):
    """Two end tokens, 2 and 7, of which 2 is also the padding id; the prompt has one token, so position = index."""
    scripted = Scripted(make_model(), script)
    engine = Engine(scripted, end_token_ids=(2, 7), num_slots=16, max_sequence_tokens=8, fuses=False)
    (completion,) = engine.generate([Request("x", (5,), 0, 5)], SamplingConfig())
    assert completion.token_ids_R.tolist() == script[:mask_length]
    assert completion.finish == finish


def drain(engine):
    done = {}
    while not engine.is_idle:
        completion = engine.next_completed()
        done[completion.request.id] = completion
    return done


def paused_midway(model, requests, num_tokens=4):
    engine = Engine(model, end_token_ids=END, num_slots=8, max_sequence_tokens=32)
    engine.submit(requests)
    early = [c for _ in range(num_tokens) for c in engine.step()]
    engine.pause()
    return engine, {c.request.id: c for c in early}


def test_a_pause_between_tokens_changes_nothing(make_model):
    requests = some_requests()
    reference = run(make_model(), requests)
    engine, early = paused_midway(make_model(), requests)
    with pytest.raises(AssertionError, match="paused"):
        engine.next_completed()
    engine.resume()
    for name, completion in (early | drain(engine)).items():
        assert completion.token_ids_R.tolist() == reference[name].token_ids_R.tolist()


def test_new_weights_between_tokens_with_keys_and_values_computed_again(make_model):
    """Tokens after the change have the log-probabilities of the new weights over the whole sequence."""
    model, other = make_model(), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    engine, _ = paused_midway(model, some_requests(num_prompts=2))
    model.load_state_dict(other.state_dict())
    engine.set_version(1, recompute_kv=True)
    engine.resume()
    completions = [c for c in drain(engine).values() if set(c.versions_R.tolist()) == {0, 1}]
    assert completions
    old, new = (
        sequence_logprobs(m, as_sequences(completions), temperature=1.0, max_tokens=64) for m in (make_model(), other)
    )
    for completion, of_old, of_new in zip(completions, old, new, strict=True):
        is_new = completion.versions_R == 1
        assert is_new.tolist() == sorted(is_new.tolist())
        assert completion.logprobs_R[is_new] == pytest.approx(of_new.numpy()[is_new], abs=1e-4)
        assert completion.logprobs_R[~is_new] == pytest.approx(of_old.numpy()[~is_new], abs=1e-4)
        assert np.abs(of_new.numpy()[is_new] - of_old.numpy()[is_new]).max() > 1e-2


def test_new_weights_with_keys_and_values_kept_differ_from_computed_again(make_model):
    def last_logprobs(recompute_kv):
        model = make_model()
        engine, _ = paused_midway(model, some_requests(num_prompts=1, num_samples=1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.set_version(1, recompute_kv=recompute_kv)
        engine.resume()
        return drain(engine)["0#0"].logprobs_R

    kept, again = last_logprobs(False), last_logprobs(True)
    assert kept[:5] == pytest.approx(again[:5])  # the first step samples two: one from the prompt, one after it
    assert abs(kept[5] - again[5]) > 1e-4


def test_long_prompts_are_prefilled_in_several_passes(make_model, monkeypatch):
    from plait.rollout import prompts as module

    requests = some_requests(num_prompts=9)
    whole = run(make_model(), requests, num_slots=30)
    monkeypatch.setattr(module, "MAX_PASS_TOKENS", 15)
    parts = run(make_model(), requests, num_slots=30)
    assert all(whole[name].token_ids_R.tolist() == parts[name].token_ids_R.tolist() for name in whole)


@pytest.mark.parametrize("num_slots", [2, 3, 7])
def test_a_prompt_is_computed_once_however_few_slots_its_group_gets(make_model, num_slots, monkeypatch):
    requests = some_requests(num_prompts=5)
    engine = Engine(make_model(), end_token_ids=END, num_slots=num_slots, max_sequence_tokens=32)
    seen = []
    compute = engine._runner.prefill
    monkeypatch.setattr(engine._runner, "prefill", lambda prompts: seen.extend(prompts) or compute(prompts))
    engine.submit(requests)
    drain(engine)
    assert sorted(seen) == sorted({request.prompt_ids for request in requests})
    assert not engine._prompts.places((), ())


def test_waiting_prompts_are_computed_again_after_new_weights(make_model):
    """A group whose first samples came from version 0: the others must start from the weights of version 1."""
    engine = Engine(make_model(), end_token_ids=(), num_slots=1, max_sequence_tokens=32)
    engine.submit(some_requests(num_prompts=1))
    first = engine.next_completed()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)
    engine.set_version(1, recompute_kv=True)
    later = drain(engine)
    fresh = Engine(engine.model, end_token_ids=(), num_slots=1, max_sequence_tokens=32)
    fresh.submit(some_requests(num_prompts=1))
    expected = drain(fresh)
    assert first.request.id not in later
    for name, completion in later.items():
        assert completion.token_ids_R.tolist() == expected[name].token_ids_R.tolist()
        assert completion.logprobs_R == pytest.approx(expected[name].logprobs_R, abs=1e-5)


def test_kv_memory_is_stated(make_model):
    engine = Engine(make_model(torch.bfloat16), end_token_ids=END, num_slots=8, max_sequence_tokens=32)
    assert engine.num_kv_bytes == 2 * 2 * 8 * 2 * 32 * 16 * 2  # k and v, layers, slots, kv heads, tokens, head, bytes


@pytest.fixture(scope="module")
def moe_model():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from plait.models import attention

    attention.register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="plait", dtype=torch.float32).eval()


def routed_alone(model, ids):
    """Experts of every layer in one plain forward pass."""
    chosen = []

    def listen(module, inputs, outputs):
        chosen.append(outputs[-1])

    handles = [layer.mlp.gate.register_forward_hook(listen) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, context=PackedAttention([ids.shape[1]]))
    for handle in handles:
        handle.remove()
    return chosen


def test_experts_are_recorded_as_the_model_alone_chooses_them(moe_model):
    """Against one plain forward pass over each finished sequence, through more requests than there are slots."""
    engine = Engine(moe_model, end_token_ids=END, num_slots=4, max_sequence_tokens=32, record_experts=True)
    completions = list(engine.generate(some_requests(), SamplingConfig()))
    engine.close()
    for completion in completions:
        ids = torch.tensor([[*completion.request.prompt_ids, *completion.token_ids_R.tolist()]])
        chosen = routed_alone(moe_model, ids[:, :-1])
        expected = torch.stack(chosen, dim=1).sort(-1).values
        assert torch.equal(torch.from_numpy(completion.experts_TLK).long().sort(-1).values, expected)


def test_a_dense_model_has_no_experts_to_record(make_model):
    with pytest.raises(ConfigError, match="has no router"):
        Engine(make_model(), end_token_ids=END, num_slots=2, max_sequence_tokens=8, record_experts=True)
