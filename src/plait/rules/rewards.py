"""Reward models, and what the reward is made of."""

from collections.abc import Iterator
from pathlib import Path

from plait.config import ControlConfig, RewardModelConfig, VerifiersConfig
from plait.errors import Violation
from plait.models.folder import ModelFolderError, read_json, read_model_facts


def weights(reward_models: tuple[RewardModelConfig, ...], verifiers: VerifiersConfig) -> Iterator[Violation]:
    if not reward_models and "weight" in verifiers.model_fields_set and verifiers.weight > 0:
        yield Violation(
            "verifiers.weight",
            "it changes nothing without [[reward_models]]: the reward is the verifier's score",
            "Take it out, or add a reward model",
        )
    parts = [verifiers.weight, *(one.weight for one in reward_models)]
    if sum(parts) == 0:
        where = "reward_models" if reward_models else "verifiers.weight"
        yield Violation(
            where,
            f"the weights of verifier ({verifiers.weight:g}) and reward models "
            f"({', '.join(f'{one.weight:g}' for one in reward_models) or 'none'}) sum to 0, so nothing is rewarded",
            "Set verifiers.weight to 1, or give a reward model a weight",
        )


def control(reward_models: tuple[RewardModelConfig, ...], control: ControlConfig) -> Iterator[Violation]:
    if reward_models and control.rewards != "verifier":
        yield Violation(
            "control.rewards",
            f'"{control.rewards}" replaces the verifier only, and {len(reward_models)} reward models would still say '
            "something: the control would control nothing",
            "Take [[reward_models]] out for the control",
        )


def folders(reward_models: tuple[RewardModelConfig, ...]) -> Iterator[Violation]:
    for index, one in enumerate(reward_models):
        where = f"reward_models.{index}.path"
        try:
            read_model_facts(one.path)
            config = read_json(Path(one.path) / "config.json")
        except ModelFolderError as error:
            yield Violation(where, str(error), "Give the folder of a sequence classifier with one label")
            continue
        kinds, labels = config.get("architectures"), config.get("id2label")
        if not kinds or not str(kinds[0]).endswith("ForSequenceClassification"):
            yield Violation(
                where,
                f'"{one.path}" holds {kinds[0] if kinds else "an unnamed architecture"}, expected a sequence '
                "classifier",
                "Train one with AutoModelForSequenceClassification and num_labels 1, or choose another folder",
            )
        elif labels is None or len(labels) != 1:
            yield Violation(
                where,
                f'"{one.path}" has {2 if labels is None else len(labels)} labels, and a reward is one number',
                "Choose a model with num_labels 1",
            )


def names(reward_models: tuple[RewardModelConfig, ...]) -> Iterator[Violation]:
    found = [one.name or Path(one.path).name for one in reward_models]
    for index, name in enumerate(found):
        if name in found[:index]:
            yield Violation(
                f"reward_models.{index}.name", f'two reward models are called "{name}"', "Give each a name of its own"
            )
