"""Builds one self-contained HTML file from runs: data as JSON, the page's code, and uPlot.

Text of models and users is embedded as JSON and only shown through textContent; a content security
policy in the page forbids all connections.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import slime_like
from slime_like.report.alerts import alerts
from slime_like.report.guards import guards
from slime_like.report.read import Run, curves
from slime_like.report.rollouts import Samples, read_samples

MAX_SAMPLES = 10_000
SCRIPTS = ("uPlot.iife.min.js", "core.js", "charts.js", "pages.js", "rollouts.js", "main.js")
STYLES = ("uPlot.min.css", "style.css")
DETAILS_PER_BLOCK = 250  # samples that the page decompresses together
IMAGES_PER_BLOCK = 50  # small pictures, of which a block is read when one of them is shown


RECORD = (
    "started", "argv", "layout", "world_size", "config", "changed", "environment", "patches",
    "warnings", "notes",
)  # fmt: skip


def live_data(runs: Sequence[Run], *, timeline: bool) -> dict[str, object]:
    """Data that changes during a run, by index of the runs."""
    return {"runs": [_live_run(run, timeline=timeline) for run in runs]}


def _live_run(run: Run, *, timeline: bool) -> dict[str, object]:
    data = {
        "alerts": alerts(run),
        "guards": guards(run),
        "stacks": run.stacks,
        "profile": run.profile,
        "certificates": run.certificates,
        **curves(run),
    }
    return data | {"timeline": run.timeline} if timeline else data


def runs_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Data of the runs, without samples."""
    records: list[dict[str, object]] = []
    for run in runs:
        record = {"name": run.name, "folder": str(run.folder), **_live_run(run, timeline=True)}
        records.append(record | {key: run.record.get(key) for key in RECORD})
    return {"version": slime_like.__version__, "runs": records}


def json_in_html(data: object) -> str:
    """JSON that is safe inside a <script>: without end tags, comments and line separators."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def samples_head(samples: Samples) -> dict[str, object]:
    """Columns of the samples, without details."""
    return {
        "columns": samples.columns,
        "prompts": samples.prompts,
        "vocabularies": samples.vocabularies,
        "left_out": samples.left_out,
        "problems": samples.problems,
        "per_block": DETAILS_PER_BLOCK,
        "images_per_block": IMAGES_PER_BLOCK,
    }


def details_blocks(samples: Samples) -> dict[str, object]:
    """Details of the samples by block name, with a fixed number of samples per block."""
    size = DETAILS_PER_BLOCK
    count = -(-len(samples.details) // size)
    return {f"details-{i}": samples.details[i * size : (i + 1) * size] for i in range(count)}


def image_blocks(samples: Samples) -> dict[str, object]:
    """Small pictures by block name."""
    urls = samples.thumbnails.urls
    starts = range(0, len(urls), IMAGES_PER_BLOCK)
    return {
        f"images-{start // IMAGES_PER_BLOCK}": urls[start : start + IMAGES_PER_BLOCK]
        for start in starts
    }


def data_blocks(blocks: Mapping[str, object]) -> str:
    """The blocks as HTML elements, which the page's code finds by name."""
    return "\n".join(
        f'<script type="application/json" id="data-{name}">{json_in_html(block)}</script>'
        for name, block in blocks.items()
    )


def asset(name: str) -> str:
    return files("slime_like.report").joinpath("assets", name).read_text(encoding="utf-8")


def page(runs: Sequence[Run], samples: Samples, *, live: bool = False) -> str:
    """The HTML page. Data for the tokens of samples comes last, so the browser can draw the rest
    before reading it.

    Args:
        runs: In the order of their colours.
        samples: `read_samples(runs, limit)`.
        live: The page polls its server for new data.
    """
    title = ", ".join(run.name for run in runs)
    head = {"runs": runs_data(runs), "samples": samples_head(samples), "live": live}
    connect = "'self'" if live else "'none'"
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)} - slime_like</title>",
            *(f"<style>{asset(name)}</style>" for name in STYLES),
            "</head>\n<body>",
            asset("body.html"),
            data_blocks(head),
            f"<!-- uPlot: {html.escape(asset('uPlot.LICENSE')).replace('--', '- -')} -->",
            *(f"<script>{asset(name)}</script>" for name in SCRIPTS),
            data_blocks(details_blocks(samples) | image_blocks(samples)),
            "</body>\n</html>\n",
        ]
    )


def write_page(runs: Sequence[Run], path: Path, *, max_samples: int = MAX_SAMPLES) -> Path:
    path.write_text(page(runs, read_samples(runs, max_samples)), encoding="utf-8")
    return path
