"""Write reasoning_gym_tasks.json from the installed reasoning-gym: `python -m plait.specs.make_reasoning_gym_tasks`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

NOT_OFFERED = {"composite": "mixes other data sets; several [[tasks]] with weights do that, and are reported apart"}
SET_BY_THE_RUN = ("seed", "size")

TARGET = Path(__file__).with_name("reasoning_gym_tasks.json")


def catalogue_of_package() -> dict[str, dict[str, Any]]:
    """Category and parameter names of every data set that the installed package registers, by name."""
    from reasoning_gym.factory import DATASETS

    tasks = {}
    for name, (dataset_class, config_class) in sorted(DATASETS.items()):
        if name in NOT_OFFERED:
            continue
        names = [field.name for field in dataclasses.fields(config_class)]
        params = [n for n in names if n not in SET_BY_THE_RUN]
        # reasoning_gym.<category>.<module>, as ProceduralDataset.category reads it
        tasks[name] = {"category": dataset_class.__module__.split(".")[1], "params": params}
    return tasks


def main() -> None:
    """Rewrite the file."""
    lines = [f"  {json.dumps(name)}: {json.dumps(task)}" for name, task in catalogue_of_package().items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
