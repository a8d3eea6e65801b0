"""Which stages an algorithm needs, from its settings. Torch-free."""

from collections.abc import Iterator

from plait.config import AlgorithmConfig, RunConfig
from plait.plan import BatchCounts
from plait.stages.graph import Granularity, Stage, StepGraph

_MODEL_AXES = frozenset({"dp", "tp", "sp", "pp", "cp", "ep"})
_INPUTS = frozenset(
    {
        *("prompts", "engine_weights@v", "policy_weights@v", "critic_weights@v"),
        *("reference_weights", "reward_model_weights"),
    }
)


def needs_old_logprobs(config: RunConfig) -> bool:
    """Whether the trainer must score the samples before it updates.

    With one update per step the policy that is trained is the one that sampled, so the ratio is one and its
    gradient is that of the log-probability: the pass would recompute what the update computes anyway.
    With several updates in float32 the engine's log-probabilities are the trainer's to 1e-4 (a test says so), and
    serve as they are. In bfloat16 the two round differently, by about 0.01 per token: the trainer scores them again.
    ("auto" counts as bfloat16 until it is resolved.)
    A KL in the reward is known before the first update, so it needs the pass even where there is only one.
    Where engine and trainer are compared in the loss, the engine's numbers cannot stand for the trainer's.
    """
    algorithm = config.algorithm
    if algorithm.has_pairs:
        return False  # a loss of pairs has no ratio
    if algorithm.critic.kind == "shared_trunk":
        return False  # the pass that computes values gives them as well
    has_several = BatchCounts.from_config(config).num_updates_per_step > 1
    if has_several and compares_engine(algorithm):
        return True
    has_kl_in_reward = algorithm.has_kl and algorithm.kl_in == "reward"
    return (has_several or has_kl_in_reward) and config.model.compute_dtype != "float32"


