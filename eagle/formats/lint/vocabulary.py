"""Lint rules on vocabularies: sizes, d2t (offsets from draft ids to target ids), t2d (which target ids are drafted).

target_id = draft_id + d2t[draft_id]. Every runtime drafts by d2t; none reads t2d when serving.
"""

from collections.abc import Iterator

import torch

from eagle.formats.lint.rules import Found, Look, rule
from eagle.heads.vocabulary import doubt_of_d2t

_MAKE = "write both from the list of draft tokens: d2t[i] = target id - i, t2d[target id] = true"


@rule("vocab-size", "the config's vocabulary is the target's")
def vocab_size(look: Look) -> Iterator[Found]:
    got = look.head.vocab_size
    where = "transformer_layer_config.vocab_size" if look.head.speculators else "vocab_size"
    if got is None:
        yield Found(
            severity="breaks",
            evidence=f"{where} is {look.head.layer.get('vocab_size')!r}",
            effect=f"{look.name} builds Llama's default of 32000 tokens",
            remedy="write the target's vocabulary size",
        )
    elif look.target is not None and got != look.target.vocab_size:
        yield Found(
            severity="breaks",
            evidence=f"{where} is {got}, target {look.target.name} has {look.target.vocab_size}",
            effect="the target's embedding, which the head shares, has another number of rows",
            remedy=f'write "vocab_size": {look.target.vocab_size}; the reduced size belongs into draft_vocab_size',
        )


@rule("draft-vocab-size", "the config's draft vocabulary is the LM head's", versions=("eagle3",))
def draft_vocab_size(look: Look) -> Iterator[Found]:
    head = look.head
    lm_head, got = head.tensors.get("lm_head.weight"), head.draft_vocab_size
    if lm_head is None or lm_head.ndim != 2:
        return
    rows = lm_head.shape[0]
    remedy = f'write "draft_vocab_size": {rows}'
    if got is None and look.runtime in ("sglang", "reference"):
        yield Found(
            severity="breaks",
            evidence=f"draft_vocab_size is not in config.json (lm_head.weight has {rows} rows)",
            effect=f"{look.name} reads it as an attribute, which a Llama config does not have",
            remedy=remedy,
        )
    elif got is None and rows != head.vocab_size:
        default = "32000" if look.runtime == "speculators" else f"vocab_size ({head.vocab_size})"
        yield Found(
            severity="breaks",
            evidence=f"draft_vocab_size is not in config.json, lm_head.weight has {rows} rows",
            effect=f"{look.name} takes {default}: the LM head's shape does not fit",
            remedy=remedy,
        )
    elif got is not None and got != rows:
        yield Found(
            severity="breaks",
            evidence=f"draft_vocab_size is {got}, lm_head.weight has {rows} rows",
            effect="the LM head's shape does not fit",
            remedy=remedy,
        )


@rule("d2t-missing", "a reduced vocabulary needs its map", versions=("eagle3",))
def d2t_missing(look: Look) -> Iterator[Found]:
    lm_head = look.head.tensors.get("lm_head.weight")
    size = look.head.vocab_size
    if (
        look.head.d2t is None
        and lm_head is not None
        and lm_head.ndim == 2
        and size is not None
        and lm_head.shape[0] < size
    ):
        yield Found(
            severity="silently wrong",
            evidence=f"lm_head.weight has {lm_head.shape[0]} rows of {size}, and there is no d2t",
            effect="draft ids are taken for target ids: nearly every draft is another token",
            remedy=_MAKE,
        )


@rule("d2t-dtype", "d2t is int64, one number per row of the LM head", versions=("eagle3",))
def d2t_dtype(look: Look) -> Iterator[Found]:
    d2t, lm_head = look.head.d2t, look.head.tensors.get("lm_head.weight")
    if d2t is None:
        return
    if d2t.dtype != torch.int64:
        real = d2t.is_floating_point()
        yield Found(
            severity="silently wrong" if real else "warning",
            evidence=f"d2t is {str(d2t.dtype).removeprefix('torch.')}, expected int64",
            effect="cast together with the weights: half precision cannot hold offsets above 2048 (float16) or 256 (bfloat16)"
            if real
            else "whole numbers survive the cast, if all of them fit",
            remedy="write d2t as int64, from the original one",
        )
    rows = lm_head.shape[0] if lm_head is not None and lm_head.ndim == 2 else None
    if rows is not None and (d2t.ndim != 1 or len(d2t) != rows):
        yield Found(
            severity="breaks",
            evidence=f"d2t has shape {tuple(d2t.shape)}, lm_head.weight {rows} rows",
            effect="the map and the LM head do not fit",
            remedy=_MAKE,
        )


@rule("d2t-zero", "d2t was filled", versions=("eagle3",))
def d2t_zero(look: Look) -> Iterator[Found]:
    d2t, size = look.head.d2t, look.head.vocab_size
    if d2t is None or size is None or bool(d2t.any()) or not 0 < d2t.numel() < size:
        return
    if not _confirmed(look, _target_ids(look)):
        yield Found(
            severity="silently wrong",
            evidence=f"d2t is zero at all {d2t.numel()} draft ids",
            effect="draft id i stands for target id i: right only if the draft tokens are the first ones",
            remedy=f"{_MAKE}; a checkpoint saved before the map was filled has zeros",
        )


