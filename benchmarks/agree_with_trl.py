"""The mathematics of the algorithms against TRL's: values and gradients of the same formulas on the same numbers.

    python benchmarks/agree_with_trl.py

Needs the extra "bench" (trl 1.16). TRL's formulas live in methods of its trainers. Each is called here as it stands in
the installed package, with a stand-in for the trainer that holds the settings and returns the log-probabilities we
chose: no tokenizer, no training, a model only where it is said below. Random sequences of mixed lengths, float64 where
TRL keeps it.

Compared: GRPO, DAPO, Dr. GRPO, BNPO, two-sided clipping, GSPO, CISPO, GMPO, the k3 loss; RLOO (its loss and
advantages); GRPO's advantages under three scales; importance weights in four modes; DPO (plain and smoothed), IPO,
SimPO, KTO; and a whole update by DPO of a small random model in float32. Where the two differ on purpose the
comparison says how it brings them together. The last line is JSON with the largest absolute difference of each, and
`largest`; the exit status is 1 where that exceeds 1e-5.
"""

import copy
import sys
import warnings
from typing import Any

import torch
from pair_update import pair_update
from random_models import print_figures
from torch import Tensor
from trl_stand_ins import LENGTHS, MAX_TOKENS, Model, Numbers, outputs_of, scored, their_loss, trainer

from plait.algorithms.advantages import sequence_advantages
from plait.algorithms.importance import importance_weights
from plait.algorithms.kl import k3
from plait.algorithms.losses import POLICY_LOSSES, ClipSettings, TokenBatch
from plait.algorithms.pairwise import dpo, ipo, kto, mismatched_kl, simpo
from plait.algorithms.reduce import Reduction, sequence_weights

TOLERANCE = 1e-5


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def differences(ours: Tensor, theirs: Tensor, leaf: Tensor) -> float:
    """Largest difference of two losses and of their gradients."""
    pairs = [(ours, theirs), (gradient_of(ours, leaf), gradient_of(theirs, leaf))]
    assert pairs[1][0].abs().max() > 1e-3, "a comparison of zeros"
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def our_loss(
    numbers: Numbers, name: str, clip: ClipSettings, reduction: Reduction, kl_coefficient: float = 0.0
) -> Tensor:
    """What an update makes of it: weights times per-token losses, summed."""
    tokens = TokenBatch(
        numbers.packed(numbers.now_BT),
        numbers.packed(numbers.old_BT),
        numbers.packed(numbers.rollout_BT),
        numbers.advantages_B[numbers.sequence_R],
        numbers.sequence_R,
    )
    loss_R = POLICY_LOSSES[name](tokens, clip).loss_R
    if kl_coefficient:
        loss_R = loss_R + kl_coefficient * k3(tokens.logprobs_R, numbers.packed(numbers.ref_BT))
    weights_B = sequence_weights(torch.tensor(LENGTHS), reduction, max_tokens=MAX_TOKENS)
    return (weights_B[numbers.sequence_R] * loss_R).sum()


def policy_losses(numbers: Numbers) -> dict[str, float]:
    """Losses of GRPO's kin, value and gradient."""
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    grpo = GRPOTrainer._compute_loss
    clip = ClipSettings(0.2, 0.28)
    cases: dict[str, tuple[Tensor, Tensor]] = {
        "grpo": (
            our_loss(numbers, "ppo_clip", clip, "seq-mean-token-mean"),
            their_loss(grpo, numbers, loss_type="grpo"),
        ),
        "dapo": (our_loss(numbers, "ppo_clip", clip, "token-mean"), their_loss(grpo, numbers, loss_type="dapo")),
        "bnpo": (our_loss(numbers, "ppo_clip", clip, "token-mean"), their_loss(grpo, numbers, loss_type="bnpo")),
        "dr_grpo": (
            our_loss(numbers, "ppo_clip", clip, "seq-mean-token-sum-norm"),
            their_loss(grpo, numbers, loss_type="dr_grpo"),
        ),
        # TRL's delta bounds the free ratio, so for A < 0 the loss is at most -delta A: the dual clip.
        "dual_clip": (
            our_loss(numbers, "ppo_clip", ClipSettings(0.2, 0.28, dual_clip=1.5), "token-mean"),
            their_loss(grpo, numbers, loss_type="dapo", delta=1.5),
        ),
        "k3_loss": (
            our_loss(numbers, "ppo_clip", clip, "seq-mean-token-mean", kl_coefficient=0.3),
            their_loss(grpo, numbers, loss_type="grpo", beta=0.3),
        ),
        "gspo": (
            our_loss(numbers, "gspo", ClipSettings(0.05, 0.08), "seq-mean-token-mean"),
            their_loss(
                grpo,
                numbers,
                loss_type="grpo",
                importance_sampling_level="sequence",
                epsilon_low=0.05,
                epsilon_high=0.08,
            ),
        ),
        # TRL's epsilon_high is the bound of the weight itself, ours is its distance from 1; TRL has no lower bound.
        "cispo": (
            our_loss(numbers, "cispo", ClipSettings(1.0, 0.4), "token-mean"),
            their_loss(grpo, numbers, loss_type="cispo", epsilon_high=1.4),
        ),
        "gmpo": (
            our_loss(numbers, "gmpo", ClipSettings(0.3, 0.4), "seq-mean-token-mean"),
            their_loss(GMPOTrainer._compute_loss, numbers, epsilon_low=0.3, epsilon_high=0.4),
        ),
    }
    return {name: differences(*pair, numbers.now_BT) for name, pair in cases.items()}


