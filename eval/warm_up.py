"""What is answered before anything is timed.

A few tokens are enough for allocations, caches and compilation. Not for the graphs of the engine "cudagraph": they belong to
buffers of one capacity each (eagle/target/fixed_cache.py), which follows from the prompt's length and the longest answer's,
and a graph that is captured within a request is timed with it. There every capacity that will be met is met before, by a
whole answer.
"""

from collections.abc import Sequence

from eagle.decode.decoder import TREE_ROOM
from eagle.target.fixed_cache import STRIDE, bucket
from eagle.target.target import Target


def captures(target: Target) -> bool:
    """Whether the target's engine captures graphs."""
    return target.engine == "cudagraph"


def warm_ups(
    target: Target, groups: Sequence[Sequence[Sequence[int]]], *, few: int, max_new_tokens: int
) -> list[tuple[int, int]]:
    """(number of a group, new tokens) of what is answered before the groups are.

    groups: prompts (token ids) that are answered together. It is the first group, with `few` tokens; where graphs are captured,
    of the groups that need one capacity the longest, with max_new_tokens.
    """
    if not captures(target):
        return [(0, min(few, max_new_tokens))]
    longest = {number: max(map(len, rows)) for number, rows in enumerate(groups)}
    by_capacity = {
        capacity(longest[number], max_new_tokens): number for number in sorted(longest, key=longest.__getitem__)
    }
    return [(number, max_new_tokens) for number in by_capacity.values()]


def capacity(prompt_tokens: int, max_new_tokens: int) -> int:
    """Slots of the buffers that a batch with a longest prompt of so many tokens is decoded in, where graphs are captured."""
    return bucket(prompt_tokens + max_new_tokens + TREE_ROOM + STRIDE)


def capacities(shortest: int, longest: int, max_new_tokens: int) -> list[int]:
    """Those of prompts of `shortest` to `longest` tokens, ascending."""
    found = [capacity(shortest, max_new_tokens)]
    while found[-1] < capacity(longest, max_new_tokens):
        found.append(2 * found[-1])
    return found


def lengthened(ids: Sequence[int], slots: int, max_new_tokens: int) -> list[int]:
    """A prompt for buffers of so many slots: `ids` (of a smaller capacity, or this one), repeated as far as it takes."""
    length = max(len(ids), slots // 2 + 1 - max_new_tokens - TREE_ROOM - STRIDE)
    return (list(ids) * -(-length // len(ids)))[:length]
