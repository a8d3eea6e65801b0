"""What `plait explain` is asked, read into a `Setting`; everything that is wrong with it, at once. Torch-free."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from plait.algorithm_config import AlgorithmConfig
from plait.algorithms.named import algorithm_names, is_known
from plait.algorithms.settings import step_graph
from plait.config import BatchConfig, ModelConfig, RewardModelConfig, RunConfig
from plait.cost.cluster import Cluster
from plait.cost.cluster_catalogue import find_cluster
from plait.cost.composition.step import Schedule
from plait.cost.estimate_generate import num_slots
from plait.cost.fit import engine_layouts, stage_memory, total_bytes, training_layouts
from plait.cost.lengths import log_normal_lengths
from plait.cost.model_catalogue import find_model
from plait.cost.model_spec import ModelSpec
from plait.cost.residence import resident_bytes
from plait.cost.run_memory import MAX_LOGITS_PER_CHUNK
from plait.cost.setting import ROLE_OF_STAGE, Setting, costed_as
from plait.cost.spec_tensors import SpecShape
from plait.cost.stage_costs import StepBatch
from plait.cost.state import PRECISION_RECIPES
from plait.errors import ConfigError, Violation
from plait.jobs.explain_plan import WrittenPlan, plan_pools, read_plan, unknown_name
from plait.parallel.degrees import Layout, divisors, nearest
from plait.parallel.layout_rules import layout_violations
from plait.parallel.layout_words import layout_words
from plait.recipe_errors import unknown_algorithm
from plait.stages.graph import Granularity, StepGraph

_ASYNC_STEPS = 8
TRAINING_STATES = tuple(name for name in PRECISION_RECIPES if not name.startswith("inference"))
_DTYPES = {"bf16": ("fsdp2_fp32_masters", "inference_bf16"), "fp32": ("fp32", "inference_fp32")}
_CRITICS = ("independent", "shared_trunk")
_ROLES = ("policy", "critic", "reference", "reward")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Request:
    """The command's options. None: chosen from the others, as `read_request` says.

    critic: a kind ("independent", "shared_trunk") or the model of an independent one. steps: explained together.

    plan: a layout for every model ("fsdp8tp4:sp"), "name=layout" pairs with commas, or a TOML file with pools, place
    and layout. response_tokens: mean before the cap max_response_tokens; response_cv: their coefficient of variation.
    """

    model: str
    cluster: str
    plan: str | None = None
    algorithm: str = "grpo"
    critic: str | None = None
    reward_model: str | None = None
    prompts: int = 64
    samples_per_prompt: int = 8
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    max_response_tokens: int | None = None
    response_cv: float = 0.8
    microbatch_tokens: int | None = None
    minibatch_sequences: int | None = None
    epochs: int = 1
    dtype: str = "bf16"
    state: str | None = None
    logits_chunk: int | None = None
    verifier_s: float = 0.01
    verifier_longest_s: float = 1.0
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be answered. chosen: what was left out, and what stands in its place."""

    setting: Setting
    graph: StepGraph
    schedule: Schedule
    fuse: Mapping[str, Granularity]
    num_steps: int
    algorithm: str
    cluster: Cluster
    chosen: tuple[str, ...]


def read_request(request: Request) -> Asked:
    """Read models, cluster, algorithm, plan and lengths. Raises ConfigError with every violation."""
    found: list[Violation] = []
    policy = _read(lambda: find_model(request.model), found)
    cluster = _read(lambda: find_cluster(request.cluster), found)
    roles = {"critic": None if request.critic in _CRITICS else request.critic, "reward": request.reward_model}
    others = {role: _read(partial(find_model, name), found, role) for role, name in roles.items() if name}
    wrong = [*_counts(request), *_names(request)]
    found += wrong
    plan = _read(lambda: read_plan(request.plan), found)
    if cluster is not None and request.dtype in _DTYPES and request.dtype not in cluster.device.flop_per_s:
        known = ", ".join(p for p in cluster.device.flop_per_s if p in _DTYPES)
        rule = f"{cluster.device.name} has no rate for {request.dtype}"
        found.append(Violation("dtype", rule, f"It has: {known}; or write a cluster file with it"))
    bad_lengths = {v.where for v in wrong} & {"prompt_tokens", "response_tokens", "max_response_tokens"}
    lengths = None if policy is None or bad_lengths else _lengths(request, policy)
    if lengths is not None and policy is not None:
        found += _positions(lengths, policy)
    if policy is None or cluster is None or plan is None or wrong:
        # Roles, pools and microbatches are not known: layouts are checked against what is.
        found += [] if plan is None else _layouts_alone(plan, policy, cluster)
        raise ConfigError(found)
    graph = _graph(request)
    pools, place = plan_pools(plan, cluster, graph, found)
    assert lengths is not None
    setting = _setting(request, {"policy": policy, **{r: s for r, s in others.items() if s is not None}}, lengths)
    setting = replace(
        setting, pools=pools, place=place, num_cpu_cores=cluster.num_cpu_cores or 1,
        max_staleness=plan.schedule.max_staleness,
    )  # fmt: skip
    written = _layouts(plan, graph, found)
    found += [*_fused(plan.fuse, graph, setting.batch), *_trunk(plan, graph)]
    setting, chosen = _placed(setting, written, graph, plan, found)
    if found:
        raise ConfigError(found)
    if plan.layout.get("") is None and not plan.layout:
        setting, chosen = _chosen_layouts(setting, graph)
    steps = request.steps
    if steps is None:
        steps = 1 if plan.schedule.max_staleness == 0 else _ASYNC_STEPS
        chosen += [] if steps == 1 else [f"{steps} steps (--steps), as one alone shows nothing of a schedule"]
    return Asked(setting, graph, plan.schedule, plan.fuse, steps, request.algorithm, cluster, tuple(chosen))


