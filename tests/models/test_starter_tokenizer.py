"""The starter tokenizer is reproducible, lossless and cuts digits and tags singly."""

from __future__ import annotations

import json
import string

import pytest
import reasoning_gym
from transformers import AutoTokenizer

from plait.data.worked_solutions import completion
from plait.models.starter_tokenizer import STARTER_FAMILIES, TAG_TOKENS, VOCABULARY_SIZE, build

FILES = ("tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("starter")
    build(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_two_builds_are_the_same(folder, tmp_path):
    build(tmp_path)
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_special_tokens(tokenizer):
    assert len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    for tag in TAG_TOKENS:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


@pytest.mark.parametrize("text", ["héllo ✓\t\n  x", string.printable, "日本 <think>1+2=3</think>3", "\x00\x7fÿ"])
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_digits_are_always_single(tokenizer):
    text = "x=1234567890 and 12.0° 99-98=1"
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
    for piece in pieces:
        assert len(piece) == 1 or not any(character.isdigit() for character in piece), pieces


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 ="},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", sorted(STARTER_FAMILIES))
def test_prompts_and_solutions_are_short(tokenizer, name):
    for item in reasoning_gym.create_dataset(name, size=50, seed=3, **STARTER_FAMILIES[name]):
        messages = [{"role": "user", "content": item["question"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert len(tokenizer.encode(text, add_special_tokens=False)) <= 64
        assert len(tokenizer.encode(completion(item, name, reason=True), add_special_tokens=False)) <= 96


def test_config_fits_the_tokenizer(folder, tokenizer):
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id
