"""Activations: against the bytes that autograd holds, against the published rows, by hand."""

import pytest
import torch
from small_models import ALL, build, small_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plait.cost.activations import activation_bytes, korthikanti_layer_bytes, layer_bytes, logits_bytes
from plait.cost.layers import Division
from plait.cost.model_catalogue import find_model
from plait.cost.model_config import model_spec
from plait.cost.model_spec import FeedForward, GroupedAttention, LayerRun, ModelSpec
from plait.cost.tokens import uniform_tokens

KINDS = sorted(set(ALL) - {"gpt_oss", "gpt2"})
DTYPES = {4: torch.float32, 2: torch.bfloat16}


class _Held:
    """Storages that are kept, each once, without parameters and buffers."""

    def __init__(self, model):
        self.model_own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.storages = {}

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.model_own:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def num_bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def _keep_products(head):
    def policy(_context, function, *args, **_):
        name = function._schema.name
        is_product = name in ("aten::mm", "aten::addmm")
        is_attention = name == "aten::bmm" and args[1].shape[-1] == head
        return CheckpointPolicy.MUST_SAVE if is_product or is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _measure(model, ids, recompute, head):
    """Bytes between forward and backward, logits left out."""
    held, kept_results = _Held(model), []

    def contexts():
        forward, again = create_selective_checkpoint_contexts(_keep_products(head))
        kept_results.append(forward.storage)
        return forward, again

    def rerun(layer):
        plain = type(layer).forward
        how = {} if recompute == "full" else {"context_fn": contexts}

        def forward(*args, **kwargs):
            # What a checkpoint holds in a closure, hooks do not see.
            for tensor in (*kwargs["position_embeddings"], kwargs["attention_mask"]):
                held.keep(tensor)
            return checkpoint(lambda *a, **k: plain(layer, *a, **k), *args, use_reentrant=False, **how, **kwargs)

        return forward

    if recompute != "none":
        for layer in model.base_model.layers:
            layer.forward = rerun(layer)
    with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda tensor: tensor):
        out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    held.keep(out.detach())
    for storage in kept_results:
        for results in storage.values():
            for result in results.values():
                if type(result).__name__ == "_VersionWrapper":
                    held.keep(result.val.detach())
    return held.num_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", DTYPES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_eager_bytes_are_what_autograd_holds(kind, b, recompute):
    torch.manual_seed(1)
    config = small_config(kind)
    model, spec = build(config).to(DTYPES[b]).train(), model_spec(config.to_dict())
    measured = _measure(model, torch.randint(0, 96, (1, 80)), recompute, spec.attention.value_size)
    tokens = uniform_tokens(1, 80, spec.windows, mode="square")
    predicted = activation_bytes(spec, tokens, b, implementation="eager", recompute=recompute)
    assert predicted.layers + predicted.outside == pytest.approx(measured, rel=0.03)