@rule("d2t-ids", "d2t holds offsets, not ids", versions=("eagle3",))
def d2t_ids(look: Look) -> Iterator[Found]:
    d2t, size = look.head.d2t, look.head.vocab_size
    if d2t is None or d2t.ndim != 1 or size is None or not bool(d2t.any()) or _confirmed(look, _target_ids(look)):
        return
    doubt = doubt_of_d2t(d2t, size)
    if doubt is not None:
        known = _confirmed(look, d2t.to(torch.int64))
        yield Found(
            severity="silently wrong",
            evidence=doubt + ("; as ids they are t2d's" if known else ""),
            effect="draft id i stands for target id i + d2t[i]: if these are ids, nearly every draft is another token",
            remedy="write d2t - arange(Vd)" if known else f"{_MAKE}; with t2d there is no doubt",
        )


@rule("d2t-range", "d2t leads to tokens that the target has", versions=("eagle3",))
def d2t_range(look: Look) -> Iterator[Found]:
    ids_D, size = _target_ids(look), look.head.vocab_size
    if look.target is not None:
        size = look.target.vocab_size
    if ids_D is None or size is None:
        return
    outside_D = (ids_D < 0) | (ids_D >= size)
    if bool(outside_D.any()):
        first = int(outside_D.nonzero()[0])
        yield Found(
            severity="breaks",
            evidence=f"{int(outside_D.sum())} draft ids lead outside 0 .. {size - 1}; the first: {first} -> {int(ids_D[first])}",
            effect="an index error when such a token is drafted, or a token of nobody's",
            remedy=f"{_MAKE} (are these ids instead of offsets?)",
        )


@rule("d2t-duplicate", "different draft ids stand for different tokens", versions=("eagle3",))
def d2t_duplicate(look: Look) -> Iterator[Found]:
    ids_D = _target_ids(look)
    if ids_D is None:
        return
    values, counts = ids_D.unique(return_counts=True)
    if bool((counts > 1).any()):
        repeated = int(values[counts > 1][0])
        yield Found(
            severity="silently wrong",
            evidence=f"{int((counts > 1).sum())} target ids are named more than once, such as {repeated}",
            effect="their probability is spread over several draft ids, of which the last written one counts",
            remedy=f"{_MAKE} (are these ids instead of offsets?)",
        )


@rule("d2t-idle", "no map where the vocabularies are equal", versions=("eagle3",))
def d2t_idle(look: Look) -> Iterator[Found]:
    head = look.head
    size = head.vocab_size
    there = [name for name in ("d2t", "t2d") if name in head.tensors]
    lm_head = head.tensors.get("lm_head.weight")
    if there and lm_head is not None and lm_head.ndim == 2 and lm_head.shape[0] == size:
        breaks = look.runtime == "reference"
        yield Found(
            severity="warning",
            evidence=f"{' and '.join(there)} although the draft vocabulary is the whole one ({size})",
            effect=f"{look.name} {'deletes the map before loading' if breaks else 'maps every token for nothing'}",
            remedy=f"remove {' and '.join(there)}",
        )


@rule("t2d", "t2d says the same as d2t", versions=("eagle3",))
def t2d(look: Look) -> Iterator[Found]:
    t2d_V, ids_D = look.head.tensors.get("t2d"), _target_ids(look)
    size = look.head.vocab_size
    if look.head.d2t is None:
        if t2d_V is not None:
            yield Found(
                severity="warning",
                evidence="t2d without d2t",
                effect="nothing reads it when serving",
                remedy="write both, or none",
            )
        return
    if t2d_V is None:
        if look.runtime in ("speculators", "reference"):
            yield Found(
                severity="warning",
                evidence="d2t without t2d",
                effect="serving does not need it; training goes on with an empty one",
                remedy=_MAKE,
            )
        return
    if t2d_V.dtype != torch.bool:
        yield Found(
            severity="warning",
            evidence=f"t2d is {str(t2d_V.dtype).removeprefix('torch.')}, expected bool",
            effect="training that masks with it indexes instead",
            remedy="write t2d as bool",
        )
    if t2d_V.ndim != 1 or (size is not None and len(t2d_V) != size):
        yield Found(
            severity="breaks" if look.runtime in ("reference", "speculators") else "warning",
            evidence=f"t2d has shape {tuple(t2d_V.shape)}, the vocabulary {size}",
            effect="its shape does not fit the buffer"
            if look.runtime in ("reference", "speculators")
            else "it is dropped",
            remedy=_MAKE,
        )
        return
    if ids_D is None or int(ids_D.min()) < 0 or int(ids_D.max()) >= len(t2d_V):
        return
    own_V = torch.zeros(len(t2d_V), dtype=torch.bool)
    own_V[ids_D] = True
    differing = int((own_V != t2d_V.bool()).sum())
    if differing:
        yield Found(
            severity="silently wrong",
            evidence=f"t2d has {int(t2d_V.bool().sum())} draft tokens, d2t {len(ids_D)}; they differ at {differing} tokens",
            effect="serving follows d2t; if t2d is the right one, nearly every draft is another token",
            remedy=_MAKE,
        )


def _confirmed(look: Look, ids_D: torch.Tensor | None) -> bool:
    """Whether t2d is there and names exactly these tokens."""
    t2d_V = look.head.tensors.get("t2d")
    if t2d_V is None or t2d_V.ndim != 1 or ids_D is None or not ids_D.numel():
        return False
    return torch.equal(t2d_V.bool().nonzero().flatten(), ids_D.sort().values)


def _target_ids(look: Look) -> torch.Tensor | None:
    d2t = look.head.d2t
    if d2t is None or d2t.ndim != 1 or not d2t.numel():
        return None
    return d2t.to(torch.int64) + torch.arange(len(d2t))
