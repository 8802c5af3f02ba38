"""``outrider push`` against a hub on this machine: downloads equal the export, a broken upload continues,
and the card describes the run without anything of this machine.
"""

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli import main
from outrider.engines.base import PACKAGED
from outrider.errors import CheckpointError, ConfigError, HubError
from outrider.evaluation.hub import (
    BASES,
    OMITTED,
    find_base,
    model_card,
    private_words,
    public_settings,
    push_run,
)
from outrider.training.settings import RunSettings
from outrider.viewer.run_reader import read_run
from tests.hub_server import Hub, Repository, hub_server
from tests.training.short_runs import begin
from tests.training.tool_run import write_tool_run

TOKEN = "hf_aTokenThatNobodyMaySee"
REPO = "acme/pushed"
PROGRAM = """
import contextlib, io, json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from outrider.cli import main
run, repo, exported = sys.argv[1:]
for arguments in (["push", run, "--repo", repo, "--private"],) * 2 + (["export", run, "--out", exported],):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(arguments)
    print(json.dumps({"status": status, "stderr": err.getvalue(), "stdout": out.getvalue()}))
ids = AutoTokenizer.from_pretrained(exported)("where is the lamp", return_tensors="pt")
same = AutoTokenizer.from_pretrained(repo)("where is the lamp", return_tensors="pt")
logits = [AutoModelForCausalLM.from_pretrained(one)(**ids).logits for one in (exported, repo)]
print(json.dumps({"ids": ids.input_ids.tolist() == same.input_ids.tolist(), "same": torch.equal(*logits)}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("secret-place")
    recipe = write_tool_run(root)
    return begin(recipe, root / "run", "evaluation.every=1")


@pytest.fixture(scope="module")
def pushed(run: Path) -> Iterator[tuple[Hub, list[dict[str, Any]]]]:
    """Pushed twice, of which the first call breaks at its end, exported, and loaded back."""
    with hub_server({}, token=TOKEN, failures=1) as server:
        address = {"HF_ENDPOINT": server.url, "HF_HOME": str(run.parent / "home"), "HF_TOKEN": TOKEN}
        reason = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(run), REPO, str(run.parent / "exported")],
            env=os.environ | address | reason,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        yield server, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_a_broken_upload_is_one_line_and_the_second_call_continues(
    pushed: tuple[Hub, list[dict[str, Any]]],
) -> None:
    """The weights, which had arrived, are not sent again."""
    server, (first, second, *_) = pushed
    assert first["status"] == 1 and len(first["stderr"].strip().splitlines()) == 1
    assert f"{REPO} was not pushed" in first["stderr"] and "the disk is full" in first["stderr"]
    assert "the same command continues" in first["stderr"] and TOKEN not in first["stderr"]
    assert second["status"] == 0 and f"pushed to {server.url}/{REPO}" in second["stdout"]
    assert sum(one.startswith("PUT /lfs/") for one in server.asked) == 1
    assert server.repositories[f"models/{REPO}"].private


def test_what_is_to_be_private_is_not_sent_to_a_public_repository(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub takes the wish for one that is there already, and leaves it public."""
    with hub_server({f"models/{REPO}": Repository(files={})}, token=TOKEN) as server:
        api = HfApi(endpoint=server.url, token=TOKEN)
        monkeypatch.setattr("outrider.evaluation.hub.HfApi", lambda **given: api)
        monkeypatch.setattr("outrider.evaluation.hub.get_token", lambda: TOKEN)
        with pytest.raises(ConfigError, match="exists and is public; nothing was sent"):
            push_run(run, REPO, private=True)
        assert not server.repositories[f"models/{REPO}"].files
        assert not any("commit" in one or "preupload" in one for one in server.asked)


@pytest.mark.long
def test_what_is_fetched_back_is_the_exported_folder(
    run: Path, pushed: tuple[Hub, list[dict[str, Any]]]
) -> None:
    """Every file, and so the same logits."""
    server, (*_, loaded) = pushed
    assert loaded == {"ids": True, "same": True}
    files = dict(server.repositories[f"models/{REPO}"].files)
    card = files.pop("README.md").decode()
    exported = {one.name: one.read_bytes() for one in (run.parent / "exported").iterdir()}
    assert files == exported and "outrider.json" in files
    assert card == push_run(run, REPO, dry_run=True).card


def test_the_card_has_scores_with_intervals_and_how_to_load(run: Path) -> None:
    card = push_run(run, REPO, dry_run=True).card
    data = ModelCard(card).data
    assert data["library_name"] == "transformers" and data["tags"] == [
        "outrider",
        "reinforcement-learning",
        "rapo",
    ]
    evaluations = read_run(run).evaluations
    assert len(evaluations) >= 2
    for one in evaluations:
        score = one.interval
        assert score is not None
        bounds = f"{100 * score.value:.1f} % [{100 * score.ci_low:.1f}, {100 * score.ci_high:.1f}]"
        assert bounds in card and one.panel_hash in card
    assert "| **after RAPO** | 2 |" in card and "`outrider train` printed them" in card
    assert f'from_pretrained("{REPO}")' in card and 'history_thinking = "keep"' in card
    earlier = push_run(run, REPO, step=1, dry_run=True).card
    assert "1 step," in earlier and "after RAPO" not in earlier


def test_the_card_contains_nothing_of_this_machine(run: Path) -> None:
    card = push_run(run, REPO, dry_run=True).card
    assert "secret-place" not in card and str(Path.home()) not in card
    words = {word.lower() for word in card.replace("/", " ").replace('"', " ").split()}
    assert not private_words() & words and getpass.getuser() not in words
    assert 'corpus = "(not shown)"' in card and "group_size = 4" in card


