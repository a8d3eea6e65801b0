"""Rules between settings, all checked before anything starts and reported at once. Torch-free.

A rule is a function whose parameters are the sections it reads; it runs only where these are valid by
themselves, so that one wrong field does not hide what is wrong elsewhere. A parameter with a default is a
section that the rule uses when it is valid and does without otherwise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from plait.config import RunConfig, SftConfig
from plait.errors import ConfigError, Violation
from plait.rules import algorithm, batch, inert, inert_algorithm, model, pairwise, plan, rewards, sampling, tasks
from plait.section import Section

Rule = Callable[..., Iterable[Violation]]

_RUN_RULES: tuple[Rule, ...] = (
    tasks.run_name,
    batch.group_size,
    batch.minibatch_keeps_groups_whole,
    batch.minibatch_divides_step,
    batch.minibatch_fits,
    batch.batch_std_needs_two,
    batch.microbatch_holds_longest,
    model.model_folder_is_readable,
    model.positions,
    model.evaluation_positions,
    model.end_token,
    model.attention_kinds,
    model.experts_to_record,
    sampling.training_temperature,
    sampling.training_distribution,
    sampling.stop_tokens,
    sampling.dynamic_needs_groups,
    sampling.dynamic_needs_signal,
    tasks.reasoning_gym_tasks,
    tasks.row_files,
    tasks.verifiers,
    tasks.names,
    tasks.evaluation_covers_tasks,
    algorithm.value_needs_critic,
    algorithm.estimator,
    algorithm.scale,
    algorithm.kl,
    algorithm.clips,
    algorithm.correction,
    algorithm.critic,
    model.critic_folder,
    rewards.weights,
    rewards.control,
    rewards.folders,
    rewards.names,
    pairwise.no_advantages,
    pairwise.unread,
    pairwise.pairs_fit,
    pairwise.rows_of_pairs,
    pairwise.nothing_is_sampled,
    inert_algorithm.kl,
    inert_algorithm.advantage_scale,
    inert_algorithm.returns,
    inert_algorithm.clips,
    inert_algorithm.critic,
    inert_algorithm.correction,
    inert_algorithm.shaping,
    inert.learning_rate_schedule,
    plan.pools_and_layouts,
    plan.layouts_fit_model,
    plan.ray_is_there,
    plan.roles_on_ranks,
)
_RUN_WARNINGS: tuple[Rule, ...] = (
    model.unknown_positions,
    sampling.greedy_baseline_of_chance,
    sampling.greedy_repeats,
    sampling.greedy_ignores,
    sampling.dynamic_cannot_fill,
    tasks.nothing_held_out,
    tasks.eval_path_wins,
    inert.never_reached,
    inert.warmup_takes_all,
    inert_algorithm.dynamic_sampling,
    algorithm.reinforce_on_old_samples,
    inert.sgd,
    pairwise.beta_of_another_loss,
)
_SFT_RULES: tuple[Rule, ...] = (
    tasks.run_name,
    model.model_folder_is_readable,
    model.sft_positions,
    model.sft_end_token,
    model.sft_attention_kinds,
    batch.sft_microbatch_holds_longest,
    tasks.reasoning_gym_tasks,
    tasks.names,
    tasks.worked_solutions_need_tasks,
    tasks.supervised_file,
    inert.learning_rate_schedule,
)


_OF_ADVANTAGES = frozenset(
    {
        *(algorithm.value_needs_critic, algorithm.estimator, algorithm.scale, algorithm.kl, algorithm.clips),
        *(algorithm.correction, inert_algorithm.kl, inert_algorithm.advantage_scale, inert_algorithm.returns),
        *(inert_algorithm.clips, inert_algorithm.correction),
    }
)
"""Rules between factors that have no place under a loss on pairs: `pairwise.no_advantages` refuses them there, and
what these would say of each other could only confuse."""


def _run(rules: Sequence[Rule], sections: Mapping[str, Any]) -> list[Violation]:
    found: list[Violation] = []
    has_pairs = "algorithm" in sections and sections["algorithm"].has_pairs
    for rule in rules:
        if has_pairs and rule in _OF_ADVANTAGES:
            continue
        parameters = signature(rule).parameters
        required = [name for name, parameter in parameters.items() if parameter.default is Parameter.empty]
        if all(name in sections for name in required):
            found += rule(**{name: sections[name] for name in parameters if name in sections})
    return found


def _sections(config: RunConfig | SftConfig) -> dict[str, Any]:
    return {name: config.__dict__[name] for name in type(config).model_fields}


def section_violations(root: type[Section], sections: Mapping[str, Any]) -> list[Violation]:
    """The rules of a configuration type that can be checked with the sections that are valid."""
    return _run(_SFT_RULES if root is SftConfig else _RUN_RULES, sections)


def config_violations(config: RunConfig | SftConfig) -> list[Violation]:
    """Every rule that a configuration breaks."""
    return section_violations(type(config), _sections(config))


def config_warnings(config: RunConfig | SftConfig) -> list[Violation]:
    """What is allowed and probably not meant."""
    return [] if isinstance(config, SftConfig) else _run(_RUN_WARNINGS, _sections(config))


def check_config(config: RunConfig | SftConfig) -> None:
    """Raise ConfigError with every rule that a configuration breaks."""
    if violations := config_violations(config):
        raise ConfigError(violations)
