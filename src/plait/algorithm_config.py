"""The settings of an algorithm, by factors: every one has one meaning, whatever the algorithm is called.

`name` chooses a named algorithm (`plait.algorithms.named`): its file gives the defaults, and what a recipe writes
wins. A default that stands here is that of every algorithm whose file is silent about it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError

from plait.algorithms.named import algorithm_names, is_known, named_algorithm
from plait.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share

Baseline = Literal["none", "group_mean", "leave_one_out", "batch_mean", "length_weighted", "greedy", "value"]
OpenShare = Annotated[float, Field(gt=0, le=1)]


class ReturnsConfig(Section):
    """How rewards over time become one number per token."""

    estimator: Literal["monte_carlo", "sequence", "gae", "n_step"] = "monte_carlo"
    """"monte_carlo": the rewards from a token on; "sequence": all rewards of the completion for each of its tokens,
    as if it were one action. They differ only where there are rewards before the end (algorithm.kl_in "reward")."""
    gamma: OpenShare = 1.0
    lambda_policy: Share = 0.95
    """GAE's lambda for the advantages."""
    lambda_critic: Share = 0.95
    """GAE's lambda for what the critic is trained to predict; 1 is the Monte Carlo return."""
    length_adaptive_alpha: PositiveFloat | None = None
    """lambda_policy = 1 - 1 / (alpha x response tokens) per sample, in place of lambda_policy (VAPO)."""
    num_steps: PositiveInt = 1
    """n of "n_step": rewards of so many tokens, then the critic's value."""
    bootstrap_truncated: bool = False
    """Let the critic's value stand for what a completion cut at the limit would still have earned. A verifier has
    judged the cut completion already, so by default nothing follows it."""


class AdaptiveKLConfig(Section):
    """Steer kl_coefficient towards a KL (Ziegler et al., arXiv 1909.08593)."""

    target: PositiveFloat | None = None
    """KL to the reference per sample in nats, summed over its tokens; without it the coefficient stays."""
    horizon: PositiveInt = 10_000
    """Each step changes the coefficient by samples / horizon times the relative deviation, of which 20 % count."""


class CorrectionConfig(Section):
    """Weigh tokens by trainer / engine probability: what sampled is never quite what trains."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """"truncate" clamps the weight into [low, high], "mask" drops tokens whose weight is outside."""
    level: Literal["token", "sequence", "geometric_mean"] = "token"
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0


class ShapingConfig(Section):
    """What is added to the reward, beside correctness."""

    overlong_buffer_share: Share = 0.0
    """Last part of the completion limit in which the reward falls linearly by up to overlong_penalty (DAPO)."""
    overlong_penalty: NonNegativeFloat = 1.0
    length_weight: NonNegativeFloat = 0.0
    """Weight of a reward for being shorter than one's siblings (Kimi k1.5)."""
    format_weight: Share = 0.0
    """Share of the reward that is 1 for a closed reasoning part and an answer after it."""


class FiltersConfig(Section):
    """Which scored samples take no part in the loss."""

    overlong: bool = False
    """Leave samples that were cut at the limit out of the loss and of every statistic (DAPO)."""


class DynamicSamplingConfig(Section):
    """Refill groups whose rewards are all equal with new prompts (DAPO, arXiv 2503.14476)."""

    enabled: bool = False
    max_rounds: PositiveInt = 4
    """Rounds of generation per step, the first one included."""
    when_exhausted: Literal["train_on_partial", "skip_step", "stop"] = "train_on_partial"
    expected_share_with_signal: Share | None = None
    """If known, `plait check` warns where the rounds cannot fill a step."""


