"""The metrics of one training step, from what its stages left behind. Definitions: `plait.telemetry.definitions`."""

import resource
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from plait.batch import Group, Sample
from plait.config import AlgorithmConfig
from plait.executor.inline import kl_per_sample
from plait.executor.step_state import StepState
from plait.jobs.critic_metrics import critic_metrics
from plait.jobs.pair_metrics import pair_metrics
from plait.rewards.breaker import count_outcomes
from plait.rewards.extract import extract
from plait.stages.update import UpdateTally
from plait.telemetry.gap import gap_statistics
from plait.telemetry.repetition import is_repetitive


def step_metrics(
    state: StepState,
    seconds: Mapping[str, float],
    *,
    algorithm: AlgorithmConfig,
    compute_dtype: str,
    policy_version: int,
    num_dropped: int,
) -> dict[str, float]:
    """seconds: wall time of this step per stage, and of the whole step under "step". compute_dtype: of the policy."""
    assert state.tally is not None, f"step {state.step} has made no update"
    metrics = {
        **(_sampling_metrics(state, seconds["generate"], policy_version) if algorithm.samples_answers else {}),
        **_update_metrics(state.tally, algorithm),
        **(pair_metrics(state.tally) if algorithm.has_pairs else {}),
        **_kl_metrics(state, algorithm),
        **critic_metrics(state, algorithm),
        **_gap_metrics(state.tally, compute_dtype),
        "prompts_dropped_overlong": num_dropped,
        "memory/peak_rss_bytes": peak_rss_bytes(),
    }
    if state.tally.num_trained_tokens:
        metrics["throughput/trained_tokens_per_s"] = state.tally.num_trained_tokens / seconds["update_policy"]
    return metrics | {f"time/{stage}_s": value for stage, value in seconds.items()}


def _sampling_metrics(state: StepState, generate_s: float, policy_version: int) -> dict[str, float]:
    """Of what the step sampled, whether or not it trained on it."""
    samples = [sample for group in state.sampled for sample in group.samples]
    greedy = [group.greedy for group in state.groups if group.greedy is not None]
    tokens = sum(sample.num_response_tokens for sample in (*samples, *greedy))
    return {
        **_reward_metrics(samples),
        **_shaping_metrics(samples, greedy),
        **_completion_metrics(samples, state.sampled),
        **_group_metrics(state.sampled),
        **_staleness(samples, state.policy_version),
        "sampling_rounds": state.num_rounds,
        "policy_version": policy_version,
        "tokens_generated": tokens,
        "throughput/generated_tokens_per_s": tokens / generate_s,
    }


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def has_reasoning(sample: Sample) -> bool:
    """Whether the completion shows steps: text that is not blank between its think tags."""
    return extract(sample.prompt.prefix + sample.text).has_reasoning


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = np.array([sample.reward for sample in samples])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "accuracy": float(np.mean([sample.score == 1 for sample in samples])),
    }
    for outcome, count in count_outcomes(samples).items():
        metrics[f"verdict/{outcome}"] = count / len(samples)
    for task in sorted({sample.prompt.task for sample in samples}):
        metrics[f"reward/mean/{task}"] = float(np.mean([s.reward for s in samples if s.prompt.task == task]))
    return metrics


def _shaping_metrics(samples: Sequence[Sample], greedy: Sequence[Sample]) -> dict[str, float]:
    """Nothing where the reward is the verifier's score as it stands."""
    metrics = {}
    if any(sample.shaping for sample in samples) or any(sample.reward_scores for sample in samples):
        metrics["reward/unshaped_mean"] = float(np.mean([sample.unshaped_reward for sample in samples]))
        metrics["reward/verifier_mean"] = float(np.mean([sample.score for sample in samples]))
    for kind in sorted({kind for sample in samples for kind in sample.shaping}):
        metrics[f"shaping/{kind}"] = float(np.mean([sample.shaping[kind] for sample in samples]))
    for name in sorted({name for sample in samples for name in sample.reward_scores}):
        scores = [sample.reward_scores[name] for sample in samples if sample.is_scored]
        if scores:
            metrics[f"reward_model/{name}"] = float(np.mean(scores))
    if greedy:
        metrics["reward/greedy_mean"] = float(np.mean([sample.reward for sample in greedy]))
    return metrics


