"""Numbers, and stand-ins for TRL's trainers and models, for agree_with_trl.py: nothing is loaded or trained."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LENGTHS = (5, 1, 9, 3, 7, 2)
GROUP = 3
MAX_TOKENS = 12


class Numbers:
    """Log-probabilities per token, padded [B, T], with their mask, and one advantage and reward per sequence."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS), max(LENGTHS))

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.mask_BT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        self.old_BT = -normal(1.0).abs() - 0.1
        self.now_BT = (self.old_BT + normal(0.4)).requires_grad_()
        self.rollout_BT = self.old_BT + normal(0.5)
        self.ref_BT = self.old_BT + normal(0.3)
        self.advantages_B = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
        self.rewards_B = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float32)
        self.group_B = torch.arange(len(LENGTHS)) // GROUP
        self.sequence_R = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def packed(self, padded_BT: Tensor) -> Tensor:
        return padded_BT[self.mask_BT]

    def sums(self, padded_BT: Tensor) -> Tensor:
        return torch.where(self.mask_BT, padded_BT, 0).sum(1)


class Accelerator(SimpleNamespace):
    """One process: gathering and reducing give back what they got."""

    num_processes, process_index, device, sync_gradients = 1, 0, torch.device("cpu"), True

    def gather(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        """The value itself."""
        return value


class Model(SimpleNamespace):
    """A model in training mode that answers every call with the outputs it was given."""

    training, is_gradient_checkpointing = True, False

    def __call__(self, **inputs: Any) -> Any:
        return self.outputs


def trainer(**settings: Any) -> SimpleNamespace:
    """A stand-in for a TRL trainer: neutral settings and those given."""
    neutral: dict[str, Any] = {
        "accelerator": Accelerator(),
        "model": Model(),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: defaultdict(list)) | {name: [] for name in ("prompt", "completion", "advantages")},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "_entropy_bonus_enabled": False,
    }
    return SimpleNamespace(**(neutral | settings))


def their_loss(method: Callable[..., Tensor], numbers: Numbers, **settings: Any) -> Tensor:
    """A TRL policy loss on these numbers."""
    stand_in = trainer(
        args=SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            numbers.now_BT,
            torch.zeros_like(numbers.old_BT),
            None,
        ),
        **settings,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(numbers.mask_BT.shape, dtype=torch.int64),
        "completion_mask": numbers.mask_BT.long(),
        "advantages": numbers.advantages_B,
        "old_per_token_logps": numbers.old_BT,
        "old_logps": numbers.sums(numbers.old_BT),
        "ref_per_token_logps": numbers.ref_BT,
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
    }
    return method(stand_in, Model(), inputs)


def scored(method: Callable[..., dict[str, Tensor]], numbers: Numbers, **settings: Any) -> dict[str, Tensor]:
    """TRL's generation stage with the generation, the rewards and the passes replaced by these numbers."""
    ids = [[3] * length for length in LENGTHS]
    sampling = [numbers.rollout_BT[i, :n].tolist() for i, n in enumerate(LENGTHS)]
    is_grpo = method.__qualname__.startswith("GRPO")
    generated = ([[1]] * len(LENGTHS), ids, [""] * len(LENGTHS))
    if is_grpo:
        generated = ([[1]] * len(LENGTHS), ids, None, [""] * len(LENGTHS), sampling, {}, None, None)
    stand_in = trainer(
        args=SimpleNamespace(
            per_device_train_batch_size=len(LENGTHS),
            gradient_checkpointing_kwargs=None,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
        ),
        _generate=lambda *_: generated,
        _get_per_token_logps_and_entropies=lambda *_, **__: (numbers.old_BT, None, None),
        _calculate_rewards=lambda *_: numbers.rewards_B[:, None],
        _tokenizer=SimpleNamespace(pad_token_id=0, batch_decode=lambda rows, **_: [""] * len(rows)),
        processing_class=SimpleNamespace(batch_decode=lambda rows, **_: [""] * len(rows)),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_generations=GROUP,
        num_iterations=1,
        reward_weights=torch.ones(1),
        reward_funcs=["score"],
        reward_func_names=["score"],
        reward_clip_range=None,
        normalize_advantages=False,
        multi_objective_aggregation="sum_then_normalize",
        environment_factories=None,
        environments=None,
        tools=[],
        _is_vlm=False,
        _image_pad_token_id=None,
        _video_pad_token_id=None,
        chat_template_kwargs={},
        eos_token_ids=[3],
        log_multimodal=False,
        **settings,
    )
    return method(stand_in, [{"prompt": "x"}] * len(LENGTHS))


def outputs_of(numbers: Numbers) -> Any:
    """What TRL reads from a model's fused head; log-probabilities are 0 at masked positions."""
    logprobs_BT = torch.where(numbers.mask_BT, numbers.now_BT, 0)
    zeros_BT = torch.zeros_like(numbers.old_BT)
    return SimpleNamespace(log_probs=logprobs_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool())
