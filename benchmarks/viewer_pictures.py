"""Pictures of the viewer for the documents, from any recorded run.

    python -m benchmarks.viewer_pictures curves group rollout
    python -m benchmarks.viewer_pictures overview --run runs/demo

Without a run, the small one of the viewer's tests is generated: three steps of RAPO, ARPO and EMPO² together,
with a random model of a few thousand weights and a tool that sometimes fails.

Pictures: the overview, curves, the group with most retrieved steps of the newest step that has any, and its
best rollout. The overview in the documents is that of the demo run (``make demo``).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.training.recorded_run import record_run

from benchmarks.viewer import BROWSERS, server
from outrider.viewer.answers import run_id
from outrider.viewer.search import RolloutIndex, find


def views(run: Path) -> dict[str, str]:
    """Return addresses below that of the run, by the name of the picture."""
    table = RolloutIndex(run).table()
    rows = find(table, {"training": "1", "sort": "step", "descending": "1"})["rows"]
    row = max(rows, key=lambda one: (one["num_splices"] + one["num_tips"], one["episode_return"] or 0.0))
    place = f"{row['where']}/{row['trace_id'].rpartition('/')[2]}"
    return {
        "overview": "",
        "curves": "curves",
        "group": f"group/{place}",
        "rollout": f"rollout/{place}/{row['rollout']}",
    }


def take(run: Path, names: list[str], out: Path, browser_path: str, *, width: int, scheme: str) -> None:
    """Write the pictures of the named views, and print their sizes in bytes."""
    from playwright.sync_api import sync_playwright

    with server(run) as (address, _), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        size = {"width": width, "height": 800}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        paths = views(run)
        for name in names or paths:
            path = paths[name]
            page.goto("about:blank")
            page.goto(f"{address}#/run/{run_id(run)}/{path}")
            page.wait_for_selector("main h1")
            page.wait_for_timeout(400)  # charts are drawn when they are seen
            file = out / f"viewer-{name}.png"
            page.screenshot(path=file)
            print(file, file.stat().st_size)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "views", nargs="*", metavar="VIEW", help="overview, curves, group, rollout; default all"
    )
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    given = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        parser.error("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or record_run(Path(folder))
        take(run, given.views, given.out, browser_path, width=given.width, scheme=given.scheme)


if __name__ == "__main__":
    main()
