"""A run that is under way: its steps come without a reload, and the button ends it with a checkpoint."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.tool_run import ENVIRONMENT, write_tool_run
from tests.viewer.pages.browser.places import until
from tests.viewer.pages.serving import serving

PROGRAM = "import sys; from outrider.cli import main; sys.exit(main(sys.argv[1:]))"


def test_new_steps_appear_and_the_stop_button_ends_the_run(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    recipe = write_tool_run(tmp_path / "inputs")
    run = tmp_path / "run"
    given = ["train", str(recipe), "--run", str(run), "--progress", "none", "train.num_steps=100000"]
    given += ["evaluation.every=0", "evaluation.at_start=false", "train.checkpoint_every=50"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *given], env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE
    )
    try:
        while not (run / "traces" / "step-000002.parquet").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.1)
        with serving([run]) as served:
            page = open_page(f"{served.address}#/run/{served.ids[0]}/step/step-000001")
            page.evaluate("window.stays = true")
            page.wait_for_selector("[data-live]:has-text('Running: train')", timeout=60_000)
            page.wait_for_selector("[data-live]:has-text('tokens/s')", timeout=60_000)
            newest = "Number(document.querySelector('[data-live] a').textContent.match(/\\d+/)[0])"
            first = page.evaluate(newest)
            until(page, f"{newest} > {first} + 1")
            assert page.evaluate("window.stays === true")  # the page was not loaded again
            page.goto(f"{served.address}#/run/{served.ids[0]}/curves")
            label = "document.querySelector('[data-metric=\"reward/mean\"] .plot')?.ariaLabel"
            page.wait_for_selector('[data-metric="reward/mean"] .plot')
            before = page.evaluate(label)
            until(page, f"({label} ?? {json.dumps(before)}) !== {json.dumps(before)}")
            page.get_by_role("button", name="Stop …").click()
            page.get_by_role("button", name="Let it run").click()
            assert process.poll() is None
            page.get_by_role("button", name="Stop …").click()
            page.get_by_role("button", name="Stop it").click()
            assert process.wait(120) == 143 or process.returncode == 0
            page.wait_for_selector("[data-live]", state="hidden", timeout=60_000)
            page.close()  # before its server
        newest_checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
        last = sorted((run / "traces").glob("step-*.parquet"))[-1]
        assert newest_checkpoint.name == last.stem
    finally:
        process.kill()
        process.wait()
