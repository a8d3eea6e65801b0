"""What the model folder can do with the lengths that are asked for."""

from collections.abc import Iterator

from plait.config import AlgorithmConfig, EvaluationConfig, ModelConfig, RolloutConfig, SftModelConfig
from plait.errors import Violation
from plait.models.folder import (
    LOGIT_CHANGES,
    ModelFacts,
    ModelFolderError,
    model_folder,
    read_json,
    read_model_facts,
)


def _facts(model: ModelConfig) -> ModelFacts | None:
    try:
        return read_model_facts(model.path)
    except ModelFolderError:
        return None  # reported by model_folder_is_readable


def model_folder_is_readable(model: ModelConfig) -> Iterator[Violation]:
    try:
        read_model_facts(model.path)
    except ModelFolderError as error:
        change = 'Give the path of a transformers model folder, or "starter"'
        if model.path.count("/") == 1 and not model.path.startswith((".", "~")):
            folder = f"models/{model.path.partition('/')[2]}"
            change += f"; nothing is downloaded (hf download {model.path} --local-dir {folder})"
        elif model.path.startswith("~"):
            change += "; ~ is not expanded"
        yield Violation("model.path", str(error), change)


def _too_long(where: str, total: int, sum_text: str, facts: ModelFacts | None) -> Iterator[Violation]:
    if facts is not None and facts.max_positions is not None and total > facts.max_positions:
        yield Violation(
            where,
            f"{sum_text} = {total} tokens is more than the {facts.max_positions} positions of the model",
            f"Lower one of them by {total - facts.max_positions} or more, or choose a model that takes more",
        )


def positions(model: ModelConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    text = f"rollout.max_prompt_tokens {prompt} + rollout.max_completion_tokens {completion}"
    return _too_long("rollout.max_completion_tokens", prompt + completion, text, _facts(model))


def evaluation_positions(
    model: ModelConfig, rollout: RolloutConfig, evaluation: EvaluationConfig
) -> Iterator[Violation]:
    prompt, completion = rollout.max_prompt_tokens, evaluation.max_completion_tokens
    if completion > 0:
        text = f"rollout.max_prompt_tokens {prompt} + evaluation.max_completion_tokens {completion}"
        yield from _too_long("evaluation.max_completion_tokens", prompt + completion, text, _facts(model))


def unknown_positions(model: ModelConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    facts = _facts(model)
    if facts is not None and facts.max_positions is None:
        total = rollout.max_prompt_tokens + rollout.max_completion_tokens
        yield Violation(
            "model.path",
            f"its config.json names no longest sequence, so {total} tokens cannot be checked",
            "See in the model's documentation whether it takes them",
        )


def _endless(model: ModelConfig) -> Iterator[Violation]:
    facts = _facts(model)
    if facts is not None and not facts.has_end_token:
        yield Violation(
            "model.path",
            "none of generation_config.json, config.json and tokenizer_config.json names an end token, "
            "so no completion could end before its limit",
            'Set "eos_token" in its tokenizer_config.json',
        )


def end_token(model: ModelConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    for violation in _endless(model):
        if not rollout.stop_tokens:
            yield Violation(violation.where, violation.rule, f"{violation.change}, or name one in rollout.stop_tokens")


def sft_end_token(model: SftModelConfig) -> Iterator[Violation]:
    return _endless(model)


def _attention(model: ModelConfig, total: int) -> Iterator[Violation]:
    facts = _facts(model)
    if facts is None:
        return
    if facts.window is not None and facts.window < total:
        yield Violation(
            "model.path",
            f"its layers see a sliding window of {facts.window} tokens, and sequences have up to {total}; "
            "windows are not supported yet",
            f"Choose a model with full attention, or keep prompt and completion within {facts.window} tokens",
        )
    if facts.other_layers:
        yield Violation(
            "model.path",
            f"it has layers of kind {', '.join(facts.other_layers)}; only full attention is supported yet",
            "Choose a model with full attention",
        )


def attention_kinds(
    model: ModelConfig, rollout: RolloutConfig, evaluation: EvaluationConfig | None = None
) -> Iterator[Violation]:
    completion = rollout.max_completion_tokens
    if evaluation is not None:
        completion = max(completion, evaluation.max_completion_tokens)
    return _attention(model, rollout.max_prompt_tokens + completion)


def sft_attention_kinds(model: SftModelConfig, max_sequence_tokens: int) -> Iterator[Violation]:
    return _attention(model, max_sequence_tokens)


def sft_positions(model: SftModelConfig, max_sequence_tokens: int) -> Iterator[Violation]:
    facts = _facts(model)
    if facts is not None and facts.max_positions is not None and max_sequence_tokens > facts.max_positions:
        yield Violation(
            "max_sequence_tokens",
            f"{max_sequence_tokens} tokens is more than the {facts.max_positions} positions of the model",
            f"Set it to {facts.max_positions} or less, or choose a model that takes more",
        )


def critic_folder(
    algorithm: AlgorithmConfig, model: ModelConfig, rollout: RolloutConfig | None = None
) -> Iterator[Violation]:
    """An independent critic's own folder, or what a shared trunk needs of the policy's."""
    critic = algorithm.critic
    if critic.kind == "independent" and critic.path:
        try:
            facts = read_model_facts(critic.path)
        except ModelFolderError as error:
            change = "Give the path of a transformers model folder, or take it out for the policy's own"
            yield Violation("algorithm.critic.path", str(error), change)
            return
        if rollout is not None:
            prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
            text = f"rollout.max_prompt_tokens {prompt} + rollout.max_completion_tokens {completion}"
            yield from _too_long("algorithm.critic.path", prompt + completion, text, facts)
    if critic.kind == "shared_trunk":
        try:
            config = read_json(model_folder(model.path) / "config.json")
        except ModelFolderError:
            return  # reported by model_folder_is_readable
        changed = [key for key in LOGIT_CHANGES if key in config and config[key] not in (None, 1.0)]
        if changed:
            yield Violation(
                "algorithm.critic.kind",
                f"the model changes its logits after the head ({', '.join(changed)}), and a shared trunk is "
                "supported for plain heads only",
                'Set it to "independent"',
            )


def experts_to_record(model: ModelConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    facts = _facts(model)
    if rollout.record_experts and facts is not None and facts.num_experts == 0:
        yield Violation(
            "rollout.record_experts",
            f'"{model.path}" is a dense model: its config.json names no experts, so there are no choices to record',
            "Set it to false, or choose a mixture of experts",
        )
