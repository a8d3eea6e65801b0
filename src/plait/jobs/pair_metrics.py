"""The metrics of a loss on pairs in one training step. Definitions: `plait.telemetry.definitions`."""

from plait.stages.update import UpdateTally


def pair_metrics(tally: UpdateTally) -> dict[str, float]:
    """How many pairs there were, and where there were any, how the policy tells their answers apart."""
    pairs, metrics = tally.pairs, {"pairs/number": float(tally.pairs.num_pairs)}
    if not pairs.num_pairs:
        return metrics
    return metrics | {
        "loss/pairwise": tally.policy_loss / len(tally.grad_norms),
        "pairs/accuracy": pairs.num_right / pairs.num_pairs,
        "pairs/margin": (pairs.chosen_reward_sum - pairs.rejected_reward_sum) / pairs.num_pairs,
        "pairs/chosen_reward": pairs.chosen_reward_sum / pairs.num_pairs,
        "pairs/rejected_reward": pairs.rejected_reward_sum / pairs.num_pairs,
        "pairs/chosen_logprob": pairs.chosen_logprob_sum / pairs.num_pairs,
        "pairs/rejected_logprob": pairs.rejected_logprob_sum / pairs.num_pairs,
    }