def _completion_metrics(samples: Sequence[Sample], groups: Sequence[Group]) -> dict[str, float]:
    lengths = np.array([sample.num_response_tokens for sample in samples])
    p10, p50, p90 = np.percentile(lengths, [10, 50, 90])
    num_distinct = sum(len({sample.text for sample in group.samples}) for group in groups)
    reasoning = np.array([has_reasoning(sample) for sample in samples])
    logprobs_T = np.concatenate([sample.rollout_logprobs_R for sample in samples])
    return {
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/p10": float(p10),
        "response_tokens/p50": float(p50),
        "response_tokens/p90": float(p90),
        "response_tokens/max": int(lengths.max()),
        "prompt_tokens/mean": float(np.mean([len(sample.prompt_ids) for sample in samples])),
        "truncated_share": float(np.mean([sample.finish == "length" for sample in samples])),
        "reasoning_share": float(reasoning.mean()),
        "duplicates_share": 1 - num_distinct / len(samples),
        "repetition_share": float(np.mean([is_repetitive(sample.response_ids_R) for sample in samples])),
        "nonfinite_logprob_share": float(np.mean(~np.isfinite(logprobs_T))),
    }


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    counted = [[s.unshaped_reward for s in group.samples if s.is_counted] for group in groups]
    compared = [rewards for rewards in counted if len(rewards) >= 2]
    return {
        "groups/with_signal": float(np.mean([group.has_signal for group in groups])),
        "groups/all_correct": sum(min(rewards) == 1 == max(rewards) for rewards in compared) / len(groups),
        "groups/all_wrong": sum(max(rewards) <= 0 for rewards in compared) / len(groups),
        "groups/excluded": 1 - len(compared) / len(groups),
    }


def _update_metrics(tally: UpdateTally, algorithm: AlgorithmConfig) -> dict[str, float]:
    # No rate where no update was due: while the critic is trained alone.
    metrics: dict[str, float] = {"learning_rate": tally.rate} if tally.rate else {}
    metrics |= {
        "updates_applied": tally.num_applied,
        "updates_skipped_nonfinite": tally.num_nonfinite,
        "tokens_trained": tally.num_trained_tokens,
        "samples_trained": tally.num_trained_samples,
        "samples_skipped_zero_advantage": tally.num_skipped_samples,
    }
    if not tally.num_trained_tokens:
        return metrics
    num_updates, num_tokens = len(tally.grad_norms), tally.num_trained_tokens
    metrics |= {
        "loss/total": tally.total_loss / num_updates,
        "entropy": tally.entropy_sum / num_tokens,
        "grad_norm": float(np.mean(tally.grad_norms)),
    }
    if not algorithm.has_pairs:
        metrics |= {
            "loss/policy": tally.policy_loss / num_updates,
            "clip/binds_share": tally.binds_sum / num_tokens,
            "clip/outside_share": tally.outside_sum / num_tokens,
            "ratio/mean": tally.ratio_sum / num_tokens,
        }
    if algorithm.has_kl and algorithm.kl_in == "loss":
        metrics["loss/kl"] = tally.kl_loss / num_updates
        metrics["kl/reference"] = tally.kl_sum / num_tokens
    if algorithm.positive_nll_coefficient > 0:
        metrics["loss/positive_nll"] = tally.example_loss / num_updates
    if algorithm.correction.kind != "none":
        metrics["correction/weight_mean"] = tally.correction_sum / num_tokens
        metrics["correction/ratio_max"] = tally.correction_max
        metrics["correction/kept_share"] = tally.correction_kept_sum / num_tokens
    return metrics


def _kl_metrics(state: StepState, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Nothing without a reference."""
    if not algorithm.has_kl:
        return {}
    kl = kl_per_sample(state)
    return {"kl/coefficient": state.kl_coefficient} | ({} if kl is None else {"kl/per_sample": kl})


def _gap_metrics(tally: UpdateTally, compute_dtype: str) -> dict[str, float]:
    """Nothing where no token was scored by the weights that sampled it."""
    if not tally.gaps:
        return {}
    return gap_statistics(torch.cat(tally.gaps).numpy(), compute_dtype)


def _staleness(samples: Sequence[Sample], newest_version: int) -> dict[str, float]:
    ages = newest_version - np.concatenate([sample.versions_R for sample in samples])
    return {"staleness/mean": float(ages.mean()), "staleness/max": int(ages.max())}
