"""slime-like report RUN_DIR [OTHER_RUN ...]: write one HTML file with the curves, times, settings
and recorded rollouts of runs. The file needs no network and can be shared: it has settings and
responses of the model, but no keys.

Exit status: 0 written, 2 a folder is not a run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like.metrics.run_names import run_names
from slime_like.report.page import MAX_SAMPLES, live_data, page, write_page
from slime_like.report.read import Run, read_run, state_of
from slime_like.report.rollouts import read_samples


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="slime-like report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="--output-dir of a run"
    )
    result.add_argument(
        "--output", type=Path, help="file to write; default: report.html in the first folder"
    )
    result.add_argument(
        "--samples",
        type=int,
        default=MAX_SAMPLES,
        help=f"maximum number of recorded samples, newest rollouts first (default {MAX_SAMPLES})",
    )
    result.add_argument(
        "--serve", action="store_true", help="serve a live page of active runs on a loopback port"
    )
    result.add_argument("--port", type=int, default=0, help="port of --serve; default: a free one")
    result.add_argument(
        "--text", action="store_true", help="print a table and draw report.png instead"
    )
    return result


def read_runs(folders: list[Path]) -> list[Run]:
    return [read_run(folder, name) for folder, name in zip(folders, run_names(folders))]


def serve(folders: list[Path], port: int, samples: int) -> None:
    from slime_like.report.serve import ReportServer

    def make_page() -> str:
        runs = read_runs(folders)
        return page(runs, read_samples(runs, samples), live=True)

    def make_data(timeline: bool) -> object:
        return live_data(read_runs(folders), timeline=timeline)

    def state() -> str:
        return "-".join(map(state_of, folders))

    with ReportServer(port, make_page, make_data, state) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def main() -> int:
    args = parser().parse_args()
    folders = [path.parent if path.is_file() else path for path in args.runs]
    try:
        if args.text:
            from slime_like.metrics.report import write_report

            written = [write_report(folder / "metrics.jsonl", args.output) for folder in folders]
            return 0 if written else 1
        runs = read_runs(folders)
        if args.serve:
            serve(folders, args.port, args.samples)
            return 0
        path = write_page(runs, args.output or folders[0] / "report.html", max_samples=args.samples)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
