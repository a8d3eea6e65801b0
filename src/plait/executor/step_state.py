"""What the stages of one step have written so far."""

from dataclasses import dataclass, field

from torch import Tensor

from plait.batch import Group
from plait.stages.advantage import Advantages, Values
from plait.stages.critic_update import CriticTally
from plait.stages.update import UpdateTally


@dataclass(slots=True)
class StepState:
    """Everything of one step; the job makes its metrics from it when the step ends."""

    step: int
    policy_version: int
    kl_coefficient: float = 0.0
    """The one that holds in this step."""
    sampled: list[Group] = field(default_factory=list)
    """Every group sampled in this step, those without signal included."""
    groups: list[Group] = field(default_factory=list)
    """The groups that the step trains on."""
    unscored: list[Group] = field(default_factory=list)
    num_rounds: int = 0
    advantages: Advantages | None = None
    values: Values | None = None
    old_logprobs: dict[str, Tensor] | None = None
    ref_logprobs: dict[str, Tensor] | None = None
    tally: UpdateTally | None = None
    critic_tally: CriticTally | None = None
    started_s: float = 0.0
