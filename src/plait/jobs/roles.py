"""Every role and service of a run, loaded as its settings ask."""

from contextlib import ExitStack

from plait.config import RowsTask, RunConfig
from plait.data.mixture import Mixture
from plait.errors import ConfigError
from plait.executor.inline import Parts
from plait.executor.workers import LocalWorkers, Roles, Workers
from plait.jobs.setup import dtype_of, load, make_engine, make_stream
from plait.models.load import Tokenizer, load_reward_model, load_tokenizer
from plait.models.value_head import ValueHead
from plait.plan import Plan
from plait.rewards.breaker import CircuitBreaker
from plait.rewards.scoring import Scoring
from plait.roles.critic import Critic
from plait.roles.policy import Policy
from plait.roles.reference import Reference
from plait.roles.reward import RewardModel
from plait.telemetry.trace import Trace


def load_parts(
    stack: ExitStack,
    config: RunConfig,
    plan: Plan,
    mixture: Mixture,
    scorers: tuple[Scoring, Scoring],
    trace: Trace,
) -> Parts:
    """Load models while the verifiers' workers start. stack: ends processes. scorers: of training, of evaluation."""
    names = {task.verifier if isinstance(task, RowsTask) else "reasoning_gym" for task in config.tasks}
    scorers[1].prepare(sorted(names))
    workers: Workers
    if plan.is_on_ray:
        from plait.executor.ray_executor import RayWorkers  # Ray is an extra

        tokenizer = load_tokenizer(config.model.path, config.rollout.stop_tokens)
        workers = stack.enter_context(RayWorkers(config, plan))
    else:
        tokenizer, workers = _local(config, plan)
    return Parts(
        workers=workers,
        tokenizer=tokenizer,
        scorer=scorers[0],
        breaker=CircuitBreaker(config.verifiers.max_failed_share),
        evaluation_scorer=scorers[1],
        stream=make_stream(mixture, tokenizer, config),
        trace=trace,
    )


def _local(config: RunConfig, plan: Plan) -> tuple[Tokenizer, LocalWorkers]:
    loaded = load(config.model, config.rollout.stop_tokens)
    reference = None
    if config.algorithm.needs_reference:
        reference = Reference(load(config.model, config.rollout.stop_tokens).model.requires_grad_(False))
    value_head = None
    if config.algorithm.critic.kind == "shared_trunk":
        value_head = ValueHead(loaded.model.config.hidden_size, config.model.device)
    policy = Policy(
        loaded.model,
        config.optimizer,
        max_nonfinite_updates=config.train.max_nonfinite_updates,
        recompute=plan.layout_of("update_policy", ("policy",)).recompute,
        value_head=value_head,
    )
    roles = Roles(
        policy=policy,
        engine=make_engine(loaded, plan),
        reference=reference,
        critic=_critic(config, plan, loaded.tokenizer),
        reward_models=_reward_models(config, loaded.tokenizer),
    )
    return loaded.tokenizer, LocalWorkers(roles, config, plan)


def _critic(config: RunConfig, plan: Plan, tokenizer: Tokenizer) -> Critic | None:
    settings = config.algorithm.critic
    if settings.kind != "independent":
        return None
    model = config.model.model_copy(update={"path": settings.path or config.model.path})
    rate = settings.learning_rate or config.optimizer.learning_rate
    loaded = load(model, config.rollout.stop_tokens)
    if loaded.tokenizer.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ConfigError(
            f'algorithm.critic.path: the tokenizer in "{settings.path}" is not the policy\'s, and a critic reads the '
            "very tokens that the policy wrote. Choose a model of the policy's family"
        )
    return Critic(
        loaded.model,
        config.optimizer.model_copy(update={"learning_rate": rate}),
        max_nonfinite_updates=config.train.max_nonfinite_updates,
        recompute=plan.layout_of("update_critic", ("critic",)).recompute,
    )


def _reward_models(config: RunConfig, tokenizer: Tokenizer) -> tuple[RewardModel, ...]:
    dtype, device = dtype_of(config.model), config.model.device
    return tuple(
        RewardModel(
            one.label,
            one.weight,
            load_reward_model(one.path, tokenizer, dtype=dtype, device=device),
        )
        for one in config.reward_models
    )
