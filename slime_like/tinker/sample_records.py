"""What the server remembers of samples, for losses that ask for it by sequence id.

`record_stability_info` of a sampling client keeps log-probs and sampling masks of its samples on
the server; a datum of `stable_reinforce` names them by its provenance spans. Records belong to
their session, live in memory, and expire.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_like.tinker.errors import Refused

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from slime_like.tinker.sampler import SampledSequence

MAX_BYTES = 2**30
KEEP_S = 3600.0  # without use
Array = NDArray[Any]


@dataclass(slots=True)
class SampledRecord:
    """A sampled sequence of R tokens."""

    session: str
    tokens: Array  # [R] int32
    log_probs: Array  # [R] float32, over the sampling mask where there is one
    # tokens that top-k and top-p left to sample each token from, concatenated; None: all
    set_tokens: Array | None
    set_ends: Array  # [R + 1] int64, of each token's set in `set_tokens`
    used: float = field(default_factory=time.time)

    @staticmethod
    def of(session: str, sequence: SampledSequence) -> SampledRecord:
        sets = sequence.get("sets")
        counts = np.frombuffer(sets["counts"], dtype="<i4") if sets else np.zeros(0, np.int32)
        return SampledRecord(
            session,
            np.frombuffer(sequence["tokens"], dtype="<i4"),
            np.frombuffer(sequence["log_probs"], dtype="<f4"),
            np.frombuffer(sets["tokens"], dtype="<i4") if sets else None,
            np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        )

    @property
    def size(self) -> int:
        set_bytes = 0 if self.set_tokens is None else self.set_tokens.nbytes
        return int(self.tokens.nbytes + self.log_probs.nbytes + set_bytes + self.set_ends.nbytes)

    def set_of(self, index: int) -> Array:
        assert self.set_tokens is not None
        return self.set_tokens[self.set_ends[index] : self.set_ends[index + 1]]


class SampleRecords:
    """Records by sequence id; the least recently used ones make room."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, SampledRecord] = OrderedDict()
        self._bytes = 0

    def keep(self, id: str, record: SampledRecord) -> None:
        self._forget(id)
        self._records[id] = record
        self._bytes += record.size
        while self._bytes > MAX_BYTES:
            self._forget(next(iter(self._records)))

    def find(self, id: str, session: str) -> SampledRecord:
        """Raises Refused if this session has no such record, or it has expired."""
        record = self._records.get(id)
        if record is None or record.session != session:
            raise Refused(
                f"no record of sequence {id:.256} in session {session}: sample it with "
                "record_stability_info; records expire after an hour without use, and with the "
                "server's process"
            )
        record.used = time.time()
        self._records.move_to_end(id)
        return record

    def expire(self, now: float) -> None:
        for id in [id for id, each in self._records.items() if now - each.used > KEEP_S]:
            self._forget(id)

    def forget_session(self, session: str) -> None:
        for id in [id for id, each in self._records.items() if each.session == session]:
            self._forget(id)

    def _forget(self, id: str) -> None:
        record = self._records.pop(id, None)
        if record is not None:
            self._bytes -= record.size


@dataclass(frozen=True, slots=True)
class Replay:
    """What a datum's provenance says of its N targets."""

    log_probs: Array  # [N] float32, 0 where the target was not sampled
    sampled: Array  # [N] float32, 1 where it was
    sets: list[Array] | None  # N sampling masks


def replay(
    spans: Sequence[Message], targets: Array, where: str, records: SampleRecords, session: str
) -> Replay:
    """Look up a datum's spans, which tile its targets [N]. Raises Refused for spans that do not,
    unknown sequences, and targets other than the recorded tokens."""
    total = sum(getattr(span, span.WhichOneof("span") or "sampled_tokens").length for span in spans)
    if not spans or total != targets.size:
        raise Refused(
            f"{where}: loss_fn_input_spans cover {total} of {targets.size} targets; "
            "Datum.with_provenance sets them"
        )
    log_probs = np.zeros(targets.size, dtype=np.float32)
    sampled = np.zeros(targets.size, dtype=np.float32)
    sets: list[Array] = [targets[i : i + 1] for i in range(targets.size)]
    restricted = []
    start = 0
    for span in spans:
        if span.WhichOneof("span") != "sampled_tokens":
            start += span.prompt_tokens.length
            continue
        run = span.sampled_tokens
        rows = slice(start, start + run.length)
        record = records.find(run.sequence_id, session)
        of_record = slice(run.offset, run.offset + run.length)
        if not np.array_equal(record.tokens[of_record], targets[rows]):
            raise Refused(
                f"{where}: targets {start} to {rows.stop} are not tokens {run.offset} to "
                f"{of_record.stop} of sequence {run.sequence_id:.256}"
            )
        log_probs[rows] = record.log_probs[of_record]
        sampled[rows] = 1.0
        restricted.append(record.set_tokens is not None)
        if restricted[-1]:
            sets[rows] = [record.set_of(i) for i in range(of_record.start, of_record.stop)]
        start = rows.stop
    if len(set(restricted)) > 1:
        raise Refused(
            f"{where}: some of its sequences were sampled with top_k or top_p, some without"
        )
    if not restricted:
        raise Refused(f"{where}: no target was sampled")
    return Replay(log_probs, sampled, sets if restricted[0] else None)
