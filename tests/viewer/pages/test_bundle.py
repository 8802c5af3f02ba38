"""A bundle is read by others, from servers that say nothing: what its page may do, and what is not in it."""

import json
import os
import platform
import shutil
from pathlib import Path

from outrider.cli import main
from outrider.viewer.run_reader import LIVE, NOTES


def test_a_bundle_has_its_policy_and_no_name_of_this_machine(recorded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(recorded, tmp_path / "private-folder" / "a" / "run")
    (run / LIVE).write_text(json.dumps({"pid": os.getpid(), "host": "private-host", "stage": "train"}))
    with (run / NOTES).open("a") as notes:
        notes.write(json.dumps({"step": 3, "time": 0.0, "text": f"WARNING: {run / 'buffer.sqlite'} is old"}))
    folder = tmp_path / "page"
    assert main(["view", str(run), str(recorded), "--bundle", str(folder)]) == 0
    comparison = (folder / "compare.html").read_text()
    assert "leave one of them out" in comparison  # two copies are no comparison
    assert 'lang="en"' in comparison and "<main" in comparison and 'href="index.html"' in comparison
    page = (folder / "index.html").read_text()
    before, policy, behind = page.partition('<meta http-equiv="Content-Security-Policy" content="')
    assert "default-src 'none'; script-src 'self'" in behind.partition('"')[0]
    assert "<script" not in before and "<link" not in before and policy
    secret = [b"private-folder", b"private-host", platform.node().encode(), str(recorded.parent).encode()]
    for path in folder.rglob("*"):
        if path.is_file():
            assert not [one for one in secret if one in path.read_bytes()], path