def compares_engine(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss weighs tokens by trainer against engine probabilities."""
    return algorithm.correction.kind != "none" or algorithm.policy_loss == "decoupled_ppo"


def advantage_piece(algorithm: AlgorithmConfig) -> tuple[Granularity, str]:
    """The smallest piece for which advantages can be known, and what makes it so."""
    if algorithm.whitening:
        return "step", "whitening takes mean and deviation over all tokens of the step"
    if algorithm.scale == "batch_std":
        return "step", "the scale is the standard deviation over the step"
    if algorithm.baseline == "batch_mean":
        return "step", "the baseline is the mean over the step"
    baselines, scales = ("group_mean", "leave_one_out", "length_weighted"), ("group_std", "leave_one_out_std")
    if algorithm.baseline in baselines or algorithm.scale in scales:
        return "group", "a sample is compared with its siblings"
    if algorithm.shaping.length_weight > 0:
        return "group", "a sample's length is compared with its siblings'"
    if algorithm.baseline == "value":
        return "sample", "values and rewards of one sample are enough"
    if algorithm.baseline == "greedy":
        return "sample", "a sample is compared with the greedy completion of its prompt"
    return "sample", "a sample is compared with no other"


def step_graph(config: RunConfig) -> StepGraph:
    """The StepGraph of an algorithm under these settings."""
    algorithm = config.algorithm
    if algorithm.has_pairs:
        return _pairwise_graph(config)
    stages = [*_sampling(config), *_scoring(config), *_inference(config)]
    made = frozenset().union(*(stage.writes for stage in stages))
    advantage = _advantage(config, made)
    updates = _updates(config, made | advantage.writes)
    outputs = {"policy_weights@v+1", "engine_weights@v+1"}
    if algorithm.critic.kind == "independent":
        outputs.add("critic_weights@v+1")
    return StepGraph([*stages, advantage, *updates], inputs=_INPUTS, outputs=outputs)


def _pairwise_graph(config: RunConfig) -> StepGraph:
    """Pairs of rows are there before the step, and nothing samples from the weights after it."""
    algorithm = config.algorithm
    inputs, outputs = _INPUTS | {"pairs"}, {"policy_weights@v+1"}
    stages: list[Stage] = []
    if algorithm.samples_answers:
        inputs, outputs = _INPUTS, outputs | {"engine_weights@v+1"}
        stages += [*_sampling(config), *_scoring(config), _pair(config)]
    if algorithm.needs_reference:
        stages.append(_pass("ref_logprob", ("reference",), {"reference_weights"}, {"ref_logprobs"}, of="pairs"))
    reads = {"pairs", "policy_weights@v"} | ({"ref_logprobs"} if algorithm.needs_reference else set())
    stages.append(
        _update_policy(
            config,
            reads,
            split_by="groups",
            why="the loss is of two answers: they go through the model in one microbatch",
        )
    )
    if algorithm.samples_answers:
        stages.append(_sync_weights())
    return StepGraph(stages, inputs=inputs, outputs=outputs)


def _pair(config: RunConfig) -> Stage:
    return Stage(
        name="pair",
        roles=(),
        kind="host",
        reads=frozenset({"samples", "verdicts"} | ({"reward_scores"} if config.reward_models else set())),
        writes=frozenset({"pairs"}),
        granularity="group",
        axes=frozenset({"groups"}),
        why="the best of a prompt's samples against the worst",
    )


def _rounds(config: RunConfig) -> tuple[int, str]:
    dynamic = config.algorithm.dynamic_sampling
    if config.algorithm.baseline == "greedy":
        return 2, "the second greedy, one completion per prompt: the baseline"
    if dynamic.enabled:
        return dynamic.max_rounds, "at most, until enough groups have rewards that differ"
    return 1, ""


def _sampling(config: RunConfig) -> Iterator[Stage]:
    rounds, why = _rounds(config)
    yield Stage(
        name="generate",
        roles=("policy",),
        kind="generation",
        reads=frozenset({"prompts", "engine_weights@v"}),
        writes=frozenset({"samples"}),
        granularity="sample",
        repeat=rounds,
        axes=frozenset({"samples", "dp", "tp"}),
        why=why,
    )


def _scoring(config: RunConfig) -> Iterator[Stage]:
    """Every sample is judged by verifiers even where only reward models reward: accuracy is theirs."""
    rounds, why = _rounds(config)
    yield Stage(
        name="score_verifier",
        roles=("verifier",),
        kind="host",
        reads=frozenset({"samples"}),
        writes=frozenset({"verdicts"}),
        granularity="sample",
        repeat=rounds,
        axes=frozenset({"samples"}),
        why=why,
    )
    if config.reward_models:
        yield Stage(
            name="score_reward",
            roles=("reward",),
            kind="inference",
            reads=frozenset({"samples", "reward_model_weights"}),
            writes=frozenset({"reward_scores"}),
            granularity="sample",
            repeat=rounds,
            axes=_MODEL_AXES | {"samples"},
            why=why,
        )


def _inference(config: RunConfig) -> Iterator[Stage]:
    algorithm = config.algorithm
    if needs_old_logprobs(config):
        why = "the ratio of later updates is taken against the policy before the first"
        if algorithm.has_kl and algorithm.kl_in == "reward":
            why = "the KL in the reward is known before the first update"
        yield _pass("old_logprob", ("policy",), {"policy_weights@v"}, {"old_logprobs"}, why)
    if algorithm.needs_reference:
        yield _pass("ref_logprob", ("reference",), {"reference_weights"}, {"ref_logprobs"})
    if algorithm.critic.kind == "independent":
        yield _pass("value", ("critic",), {"critic_weights@v"}, {"values"})
    elif algorithm.critic.kind == "shared_trunk":
        why = "one pass of the shared trunk gives values and log-probabilities"
        yield _pass("value", ("policy", "critic"), {"policy_weights@v"}, {"values", "old_logprobs"}, why)


def _pass(
    name: str, roles: tuple[str, ...], weights: set[str], writes: set[str], why: str = "", of: str = "samples"
) -> Stage:
    return Stage(
        name=name,
        roles=roles,
        kind="inference",
        reads=frozenset({of, *weights}),
        writes=frozenset(writes),
        granularity="sample",
        axes=_MODEL_AXES | {"samples"},
        why=why,
    )


def _advantage(config: RunConfig, made: frozenset[str]) -> Stage:
    algorithm = config.algorithm
    piece, why = advantage_piece(algorithm)
    reads = {"samples", "verdicts"} | ({"reward_scores", "values"} & made)
    if algorithm.has_kl and algorithm.kl_in == "reward":
        reads |= {"ref_logprobs", "old_logprobs"} & made
    return Stage(
        name="advantage",
        roles=(),
        kind="host",
        reads=frozenset(reads),
        writes=frozenset({"advantages"} | ({"returns"} if "values" in made else set())),
        granularity=piece,
        axes=frozenset({"sample": {"samples"}, "group": {"groups"}}.get(piece, set())),
        why=why,
    )


def _updates(config: RunConfig, made: frozenset[str]) -> Iterator[Stage]:
    algorithm = config.algorithm
    is_shared, is_independent = (algorithm.critic.kind == kind for kind in ("shared_trunk", "independent"))
    reads = {"samples", "advantages", "policy_weights@v"} | ({"old_logprobs"} & made)
    if algorithm.kl_in == "loss":
        reads |= {"ref_logprobs"} & made
    if is_shared:
        reads |= {"returns", "values"}
    why = "one update of the shared trunk for both losses" if is_shared else ""
    yield _update_policy(config, reads, roles=("policy", "critic") if is_shared else ("policy",), why=why)
    if is_independent:
        yield Stage(
            name="update_critic",
            roles=("critic",),
            kind="training",
            reads=frozenset({"samples", "returns", "values", "critic_weights@v"}),
            writes=frozenset({"critic_weights@v+1"}),
            granularity="minibatch",
            repeat=BatchCounts.from_config(config).num_updates_per_step,
            axes=_MODEL_AXES | {"samples"},
        )
    yield _sync_weights()


def _update_policy(
    config: RunConfig,
    reads: set[str],
    *,
    roles: tuple[str, ...] = ("policy",),
    split_by: str = "samples",
    why: str,
) -> Stage:
    return Stage(
        name="update_policy",
        roles=roles,
        kind="training",
        reads=frozenset(reads),
        writes=frozenset({"policy_weights@v+1"}),
        granularity="minibatch",
        repeat=BatchCounts.from_config(config).num_updates_per_step,
        axes=_MODEL_AXES | {split_by},
        why=why,
    )


def _sync_weights() -> Stage:
    return Stage(
        name="sync_weights",
        roles=("policy",),
        kind="transfer",
        reads=frozenset({"policy_weights@v+1"}),
        writes=frozenset({"engine_weights@v+1"}),
        granularity="step",
        axes=frozenset({"dp", "tp"}),
    )
