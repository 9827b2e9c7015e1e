"""ModelDrafter: a small causal LM drafts for a large one (Leviathan et al. 2023, arXiv 2211.17192).

B rows, K committed tokens, H the draft model's hidden size. Any Target can draft; verification is the same as for heads.
"""

from collections.abc import Sequence

import torch

from eagle.draft.by_level import LevelDrafter, TreeShape
from eagle.errors import EagleError
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.sample.row import Row
from eagle.target.attention import TreeStep
from eagle.target.loading import tokenizer_identity
from eagle.target.target import Target


class ModelDrafter(LevelDrafter):
    """Drafts with `draft` for `target`, in trees of any shape (DynamicTree(top_k=1, ...) is the paper's chain).

    The model's cache holds the committed tokens; what a tree left there is overwritten. Features are not used.
    Raises EagleError when the two models do not share a tokenizer (or, where one has none, a vocabulary size).
    """

    def __init__(self, draft: Target, target: Target, shape: TreeShape):
        check_same_tokens(draft, target)
        # Models of one tokenizer may be padded to different sizes; the shared ids are drafted, the padding is not.
        shared = min(draft.vocab_size, target.vocab_size)
        vocabulary = DraftTokens(draft.tokens)
        if shared < draft.vocab_size:
            ids = DraftVocabulary(target_ids_D=torch.arange(shared), target_size=draft.vocab_size)
            vocabulary = DraftTokens(draft.tokens, ids)
        super().__init__(shape, vocabulary, target_size=target.vocab_size)
        self.draft = draft

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        """Raises EagleError when a row may grow beyond the draft model's positions."""
        self.begin(rows)
        limit = self.draft.max_positions
        longest = max(len(row.tokens) + row.max_new_tokens for row in rows)
        if limit is not None and longest > limit:
            raise EagleError(
                f"a row may grow to {longest} tokens, the draft model {self.draft.name} has {limit} positions; lower "
                "max_new_tokens, shorten the prompt or take another draft model"
            )
        self.__dict__.pop("cache", None)  # the last batch's buffers go back before buffers are taken
        self.cache = self.draft.new_cache(rows=len(rows), capacity=capacity + self.shape.columns)
        self._first_B1 = torch.tensor([[row.tokens[0]] for row in rows])
        self.roots_B, self.predicted_BH = torch.empty(0), torch.empty(0)  # until the first observe

    @torch.inference_mode()
    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        next_tokens_BK = next_tokens_BK.cpu()
        if not bool(self.cache.lengths_B.any()):  # the prompt and the first token after it
            ids_BT, written_B = torch.cat([self._first_B1, next_tokens_BK], dim=1), counts_B + 1
            predictions_BTH = self.draft.prefill(self._known(ids_BT), written_B, self.cache).features_BNH
            self.cache.lengths_B = torch.zeros_like(written_B)  # counted by _committed
        else:
            ids_BT, written_B = next_tokens_BK, counts_B
            depths_BT = torch.arange(ids_BT.shape[1]).expand(len(ids_BT), -1)
            step = TreeStep(lengths_B=self.cache.lengths_B, depths_BN=depths_BT, ancestors_BNW=None)
            predictions_BTH = self.run(states_BKX, ids_BT, step)
        self._committed(predictions_BTH, next_tokens_BK, counts_B, written_B=written_B)

    def run(self, features_BNH: torch.Tensor, tokens_BN: torch.Tensor, step: TreeStep) -> torch.Tensor:
        states = self.draft.run_step(self._known(tokens_BN), self._within_positions(step), self.cache)
        return states.features_BNH

    @property
    def deepest(self) -> int | None:
        # A child of the root is run at position lengths_B; the tree's last level is not run.
        limit = self.draft.max_positions
        return None if limit is None else 1 + limit - self.cache.longest

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the target has and the draft model has not (padding of its vocabulary) become some other token."""
        return ids.clamp_max(self.draft.vocab_size - 1)

    def _within_positions(self, step: TreeStep) -> TreeStep:
        """Padding and rows that just ended may lie behind the last position, where position tables end: they stay on it."""
        limit = self.draft.max_positions
        if limit is None or int((step.lengths_B[:, None] + step.depths_BN).max()) < limit:
            return step
        depths_BN = torch.minimum(step.depths_BN, (limit - 1 - step.lengths_B[:, None]))
        return TreeStep(
            lengths_B=step.lengths_B,
            depths_BN=depths_BN,
            ancestors_BNW=step.ancestors_BNW,
            column_depths_BC=step.column_depths_BC,
            offset=step.offset,
        )


def check_same_tokens(draft: Target, target: Target) -> None:
    """Raises EagleError when a token id does not mean the same to both models."""
    if draft.tokenizer is None or target.tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise EagleError(
                f"the draft model {draft.name} has {draft.vocab_size} tokens, the target {target.name} "
                f"{target.vocab_size}; give one of the target's family, or both tokenizers if they are the same one"
            )
        return
    own = tokenizer_identity(draft.tokenizer)["tokenizer_sha256"]
    if own == tokenizer_identity(target.tokenizer)["tokenizer_sha256"]:
        return
    ours, theirs = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = [token for token in theirs if ours.get(token) != theirs[token]] or [t for t in ours if t not in theirs]
    if differing:
        example = min(differing, key=lambda token: theirs.get(token, len(theirs)))
        raise EagleError(
            f"the draft model {draft.name} has another tokenizer than the target {target.name}: {len(differing)} tokens "
            f"differ, e.g. {example!r} is id {ours.get(example)} there and {theirs.get(example)} here; give a draft model of "
            "the target's family, or drafter ngram, which needs no model"
        )
