"""SGLang servers as a rollout engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.served import ServedEngine
from slime_like.logs import warn_rank_0
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.sglang.tensor_dump import FOLDER_SETTING, dump_files, dumped_states

logger = logging.getLogger(__name__)


class SglangEngine(ServedEngine):
    """See `ServedEngine`."""

    takes_quantized = True
    takes_prediction_layers = True

    def trace(self, sequences: Sequence[Tensor]) -> list[tuple[str, Mapping[str, Tensor]]]:
        """See `RolloutEngine`. Of servers with --debug-tensor-dump-output-folder, whose folder this
        process must see. A server that does not answer is evicted with a warning."""
        assert self.pool is not None
        requests = [
            GenerateRequest(-1 - i, tuple(tokens.tolist()), seed=i)
            for i, tokens in enumerate(sequences)
        ]
        found: list[tuple[str, Mapping[str, Tensor]]] = []
        for worker in self.pool.ready():
            try:
                info = self.pool.call(worker, "/server_info", timeout_s=CONTROL_S, method="GET")
            except RequestFailed as failure:
                self.pool.evict(worker, f"no answer before a certificate: {failure}")
                continue
            folder = info.get(FOLDER_SETTING)
            if not isinstance(folder, str):
                continue
            before = dump_files(Path(folder))
            if not self.ask([worker], requests, SamplingParams(max_new_tokens=1)):
                continue
            missing = (
                f"{folder}, its --debug-tensor-dump-output-folder, has no pass with the "
                "certificate's tokens; is it a folder that this machine sees, too?"
            )
            try:
                files = dump_files(Path(folder)) - before
                states = dumped_states(files, sequences, routes=self._has_final_routes())
            except ValueError as error:
                states = {}
                missing = str(error)
            if states:
                found.append((worker.url, states))
            else:
                warn_rank_0(logger, f"the layers of {worker.url} are not compared: {missing}")
        return found

    def _has_final_routes(self) -> bool:
        """Whether the routers of servers give the weights that experts have in the end: a factor on
        them is for some families one on the output."""
        try:
            config = json.loads((Path(self._hf_checkpoint) / "config.json").read_text())
        except (OSError, ValueError):
            return False
        text = config.get("text_config") or config
        return text.get("routed_scaling_factor") in (None, 1.0)
