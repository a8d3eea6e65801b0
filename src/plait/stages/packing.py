"""From samples to microbatches: sequences one after the other in one row, no padding.

Shapes: T tokens of a microbatch (prompts and responses), R loss tokens, B its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.batch import Sample
from plait.models.attention import SHAPE_MULTIPLE, PackedAttention, PassContext, filling
from plait.models.routing import NO_EXPERT, Routing


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence to score or train on: all its ids, and which of them the loss uses (never the first).

    experts_TLK: the experts that each routing layer must use for its first tokens (router replay), or None.
    """

    ids_T: np.ndarray
    loss_mask_T: np.ndarray
    experts_TLK: np.ndarray | None = None

    @classmethod
    def from_sample(cls, sample: Sample, *, replays_experts: bool = False) -> "TokenSequence":
        """Trains on the tokens that the model wrote, by position, whatever their values are.

        replays_experts: with the experts that were recorded when the sample was made.
        """
        prompt = np.asarray(sample.prompt_ids, dtype=np.int64)
        ids = np.concatenate([prompt, sample.response_ids_R.astype(np.int64)])
        mask = np.concatenate([np.zeros(len(prompt), dtype=bool), sample.response_mask_R])
        assert not replays_experts or sample.experts_TLK is not None, f"sample {sample.id} has no recorded experts"
        return cls(ids, mask, sample.experts_TLK if replays_experts else None)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Packed sequences for one pass.

    ids_1T: token ids. context: attention within each sequence. predict_R: packed positions whose next token is a
    loss token. targets_R: those tokens. sequence_R: for each of them, which sequence of the caller's list it is of.
    place_R: and which loss token of that sequence it is, from 0.
    sequences: the caller's indices of the packed sequences, in order. num_tokens: without the filling. last_B: packed
    position of each sequence's last token; ends_B: the caller's index of that sequence. routing: for the routers of a
    mixture of experts.

    Cut over ranks (`plait.parallel.context`), a rank has some tokens of every sequence, so some loss tokens of it, and
    its last token or not.
    """

    ids_1T: Tensor
    context: PassContext
    predict_R: Tensor
    targets_R: Tensor
    sequence_R: Tensor
    place_R: Tensor
    last_B: Tensor
    ends_B: Tensor
    sequences: tuple[int, ...]
    num_tokens: int
    routing: Routing


def filled(length: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-length // multiple) * multiple


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


def pack(sequences: Sequence[TokenSequence], max_tokens: int, device: torch.device | str) -> list[Microbatch]:
    """Pack sequences into microbatches of at most max_tokens tokens."""
    rows = plan_microbatches([len(s.ids_T) for s in sequences], max_tokens)
    return [pack_row(sequences, row, device) for row in rows]


def pack_rows(
    sequences: Sequence[TokenSequence],
    rows: Sequence[list[int]],
    device: torch.device | str,
    multiple: int = SHAPE_MULTIPLE,
    sequence_multiple: int = 1,
) -> list[Microbatch]:
    """One microbatch of each row of indices into sequences, all filled up to one length, that of the longest.

    multiple: of it that length is. An empty row becomes filling only: no sequences, no loss tokens. sequence_multiple:
    each sequence is filled up to a multiple of it, with tokens behind its end, which no other token sees.
    """
    assert multiple % sequence_multiple == 0, f"{sequence_multiple} does not divide {multiple}"
    lengths = [sum(filled(len(sequences[index].ids_T), sequence_multiple) for index in row) for row in rows]
    num_tokens = filled(max([1, *lengths]), multiple)
    return [pack_row(sequences, row, device, num_tokens, sequence_multiple) for row in rows]


def pack_row(
    sequences: Sequence[TokenSequence],
    row: list[int],
    device: torch.device | str,
    num_tokens: int | None = None,
    sequence_multiple: int = 1,
) -> Microbatch:
    """One microbatch of the sequences that `row` names. num_tokens: with filling; None takes the usual multiple."""
    lengths = [filled(len(sequences[index].ids_T), sequence_multiple) for index in row]
    extra = filling(lengths, num_tokens, sequence_multiple)
    starts = np.cumsum([0, *lengths])
    ids_T, sequence_T = np.zeros(starts[-1] + sum(extra), dtype=np.int64), np.full(starts[-1] + sum(extra), -1)
    nothing = np.zeros(0, dtype=np.int64)
    predict, targets, owner, place = ([nothing] for _ in range(4))
    last = []
    for number, (index, start) in enumerate(zip(row, starts, strict=False)):
        sequence = sequences[index]
        assert not sequence.loss_mask_T[0], "the first token of a sequence has nothing to be predicted from"
        positions = np.flatnonzero(sequence.loss_mask_T)
        tokens = slice(start, start + len(sequence.ids_T))
        ids_T[tokens], sequence_T[tokens] = sequence.ids_T, number
        predict.append(start + positions - 1)
        targets.append(sequence.ids_T[positions])
        owner.append(np.full(len(positions), index))
        place.append(np.arange(len(positions)))
        last.append(tokens.stop - 1)
    predict_R, targets_R, sequence_R, place_R = (
        torch.from_numpy(np.concatenate(part)).to(device) for part in (predict, targets, owner, place)
    )
    experts_TLK = _packed_experts([sequences[index] for index in row], starts, len(ids_T))
    routing = Routing(
        torch.from_numpy(sequence_T).to(device),
        torch.tensor([len(sequences[index].ids_T) for index in row], device=device),
        None if experts_TLK is None else torch.from_numpy(experts_TLK).to(device),
    )
    return Microbatch(
        ids_1T=torch.from_numpy(ids_T)[None].to(device),
        context=PackedAttention(lengths + extra, device),
        predict_R=predict_R,
        targets_R=targets_R,
        sequence_R=sequence_R,
        place_R=place_R,
        last_B=torch.tensor(last, dtype=torch.int64, device=device),
        ends_B=torch.tensor(row, dtype=torch.int64, device=device),
        sequences=tuple(row),
        num_tokens=int((sequence_T >= 0).sum()),
        routing=routing,
    )


def _packed_experts(sequences: Sequence[TokenSequence], starts: np.ndarray, num_tokens: int) -> np.ndarray | None:
    """Recorded experts at their packed places, NO_EXPERT elsewhere; None where no sequence has any."""
    recorded = [sequence.experts_TLK for sequence in sequences]
    first = next((experts for experts in recorded if experts is not None), None)
    if first is None:
        return None
    packed = np.full((num_tokens, *first.shape[1:]), NO_EXPERT, dtype=np.int64)
    for experts, start in zip(recorded, starts, strict=False):
        if experts is not None:
            packed[start : start + len(experts)] = experts
    return packed
