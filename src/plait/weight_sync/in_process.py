"""Weight movement inside one process: the engine runs the trainer's own module, so only the version moves.

What must hold is checked all the same: both sides name the same fingerprint, and the engine derives its fused copies
anew.
"""

from transformers import PreTrainedModel

from plait.errors import WeightSyncError
from plait.models.fingerprint import fingerprint
from plait.rollout.engine import Engine


def publish(model: PreTrainedModel, engine: Engine, version: int) -> None:
    """Make `version` of the policy the one that the engine samples from."""
    held, published = fingerprint(engine.model), fingerprint(model)
    if held != published:
        raise WeightSyncError(
            f"after publishing policy version {version} the engine holds weights {held}, the trainer {published}"
        )
    engine.set_version(version, recompute_kv=False)
