"""What every job needs before it starts: threads, device, dtype, tokenizer, model, held-out prompts."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from plait.config import ModelConfig, RunConfig
from plait.data.mixture import Mixture
from plait.data.stream import EncodedPrompt, PromptStream
from plait.errors import ConfigError, DataError
from plait.jobs.machine import available_memory_bytes, usable_cores
from plait.models.dtype import faster_dtype
from plait.models.load import Tokenizer, load_model, load_tokenizer
from plait.plan import Plan
from plait.rollout.engine import Engine


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Replace every "auto" by what this machine gives, so that config.json says what ran."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('model.device: "cuda" was asked for and torch sees no CUDA device. Set it to "cpu" or "auto"')
    dtype = faster_dtype(device) if config.compute_dtype == "auto" else config.compute_dtype
    threads = config.num_threads or usable_cores()
    return config.model_copy(update={"device": device, "compute_dtype": dtype, "num_threads": threads})


def available_bytes(config: ModelConfig) -> int | None:
    """Memory that a run on this device can still take; None where the system does not say."""
    return torch.cuda.mem_get_info()[0] if config.device == "cuda" else available_memory_bytes()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: Tokenizer


def load(config: ModelConfig, stop_tokens: tuple[str, ...] = ()) -> LoadedModel:
    """Tokenizer and compute copy of a resolved model config; sets torch's threads."""
    torch.set_num_threads(config.num_threads)
    tokenizer = load_tokenizer(config.path, stop_tokens)
    return LoadedModel(load_model(config.path, dtype=dtype_of(config), device=config.device), tokenizer)


def dtype_of(config: ModelConfig) -> torch.dtype:
    """The type that computes, of a resolved model config."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.compute_dtype]


def make_engine(loaded: LoadedModel, plan: Plan) -> Engine:
    """The rollout engine of a plan, on the model itself."""
    return Engine(
        loaded.model,
        end_token_ids=loaded.tokenizer.end_token_ids,
        num_slots=plan.engine.num_slots,
        max_sequence_tokens=plan.engine.max_sequence_tokens,
        record_experts=plan.engine.record_experts,
    )


def make_stream(mixture: Mixture, tokenizer: Tokenizer, config: RunConfig) -> PromptStream:
    """The run's training prompts, in order."""
    return PromptStream(
        mixture,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_answer_tokens=config.rollout.max_completion_tokens,
        stop_on_overlong=config.rollout.overlong_prompts == "stop",
    )


def held_out(mixture: Mixture, stream: PromptStream, num_prompts: int) -> list[EncodedPrompt]:
    """The evaluation's prompts; those over the length limit are left out, and there must be one left."""
    prompts = mixture.eval_prompts(num_prompts)
    if not prompts:
        raise DataError(
            "no prompt is held out, so nothing can be evaluated. Raise holdout_share, give an eval_path, or set "
            "evaluation.at_start and evaluation.at_end to false and evaluation.every_steps to 0"
        )
    encoded = [e for e in map(stream.encode, prompts) if e is not None]
    if not encoded:
        raise DataError(
            f"all {len(prompts)} held-out prompts are longer than rollout.max_prompt_tokens. "
            "Raise it, or choose shorter prompts"
        )
    return encoded
