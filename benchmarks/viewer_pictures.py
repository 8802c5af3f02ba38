"""Pictures of the viewer for the documents, of any recorded run.

    python -m benchmarks.viewer_pictures RUN [--out docs/images] [--width 1000]

Curves, the group with most retrieved steps of the newest step that has any, and its best rollout.
"""

import argparse
import shutil
from pathlib import Path

from benchmarks.viewer import BROWSERS, server
from outrider.watch.viewer.catalogue import run_id
from outrider.watch.viewer.rollout_index import RolloutIndex
from outrider.watch.viewer.rollout_query import Query, find


def views(run: Path) -> dict[str, str]:
    """Addresses behind the run's own, by the name of the picture."""
    table = RolloutIndex(run).table()
    rows = find(table, Query(choices={}, training=True, sort="step", descending=True))["rows"]
    row = max(rows, key=lambda one: (one["num_splices"] + one["num_tips"], one["episode_return"] or 0.0))
    place = f"{row['where']}/{row['trace_id'].rpartition('/')[2]}"
    return {"curves": "", "group": f"group/{place}", "rollout": f"rollout/{place}/{row['rollout']}"}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--width", type=int, default=1000)
    given = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        parser.error("no chromium here: apt-get install chromium")
    with server(given.run) as (address, _), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": given.width, "height": 620}, color_scheme="light")
        for name, path in views(given.run).items():
            page.goto("about:blank")
            page.goto(f"{address}#/run/{run_id(given.run)}/{path}")
            page.wait_for_selector("main h1")
            page.wait_for_timeout(400)  # charts are drawn when they are seen
            file = given.out / f"viewer-{name}.png"
            page.screenshot(path=file)
            print(file, file.stat().st_size)
        browser.close()


if __name__ == "__main__":
    main()
