"""A run that takes a second: a random model of 60k parameters with the starter's tokenizer, and a toy verifier."""

import json

import pytest

TOY_VERIFIER = '''

def letters(samples):
    """Share of ASCII letters in what was said: dense, so that a random model has something to learn."""
    return [sum(c.isascii() and c.isalpha() for c in s.completion) / max(len(s.completion), 1) for s in samples]

def raises_on_one(samples):
    if any(s.prompt.answer == "3" and s.id.endswith("#0") for s in samples):
        raise KeyError("no such answer")
    return letters(samples)

def gives_none(samples):
    return [None for s in samples]

def gives_nan(samples):
    return [float("nan") for s in samples]

def one_too_few(samples):
    return [1.0] * (len(samples) - 1)

def four_kinds(samples):
    """By the sample's number: wrong, wrong, no answer, failed."""
    from plait.batch import Verdict
    kinds = [Verdict("scored", 0.0, detail="wrong")] * 2 + [Verdict("scored", 0.0, detail="no_answer"), None]
    return [kinds[int(s.id[-1])] for s in samples]

def always_one(samples):
    return [1.0 for s in samples]
'''


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random model that transformers loads."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from plait.models.load import load_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = load_tokenizer("starter").backend
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def toy(tmp_path, tiny_model, monkeypatch):
    """toy(**overrides) loads the toy recipe; the working directory is a fresh folder."""
    from plait.recipe import load_run_config

    rows = [{"id": f"r{i}", "prompt": f"Say {i}", "answer": str(i)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "toy_verifier.py").write_text(TOY_VERIFIER)
    (tmp_path / "toy.toml").write_text(f"""
name = "toy"
model = {{ path = "{tiny_model}", compute_dtype = "float32", num_threads = 1 }}
batch = {{ num_prompts_per_step = 4, num_samples_per_prompt = 4, num_tokens_per_microbatch = 512 }}
rollout = {{ max_prompt_tokens = 40, max_completion_tokens = 12 }}
optimizer = {{ learning_rate = 1e-2 }}
train = {{ num_steps = 4 }}
evaluation = {{ num_prompts = 4, num_samples_per_prompt = 2 }}
[[tasks]]
source = "rows"
path = "rows.jsonl"
verifier = "toy_verifier:letters"
""")
    monkeypatch.chdir(tmp_path)
    # Each test writes its own module of this name; the import system must not hand out another test's.
    monkeypatch.delitem(__import__("sys").modules, "toy_verifier", raising=False)

    def load(*overrides):
        return load_run_config("toy.toml", overrides)

    return load