def test_fused_bytes_with_flash_attention_and_fused_norms():
    """torch's flash attention and our norms keep each tensor once; torch keeps the SiLU output too (b F more)."""
    import transformers

    from plait.models.norms import swap_norms

    torch.manual_seed(1)
    config = small_config("llama", num_key_value_heads=4, attention_bias=False, mlp_bias=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    swap_norms(model)
    measured = _measure(model, torch.randint(0, 96, (1, 80)), "none", 16)
    spec = model_spec(config.to_dict())
    predicted = activation_bytes(spec, uniform_tokens(1, 80), 4)
    silu = 3 * 80 * 4 * 112
    assert predicted.layers + silu + predicted.outside == pytest.approx(measured, rel=0.02)


def _gpt(h, a, b=2):
    attention = GroupedAttention(a, a, h // a, 0)
    return ModelSpec("gpt", 51_200, h, (LayerRun(1),), attention, FeedForward(4 * h, is_gated=False), None, True, 2048)


@pytest.mark.parametrize(("h", "a"), [(12_288, 96), (20_480, 128), (6144, 64)])
@pytest.mark.parametrize("t", [1, 8])
def test_korthikanti_rows(h, a, t):
    """2205.05198, table 2: without the two masks of dropout, one byte each, the fused form is their selective one."""
    s, spec = 2048, _gpt(h, a)
    tokens = uniform_tokens(1, s)
    sbh = s * h
    log_sum_exp = 4 * s * a / t
    for sp in (False, True):
        ours = layer_bytes(spec, LayerRun(1), tokens, 2, division=Division(tp=t, sp=sp)).total - log_sum_exp
        masks = 2 * sbh / (t if sp else 1)
        published = sbh / t * 34 if sp else sbh * (10 + 24 / t)
        assert ours + masks == pytest.approx(published)
        assert korthikanti_layer_bytes(s, 1, h, a, t=t, sp=sp, recompute="selective") == pytest.approx(published)
        scores = 5 * a * s / h
        whole = sbh / t * (34 + scores) if sp else sbh * (10 + 24 / t + scores / t)
        assert korthikanti_layer_bytes(s, 1, h, a, t=t, sp=sp) == pytest.approx(whole)
    full = layer_bytes(spec, LayerRun(1), tokens, 2, recompute="full").total
    assert full == 2 * sbh == korthikanti_layer_bytes(s, 1, h, a, recompute="full")


def test_what_selective_recompute_saves_is_published():
    # 70 % for GPT-3 (h 12,288, 96 heads) and 65 % for MT-NLG (h 20,480, 128 heads) at 2,048 tokens.
    for h, a, saved in ((12_288, 96, 0.70), (20_480, 128, 0.65)):
        part = korthikanti_layer_bytes(2048, 1, h, a, recompute="selective") / korthikanti_layer_bytes(2048, 1, h, a)
        assert 1 - part == pytest.approx(saved, abs=0.005)


def test_llama_by_hand():
    # 8,192 tokens: 34 D bytes per token and layer (and 4 bytes per head of log-sum-exp), 2.15 GB under full recompute.
    spec = find_model("Llama-3.1-8B")
    tokens = uniform_tokens(1, 8192, num_head_tokens=0)
    found = activation_bytes(spec, tokens, 2)
    assert found.layers == 8192 * 32 * (34 * 4096 + 4 * 32)
    full = activation_bytes(spec, tokens, 2, recompute="full")
    assert full.layers == pytest.approx(2.15e9, rel=2e-3)
    assert full.working == found.layers / 32 - full.layers / 32
    assert full.peak == full.layers + full.outside + full.working
    # The layer's input and two row-wise results, queries, keys, values and attention's output, gate and up.
    selective = activation_bytes(spec, tokens, 2, recompute="selective")
    assert selective.layers == 8192 * 32 * (2 * (3 * 4096 + 4096 + 2 * 1024 + 4096 + 2 * 14_336) + 4 * 32)


def test_logits_by_hand():
    # One fp32 copy of 8,192 x 128,256 is 4.2 GB; bf16 logits beside two of them.
    spec = find_model("Llama-3.1-8B")
    assert logits_bytes(spec, 8192, 0) / 2 == pytest.approx(4.2e9, rel=2e-3)
    assert logits_bytes(spec, 8192, 2) == 8192 * 128_256 * 10
    assert logits_bytes(spec, 8192, 2, Division(tp=8)) * 8 == logits_bytes(spec, 8192, 2)
    assert logits_bytes(spec, 8192, 2, chunk=1024) * 8 == logits_bytes(spec, 8192, 2)
    assert logits_bytes(spec, 100, 2, chunk=1024) == logits_bytes(spec, 100, 2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_share(recompute):
    spec = find_model("Qwen2.5-7B")
    tokens = uniform_tokens(1, 4096)
    whole = activation_bytes(spec, tokens, 2, recompute=recompute)
    for division, ways in ((Division(tp=4, sp=True), 4), (Division(cp=4), 4), (Division(tp=2, cp=2, sp=True), 4)):
        part = activation_bytes(spec, tokens, 2, recompute=recompute, division=division)
        assert part.layers * ways == pytest.approx(whole.layers)
        assert part.logits * ways == whole.logits
    apart = activation_bytes(spec, tokens, 2, recompute=recompute, division=Division(tp=4))
    assert whole.layers / 4 < apart.layers <= whole.layers
    stages = [activation_bytes(spec.pipeline_stage(index, 4), tokens, 2, recompute=recompute) for index in range(4)]
    assert sum(stage.layers for stage in stages) == pytest.approx(whole.layers)
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_experts_that_are_whole_take_a_part_of_the_rows():
    spec = find_model("Qwen3-30B-A3B")
    tokens = uniform_tokens(1, 1024)
    one = layer_bytes(spec, LayerRun(1, is_sparse=True), tokens, 2).feed_forward
    # 8 rows of D and 3 F per token in bf16, 128 router weights in fp32.
    assert one == 1024 * (8 * 2 * (2048 + 3 * 768) + 4 * 128)
    cut = layer_bytes(spec, LayerRun(1, is_sparse=True), tokens, 2, division=Division(tp=2)).feed_forward
    assert cut == 1024 * (8 * 2 * (2048 + 3 * 384) + 4 * 128)
    whole = layer_bytes(spec, LayerRun(1, is_sparse=True), tokens, 2, division=Division(tp=2, ep=8)).feed_forward
    assert whole == 1024 * (8 * 2 * (1024 + 3 * 384) + 4 * 128)