def _fused(fuse: Mapping[str, Granularity], graph: StepGraph, batch: StepBatch) -> Iterator[Violation]:
    """Consumers are stages, and pieces are made of whole smaller ones."""
    for name in fuse:
        if name not in graph:
            known = ", ".join(stage.name for stage in graph.stages)
            yield Violation(f"plan.fuse.{name}", "it names no stage of this algorithm", f"Known: {known}")
    each, group = batch.num_sequences * batch.num_epochs / batch.num_updates, batch.num_samples_per_prompt
    if fuse and each % group:
        rule = f"a minibatch of {each:g} sequences is not made of whole groups of {group}"
        yield Violation("minibatch_sequences", rule, f"Set it to a multiple of {group}, or leave out plan.fuse")


def _trunk(plan: WrittenPlan, graph: StepGraph) -> Iterator[Violation]:
    """A critic that shares the policy's trunk is where the policy is."""
    if "critic" not in graph["update_policy"].roles:
        return
    for table, names in (("place", plan.place), ("layout", plan.layout)):
        for name in {"critic", "value"} & set(names):
            rule = "the critic shares the policy's trunk and has no place or layout of its own"
            yield Violation(f"plan.{table}.{name}", rule, "Leave it out, or ask for --critic independent")


def _layouts_alone(plan: WrittenPlan, policy: ModelSpec | None, cluster: Cluster | None) -> Iterator[Violation]:
    shape = None if policy is None else SpecShape(policy)
    num_devices = None if cluster is None or plan.pools else cluster.num_devices
    for name, fields in plan.layout.items():
        for broken in layout_violations(fields, shape, num_devices, can_replicate_kv_heads=name == "generate"):
            yield replace(broken, where=f"plan.layout.{name}.{broken.where}" if name else f"plan.{broken.where}")


def _read(of: Callable[[], Read], found: list[Violation], where: str = "") -> Read | None:
    try:
        return of()
    except ConfigError as error:
        if where:
            found += [replace(violation, where=where) for violation in error.violations]
            return None
        found += error.violations or [Violation("model or cluster", str(error), "Correct the file")]
        return None


def _counts(request: Request) -> Iterator[Violation]:
    names = ("prompts", "samples_per_prompt", "prompt_tokens", "response_tokens", "max_response_tokens",
             "microbatch_tokens", "minibatch_sequences", "epochs", "logits_chunk", "steps")  # fmt: skip
    values = {name: getattr(request, name) for name in names}
    for name, value in values.items():
        if value is not None and value < (0 if name == "logits_chunk" else 1):
            yield Violation(name, f"{name} is {value}", "Write a whole number of at least 1")
    for name in ("response_cv", "verifier_s", "verifier_longest_s"):
        if not 0 <= getattr(request, name) < math.inf:
            yield Violation(name, f"{name} is {getattr(request, name)}", "Write a finite number of at least 0")
    total, each = request.prompts * request.samples_per_prompt, request.minibatch_sequences
    if each is not None and each > 0 and total > 0 and total % each:
        rule = f"minibatch_sequences {each} does not divide the {total} sequences of a step"
        yield Violation("minibatch_sequences", rule, f"Set it to {nearest(divisors(total), each)}")


def _names(request: Request) -> Iterator[Violation]:
    if not is_known(request.algorithm):
        yield unknown_algorithm("algorithm", request.algorithm, list(algorithm_names()))
    elif request.critic and not AlgorithmConfig(name=request.algorithm).has_critic:
        rule = f"{request.algorithm} has no critic"
        yield Violation("critic", rule, "Leave it out, or ask for an algorithm that has one, such as ppo")
    if request.dtype not in _DTYPES:
        yield Violation("dtype", f'there is no dtype "{request.dtype}"', f"Known: {', '.join(_DTYPES)}")
    if request.state is not None and request.state not in TRAINING_STATES:
        yield Violation("state", f'there is no state "{request.state}"', f"Known: {', '.join(TRAINING_STATES)}")


