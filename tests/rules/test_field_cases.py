"""Every field case leads to a test that exists, to a later capability, or to why there is no such key."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CASES = yaml.safe_load((ROOT / "tests" / "field_cases.yaml").read_text())


def test_cases_lead_somewhere():
    assert len(CASES) == 82
    for case, place in CASES.items():
        assert re.fullmatch(r"[CDNB]\d+|V", case), case
        if place.startswith(("later: ", "no such key: ")):
            continue
        path, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), f"{case}: {place} does not exist"
