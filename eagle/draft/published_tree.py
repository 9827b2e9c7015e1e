"""EAGLE-1's static tree: the shape is fixed, only the tokens change (arXiv 2401.15077, appendix).

A shape is a list of child-rank paths: [0, 2] is the third most confident child of the root's most confident child; the
root itself, [], is left out. B rows, N nodes, E expanded nodes (those with children), H hidden.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from eagle.draft.by_level import LevelDrafter
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.kernels.placement import sent
from eagle.kernels.tree_build.reference import ancestry
from eagle.target.attention import TreeStep

RankPath = tuple[int, ...]

PUBLISHED: tuple[RankPath, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The 25 nodes of the reference implementation."""


def read_paths(file: str | Path) -> tuple[RankPath, ...]:
    """The paths in a JSON file, `[[0], [1], [0, 0], ...]` in any order. Raises EagleError for anything else."""
    try:
        values: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise EagleError(
            f"tree file {file} cannot be read ({error.strerror}); give a JSON file of rank paths"
        ) from error
    except ValueError as error:
        raise EagleError(f"tree file {file} is not valid JSON ({error}); expected [[0], [1], [0, 0], ...]") from error
    if not isinstance(values, list):
        raise EagleError(
            f"tree file {file} holds {type(values).__name__}, expected a list of paths: [[0], [1], [0, 0]]"
        )
    return check_paths(values, where=f"tree file {file}")


def check_paths(paths: Iterable[Any], *, where: str = "the static tree") -> tuple[RankPath, ...]:
    """The paths by depth, then by rank. Raises EagleError for a path that is no list of ranks, is there twice or lacks
    its parent."""
    seen: set[RankPath] = set()
    for path in paths:
        ranks = isinstance(path, (list, tuple)) and all(type(rank) is int and rank >= 0 for rank in path)
        if not ranks or not path:
            raise EagleError(f"{where}: {path!r} is not a path; expected a list of ranks from 0 on, such as [0, 2]")
        if tuple(path) in seen:
            raise EagleError(f"{where}: the path {list(path)} is there twice; list every node once")
        seen.add(tuple(path))
    if not seen:
        raise EagleError(f"{where} has no paths; list at least one, such as [[0]]")
    for one in sorted(seen, key=lambda path: (len(path), path)):
        if len(one) > 1 and one[:-1] not in seen:
            raise EagleError(f"{where}: {list(one)} has no parent; add {list(one[:-1])} or leave it out")
    return tuple(sorted(seen, key=lambda path: (len(path), path)))


@dataclass(frozen=True, kw_only=True)
class _Level:
    """One level below the root; lists are over its nodes, in path order."""

    parents: list[int]
    """Place of the node's parent among the expanded nodes of the level above."""
    ranks: list[int]
    expanded: list[int]
    """Places of the nodes that have children."""
    most: int
    """Children of one expanded node, at most (the largest rank + 1); 0 at the last level."""


class StaticTree:
    """A TreeShape (eagle/draft/by_level.py) of fixed rank paths; children as DynamicTree's.

    Raises EagleError for paths that make no tree.
    """

    def __init__(self, paths: Sequence[RankPath] = PUBLISHED, *, children: Literal["coupled", "top"] = "coupled"):
        self.paths, self.children = check_paths(paths), children
        number = {path: node for node, path in enumerate(((), *self.paths))}
        self._parents_N = torch.tensor([-1] + [number[path[:-1]] for path in self.paths])
        inner = {path[:-1] for path in self.paths}
        self._most_of_root = 1 + max(path[-1] for path in self.paths if len(path) == 1)
        self._levels: list[_Level] = []
        above: list[RankPath] = [()]
        for depth in range(1, 1 + max(len(path) for path in self.paths)):
            nodes = [path for path in self.paths if len(path) == depth]
            deeper = [path for path in self.paths if len(path) == depth + 1]
            self._levels.append(
                _Level(
                    parents=[above.index(path[:-1]) for path in nodes],
                    ranks=[path[-1] for path in nodes],
                    expanded=[place for place, path in enumerate(nodes) if path in inner],
                    most=1 + max((path[-1] for path in deeper), default=-1),
                )
            )
            above = [path for path in nodes if path in inner]
        # The expanded nodes below the root are the columns of the drafting cache, in order.
        expanded = [path for path in self.paths if path in inner]
        column = {path: place for place, path in enumerate(expanded)}
        parents_1E = torch.tensor([[column.get(path[:-1], -1) for path in expanded]], dtype=torch.int64)
        self._column_depths_1E, self._column_bits_1EW = ancestry(parents_1E)

    @property
    def depth(self) -> int:
        return len(self._levels)

    def __str__(self) -> str:
        return "EAGLE-1's static tree" if self.paths == PUBLISHED else f"static tree of {len(self.paths) + 1} nodes"

    @property
    def widest(self) -> int:
        return max(self._most_of_root, *(level.most for level in self._levels))

    @property
    def columns(self) -> int:
        return self._column_depths_1E.shape[1]

    def grow(self, draft: LevelDrafter) -> DraftTree:
        """One run of the model per level that has expanded nodes; where positions end, the tree ends with them."""
        rows, start, most = len(draft.roots_B), 0, self._most_of_root
        tokens, scores = list[torch.Tensor](), list[torch.Tensor]()
        predictions_BEH, above_scores_BE = draft.predicted_BH[:, None], torch.zeros(rows, 1)
        levels = self._levels if draft.deepest is None else self._levels[: max(1, draft.deepest)]
        for depth, level in enumerate(levels, start=1):
            children, child_scores = draft.children(
                predictions_BEH, above_scores_BE, depth=depth, count=most, choice=self.children
            )
            picked = [parent * most + rank for parent, rank in zip(level.parents, level.ranks)]
            tokens.append(_columns(children, picked))
            scores.append(_columns(child_scores, picked))
            if depth == len(levels):
                break
            end = start + len(level.expanded)
            step = TreeStep(
                lengths_B=draft.cache.lengths_B,
                depths_BN=self._column_depths_1E[:, start:end].expand(rows, -1),
                ancestors_BNW=self._column_bits_1EW[:, start:end].expand(rows, -1, -1),
                column_depths_BC=self._column_depths_1E[:, :end].expand(rows, -1),
                offset=start,
            )
            features_BEH = _columns(predictions_BEH, [level.parents[place] for place in level.expanded])
            predictions_BEH = draft.run(features_BEH, _columns(tokens[-1], level.expanded), step)
            above_scores_BE = _columns(draft.growing(tokens[-1], scores[-1]), level.expanded)
            most, start = level.most, end
        device = tokens[0].device
        tokens_BN = torch.cat([sent(draft.roots_B, device)[:, None], *tokens], dim=1)
        return DraftTree.from_parents(
            tokens_BN,
            sent(self._parents_N, device)[: tokens_BN.shape[1]].expand(rows, -1),
            torch.cat([torch.zeros(rows, 1, device=device), *scores], dim=1),
            children=self.children,
            widest=self.widest,
            ends_BN=draft.ends(tokens_BN),
        )


def _columns(values_BMX: torch.Tensor, index: list[int]) -> torch.Tensor:
    """values[:, index], without waiting for the values' device."""
    return values_BMX.index_select(1, sent(torch.tensor(index), values_BMX.device))