class CriticConfig(Section):
    """The model that predicts returns, for baseline "value"."""

    kind: Literal["none", "independent", "shared_trunk"] = "none"
    """"independent": its own model; "shared_trunk": one more output of the policy, trained with it in one update."""
    path: str = ""
    """Folder from which an independent critic starts; empty is the policy's."""
    learning_rate: PositiveFloat | None = None
    """Peak rate of an independent critic; without it the policy's. The other optimiser settings are shared."""
    value_loss: Literal["plain", "clipped"] = "clipped"
    value_clip: PositiveFloat = 0.2
    """"clipped": a value may move this far from the one before the step's updates."""
    coefficient: PositiveFloat = 0.5
    """Weight of the value loss; in a shared trunk against the policy's loss."""
    pretraining_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained (VAPO)."""


class PairwiseConfig(Section):
    """What algorithm.pairwise_loss learns from, and its constants."""

    origin: Literal["rollouts", "rows"] = "rollouts"
    """"rollouts": the best of a prompt's samples against the worst; prompts whose samples earn the same give no pair.
    "rows": what the tasks' rows call chosen and rejected; nothing is sampled ([[tasks]] source = "preferences")."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference; in "simpo", which has none, factor of the mean log-probability."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be the wrong way round ("dpo" only)."""
    margin: NonNegativeFloat = 0.0
    """By how much the chosen answer's reward is to be above the other's ("simpo" only)."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """A named algorithm, or the path of a .toml file like theirs."""
    returns: ReturnsConfig = ReturnsConfig()
    baseline: Baseline = "group_mean"
    scale: Literal["none", "group_std", "batch_std", "leave_one_out_std"] = "group_std"
    std_correction: Literal[0, 1] = 1
    """1 divides by n - 1 (sample standard deviation), 0 by n."""
    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation, not to the variance."""
    whitening: bool = False
    """Give the advantages of all tokens of the step mean 0 and standard deviation 1."""
    policy_loss: Literal["reinforce", "ppo_clip", "gspo", "gmpo", "cispo", "decoupled_ppo"] = "ppo_clip"
    pairwise_loss: Literal["none", "dpo", "ipo", "simpo"] = "none"
    """A loss on pairs of answers; it takes the place of advantages, policy_loss, reduction and critic."""
    pairwise: PairwiseConfig = PairwiseConfig()
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; DAPO's clip-higher raises clip_high. For "gmpo" the
    logarithm of the ratio is clipped to [-clip_low, clip_high]."""
    dual_clip: PositiveFloat | None = None
    """Upper bound of the loss of a token with negative advantage, in units of -advantage; above 1."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0 loads no reference model. The first one under adaptive_kl."""
    behaviour_cap: PositiveFloat | None = None
    """Upper bound of the weight of "decoupled_ppo"."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_with_k2_gradient"] = "k3"
    """k1 only in the reward: in the loss the expectation of its gradient is zero."""
    kl_in: Literal["loss", "reward"] = "loss"
    adaptive_kl: AdaptiveKLConfig = AdaptiveKLConfig()
    entropy_coefficient: NonNegativeFloat = 0.0
    positive_nll_coefficient: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of correct samples (VAPO's positive example loss)."""
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    filters: FiltersConfig = FiltersConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    critic: CriticConfig = CriticConfig()

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        if not is_known(name):
            known = ", ".join(algorithm_names())
            raise PydanticCustomError("unknown_algorithm", "there is no such algorithm", {"known": known})
        return name

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_named(cls, data: Any, handler: ModelWrapValidatorHandler["AlgorithmConfig"]) -> "AlgorithmConfig":
        """Take the named algorithm's values where `data` has none; `model_fields_set` keeps what was written."""
        if not isinstance(data, Mapping):
            return handler(data)
        name = data["name"] if "name" in data else cls.model_fields["name"].default
        if not isinstance(name, str) or not is_known(name):
            return handler(data)
        defaults = named_algorithm(name).settings
        made = handler(_overlaid(defaults, data))
        _forget(made, defaults, data)
        return made

    @property
    def has_critic(self) -> bool:
        return self.critic.kind != "none"

    @property
    def has_pairs(self) -> bool:
        """Whether the loss is one of pairs of answers."""
        return self.pairwise_loss != "none"

    @property
    def samples_answers(self) -> bool:
        """Whether a step generates; otherwise it trains on pairs that rows give."""
        return not self.has_pairs or self.pairwise.origin == "rollouts"

    @property
    def has_kl(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def needs_reference(self) -> bool:
        return self.has_kl or self.pairwise_loss in ("dpo", "ipo")


def _overlaid(defaults: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data`, with the defaults where it is silent, section by section."""
    made = dict(data)
    for key, default in defaults.items():
        if key not in made:
            made[key] = default
        elif isinstance(default, Mapping) and isinstance(made[key], Mapping):
            made[key] = _overlaid(default, made[key])
    return made


def _forget(section: Section, defaults: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Take what only the defaults wrote out of `model_fields_set`: rules ask there what a person wrote."""
    for key, default in defaults.items():
        is_written = key in data
        if isinstance(default, Mapping):
            _forget(section.__dict__[key], default, data[key] if is_written else {})
        if not is_written:
            section.model_fields_set.discard(key)
