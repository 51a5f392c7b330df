"""Preflight check of a command line before its job is queued: whether it starts, fits in memory and
is balanced. See docs/en/preflight.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from arguments.run_config import RunConfig
from slime_like.config import ConfigError
from slime_like.errors import RunError

DOES_NOT_FIT = 1
WRONG = 2


def run_preflight(config: RunConfig) -> int:
    """Run the preflight and print its result. Returns the exit status: 0 if the job fits, 1 if not,
    2 for an invalid command line. Needs neither a process group nor a GPU."""
    from slime_like.preflight.check import check
    from slime_like.preflight.report import json_of, text_of

    try:
        preflight = check(config)
        print(text_of(preflight), flush=True)
        result = json_of(preflight)
        if config.preflight.preflight_search:
            from slime_like.preflight.search import search, text_of_search

            best = search(config)
            print(text_of_search(best), flush=True)
            result["search"] = [each.as_json() for each in best]
    except (ConfigError, RunError) as error:
        print(error, file=sys.stderr, flush=True)
        return WRONG
    if config.preflight.preflight_json is not None:
        text = json.dumps(result, indent=1) + "\n"
        Path(config.preflight.preflight_json).write_text(text, encoding="utf-8")
    return 0 if preflight.fits else DOES_NOT_FIT
