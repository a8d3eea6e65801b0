# Longer than 400 lines: it is one list of data, an entry per metric, read from top to bottom.
"""Every metric that a run may write, with its definition: the names in METRICS are the only ones accepted.

A name that ends in "<task>" stands for one metric per task, one in "<model>" for one per reward model. Shares lie
between 0 and 1. "Counted" samples are those that a verifier scored and that have at least one token written by the
model.
"""

from dataclasses import dataclass

from plait.telemetry.gap import BANDS, OUTSIDE_SHARE_LIMIT
from plait.telemetry.repetition import NUM_GRAM_TOKENS, REPEATED_SHARE


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    definition: one sentence with its denominator.
    unit: "share", "tokens", "s", "nat", ...; "" for a pure number.
    expected: what a healthy run shows.
    hint: why a value that looks odd is right; shown once, when the value lies within `hint_when`.
    hint_when: lowest and highest value (both included) for which the hint is shown.
    """

    name: str
    definition: str
    unit: str
    expected: str
    hint: str = ""
    hint_when: tuple[float, float] | None = None


_PLACEHOLDERS = ("<task>", "<model>")

STAGES = (
    "generate",
    "score_verifier",
    "score_reward",
    "old_logprob",
    "ref_logprob",
    "value",
    "advantage",
    "pair",
    "update_policy",
    "update_critic",
    "sync_weights",
)
"""Stages of a step; which of them an algorithm has, `plait algorithms NAME` says."""

_REWARDS = (
    Metric(
        "reward/mean",
        "Mean reward over all samples of the step; abstained and failed samples count as 0.",
        "reward",
        "rises over tens of steps, with noise",
    ),
    Metric(
        "reward/std",
        "Standard deviation (divisor n) of the reward over all samples of the step.",
        "reward",
        "above 0; falls as the policy becomes sure",
    ),
    Metric(
        "reward/mean/<task>",
        "Mean reward over the step's samples of this task; abstained and failed samples count as 0.",
        "reward",
        "rises over tens of steps, with noise",
    ),
    Metric(
        "accuracy",
        "Share of samples with score 1 among all samples of the step.",
        "share",
        "rises; noisier than eval/accuracy",
    ),
    Metric("verdict/correct", "Share of the step's samples that the verifier found correct.", "share", "rises"),
    Metric(
        "verdict/partial",
        "Share of the step's samples that earned part of the score.",
        "share",
        "depends on the task; 0 where answers are right or wrong",
    ),
    Metric("verdict/wrong", "Share of the step's samples with an answer that is wrong.", "share", "falls"),
    Metric(
        "verdict/truncated",
        "Share of the step's samples that are wrong or without an answer, and were cut at the limit.",
        "share",
        "below 0.1; higher means that the limit is too low or that the policy rambles",
    ),
    Metric(
        "verdict/no_answer",
        "Share of the step's samples in which the verifier found no answer.",
        "share",
        "falls within the first tens of steps; if not, look at truncated_share and at the prompt",
    ),
    Metric(
        "verdict/abstained",
        "Share of the step's samples on which the verifier had no opinion; they are kept out of the loss.",
        "share",
        "0 for most verifiers",
    ),
    Metric(
        "verdict/failed",
        "Share of the step's samples for which the verifier raised, hung or returned rubbish; "
        "they are kept out of the loss.",
        "share",
        "0; samples.jsonl has the reasons",
    ),
)

_COMPLETIONS = (
    Metric(
        "truncated_share",
        "Share of the step's samples cut at the limit of completion tokens.",
        "share",
        "below 0.1; higher means that the limit is too low or that the policy rambles",
    ),
    Metric(
        "response_tokens/mean",
        "Mean number of response tokens over all samples of the step.",
        "tokens",
        "changes slowly",
    ),
    Metric("response_tokens/p10", "10th percentile of response tokens over the samples.", "tokens", "above 1"),
    Metric("response_tokens/p50", "Median of response tokens over the samples.", "tokens", "near the mean"),
    Metric(
        "response_tokens/p90",
        "90th percentile of response tokens over the samples.",
        "tokens",
        "below the limit of completion tokens",
    ),
    Metric(
        "response_tokens/max",
        "Largest number of response tokens of a sample of the step.",
        "tokens",
        "at most the limit of completion tokens",
    ),
    Metric(
        "prompt_tokens/mean",
        "Mean number of prompt tokens over all samples of the step.",
        "tokens",
        "constant but for noise",
    ),
    Metric(
        "reasoning_share",
        "Share of the step's samples with text that is not blank between <think> and </think>.",
        "share",
        "near 1 for a reasoning model",
    ),
    Metric(
        "duplicates_share",
        "Share of the step's samples whose text equals that of an earlier sample of their group.",
        "share",
        "low; near 1 means that the policy has collapsed to one answer per prompt",
    ),
    Metric(
        "repetition_share",
        f"Share of the step's samples that repeat themselves: more than {REPEATED_SHARE:g} of their token "
        f"{NUM_GRAM_TOKENS}-grams stood earlier in the same completion.",
        "share",
        "0, or a few in a hundred; above that the policy loops",
    ),
    Metric(
        "nonfinite_logprob_share",
        "Share of the step's response tokens whose log-probability was not finite when they were sampled.",
        "share",
        "0; else the model computes no numbers, and what it samples is one token again and again",
    ),
)

_GROUPS = (
    Metric(
        "groups/with_signal",
        "Share of the groups drawn in the step (all sampling rounds) whose counted rewards differ.",
        "share",
        "0.2 to 0.9; near 0 the tasks are too easy or too hard to learn from",
    ),
    Metric(
        "groups/all_correct",
        "Share of the groups drawn in the step in which every counted sample has score 1.",
        "share",
        "rises late in a run",
    ),
    Metric(
        "groups/all_wrong",
        "Share of the groups drawn in the step in which no counted sample has a score above 0.",
        "share",
        "falls",
    ),
    Metric(
        "groups/excluded",
        "Share of the groups drawn in the step with fewer than two counted samples: nothing to compare.",
        "share",
        "0",
    ),
    Metric(
        "sampling_rounds",
        "Rounds of generation in the step, the first one included.",
        "rounds",
        "1, or a little more under dynamic sampling",
    ),
    Metric(
        "prompts_dropped_overlong",
        "Prompts dropped in the step because they exceed the limit of prompt tokens.",
        "prompts",
        "0",
    ),
)

_UPDATES = (
    Metric(
        "loss/policy",
        "Clipped policy loss in the configured reduction, mean over the step's updates.",
        "",
        "near 0",
        "loss/policy shows 0.000, as it should: with one update per step the ratios are 1 and the advantages "
        "of a group sum to about 0. The gradient is not 0: see grad_norm.",
        (-5e-4, 5e-4),
    ),
    Metric(
        "loss/kl",
        "KL to the reference (configured estimator and reduction) before its coefficient, mean over updates.",
        "nat",
        "small, rising slowly",
    ),
    Metric(
        "loss/total",
        "What is minimised: policy loss + coefficient x KL - coefficient x entropy, mean over updates.",
        "",
        "near 0",
    ),
    Metric(
        "kl/reference",
        "KL of the policy to the reference by the configured estimator, mean over the tokens of the loss.",
        "nat",
        "0 at first, then rising slowly; k1 may be slightly negative",
        "kl/reference is 0.000: until the first update the policy is the reference.",
        (0.0, 0.0),
    ),
    Metric(
        "entropy",
        "Entropy of the policy's next-token distribution, mean over the tokens of the loss.",
        "nat",
        "falls slowly; near 0 exploration has ended",
    ),
    Metric(
        "clip/binds_share",
        "Share of the tokens of the loss whose gradient the clip removes.",
        "share",
        "0 with one update per step, else below 0.2",
        "clip/binds_share is 0, as it should be with one update per step: the policy updated is the one that sampled.",
        (0.0, 0.0),
    ),
    Metric(
        "clip/outside_share",
        "Share of the tokens of the loss whose ratio lies outside the clip range, removed or not.",
        "share",
        "0 with one update per step, else below 0.3",
    ),
    Metric("ratio/mean", "Mean over the tokens of the loss of exp(logprob - old logprob).", "", "1 within 0.01"),
    Metric(
        "gap/mean",
        "Mean of |trainer logprob - rollout logprob| for the same weights, over the tokens of the step's first applied "
        "update; over those of all counted samples where the step has several updates (old_logprob).",
        "nat",
        "0.0003 to 0.01 in bfloat16, below 0.00001 in float32",
        "gap/mean up to 0.01 can be rounding in bfloat16, since trainer and engine round differently; "
        "gap/outside_share near 0 says that it is. float32 brings it below 0.00001. docs/gap.md says more.",
        (3e-4, 1e-2),
    ),
    Metric(
        "gap/std",
        "Standard deviation (divisor n) of |trainer logprob - rollout logprob| over the tokens of gap/mean.",
        "nat",
        "a few times gap/mean: most tokens are sure and have no gap",
    ),
    Metric(
        "gap/p99",
        "99th percentile of |trainer logprob - rollout logprob| over the tokens of gap/mean.",
        "nat",
        f"below {BANDS['bfloat16']:g} in bfloat16, {BANDS['float32']:g} in float32",
    ),
    Metric(
        "gap/max",
        "Largest |trainer logprob - rollout logprob| over the tokens of gap/mean.",
        "nat",
        f"below or near {BANDS['bfloat16']:g} in bfloat16, {BANDS['float32']:g} in float32",
    ),
    Metric(
        "gap/outside_share",
        f"Share of the tokens of gap/mean whose gap is above the band of the compute dtype ({BANDS['bfloat16']:g} in "
        f"bfloat16, {BANDS['float32']:g} in float32).",
        "share",
        f"0, or one in a thousand; above {OUTSIDE_SHARE_LIMIT:g} the run says so: see docs/gap.md",
    ),
    Metric(
        "grad_norm",
        "Norm of the whole gradient before clipping, mean over the step's applied updates.",
        "",
        "above 0, without jumps of ten times",
    ),
    Metric(
        "learning_rate",
        "Learning rate of the step's last update.",
        "",
        "follows the schedule",
        "learning_rate is 0: the warm-up begins at 0.",
        (0.0, 0.0),
    ),
    Metric("updates_applied", "Optimiser updates applied in the step.", "updates", "as planned per step"),
    Metric(
        "updates_skipped_nonfinite",
        "Updates of the step not applied because their gradient was not finite.",
        "updates",
        "0",
    ),
)

_PARTS_OF_REWARDS = (
    Metric(
        "reward/verifier_mean",
        "Mean score of the verifier over all samples of the step, where other things are part of the reward.",
        "reward",
        "rises over tens of steps, with noise",
    ),
    Metric(
        "reward/unshaped_mean",
        "Mean reward before shaping: verifier and reward models with their weights, over all samples of the step.",
        "reward",
        "rises over tens of steps, with noise",
    ),
    Metric(
        "reward_model/<model>",
        "Mean score of this reward model, before its weight, over the step's samples that were scored.",
        "reward",
        "rises; if it rises while accuracy falls, the policy exploits the model",
    ),
    Metric(
        "reward/greedy_mean",
        "Mean reward of the greedy completions of the step's prompts, the baseline.",
        "reward",
        "above reward/mean while sampling costs accuracy",
    ),
    Metric(
        "shaping/format",
        "What algorithm.shaping.format_weight adds to the reward, mean over all samples of the step.",
        "reward",
        "rises towards 0 or above as the format is learnt",
    ),
    Metric(
        "shaping/overlong",
        "What the soft overlong penalty adds to the reward, mean over all samples of the step.",
        "reward",
        "0 or a little below; far below 0 completions crowd at the limit",
    ),
    Metric(
        "shaping/length",
        "What algorithm.shaping.length_weight adds to the reward, mean over all samples of the step.",
        "reward",
        "near 0: what the shorter ones win, the longer ones lose",
    ),
)

_ALGORITHM = (
    Metric(
        "kl/coefficient",
        "Weight of the KL to the reference in this step.",
        "",
        "constant, or moving slowly under algorithm.adaptive_kl",
    ),
    Metric(
        "kl/per_sample",
        "KL of the policy to the reference by the configured estimator, summed over the tokens of a sample, mean over "
        "the samples that were measured.",
        "nat",
        "0 at first, then near algorithm.adaptive_kl.target where there is one",
    ),
    Metric(
        "loss/positive_nll",
        "Mean negative log-likelihood of the tokens of correct samples before its coefficient, mean over updates.",
        "nat",
        "falls slowly, like entropy",
    ),
    Metric(
        "correction/weight_mean",
        "Mean over the tokens of the loss of the weight that corrects engine against trainer; dropped tokens count 0.",
        "",
        "1 within 0.01 for synchronous runs",
    ),
    Metric(
        "correction/ratio_max",
        "Largest trainer / engine probability of the tokens of the loss, at the configured level, before any bound.",
        "",
        "below algorithm.correction.high",
    ),
    Metric(
        "correction/kept_share",
        "Share of the tokens of the loss that the correction does not drop; 1 where it truncates.",
        "share",
        "above 0.99",
    ),
    Metric(
        "loss/pairwise",
        "Loss of a pair (dpo, ipo, simpo), mean over the pairs of an update, then over the step's updates.",
        "",
        "falls, for dpo from 0.69 (log 2), where policy and reference are equal",
    ),
    Metric("pairs/number", "Pairs that the step's updates trained on.", "pairs", "near the prompts of a step x epochs"),
    Metric(
        "pairs/accuracy",
        "Share of the pairs whose chosen answer has the higher reward under the policy when it is trained on; equal "
        "rewards count as wrong.",
        "share",
        "0 in the first update of dpo and ipo, where both rewards are 0; then rises to 0.7 or more",
        "pairs/accuracy is 0: until the first update policy and reference are equal, and so are all rewards.",
        (0.0, 0.0),
    ),
    Metric(
        "pairs/margin",
        "Reward of the chosen minus that of the rejected answer, mean over pairs.",
        "",
        "rises where pairs come again; of new samples it may stay near 0",
    ),
    Metric(
        "pairs/chosen_reward",
        "beta x (log-probability under the policy - under the reference) of chosen answers, mean over pairs; for simpo "
        "beta x mean log-probability of a token.",
        "",
        "0 at first; should not fall far: the chosen answers would become unlikely as well",
    ),
    Metric("pairs/rejected_reward", "The same of the rejected answers.", "", "falls"),
    Metric(
        "pairs/chosen_logprob",
        "Log-probability of a whole chosen answer under the policy, mean over pairs.",
        "nat",
        "steady or rising",
    ),
    Metric(
        "pairs/rejected_logprob",
        "Log-probability of a whole rejected answer under the policy, mean over pairs.",
        "nat",
        "falls",
    ),
    Metric(
        "loss/value",
        "Value loss in the configured reduction before its coefficient, mean over the step's updates.",
        "",
        "falls within tens of steps, then follows the variance of returns",
    ),
    Metric(
        "value/mean",
        "Mean value that the critic gives the tokens of the loss before the step's updates.",
        "reward",
        "near value/return_mean",
    ),
    Metric(
        "value/return_mean",
        "Mean return that the critic is trained to predict, over the tokens of the loss.",
        "reward",
        "near reward/mean",
    ),
    Metric(
        "value/explained_variance",
        "1 - Var(return - value) / Var(return) over the tokens of the loss, with the values before the step's updates; "
        "absent where all returns are equal.",
        "share",
        "rises from about 0; below 0 the critic is worse than a constant",
    ),
    Metric(
        "value/clip_binds_share",
        "Share of the tokens whose value gradient the clip of the value loss removes.",
        "share",
        "below 0.2",
    ),
    Metric(
        "critic/grad_norm",
        "Norm of the critic's gradient before clipping, mean over the step's updates.",
        "",
        "above 0, without jumps of ten times",
    ),
    Metric(
        "critic/learning_rate", "Learning rate of the critic's last update of the step.", "", "follows the schedule"
    ),
    Metric("critic/updates_applied", "Updates of the critic applied in the step.", "updates", "as planned per step"),
    Metric(
        "critic/updates_skipped_nonfinite",
        "Updates of the critic not applied because their gradient was not finite.",
        "updates",
        "0",
    ),
)

_COUNTS = (
    Metric(
        "tokens_trained",
        "Response tokens that entered the loss, summed over the step's updates.",
        "tokens",
        "near tokens_generated x epochs",
    ),
    Metric(
        "samples_trained",
        "Samples that had a training pass, summed over the step's updates.",
        "samples",
        "near the samples of a step x epochs",
    ),
    Metric(
        "samples_skipped_zero_advantage",
        "Samples whose pass was skipped because their advantage is 0; they still count in denominators.",
        "samples",
        "the samples of groups without signal",
    ),
    Metric(
        "tokens_generated",
        "Response tokens sampled in the step, all sampling rounds together.",
        "tokens",
        "samples x response_tokens/mean",
    ),
    Metric(
        "policy_version",
        "Newest published version of the weights at the end of the step.",
        "version",
        "rises by 1 per step",
    ),
    Metric(
        "staleness/mean",
        "Mean over the step's response tokens of newest published version minus version that sampled it.",
        "versions",
        "0 for the synchronous schedule",
    ),
    Metric(
        "staleness/max",
        "Largest over the step's response tokens of newest published version minus version that sampled it.",
        "versions",
        "0 for the synchronous schedule",
    ),
)

_TIMES = (
    *(Metric(f"time/{stage}_s", f"Seconds of the step spent in the stage {stage}.", "s", "steady") for stage in STAGES),
    Metric(
        "time/step_s",
        "Seconds from the start of the step to its end, evaluation and checkpoint left out.",
        "s",
        "steady",
    ),
    Metric(
        "throughput/generated_tokens_per_s",
        "tokens_generated divided by time/generate_s.",
        "tokens/s",
        "steady",
    ),
    Metric(
        "throughput/trained_tokens_per_s",
        "tokens_trained divided by time/update_policy_s.",
        "tokens/s",
        "steady",
    ),
    Metric(
        "memory/peak_rss_bytes",
        "Largest resident memory of the process so far.",
        "bytes",
        "level after the first steps",
    ),
)

_EVALUATION = (
    Metric(
        "eval/accuracy",
        "Share of samples with score 1 among all samples of the evaluation.",
        "share",
        "rises from evaluation to evaluation",
    ),
    Metric(
        "eval/accuracy_low",
        "Lower end of the 95 % interval of eval/accuracy, by bootstrap over prompts.",
        "share",
        "below eval/accuracy",
    ),
    Metric(
        "eval/accuracy_high",
        "Upper end of the 95 % interval of eval/accuracy, by bootstrap over prompts.",
        "share",
        "above eval/accuracy",
    ),
    Metric(
        "eval/accuracy/<task>",
        "Share of samples with score 1 among the evaluation's samples of this task.",
        "share",
        "rises from evaluation to evaluation",
    ),
    Metric(
        "eval/pass_at_k",
        "Unbiased pass@k with k = samples per prompt of the evaluation, mean over its prompts.",
        "share",
        "at least eval/accuracy",
    ),
    Metric(
        "eval/reasoning_share",
        "Share of the evaluation's samples with text that is not blank between <think> and </think>.",
        "share",
        "near 1 for a reasoning model",
    ),
    Metric(
        "eval/response_tokens_mean",
        "Mean number of response tokens over all samples of the evaluation.",
        "tokens",
        "near response_tokens/mean",
    ),
    Metric(
        "eval/truncated_share",
        "Share of the evaluation's samples cut at the limit of completion tokens.",
        "share",
        "below 0.1",
    ),
    Metric("eval/num_prompts", "Prompts of the evaluation.", "prompts", "the same at each evaluation"),
    Metric("eval/num_samples", "Samples of the evaluation.", "samples", "the same at each evaluation"),
    Metric("eval/time_s", "Seconds the evaluation took, generation and scoring together.", "s", "steady"),
)

_SECTIONS = (*(_REWARDS, _PARTS_OF_REWARDS, _COMPLETIONS, _GROUPS, _UPDATES, _ALGORITHM, _COUNTS, _TIMES, _EVALUATION),)

METRICS: dict[str, Metric] = {metric.name: metric for section in _SECTIONS for metric in section}

_FAMILIES: dict[str, Metric] = {
    name.partition("<")[0]: metric for name, metric in METRICS.items() if name.endswith(_PLACEHOLDERS)
}


def metric_of(name: str) -> Metric:
    """The metric that a logged name belongs to: itself, or its family ("reward/mean/sums").

    KeyError for a name that is not registered.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, metric in _FAMILIES.items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return metric
    raise KeyError(f'"{name}" is not a registered metric; add it to plait.telemetry.definitions')
