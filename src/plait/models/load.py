"""Transformers causal LMs and their tokenizers: loading, checks at the door, export."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from plait.batch import Prompt
from plait.errors import ConfigError
from plait.models import attention
from plait.models.folder import model_folder
from plait.models.norms import swap_norms
from plait.models.routing import prepare_routers


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A transformers tokenizer with what sampling needs to know of it."""

    backend: Any
    end_token_ids: tuple[int, ...]
    """Every id that ends a completion; the first one sampled is trained, nothing after it exists."""

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the chat up to the place where the policy goes on, `prompt.prefix` included."""
        if self.backend.chat_template is None:
            if len(prompt.messages) != 1:
                raise ConfigError(
                    f"prompt {prompt.id} has {len(prompt.messages)} messages and the tokenizer has no chat template. "
                    "Give the tokenizer a chat_template, or use prompts of a single text"
                )
            ids = self.backend.encode(prompt.messages[0].content + prompt.prefix)
            return tuple(ids)
        chat = [{"role": m.role, "content": m.content} for m in prompt.messages]
        text = self.backend.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        # The template writes its own start token, so the tokenizer must not add a second one.
        return tuple(self.backend.encode(text + prompt.prefix, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion for verifiers and people; special tokens left out. Never encoded again."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(path: str, stop_tokens: Sequence[str] = ()) -> Tokenizer:
    """Load a tokenizer and find every id that ends a completion. Raises ConfigError where there is none."""
    folder = _existing(path)
    backend = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            value = json.loads((folder / name).read_text()).get("eos_token_id")
            ids += value if isinstance(value, list) else [value]
    ids.append(backend.eos_token_id)
    for token in stop_tokens:
        encoded = backend.encode(token, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(
                f'rollout.stop_tokens: "{token}" is {len(encoded)} tokens of this tokenizer, expected exactly 1. '
                "Name a single token, for example one of its special tokens"
            )
        ids.append(encoded[0])
    found = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not found:
        raise ConfigError(
            f"model.path: the tokenizer in {folder} has no end token, so no completion could end. "
            'Set "eos_token" in its tokenizer_config.json, or name one in rollout.stop_tokens'
        )
    return Tokenizer(backend, found)


def load_model(path: str, *, dtype: torch.dtype, device: str, from_scratch_seed: int | None = None) -> PreTrainedModel:
    """A causal LM on `device` in `dtype`, attending through `plait.models.attention`.

    from_scratch_seed: initialise weights at random instead of reading them.
    """
    attention.register()
    # Its bars would be drawn over the run's own progress.
    disable_progress_bar()
    folder = _existing(path)
    config = AutoConfig.from_pretrained(folder)
    if from_scratch_seed is not None:
        torch.manual_seed(from_scratch_seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
        model = model.to(dtype)
        if (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME, dtype=dtype)
    swap_norms(model)
    prepare_routers(model)
    # Dropout would make the trainer see another model than the one that sampled.
    return model.to(device).eval()


def load_reward_model(path: str, tokenizer: Tokenizer, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A sequence classifier with one label. Raises ConfigError where the folder holds none, or other tokens."""
    attention.register()
    disable_progress_bar()
    folder = _existing(path, "reward_models.path")
    own = AutoTokenizer.from_pretrained(folder)
    if own.get_vocab() != tokenizer.backend.get_vocab():
        raise ConfigError(
            f'reward_models.path: the tokenizer in "{path}" is not the policy\'s, and a reward model reads the very '
            "tokens that the policy wrote. Choose a reward model of the policy's family"
        )
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation=attention.NAME, dtype=dtype, output_loading_info=True
    )
    head = dict(model.named_children()).get("score")
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])) or "a linear head of one label named score"
        raise ConfigError(
            f'reward_models.path: "{path}" lacks {missing}, so it is no trained reward model. '
            "Give the folder of a sequence classifier with num_labels 1"
        )
    swap_norms(model)
    return model.requires_grad_(False).to(device).eval()


def enable_recompute(model: PreTrainedModel) -> None:
    """Let each layer keep only its input in training mode; dropout is switched off, which evaluation mode had done."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def export(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a plain transformers folder (bf16 safetensors) that transformers and vLLM load."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
    tokenizer.backend.save_pretrained(folder)
    for path in folder.iterdir():
        # safetensors writes for its owner alone; a model is there to be read by other programs.
        path.chmod(0o644)


def _existing(path: str, key: str = "model.path") -> Path:
    folder = model_folder(path)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f'{key}: there is no config.json in "{folder}", expected a transformers model folder. '
            'Give the path of one, or "starter"; nothing is downloaded'
        )
    return folder
