"""Beam search over the target: prefill each prompt once, then carry every row's live hypotheses as rows of one cache.

B prompts, X live hypotheses of all rows together, H hidden, V vocabulary. What to keep is decided in
eagle/decode/hypotheses.py; here is the forward and the moving of keys and values. Rows are ragged and independent.
"""

import time

import torch
from torch.nn.utils.rnn import pad_sequence

from eagle.decode.beam_settings import BeamSettings
from eagle.decode.hypotheses import FORMS, RowSearch
from eagle.draft.tree import DraftTree
from eagle.sample.row import Row, timed
from eagle.target.cache import TreeCache
from eagle.target.target import Target


def search(target: Target, rows: list[Row], settings: BeamSettings) -> list[RowSearch]:
    """Runs every row's search to its end."""
    start = time.perf_counter()
    searches = [FORMS[settings.search](row, settings) for row in rows]
    lengths_B = torch.tensor([len(row.tokens) for row in rows])
    ids_BT = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
    cache = target.new_cache(rows=len(rows), capacity=max(len(row.tokens) + row.max_new_tokens for row in rows))
    with timed(rows, "prefill_ms", device=target.device):
        features_BTH = target.prefill(ids_BT, lengths_B, cache).features_BNH
        logits_XV = target.logits(features_BTH[torch.arange(len(rows)), lengths_B - 1])
    _note_memory(searches, cache)
    for one in searches:
        one.row.stats.kv_bytes_per_token = cache.row_bytes // cache.capacity
        one.stats.kv_tokens = len(one.row.tokens)
    running = searches
    while running:
        origins_X = _advance(running, logits_XV)
        for one in running:
            one.row.stats.total_ms = 1e3 * (time.perf_counter() - start)
        running = [one for one in running if one.live]
        if running:
            cache.reorder(origins_X)
            _note_memory(running, cache)
            with timed([one.row for one in running], "verify_ms", device=target.device):
                logits_XV = _forward(target, running, cache)
    return searches


def _advance(running: list[RowSearch], logits_XV: torch.Tensor) -> list[int]:
    """Every search takes its rows of the logits. Returns, for each new live hypothesis, the cache row it extends."""
    origins, first = [], 0
    for one in running:
        width = len(one.live)
        origins += [first + origin for origin in one.advance(logits_XV[first : first + width])]
        first += width
    return origins


def _forward(target: Target, running: list[RowSearch], cache: TreeCache) -> torch.Tensor:
    """Float [X, V]: the logits after the live hypotheses' last tokens, whose keys and values are committed."""
    tree = DraftTree.roots(torch.tensor([found.token for one in running for found in one.live]))
    states = target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, cache)
    cache.commit(torch.zeros(cache.rows, 1, dtype=torch.int64), torch.ones(cache.rows, dtype=torch.int64))
    first = 0
    for one in running:
        one.row.stats.count_step(path_length=1, at_leaf=True)
        one.stats.forward_rows += len(one.live)
        one.stats.kv_tokens = max(one.stats.kv_tokens, len(one.live) * int(cache.lengths_B[first]))
        first += len(one.live)
    return target.logits(states.features_BNH[:, 0])


def _note_memory(running: list[RowSearch], cache: TreeCache) -> None:
    for one in running:
        one.stats.kv_bytes = max(one.stats.kv_bytes, len(one.live) * cache.row_bytes)
        one.stats.plain_kv_bytes = cache.row_bytes
