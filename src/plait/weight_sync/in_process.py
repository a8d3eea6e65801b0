"""Weight movement inside one process: the engine runs the trainer's own module, so only the version moves.

What must hold is checked all the same: after each publication both sides name the same fingerprint.
"""

import hashlib

import torch
from transformers import PreTrainedModel

from plait.errors import WeightSyncError
from plait.rollout.engine import Engine

_SAMPLED_PER_TENSOR = 64


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Hash of evenly spaced entries of every parameter: cheap, and no update leaves it as it was."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        stride = max(1, len(flat) // _SAMPLED_PER_TENSOR)
        digest.update(name.encode())
        digest.update(flat[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def publish(model: PreTrainedModel, engine: Engine, version: int) -> None:
    """Make `version` of the policy the one that the engine samples from."""
    held, published = fingerprint(engine.model), fingerprint(model)
    if held != published:
        raise WeightSyncError(
            f"after publishing policy version {version} the engine holds weights {held}, the trainer {published}"
        )
    engine.set_version(version, recompute_kv=False)
