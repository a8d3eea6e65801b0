"""What a transformers model folder says of itself in its JSON files. Torch-free."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

STARTER = "starter"
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Keys by which Gemma 2, Granite and Cohere say that their logits are more than the head's product."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
"""Names of the longest sequence in config.json; GPT-2, MPT and others spell it their own way."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in config.json."""


class ModelFolderError(ValueError):
    """The folder is missing, or one of its JSON files cannot be read."""


def model_folder(path: str) -> Path:
    """The folder of a model: the packaged starter by its name, else the path itself."""
    if path == STARTER:
        return Path(str(files("plait.assets") / STARTER))
    return Path(path)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules need to know of a model.

    max_positions: longest sequence in tokens, None where config.json names none.
    has_end_token: whether any of its files names a token that ends a completion.
    window: the smallest sliding window of its layers in tokens, None where all attend to the whole sequence.
    num_experts: that a layer chooses from, 0 for a dense model.
    other_layers: kinds of its layers that are neither full nor sliding attention.
    """

    max_positions: int | None
    has_end_token: bool
    window: int | None
    other_layers: tuple[str, ...]
    num_experts: int = 0


def read_model_facts(path: str) -> ModelFacts:
    """Read config.json, generation_config.json and tokenizer_config.json. Raises ModelFolderError."""
    folder = model_folder(path)
    if not folder.is_dir():
        raise ModelFolderError(f'there is no folder "{path}"')
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f'there is no config.json in "{folder}"')
    config = read_json(folder / "config.json")
    # Models with several parts keep the language model's settings one level down.
    text = config
    if "text_config" in config:
        text = config["text_config"]
    positions = [text[key] for key in _POSITION_KEYS if key in text and isinstance(text[key], int)]
    layers: list[str] = []
    if "layer_types" in text:
        layers = text["layer_types"] or []
    return ModelFacts(
        max_positions=positions[0] if positions else None,
        has_end_token=_has_end_token(folder, (config, text)),
        window=_window(text, layers),
        other_layers=tuple(sorted(set(layers) - {"full_attention", "sliding_attention"})),
        num_experts=max((text[key] for key in _EXPERT_KEYS if key in text and isinstance(text[key], int)), default=0),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFolderError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFolderError(f'"{path}" cannot be read as JSON: {error}') from error
    if not isinstance(data, dict):
        raise ModelFolderError(f'"{path}" does not hold a JSON object')
    return data


def _has_end_token(folder: Path, configs: tuple[dict[str, Any], ...]) -> bool:
    for name, key in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        if (folder / name).is_file():
            data = read_json(folder / name)
            if key in data and data[key] not in (None, [], ""):
                return True
    return any("eos_token_id" in c and c["eos_token_id"] not in (None, []) for c in configs)


def _window(config: dict[str, Any], layers: list[str]) -> int | None:
    if "sliding_window" not in config or not isinstance(config["sliding_window"], int):
        return None
    # Qwen keeps a window in its file and switches it off beside it.
    is_off = "use_sliding_window" in config and config["use_sliding_window"] is False
    if is_off or (layers and "sliding_attention" not in layers):
        return None
    return config["sliding_window"]
