"""What stays on a device between stages, beside what the running stage needs. Torch-free.

A trained model keeps its parameters and its optimiser state where its update runs; a frozen one its parameters where
its pass runs. Gradients and activations exist during an update only, the engine's cache during generation only. An
engine beside a trainer gives back its weights too (`has_sleeping_engine`); one on devices of its own keeps them.
"""

from collections.abc import Iterable

from plait.cost.arithmetic import Number
from plait.cost.layers import Division
from plait.cost.setting import ROLE_OF_STAGE, TRAINED, Setting
from plait.cost.stage_costs import pipeline_rank
from plait.cost.state import local_parameters, rank_state

HOME_STAGE = {
    "policy": "update_policy",
    "critic": "update_critic",
    "reference": "ref_logprob",
    "reward": "score_reward",
}
"""Where a role's parameters stay."""


def home_bytes(setting: Setting, role: str) -> dict[str, Number]:
    """What a role leaves on its devices between stages, parameters, and optimiser if trained; largest rank.

    Offloaded state waits in host memory; of a frozen model all of it, gathered when it runs.
    """
    layout, spec = setting.layout_of(HOME_STAGE[role]), setting.models[role]
    recipe = setting.training if role in TRAINED else setting.inference
    division = Division.of(layout)
    found: dict[str, Number] = {"parameters": 0, "optimizer": 0}
    for rank in range(layout.pp):
        part = pipeline_rank(spec, layout, rank)
        state = rank_state(part, recipe, division, zero=layout.zero, dp_shard=layout.dp_shard)
        terms = {
            "parameters": 0 if layout.offload == "all" else state.parameters,
            "optimizer": 0 if layout.offload != "none" else state.optimizer,
        }
        if sum(terms.values()) > sum(found.values()):
            found = terms
    return found


def resident_bytes(setting: Setting, stage: str, stages: Iterable[str]) -> Number:
    """Bytes per device that other models, or other states of the same one, hold while a stage runs.

    stages: all of the step; only roles that they run have a home.
    """
    names, here = set(stages), setting.pool_of(stage)
    total: Number = 0
    for role, home in HOME_STAGE.items():
        if home not in names or setting.pool_of(home) != here:
            continue
        held = home_bytes(setting, role)
        if home == stage:
            continue
        is_same = ROLE_OF_STAGE.get(stage) == role and stage not in ("generate", "sync_weights")
        # A pass of the trained model works on the parameters that are there.
        total += held["optimizer"] if is_same else held["optimizer"] + held["parameters"]
    if here == setting.pool_of("generate"):
        engine = engine_bytes(setting)
        total += engine if setting.max_staleness > 0 else 0  # the shadow copy
        total += 0 if stage in ("generate", "sync_weights") or has_sleeping_engine(setting, names) else engine
    return total


def has_sleeping_engine(setting: Setting, stages: Iterable[str]) -> bool:
    """Whether the engine gives back its weights while others run: it shares its devices with a trained model."""
    names, here = set(stages), setting.pool_of("generate")
    return any(HOME_STAGE[role] in names and setting.pool_of(HOME_STAGE[role]) == here for role in TRAINED)


def engine_bytes(setting: Setting) -> Number:
    """The engine's weights on one of its devices."""
    division = Division.of(setting.layout_of("generate"))
    return setting.inference.parameter_b * local_parameters(setting.models["policy"], division).total
