"""100,000 rollouts: everything answers, the server stays small. How fast, `benchmarks.viewer` measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.viewer import largest_mib, server
from benchmarks.viewer_run import PER_STEP, write_run

pytestmark = pytest.mark.timeout(600)
NUM = 100_000


def test_a_hundred_thousand_rollouts_are_filtered_and_searched(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    run = write_run(tmp_path / "run", NUM)
    num_steps = -(-NUM // PER_STEP)
    total = num_steps * PER_STEP
    with server(run) as (address, pid):
        page = open_page(address)
        page.locator("tbody tr a").first.click()
        page.wait_for_selector("h2:has-text('What did it cost?')", timeout=60_000)
        page.get_by_role("link", name="All rollouts").click()
        page.wait_for_selector(f'[data-total="{total}"]', timeout=120_000)
        page.get_by_label("kind").select_option("hybrid")
        page.wait_for_selector(f'[data-total="{total // 4}"]', timeout=60_000)
        page.get_by_label("outcome").select_option("tool_fault")
        page.wait_for_selector(f'[data-total="{total // 64}"]', timeout=60_000)
        page.get_by_label("Search in text").fill("100-1000")  # one turn of one step
        page.wait_for_selector(".hits mark", timeout=120_000)
        hits = page.locator(".hits a").all_inner_texts()
        assert len(hits) == 1 and hits[0].startswith("step 100, ")
        page.locator(".hits a").first.click()
        page.wait_for_selector(".turn")
        assert largest_mib(pid) <= 500
        page.close()  # before its server
