"""One whole update on pairs, through packing and the update loop, against TRL's DPOTrainer: for agree_with_trl.py."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from random_models import write_random_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl_stand_ins import Model, trainer

from plait.batch import Group, Prompt
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.data.stream import EncodedPrompt
from plait.models.load import load_model
from plait.plan import BatchCounts
from plait.roles.policy import Policy
from plait.stages.logprob import group_logprobs
from plait.stages.pair import given_pair
from plait.stages.update import UpdateInputs, UpdateSettings, update_policy

NUM_PAIRS = 4
BETA = 0.3


def pair_update(seed: int) -> dict[str, float]:
    """Largest difference of the loss, and of the gradient in every weight, of a random model in float32."""
    from trl import DPOTrainer

    pairs = _pairs(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), "60k", initializer_range=0.3)
        ours = load_model(str(folder), dtype=torch.float32, device="cpu")
        reference = load_model(str(folder), dtype=torch.float32, device="cpu")
        _shake(reference, seed)
        ref_logprobs = group_logprobs(reference, pairs, temperature=1.0, max_tokens=1000)
        start = [p.detach().clone() for p in ours.parameters()]
        # Plain SGD at rate 1: the weights move by the gradient.
        sgd = OptimizerConfig(name="sgd", learning_rate=1.0, betas=(0.0, 0.0), max_grad_norm=1e9)
        policy = Policy(ours, sgd)
        tally = update_policy(policy, UpdateInputs(pairs, {}, None, ref_logprobs), _settings(), step=1)
        moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(start, ours.parameters(), strict=True)])
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # TRL wants all chosen answers, then all rejected ones, padded to one length.
    rows = [pair.samples[side] for side in (0, 1) for pair in pairs]
    ref_sums = torch.tensor([float(ref_logprobs[row.id].sum()) for row in rows])
    longest = max(len(row.prompt_ids) + row.num_response_tokens for row in rows)
    ids_BT, mask_BT = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for index, row in enumerate(rows):
        ids = [*row.prompt_ids, *row.response_ids_R.tolist()]
        ids_BT[index, : len(ids)] = torch.tensor(ids)
        mask_BT[index, len(row.prompt_ids) : len(ids)] = 1
    # Padding is on the right, so that no real token sees it.
    logprobs_BT = theirs(ids_BT).logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    zeros_BT = torch.zeros_like(logprobs_BT)
    masked_BT = torch.where(mask_BT[:, 1:].bool(), logprobs_BT, 0)
    outputs = Model(log_probs=masked_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool())
    stand_in = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
    )
    stand_in.beta = BETA
    inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "completion_mask": mask_BT}
    inputs |= {"ref_chosen_logps": ref_sums[:NUM_PAIRS], "ref_rejected_logps": ref_sums[NUM_PAIRS:]}
    loss: Tensor = DPOTrainer._compute_loss(stand_in, Model(outputs=outputs), inputs, False)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in theirs.parameters() if p.grad is not None])
    assert gradient.abs().max() > 1e-2, "a comparison of zeros"
    return {
        "dpo_update_loss": abs(tally.policy_loss - float(loss)),
        "dpo_update_gradient": float((moved - gradient).abs().max()),
    }


def _pairs(seed: int) -> list[Group]:
    generator = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(generator.integers(3, 200, generator.integers(low, high)).tolist())

    rows = []
    for number in range(NUM_PAIRS):
        prompt = Prompt(str(number), "pairs", (), None, "answer", preference=("", ""))
        rows.append(EncodedPrompt(prompt, tokens(2, 6), (tokens(1, 9), tokens(1, 9))))
    return [given_pair(row, 0) for row in rows]


def _shake(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def _settings() -> UpdateSettings:
    """Microbatches of 40 tokens, so that the pairs are spread over several."""
    count = 2 * NUM_PAIRS
    return UpdateSettings(
        algorithm=AlgorithmConfig.model_validate({"name": "dpo", "pairwise": {"beta": BETA}}),
        counts=BatchCounts(NUM_PAIRS, 2, count, count, 1, 40),
        num_epochs=1,
        temperature=1.0,
        max_completion_tokens=20,
        num_updates=1,
        seed=1,
    )
