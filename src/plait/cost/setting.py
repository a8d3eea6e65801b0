"""Everything that a stage's estimate depends on: models by role, pools, layouts, batch, precision. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.cost.arithmetic import Number
from plait.cost.cluster import Cluster, Precision
from plait.cost.model_spec import ModelSpec
from plait.cost.operators import Implementation
from plait.cost.stage_costs import StepBatch
from plait.cost.state import PRECISION_RECIPES, PrecisionRecipe
from plait.parallel.degrees import Layout
from plait.stages.graph import Stage

ROLE_OF_STAGE = {
    "generate": "policy",
    "score_reward": "reward",
    "old_logprob": "policy",
    "ref_logprob": "reference",
    "value": "critic",
    "update_policy": "policy",
    "update_critic": "critic",
    "sync_weights": "policy",
}
"""The model that a stage runs; the others run on the host."""


def costed_as(stage: Stage) -> str:
    """The stage whose passes it makes: values of a shared trunk come with the policy's log-probabilities."""
    return "old_logprob" if stage.name == "value" and "policy" in stage.roles else stage.name


TRAINED = ("policy", "critic")


@dataclass(frozen=True, slots=True)
class Setting:
    """One step on given devices.

    models: role -> spec. pools: name -> its devices. place: stage or role -> pool, else the first. layouts: stage or
    role -> layout; a stage wins over its role. training, inference: bytes per parameter of trained, of frozen models.
    precision: of products. logits_chunk: head tokens at a time, all if None. num_slots: sequences that one replica
    generates at once, as many as fit if None. verifier_s, verifier_longest_s: processor seconds of one check, mean
    and longest; num_cpu_cores: for checks. memory_share: of a device that may be used; the rest is fragments.
    max_staleness: policy versions that generation may lag; above 0 the engine keeps a shadow copy of its weights.
    """

    models: Mapping[str, ModelSpec]
    pools: Mapping[str, Cluster]
    batch: StepBatch
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    place: Mapping[str, str] = field(default_factory=dict)
    training: PrecisionRecipe = PRECISION_RECIPES["fsdp2_fp32_masters"]
    inference: PrecisionRecipe = PRECISION_RECIPES["inference_bf16"]
    precision: Precision = "bf16"
    implementation: Implementation = "fused"
    logits_chunk: Number | None = None
    num_slots: Number | None = None
    shares_prefixes: bool = False
    verifier_s: float = 0.01
    verifier_longest_s: float = 1.0
    num_cpu_cores: float = 1
    memory_share: float = 0.95
    max_staleness: int = 0

    def pool_of(self, stage: str) -> str:
        """The name of the pool that runs a stage."""
        for name in (stage, ROLE_OF_STAGE.get(stage, stage)):
            if name in self.place:
                return self.place[name]
        return next(iter(self.pools))

    def cluster_of(self, stage: str) -> Cluster:
        """The devices that run a stage."""
        return self.pools[self.pool_of(stage)]

    def layout_of(self, stage: str) -> Layout:
        """How a stage's model is split; one device if nothing is said."""
        for name in (stage, ROLE_OF_STAGE.get(stage, stage)):
            if name in self.layouts:
                return self.layouts[name]
        return Layout()

    def spec_of(self, stage: str) -> ModelSpec:
        """The model that a stage runs."""
        return self.models[ROLE_OF_STAGE[stage]]

    def usable_bytes(self, stage: str) -> float:
        """Memory of one of its devices that may be used."""
        return self.cluster_of(stage).device.memory_bytes * self.memory_share