def rloo_loss(numbers: Numbers) -> dict[str, float]:
    """On the policy that sampled, gradients only: TRL clips the product of a sequence's ratios, which then is 1.

    TRL averages over sequences the sum over tokens: our sum-norm reduction times its constant.
    """
    from trl import RLOOTrainer

    fresh = copy.copy(numbers)
    fresh.now_BT = numbers.old_BT.clone().requires_grad_()
    ours = MAX_TOKENS * our_loss(fresh, "reinforce", ClipSettings(0.2, 0.2), "seq-mean-token-sum-norm")
    theirs = their_loss(RLOOTrainer._compute_loss, fresh)
    gap = gradient_of(ours, fresh.now_BT) - gradient_of(theirs, fresh.now_BT)
    return {"rloo_gradient_on_policy": float(gap.abs().max())}


def advantages(numbers: Numbers) -> dict[str, float]:
    """Advantages of GRPO and RLOO. TRL's deviations have divisor n - 1 and 1e-4 added."""
    from trl import GRPOTrainer, RLOOTrainer

    def ours(baseline: Any, scale: Any) -> Tensor:
        counted_B = torch.ones(len(LENGTHS), dtype=torch.bool)
        return sequence_advantages(
            numbers.rewards_B, numbers.group_B, counted_B, baseline=baseline, scale=scale, std_correction=1, eps=1e-4
        )

    result = {}
    for theirs, scale in (("group", "group_std"), ("batch", "batch_std"), ("none", "none")):
        scores = scored(GRPOTrainer._generate_and_score_completions, numbers, scale_rewards=theirs)["advantages"]
        result[f"grpo_advantages_{scale}"] = float((scores - ours("group_mean", scale)).abs().max())
    scores = scored(RLOOTrainer._generate_and_score_completions, numbers)["advantages"]
    result["rloo_advantages"] = float((scores - ours("leave_one_out", "none")).abs().max())
    return result


def importance(numbers: Numbers) -> dict[str, float]:
    """Weights between engine and trainer, all four of TRL's modes."""
    from trl import GRPOTrainer

    result = {}
    for level in ("token", "sequence"):
        for correction in ("truncate", "mask"):
            settings = {
                "scale_rewards": "none",
                "use_vllm": True,
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": f"{level}_{correction}",
                "vllm_importance_sampling_clip_min": 0.6,
                "vllm_importance_sampling_clip_max": 1.5,
            }
            outputs = scored(GRPOTrainer._generate_and_score_completions, numbers, **settings)
            theirs_BT = outputs["importance_sampling_ratio"].expand(numbers.mask_BT.shape)
            ours = importance_weights(
                numbers.packed(numbers.old_BT),
                numbers.packed(numbers.rollout_BT),
                numbers.sequence_R,
                level=level,
                correction=correction,
                low=0.6,
                high=1.5,
            )
            gap_R = ours.weights_R - numbers.packed(theirs_BT)
            result[f"importance_{level}_{correction}"] = float(gap_R.abs().max())
    return result


