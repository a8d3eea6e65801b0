"""Which stages each algorithm needs, from its settings. Torch-free."""

from plait.config import RunConfig
from plait.plan import BatchCounts
from plait.stages.graph import Granularity, Stage, StepGraph

_MODEL_AXES = frozenset({"dp", "tp", "sp", "pp", "cp", "ep"})


def needs_old_logprobs(config: RunConfig) -> bool:
    """Whether the trainer must score the samples before it updates.

    With one update per step the policy that is trained is the one that sampled, so the ratio is one and its
    gradient is that of the log-probability: the pass would recompute what the update computes anyway.
    With several updates in float32 the engine's log-probabilities are the trainer's to 1e-4 (a test says so), and
    serve as they are. In bfloat16 the two round differently, by about 0.01 per token: the trainer scores them again.
    ("auto" counts as bfloat16 until it is resolved.)
    """
    return BatchCounts.from_config(config).num_updates_per_step > 1 and config.model.compute_dtype != "float32"


def step_graph(config: RunConfig) -> StepGraph:
    """The StepGraph of GRPO and its kin under these settings."""
    algorithm, counts = config.algorithm, BatchCounts.from_config(config)
    rounds = algorithm.dynamic_sampling.max_rounds if algorithm.dynamic_sampling.enabled else 1
    advantage_piece: Granularity = "step" if algorithm.scale == "batch_std" else "group"
    update_reads = {"samples", "advantages", "policy_weights@v"}
    stages = [
        Stage(
            name="generate",
            roles=("policy",),
            kind="generation",
            reads=frozenset({"prompts", "engine_weights@v"}),
            writes=frozenset({"samples"}),
            granularity="sample",
            repeat=rounds,
            axes=frozenset({"samples", "dp", "tp"}),
        ),
        Stage(
            name="score_verifier",
            roles=("verifier",),
            kind="host",
            reads=frozenset({"samples"}),
            writes=frozenset({"verdicts"}),
            granularity="sample",
            repeat=rounds,
            axes=frozenset({"samples"}),
        ),
        Stage(
            name="advantage",
            roles=(),
            kind="host",
            reads=frozenset({"samples", "verdicts"}),
            writes=frozenset({"advantages"}),
            granularity=advantage_piece,
            axes=frozenset({"groups"}) if advantage_piece == "group" else frozenset(),
        ),
    ]
    if needs_old_logprobs(config):
        stages.append(_logprob_stage("old_logprob", "policy", "policy_weights@v", "old_logprobs"))
        update_reads.add("old_logprobs")
    if algorithm.kl_coefficient > 0:
        stages.append(_logprob_stage("ref_logprob", "reference", "reference_weights", "ref_logprobs"))
        update_reads.add("ref_logprobs")
    stages += [
        Stage(
            name="update_policy",
            roles=("policy",),
            kind="training",
            reads=frozenset(update_reads),
            writes=frozenset({"policy_weights@v+1"}),
            granularity="minibatch",
            repeat=counts.num_updates_per_step,
            axes=_MODEL_AXES | {"samples"},
        ),
        Stage(
            name="sync_weights",
            roles=("policy",),
            kind="transfer",
            reads=frozenset({"policy_weights@v+1"}),
            writes=frozenset({"engine_weights@v+1"}),
            granularity="step",
            axes=frozenset({"dp", "tp"}),
        ),
    ]
    return StepGraph(
        stages,
        inputs={"prompts", "engine_weights@v", "policy_weights@v", "reference_weights"},
        outputs={"policy_weights@v+1", "engine_weights@v+1"},
    )


def _logprob_stage(name: str, role: str, weights: str, writes: str) -> Stage:
    return Stage(
        name=name,
        roles=(role,),
        kind="inference",
        reads=frozenset({"samples", weights}),
        writes=frozenset({writes}),
        granularity="sample",
        axes=_MODEL_AXES | {"samples"},
    )
