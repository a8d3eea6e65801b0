"""From samples to microbatches: sequences one after the other in one row, no padding.

Shapes: T tokens of a microbatch (prompts and responses), R loss tokens, B its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.batch import Sample
from plait.models.attention import SHAPE_MULTIPLE, PackedAttention, filling


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence to score or train on: all its ids, and which of them the loss uses (never the first)."""

    ids_T: np.ndarray
    loss_mask_T: np.ndarray

    @classmethod
    def from_sample(cls, sample: Sample) -> "TokenSequence":
        """Trains on the tokens that the model wrote, by position, whatever their values are."""
        prompt = np.asarray(sample.prompt_ids, dtype=np.int64)
        ids = np.concatenate([prompt, sample.response_ids_R.astype(np.int64)])
        mask = np.concatenate([np.zeros(len(prompt), dtype=bool), sample.response_mask_R])
        return cls(ids, mask)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Packed sequences for one pass.

    ids_1T: token ids. context: attention within each sequence. predict_R: packed positions whose next token is a
    loss token. targets_R: those tokens. sequence_R: for each of them, which sequence of the caller's list it is of.
    place_R: and which loss token of that sequence it is, from 0.
    last_B: packed position of each sequence's last token. sequences: the caller's indices of the packed sequences, in
    order. num_tokens: without the filling.
    """

    ids_1T: Tensor
    context: PackedAttention
    predict_R: Tensor
    targets_R: Tensor
    sequence_R: Tensor
    place_R: Tensor
    last_B: Tensor
    sequences: tuple[int, ...]
    num_tokens: int


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Spread sequences over as few rows of at most max_tokens as first-fit decreasing finds; indices into lengths.

    Deterministic. A sequence longer than max_tokens is refused by the rules before a run starts.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= max_tokens, f"a sequence of {lengths[index]} tokens, and a microbatch has {max_tokens}"
        for row, free in enumerate(room):
            if lengths[index] <= free:
                rows[row].append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(max_tokens - lengths[index])
    return rows


def pack(
    sequences: Sequence[TokenSequence], max_tokens: int, device: torch.device | str, *, together: int = 1
) -> list[Microbatch]:
    """Pack sequences into microbatches of at most max_tokens tokens. together: so many in a row are never parted."""
    lengths = [len(sequence.ids_T) for sequence in sequences]
    assert len(lengths) % together == 0, f"{len(lengths)} sequences are no multiple of {together}"
    starts = range(0, len(lengths), together)
    rows = plan_microbatches([sum(lengths[start : start + together]) for start in starts], max_tokens)
    return [pack_row(sequences, [starts[i] + n for i in row for n in range(together)], device) for row in rows]


def pack_rows(
    sequences: Sequence[TokenSequence],
    rows: Sequence[list[int]],
    device: torch.device | str,
    multiple: int = SHAPE_MULTIPLE,
) -> list[Microbatch]:
    """One microbatch of each row of indices into sequences, all filled up to one length, that of the longest.

    multiple: of it that length is. An empty row becomes filling only: no sequences, no loss tokens.
    """
    lengths = [sum(len(sequences[index].ids_T) for index in row) for row in rows]
    num_tokens = -(-max([1, *lengths]) // multiple) * multiple
    return [pack_row(sequences, row, device, num_tokens) for row in rows]


def pack_row(
    sequences: Sequence[TokenSequence], row: list[int], device: torch.device | str, num_tokens: int | None = None
) -> Microbatch:
    """One microbatch of the sequences that `row` names. num_tokens: with filling; None takes the usual multiple."""
    lengths = [len(sequences[index].ids_T) for index in row]
    extra = filling(lengths, num_tokens)
    nothing = np.zeros(0, dtype=np.int64)
    ids, predict, targets, owner, place = ([nothing] for _ in range(5))
    start = 0
    for index in row:
        sequence = sequences[index]
        assert not sequence.loss_mask_T[0], "the first token of a sequence has nothing to be predicted from"
        positions = np.flatnonzero(sequence.loss_mask_T)
        ids.append(sequence.ids_T)
        predict.append(start + positions - 1)
        targets.append(sequence.ids_T[positions])
        owner.append(np.full(len(positions), index))
        place.append(np.arange(len(positions)))
        start += len(sequence.ids_T)
    ids.append(np.zeros(sum(extra), dtype=np.int64))
    ids_T, predict_R, targets_R, sequence_R, place_R = (
        torch.from_numpy(np.concatenate(part)).to(device) for part in (ids, predict, targets, owner, place)
    )
    return Microbatch(
        ids_1T=ids_T[None],
        context=PackedAttention(lengths + extra, device),
        predict_R=predict_R,
        targets_R=targets_R,
        sequence_R=sequence_R,
        place_R=place_R,
        last_B=torch.tensor(lengths, dtype=torch.int64, device=device).cumsum(0) - 1,
        sequences=tuple(row),
        num_tokens=start,
    )