@dataclass(frozen=True, slots=True)
class _Lengths:
    prompt: int
    response: int
    cap: int


def _lengths(request: Request, spec: ModelSpec) -> _Lengths:
    """Left out: a prompt of 256, a response of 1,024 tokens, or what the model has room for; cut at four times that."""
    prompt = request.prompt_tokens or min(256, int(spec.max_positions) // 8)
    room = max(int(spec.max_positions) - prompt, 1)
    response = request.response_tokens or min(1024, max(room // 4, 1))
    return _Lengths(prompt, response, request.max_response_tokens or min(4 * response, max(room, response)))


def _positions(lengths: _Lengths, spec: ModelSpec) -> Iterator[Violation]:
    longest, most = lengths.prompt + lengths.cap, int(spec.max_positions)
    if longest > most:
        rule = (
            f"prompt {lengths.prompt} + longest response {lengths.cap} = {longest} tokens, and {spec.name} has {most}"
        )
        change = f"Set max_response_tokens to {max(most - lengths.prompt, 1)} or less"
        if lengths.prompt >= most:
            change = f"Set prompt_tokens below {most}"
        yield Violation("max_response_tokens", f"{rule} positions", change)
    if lengths.response > lengths.cap:
        rule = f"mean response {lengths.response} is above the longest {lengths.cap}"
        yield Violation("response_tokens", rule, f"Set it to {lengths.cap} or less, or raise max_response_tokens")


def _graph(request: Request) -> StepGraph:
    kind = {"critic": {"kind": request.critic}} if request.critic in _CRITICS else {}
    algorithm = AlgorithmConfig.model_validate({"name": request.algorithm} | kind)
    total = request.prompts * request.samples_per_prompt
    batch = BatchConfig(
        num_prompts_per_step=request.prompts,
        num_samples_per_prompt=request.samples_per_prompt,
        num_sequences_per_minibatch=request.minibatch_sequences or total,
        num_epochs_per_step=request.epochs,
    )
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if request.dtype == "bf16" else "float32"
    rewards = (RewardModelConfig(path=request.reward_model),) if request.reward_model else ()
    config = RunConfig.model_construct(
        algorithm=algorithm, batch=batch, model=ModelConfig(compute_dtype=dtype), reward_models=rewards
    )
    return step_graph(config)


def _setting(request: Request, models: Mapping[str, ModelSpec], lengths: _Lengths) -> Setting:
    policy = models["policy"]
    heads = {"critic": models.get("critic", policy), "reward": models.get("reward", policy)}
    training, inference = _DTYPES[request.dtype]
    longest = lengths.prompt + lengths.cap
    batch = StepBatch(
        request.prompts, request.samples_per_prompt, lengths.prompt,
        log_normal_lengths(lengths.response, request.response_cv, lengths.cap),
        num_tokens_per_microbatch=request.microbatch_tokens or max(8192, longest),
        num_sequences_per_minibatch=request.minibatch_sequences, num_epochs=request.epochs,
    )  # fmt: skip
    chunk = request.logits_chunk
    return Setting(
        models={"policy": policy, "reference": policy, **{r: s.with_scalar_head() for r, s in heads.items()}},
        pools={},
        batch=batch,
        training=PRECISION_RECIPES[request.state or training],
        inference=PRECISION_RECIPES[inference],
        precision="bf16" if request.dtype == "bf16" else "fp32",
        logits_chunk=max(1, MAX_LOGITS_PER_CHUNK // int(policy.vocab_size)) if chunk is None else chunk or None,
        verifier_s=request.verifier_s,
        verifier_longest_s=max(request.verifier_s, request.verifier_longest_s),
    )


def _layouts(plan: WrittenPlan, graph: StepGraph, found: list[Violation]) -> dict[str, dict[str, Any]]:
    written = {name: dict(fields) for name, fields in plan.layout.items() if name}
    for name in written:
        found += unknown_name(f"plan.layout.{name}", name, graph)
    if "" in plan.layout:
        written = {**{role: dict(plan.layout[""]) for role in _ROLES}, **written}
    return written


def _placed(
    setting: Setting, written: Mapping[str, dict[str, Any]], graph: StepGraph, plan: WrittenPlan,
    found: list[Violation],
) -> tuple[Setting, list[str]]:  # fmt: skip
    """Every stage's layout: as written for it or its role, else the policy's where that fits its pool, else fsdp over
    the pool. generate: replicas of the policy's tensor parallelism, over which weights are gathered once per step.
    """
    layouts: dict[str, Layout] = {}
    chosen: list[str] = []
    for stage in (costed_as(s) for s in graph.stages if s.name in ROLE_OF_STAGE and s.name != "sync_weights"):
        role, pool = ROLE_OF_STAGE[stage], setting.cluster_of(stage)
        name = stage if stage in written else role
        fields = written.get(name, {})
        if stage == "generate" and stage not in written:
            tp = max(written.get("policy", {}).get("tp", 1), 1)
            fields = (
                {"dp_replicate": max(pool.num_devices // tp, 1), "tp": tp} if pool.num_devices % tp == 0 else {"tp": tp}
            )
            chosen += [f"generate: replicas of the policy's tp {tp}"] if plan.layout else []
        elif not fields:
            size = pool.num_devices
            policy = written.get("policy", {})
            fits = policy and not layout_violations(policy, num_devices=size)
            fields = policy if fits else {"dp_shard": size} if size > 1 else {}
        violations = _layout_violations(setting, stage, fields)
        found += [replace(v, where=f"plan.layout.{name}.{v.where}") for v in violations if _is_new(v, name, found)]
        if not violations:
            layouts[stage] = Layout(**fields)
    return replace(setting, layouts=layouts), chosen


def _is_new(violation: Violation, name: str, found: list[Violation]) -> bool:
    where = f"plan.layout.{name}.{violation.where}"
    return all((other.where, other.rule) != (where, violation.rule) for other in found)


def _layout_violations(setting: Setting, stage: str, fields: Mapping[str, Any]) -> list[Violation]:
    batch, shape, pool = setting.batch, SpecShape(setting.spec_of(stage)), setting.cluster_of(stage)
    is_training, is_engine = stage in ("update_policy", "update_critic"), stage == "generate"
    found = layout_violations(fields, shape, pool.num_devices, can_replicate_kv_heads=is_engine)
    if is_engine:
        for axis in ("pp", "cp"):
            if fields.get(axis, 1) > 1:
                rule = f"{axis} {fields[axis]} is for training passes; an engine has replicas, tp and ep"
                found.append(Violation(axis, rule, f"Leave {axis} out, and write dp or tp for its devices"))
        return found
    if found:
        return found
    layout = Layout(**fields)
    longest = int(batch.prompt_tokens) + batch.lengths.cap
    size = batch.num_tokens_per_microbatch
    if size < longest:
        rule = f"microbatches of {size} tokens cannot hold the longest sequence of {longest}"
        found.append(Violation("num_tokens_per_microbatch", rule, f"Set microbatch_tokens to {longest} or more"))
    each = batch.tokens(setting.spec_of(stage)).num_tokens * batch.num_epochs / batch.num_updates / layout.data_parallel
    count = -(-each // size)
    found += layout_violations(
        layout, num_microbatches=int(count) if is_training else None,
        num_tokens_per_microbatch=size if layout.cp > 1 or layout.sp else None,
    )  # fmt: skip
    return found


def _chosen_layouts(setting: Setting, graph: StepGraph) -> tuple[Setting, list[str]]:
    """Without a plan: the first of a few training layouts that fits (`training_layouts`), the last if none does; then
    the engine that generates most sequences at once, of several with the most replicas.
    """
    stages = tuple(stage.name for stage in graph.stages)
    updates = [stage for stage in stages if stage.startswith("update")]
    shape = SpecShape(setting.models["policy"])
    changed = setting
    for layout in training_layouts(shape, setting.cluster_of("update_policy").num_devices):
        passes = [stage for stage in setting.layouts if stage != "generate"]
        changed = replace(setting, layouts={**setting.layouts, **dict.fromkeys(passes, layout)})
        if all(_fits(changed, stage, stages) for stage in updates):
            break
    chosen = [f"training {layout_words(changed.layout_of('update_policy'))}"]
    own = changed.layouts["generate"]
    engines = [own, *engine_layouts(shape, changed.cluster_of("generate").num_devices)]
    tried = [replace(changed, layouts={**changed.layouts, "generate": layout}) for layout in engines]
    at_once = [_at_once(setting, stages) for setting in tried]
    changed = tried[at_once.index(max(at_once))]
    return changed, [*chosen, f"generate {layout_words(changed.layouts['generate'])}"]


def _at_once(setting: Setting, stages: tuple[str, ...]) -> float:
    """Sequences that all replicas of the engine generate at once; 0 where weights do not fit."""
    if not _fits(setting, "generate", stages):
        return 0
    slots = num_slots(setting, resident_bytes(setting, "generate", stages))
    return min(slots * setting.layout_of("generate").data_parallel, setting.batch.num_sequences)


def _fits(setting: Setting, stage: str, stages: tuple[str, ...]) -> bool:
    return total_bytes(stage_memory(setting, stage, stages)) <= setting.usable_bytes(stage)