def test_the_card_contains_the_settings_of_rendering() -> None:
    reason = {"enable_thinking": True, "date_string": "26 Jul 2024", "unknown": 3, "owner": "/home/me",
            "auth": "abcdef", "name": "Ann Other", "budget": [1], "x=1); print(1": 2}  # fmt: skip
    model = {"name": "acme/base", "template_kwargs": reason, "history_thinking": "strip"}
    environment = {"type": "gym"}
    settings = RunSettings.model_validate(
        {"environment": environment, "algorithm": {"type": "grpo"}, "model": model}
    )
    empty = read_run(Path("/nowhere"))
    names = ("enable_thinking", "date_string", "owner", "auth", "name", "budget", "x=1); print(1")
    template = "".join(f"{{{{ {name} }}}}" for name in names)
    card = model_card(REPO, settings, empty, step=3, base=find_base("acme/base"), template=template)
    data = ModelCard(card).data
    assert (
        data["base_model"] == "acme/base"
        and data["license"] is None
        and "license" not in card.split("---")[1]
    )
    assert "The licence of the model that training began with applies." in card
    load = card.split("## Load")[1].split("## Recipe")[0]
    assert """return_tensors="pt", enable_thinking=True, date_string='26 Jul 2024'\n""" in load
    assert '`template_kwargs = {"enable_thinking": true, "date_string": "26 Jul 2024"}`' in load
    assert "the value of `owner`, `auth`, `name`, `budget` is left out here" in load
    assert not any(one in card for one in ("/home/me", "abcdef", "Other", "print(1", "unknown="))
    compile(load.split("```python")[1].split("```")[0], "the card", "exec")
    assert "as chat servers do" in card
    assert "has no evaluation" in card


def test_packaged_models_are_known_and_folders_have_their_licence(tmp_path: Path) -> None:
    assert BASES.keys() == PACKAGED.keys()
    assert find_base("smollm2-135m-instruct")[1] == "apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert find_base(str(tmp_path)) == ("", "mit")
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert find_base(str(tmp_path)) == ("", "")


def with_values(**kwargs: Any) -> RunSettings:
    return RunSettings.model_validate(
        {"environment": {"type": "gym", "kwargs": kwargs}, "algorithm": {"type": "grpo"}}
    )


PLACES = ("/data/me", "~/x", "C:\\me", "http://me:pass@host", "two words", "$HOME", "../up", "data/me.json")


@given(st.text(min_size=1).filter(lambda text: not text.isspace()))
def test_no_text_that_may_name_a_place_is_shown(text: str) -> None:
    values: dict[str, Any] = {}
    for number, place in enumerate(PLACES):
        for kind, value in enumerate((place, text + place, [place], {"a": place}, {place: 1})):
            values[f"v{number}_{kind}"] = value
    shown = public_settings(with_values(**values))
    assert not any(place in shown for place in PLACES)


@pytest.mark.parametrize(
    "name",
    ["api_key", "hub_token", "password", "api_key_variable", "auth", "API_KEY", "apiKey", "X-Auth", "apikey"],
)
def test_no_secret_is_shown(name: str) -> None:
    shown = public_settings(with_values(**{name: "abcdef"}))
    assert "abcdef" not in shown and OMITTED in shown
    assert "Zk3J9vQ0xY7pL2mN8bT4cR6wA" not in public_settings(with_values(one="Zk3J9vQ0xY7pL2mN8bT4cR6wA"))
    assert getpass.getuser() not in public_settings(with_values(one=getpass.getuser()))
    assert 'one = "is_slippery"' in public_settings(with_values(one="is_slippery", max_tokens=3))


def test_nothing_that_is_given_to_a_program_is_shown() -> None:
    """A key may be an argument, or stand under any name in an environment."""
    server = {"type": "mcp", "name": "one", "command": "abcdef", "args": ["--key", "abcdef"]}
    settings = RunSettings.model_validate(
        {
            "environment": {"type": "tools", "tools": [{**server, "env": {"OTHER": "abcdef"}}]},
            "algorithm": {"type": "grpo"},
        }
    )
    shown = public_settings(settings)
    assert "abcdef" not in shown and OMITTED in shown and 'name = "one"' in shown


def test_what_cannot_be_pushed_is_an_error_before_the_export(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.evaluation.hub.get_token", lambda: None)
    with pytest.raises(HubError, match="set HF_TOKEN"):
        push_run(run, REPO)
    with pytest.raises(CheckpointError, match="is no run directory"):  # said before a login is asked for
        push_run(run / "gone", REPO)
    for name in ("no owner", "bare", "a/b/c", "acme/-x-"):
        with pytest.raises(ConfigError, match="--repo"):
            push_run(run, name)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 \(of steps: "):
        push_run(run, REPO, step=7, dry_run=True)
    assert main(["push", str(run.parent), "--repo", REPO, "--dry-run"]) == 1
    assert "is no run directory" in capsys.readouterr().err
    assert main(["push", str(run), "--repo", REPO, "--dry-run"]) == 0
    assert f"nothing was sent to {REPO}" in capsys.readouterr().out


def test_the_weights_of_an_earlier_step_can_be_exported(run: Path, tmp_path: Path) -> None:
    for step in ("1", "2"):
        assert main(["export", str(run), "--out", str(tmp_path / step), "--checkpoint", step]) == 0
    weights = [(tmp_path / step / "model.safetensors").read_bytes() for step in ("1", "2")]
    assert weights[0] != weights[1]
    assert main(["export", str(run), "--out", str(tmp_path / "3"), "--checkpoint", "3"]) == 1