def preference_losses(numbers: Numbers) -> dict[str, float]:
    """DPO, IPO and SimPO on pairs (sequence i, sequence i + 3), KTO on single answers; value and gradient."""
    from trl import DPOTrainer, KTOTrainer
    from trl.experimental.cpo import CPOTrainer

    half = len(LENGTHS) // 2
    completion_mask = torch.cat([torch.zeros(len(LENGTHS), 1), numbers.mask_BT], dim=1).long()  # One prompt token.
    lengths_B = torch.tensor(LENGTHS)
    now_B, ref_B = numbers.sums(numbers.now_BT), numbers.sums(numbers.ref_BT)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }

    def their_pairs(loss_type: str, label_smoothing: float = 0.0) -> Tensor:
        stand_in = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            label_smoothing=label_smoothing,
            use_weighting=False,
        )
        stand_in.beta = 0.1
        references = {"ref_chosen_logps": ref_B[:half], "ref_rejected_logps": ref_B[half:]}
        model = Model(outputs=outputs_of(numbers))
        return DPOTrainer._compute_loss(stand_in, model, inputs | references, False)

    pairs = (now_B[:half], now_B[half:], ref_B[:half], ref_B[half:])
    # TRL divides IPO's log-probabilities by the lengths; ours takes what it is given.
    means = tuple(x / n for x, n in zip(pairs, (lengths_B[:half], lengths_B[half:]) * 2, strict=True))
    # TRL's DPO offers smoothing only in the "robust" form (e with the other sign, over 1 - 2 e). Its CPO has the
    # conservative form; given log ratios to the reference it is DPO.
    smoothed = trainer(alpha=0.0, loss_type="sigmoid", label_smoothing=0.1, beta=0.1)
    their_smoothed = CPOTrainer.cpo_loss(smoothed, pairs[0] - pairs[2], pairs[1] - pairs[3])[0].mean()
    simpo_settings = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, label_smoothing=0.0, beta=2.0)
    averages = (now_B[:half] / lengths_B[:half], now_B[half:] / lengths_B[half:])
    their_simpo = CPOTrainer.cpo_loss(simpo_settings, *averages)[0].mean()
    our_simpo = simpo(*pairs[:2], lengths_B[:half], lengths_B[half:], beta=2.0, margin=0.5).loss_B.mean()

    kl_logprobs_B, kl_ref_B = now_B.detach() + 1.0, ref_B
    desirable_B = torch.tensor([True, False, True, True, False, False])
    kto_trainer = trainer(
        loss_type="kto",
        precompute_ref_logps=True,
        calculate_KL=True,
        desirable_weight=1.3,
        undesirable_weight=0.8,
        _compute_kl_logps=lambda *_: kl_logprobs_B,
        beta=0.1,
    )
    kto_inputs = inputs | {"label": desirable_B, "ref_logps": ref_B, "ref_KL_logps": kl_ref_B}
    their_kto = KTOTrainer._compute_loss(kto_trainer, Model(outputs=outputs_of(numbers)), kto_inputs, False)
    our_kto = kto(
        now_B,
        ref_B,
        desirable_B,
        kl=mismatched_kl(kl_logprobs_B, kl_ref_B),
        beta=0.1,
        desirable_weight=1.3,
        undesirable_weight=0.8,
    ).loss_B.mean()

    cases = {
        "dpo": (dpo(*pairs, beta=0.1).loss_B.mean(), their_pairs("sigmoid")),
        "dpo_label_smoothing": (dpo(*pairs, beta=0.1, label_smoothing=0.1).loss_B.mean(), their_smoothed),
        "ipo": (ipo(*means, beta=0.1).loss_B.mean(), their_pairs("ipo")),
        "simpo": (our_simpo, their_simpo),
        "kto": (our_kto, their_kto),
    }
    return {name: differences(*pair, numbers.now_BT) for name, pair in cases.items()}


def main() -> None:
    """Compare over a few seeds and report the largest difference of each."""
    warnings.filterwarnings("ignore")
    largest: dict[str, float] = {}
    for seed in range(5):
        numbers = Numbers(seed)
        for name, value in pair_update(seed).items():
            largest[name] = max(value, largest.get(name, 0.0))
        for compare in (policy_losses, rloo_loss, advantages, importance, preference_losses):
            for name, value in compare(numbers).items():
                largest[name] = max(value, largest.get(name, 0.0))
    worst = max(largest.values())
    print_figures({"benchmark": "agree_with_trl", "largest": worst, "differences": largest})
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
