"""Decode the keys that indexers of sparse attention selected, in SGLang responses
(`meta_info.indexer_topk`), for indexer replay.

Format: see layer_choices.py; a layer that takes another's choice has a copy of it. Rows of queries
that attend to all keys mean nothing, since short prompts take a way without indexers. Verified with
SGLang 0.5.23: `state_capturer/indexer_topk.py`, `BatchResultProcessor._maybe_collect_indexer_topk`.

With SGLang's default SGLANG_DSA_FUSE_TOPK=1 the indexer's kernel also looks up where keys are in
the server's cache, and these places are what a server reports: it needs SGLANG_DSA_FUSE_TOPK=0.
Places are told from positions by what a query cannot attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime_like.checked_json import InvalidResponse
from slime_like.engines.base import GenerateOutput, GenerateRequest
from slime_like.samples.indexer_topk import rows_with_choice, unknown_keys
from slime_like.servers.layer_choices import Report, read_choices, require_distinct

REPORT = Report(
    field="indexer_topk",
    about="selected keys",
    topk="index_topk",
    missing="selected keys (indexer_topk); start it with --enable-return-indexer-topk, on a GPU",
    repeated="a query selected the same key twice",
)
POSITIONS = {"SGLANG_DSA_FUSE_TOPK": "0"}  # environment of a server that reports positions


@dataclass(frozen=True, slots=True)
class IndexerFormat:
    """Sparse attention of a model."""

    indexed: tuple[bool, ...]  # for every decoder layer, whether it has an indexer of its own
    topk: int  # keys per query

    def unknown(self, length: int) -> Tensor:
        """The record of tokens of which nothing is known; see samples/indexer_topk.py."""
        return unknown_keys(length, sum(self.indexed), self.topk)


def read_indexer_topk(
    encoded: str | None,
    request: GenerateRequest,
    output: GenerateOutput,
    expected: IndexerFormat,
) -> Tensor:
    """Selected keys of the tokens with a choice (samples/indexer_topk.py), -1 for the last token;
    all -1 for a request that was aborted in the server's queue. Raises InvalidResponse."""
    length = len(request.prompt_tokens) + len(output.tokens)
    topk = expected.topk
    numbers = read_choices(REPORT, encoded, request, output, len(expected.indexed), topk)
    found = expected.unknown(length)
    if numbers is None or not rows_with_choice(length - 1, topk):
        return found
    keys = numbers[topk:, np.array(expected.indexed)]
    own = np.arange(topk, length - 1).reshape(-1, 1, 1)
    if keys.min() < 0 or (keys > own).any():
        raise InvalidResponse(
            f"selected keys from {keys.min()} to {keys.max()} in a sequence of {length} tokens are "
            "not all positions that their query sees; start the server with SGLANG_DSA_FUSE_TOPK=0 "
            "in its environment, or it reports places in its cache"
        )
    require_distinct(REPORT, keys)
    found[:-1] = torch.from_numpy(keys.astype(np.int32))
    return found
