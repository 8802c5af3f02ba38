"""``outrider explain``: settings, sections, types, presets and metrics, within 80 columns."""

import pytest

from outrider.cli import main
from outrider.reference import Setting, sections
from outrider.training.settings import StageSettings


def explained(capsys: pytest.CaptureFixture[str], *key: str) -> str:
    assert main(["explain", *key]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_without_a_key_the_sections_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys)
    for setting in sections()[0].settings():
        assert f"\n  {setting.name} " in text.replace(f"{setting.name}\n", f"{setting.name} \n")


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("optimizer.learning_rate", ["number, above 0", "1e-06", "constant after", "settings/optimizer.md"]),
        ("seed", ["integer", "docs/reference/settings.md"]),
        ("algorithm.group_size", ["algorithm.type = arpo", "default: 16", "integer, at least 2"]),
        ("algorithm.loss.ratio_cap", ["algorithm.loss.type = cispo", "required"]),
        ("algorithm.retrieval", ["algorithm.retrieval of combined", "min_similarity", "num_hybrid"]),
        ("algorithm", ["rapo", "keys of every type", "kl_weight"]),
        ("[optimizer]", ["optimizer\n", "beta1", "warmup_steps"]),
        ("dapo", ["of grpo", "DAPO: a higher upper clip"]),
        ("cispo", ["every token keeps its gradient", "ratio_cap"]),
        ("minilm", ["embedders", "384 dimensions"]),
        ("lr", ["optimizer.learning_rate"]),
        ("engine.type", ["engine.type\n", "vllm", "outrider list engines", 'default: "local"']),
        ("algorithm.type", ["algorithm.type\n", "rapo", "RAPO (arXiv", "default:"]),
        ("environment.type", ["environment.type\n", "factbook", "default:"]),
        ("algorithm.loss.type", ["algorithm.loss.type\n", "cispo"]),
        (
            "num_hybrid",
            [
                "algorithm.num_hybrid (with algorithm.type = rapo)\n",
                "\n\nalgorithm.retrieval.num_hybrid (with algorithm.type = combined)\n",
            ],
        ),
        ("min_similarity", ["algorithm.retrieval.min_similarity", "algorithm.memory.min_similarity"]),
        ("grad/norm", ["norm of the gradient before clipping", "docs/metrics.md"]),
    ],
)
def test_a_key_is_explained(key: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, key)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("algorithm.retreival", "did you mean algorithm.retrieval?"),
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("grop_size", "did you mean algorithm.group_size?"),
        ("grad/nrm", "did you mean grad/norm?"),
        ("qqqqqq", "outrider explain lists the sections"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(
    key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", key]) == 2
    assert message in capsys.readouterr().err


def test_every_setting_has_a_type_a_default_and_a_description() -> None:
    for section in sections():
        for setting in section.settings():
            assert setting.type_text and len(setting.description) > 10, (section.title, setting.name)
            assert setting.default or setting.is_section or setting.type_text.startswith("table"), (
                setting.name
            )


def test_the_keys_of_a_stage_share_no_sentence() -> None:
    first, second = (
        Setting(name, StageSettings, StageSettings).description for name in ("tasks", "num_steps")
    )
    assert first and second and not set(first.split(". ")) & set(second.split(". "))
