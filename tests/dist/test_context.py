"""Context parallelism: the cut, ring attention and Ulysses, equal to the unsharded model on packed unequal sequences."""

import equality
import pytest
import torch
import torch.distributed as dist
from models import make_sequences
from ranks import mesh

from plait.parallel.context import cut, row_multiple, sequence_multiple, zigzag
from plait.parallel.degrees import Layout
from plait.stages.packing import pack_rows

ULYSSES = {"cp_kind": "ulysses"}
LENGTHS = (60, 5, 58, 27, 31, 9, 12, 28, 3)
"""Some shorter than the 2 cp pieces that a ring cuts, and enough in one row that every rank gets loss tokens."""
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES = [
    ("qwen2", "cp4", {}, FEW_HEADS),
    ("mistral", "cp4", ULYSSES, FEW_HEADS),
    ("qwen3", "fsdp2cp2", {"recompute": "selective", "zero": 2}, {}),
    ("llama", "cp2tp2", {**ULYSSES, "recompute": "selective"}, {}),
    ("qwen3", "cp2pp2", {"recompute": "full"}, {}),
]


@pytest.mark.parametrize(("kind", "text", "settings", "changes"), CASES)
def test_equals_the_unsharded_model(groups, kind, text, settings, changes):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings, changes, LENGTHS)


def test_zigzag_gives_an_early_and_a_late_piece():
    assert zigzag([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("c", [2, 3, 4])
def test_zigzag_is_a_partition_with_equal_causal_work(c):
    lengths = [2 * c * n for n in (5, 1, 3)]
    parts = [zigzag(lengths, c, place) for place in range(c)]
    assert sorted(torch.cat(parts).tolist()) == list(range(sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])
    works = [float((positions[part] + 1).sum()) for part in parts]
    assert max(works) == min(works)


def _owners(rank, world_size, settings):
    """(loss tokens, ends) that this rank owns, its tokens, and what it packed for them."""
    layout = Layout.parse(f"cp{world_size}", **settings)
    sequences = make_sequences(LENGTHS)
    rows = [list(range(len(LENGTHS)))]
    (whole,) = pack_rows(sequences, rows, "cpu", row_multiple(layout), sequence_multiple(layout))
    mine = cut(whole, layout, mesh(layout))
    ids, positions = mine.ids_1T[0], mine.context.position_ids_1T[0]
    number_t = mine.routing.sequence_T
    for number, position, token in zip(number_t.tolist(), positions.tolist(), ids.tolist(), strict=True):
        assert number < 0 or sequences[number].ids_T[position] == token
    for index, place, predict, target in zip(
        *(x.tolist() for x in (mine.sequence_R, mine.place_R, mine.predict_R, mine.targets_R)), strict=True
    ):
        token = sequences[index].loss_mask_T.nonzero()[0][place]
        assert (int(number_t[predict]), int(positions[predict]) + 1) == (index, token)
        assert sequences[index].ids_T[token] == target
    for index, last in zip(mine.ends_B.tolist(), mine.last_B.tolist(), strict=True):
        assert (int(number_t[last]), int(positions[last])) == (index, LENGTHS[index] - 1)
    owned = list(zip(mine.sequence_R.tolist(), mine.place_R.tolist(), strict=True))
    return owned, mine.ends_B.tolist(), mine.num_tokens, len(ids)


@pytest.mark.parametrize("settings", [{}, ULYSSES])
def test_every_loss_token_has_one_owner(ranks4, settings):
    owned, ends, tokens, sizes = zip(*ranks4.run(_owners, settings), strict=True)
    expected = [
        (index, place)
        for index, sequence in enumerate(make_sequences(LENGTHS))
        for place in range(int(sequence.loss_mask_T.sum()))
    ]
    assert sorted(pair for part in owned for pair in part) == expected
    assert all(owned), "every rank has some"
    assert sorted(index for part in ends for index in part) == list(range(len(LENGTHS)))
    assert sum(tokens) == sum(LENGTHS)
    assert len(set(sizes)) == 1


def _ring_in_bf16(rank, world_size):
    """Relative errors of output and gradients against fp32, of the ring and of plain attention, all in bf16."""
    from plait.models.attention import PackedAttention
    from plait.parallel.ring import RingAttention

    lengths = [64, 32, 32]
    generator = torch.Generator().manual_seed(3)
    exact = [torch.randn(1, heads, sum(lengths), 16, generator=generator) for heads in (4, 2, 2, 4)]
    own = zigzag(lengths, world_size, rank)

    def results(context, parts):
        q, k, v = (x.clone().requires_grad_() for x in parts[:3])
        out = context.attend(0, q, k, v, 0.25)
        out.backward(parts[3].transpose(1, 2))
        return [x.float() for x in (out.detach().transpose(1, 2), q.grad, k.grad, v.grad)]

    expected = results(PackedAttention(lengths), exact)
    low = [x.bfloat16() for x in exact]
    plain = results(PackedAttention(lengths), low)
    ring = RingAttention([n // world_size for n in lengths], None, dist.group.WORLD)
    mine = results(ring, [x[:, :, own] for x in low])
    return [
        (equality.relative(a, e[:, :, own]), equality.relative(b[:, :, own], e[:, :, own]))
        for a, b, e in zip(mine, plain, expected, strict=True)
    ]


def test_ring_in_bf16_rounds_no_worse_than_plain_attention(ranks4):
    for errors in ranks4.run(_ring_in_bf16):
        for ring, plain in errors:
            assert 1e-4 < ring < 1.5 * plain


def _num_sends(rank, world_size, recompute):
    """How many tensors this rank sent on in one training pass of one microbatch."""
    sharded = equality.make_sharded("qwen3", Layout.parse("cp2", recompute=recompute))
    sequences, sent, start = make_sequences(LENGTHS), [], dist.batch_isend_irecv
    (microbatch,) = sharded.split(sequences, 256)

    def counted(operations):
        sent.append(len(operations))
        return start(operations)

    dist.batch_isend_irecv = counted
    try:
        sharded.train_pass([microbatch], lambda _, scores: scores.logprobs_R.sum(), 1.0)
    finally:
        dist.batch_isend_irecv = start
    assert set(sent) == {2}, "one sent and one received"
    return len(sent)


@pytest.mark.parametrize(("recompute", "per_layer"), [("none", 4), ("selective", 4), ("full", 5)])
def test_selective_recomputation_sends_nothing_again(ranks2, recompute, per_layer):
    """Over 2 ranks: keys and values once in forward, once in backward, their gradients twice."""
    assert ranks2.run(_num_sends, recompute) == [4 * per_layer] * 2
