"""The starter model's tokenizer and configuration.

:func:`build` makes both from nothing: a byte-level BPE tokenizer whose merges
come from reasoning-gym questions (seeded, so the result is always the same)
and the config of a small Qwen3 model. The folder it writes is an ordinary
transformers folder that lacks only the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plait.data.worked_solutions import completion

PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Added tokens that are not special, so that decoding keeps them."""

VOCABULARY_SIZE = 768
CONTEXT_LENGTH = 1024
CORPUS_SEED = 20240607

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

STARTER_FAMILIES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 4, "max_digits": 5},
    "simple_equations": {
        "min_terms": 2,
        "max_terms": 2,
        "min_value": 1000,
        "max_value": 99999,
        "operators": ("+", "-"),
        "operators_weights": [0.5, 0.5],
    },
    "complex_arithmetic": {"operations": ("*",), "operations_weights": [1.0]},
    "simple_geometry": {"min_sides": 4, "max_sides": 5},
}
"""The families the starter model is warmed up on, with their reasoning-gym parameters."""

OTHER_TASKS = (
    "basic_arithmetic",
    "products",
    "decimal_chain_sum",
    "gcd",
    "lcm",
    "fraction_simplification",
    "base_conversion",
    "count_bits",
    "leg_counting",
    "letter_counting",
    "number_filtering",
    "number_sequence",
    "number_sorting",
    "spell_backward",
    "word_sorting",
    "simple_integration",
    "polynomial_equations",
    "calendar_arithmetic",
    "time_intervals",
    "power_function",
    "prime_factorization",
    "bitwise_arithmetic",
    "propositional_logic",
    "family_relationships",
)
"""Other tasks that lend their wording, so that any text is cut into fair-sized pieces."""

_SINGLE_PIECES = Regex(r"[0-9]| ?[-+*/=×÷^%<>] ?|[()\[\]{}\n]")
"""Digits, brackets and line ends stand alone; so do operators, with the spaces around them."""


def build(folder: str | Path) -> None:
    """Write the starter tokenizer, config and generation config to ``folder``.

    Args:
        folder: is made if missing; files of the same names are overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    _write_json(folder / "config.json", model_config(len(tokenizer)))
    _write_json(folder / "generation_config.json", generation_config())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the seeded corpus."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SINGLE_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(TAG_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=40,
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core.add_tokens(list(TAG_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(vocabulary_size: int = VOCABULARY_SIZE) -> dict[str, Any]:
    """The starter's Qwen3 config, as in ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    """The starter's sampling defaults, as in ``generation_config.json``."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
    }


def _corpus() -> Iterator[str]:
    """Texts the merges are learnt from: the families with their solutions, then other tasks."""
    for name, parameters in STARTER_FAMILIES.items():
        dataset = reasoning_gym.create_dataset(name, size=400, seed=CORPUS_SEED, **parameters)
        for item in dataset:
            yield f"user\n{item['question']}"
            yield f"assistant\n{completion(item, name, reason=False)}"
            yield completion(item, name, reason=True).split(">")[1].split("<")[0]
    for name in OTHER_TASKS:
        for item in reasoning_gym.create_dataset(name, size=60, seed=CORPUS_SEED):
            yield f"system\n{item['question']}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
