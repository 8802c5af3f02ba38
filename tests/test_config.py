"""Settings: bad ones stop with one line, good ones survive the way through TOML unchanged."""

import math
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from outrider.config import Settings, load_settings, to_toml, validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("**/*.toml"))


class Inner(Settings):
    rate: float = Field(0.5, gt=0)
    limit: int | None = 3
    kind: Literal["none", "some"] = "some"


class Outer(Settings):
    name: str = "x"
    count: int = Field(1, ge=1)
    flags: tuple[int, ...] = ()
    inner: Inner = Inner()
    maybe: Inner | None = None

    @model_validator(mode="after")
    def _possible(self) -> "Outer":
        if self.count > 5 and self.name == "small":
            raise ValueError("small counts to 5 only")
        return self


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "x.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 'y'", "nmae: unknown key"),
        ("[inner]\nrat = 1", "inner.rat: unknown key"),
        ("count = 'many'", "count: "),
        ("count = 1.5", "count: "),
        ("count = 0", "count: "),
        ("name = 3", "name: "),
        ("inner = 3", "inner: "),
        ("[inner]\nrate = nan", "inner.rate: "),
        ("[inner]\nrate = inf", "inner.rate: "),
        ("name = 'small'\ncount = 6", "small counts to 5 only"),
        ("name = ", "not valid TOML"),
        ("name = 'a'\nname = 'b'", "not valid TOML"),
        (b"name = '\xff\xfe'", "not valid TOML"),
        (b"\x00\x01", "not valid TOML"),
        ("flags = " + "[" * 100_000, "not valid TOML"),
    ],
)
def test_the_error_of_a_file_names_the_key(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(Outer, file=write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(Outer, file=write(tmp_path, "count = 0\nextra = 1\n[inner]\nrate = -1"))
    assert all(key in str(caught.value) for key in ("count: ", "extra: unknown key", "inner.rate: "))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_settings(Outer, file=path)


def test_overrides_are_applied_in_order_after_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "count = 2\n[inner]\nrate = 0.25")
    loaded = load_settings(
        Outer,
        file=file,
        overrides=["count=3", "inner.rate=1e-3", "flags=[1, 2]", "name=some text", "count=4"],
    )
    assert (loaded.count, loaded.inner.rate, loaded.flags, loaded.name) == (4, 1e-3, (1, 2), "some text")
    assert load_settings(Outer, file=None, overrides=["name=a=b"]).name == "a=b"
    assert load_settings(Outer, file=None, overrides=["name="]).name == ""
    assert load_settings(Outer, file=None, overrides=["maybe.rate=2"]).maybe == Inner(rate=2)


@pytest.mark.parametrize("override", ["count", "=3", ".=3", "inner.=3", ".inner=3", "inner..rate=3", ""])
def test_a_malformed_override(override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_settings(Outer, file=None, overrides=[override])


def test_an_override_below_a_value_or_of_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match="count is a value"):
        load_settings(Outer, file=None, overrides=["count=1", "count.deep=3"])
    with pytest.raises(ConfigError, match=r"inner\.x: unknown key"):
        load_settings(Outer, file=None, overrides=["inner.x=3"])


@pytest.mark.parametrize("key", ["train.num_steps", "optimizer.learning_rate", "cold_start.tip_share"])
def test_a_truth_value_is_no_number(key: str) -> None:
    name = key.rpartition(".")[2]
    with pytest.raises(ConfigError, match=f"{name} must be a number, not true"):
        load_settings(
            RunSettings, file=None, overrides=["environment.type=house", "algorithm.type=grpo", f"{key}=true"]
        )


def test_none_disables_optional_settings_only() -> None:
    assert load_settings(Outer, file=None, overrides=["inner.limit=none"]).inner.limit is None
    assert load_settings(Outer, file=None, overrides=["inner.kind=none"]).inner.kind == "none"
    assert load_settings(Outer, file=None, overrides=["name=none"]).name == "none"
    with pytest.raises(ConfigError, match="count"):
        load_settings(Outer, file=None, overrides=["count=none"])
    off = Outer(inner=Inner(limit=None))
    assert validate(Outer, tomllib.loads(to_toml(off.model_dump(mode="json")))) == off


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().count = 2  # type: ignore[misc]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), TEXT)
VALUE = st.recursive(
    SCALAR,
    lambda v: st.one_of(st.lists(v, max_size=3), st.lists(st.dictionaries(TEXT, v, max_size=2), max_size=2)),
)
TREE = st.recursive(
    st.dictionaries(TEXT, VALUE, max_size=4), lambda t: st.dictionaries(TEXT, st.one_of(t, VALUE), max_size=4)
)


@given(tree=TREE)
def test_toml_round_trip(tree: dict[str, Any]) -> None:
    assert repr_sorted(tomllib.loads(to_toml(tree))) == repr_sorted(tree)


def repr_sorted(value: Any) -> str:
    """Equality that tells 1, 1.0 and True apart, and not the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{repr_sorted(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(repr_sorted, value)) + "]" if isinstance(value, list) else repr(value)


def test_toml_round_trip_of_special_values() -> None:
    tree = {
        "a.b": {"": {"c d": 'say "x"\\n'}},
        "\u00fc": "\x00\x1b\x7f\r\n\t\u2028\U0001f600",
        "empty": {},
        "numbers": [1e-320, -0.0, 1e16, math.inf, 10**30],
        "'": "'''",
        "=": {"]": 1},
    }
    assert repr_sorted(tomllib.loads(to_toml(tree))) == repr_sorted(tree)
    # a key that is left out, as at the top: in a table within a list too
    assert tomllib.loads(to_toml({"tools": [{"fetch": None}]})) == {"tools": [{"fetch": "none"}]}
    for impossible in ({"x": object()}, {"x": [None]}, {"x": "\ud800"}, {"\ud800": 1}):
        with pytest.raises(ConfigError, match="as TOML"):
            to_toml(impossible)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_is_equal(recipe: Path, tmp_path: Path) -> None:
    loaded = load_settings(RunSettings, file=recipe)
    again = load_settings(RunSettings, file=write(tmp_path, to_toml(loaded.model_dump(mode="json"))))
    assert again == loaded


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.type=chess"], "environment"),
        (["algorithm.type=ppo"], "algorithm"),
        (["algorithm.num_hybrid=99"], "num_hybrid 99 exceeds group_size"),
        (["algorithm.aggregation=constant_length"], "max_length"),
        (["algorithm.quality=false", "algorithm.timing=none"], "is no retrieval reward"),
        (["algorithm.retrieval.mode=execute"], "stateful"),
        (["environment.type=scienceworld", "algorithm.retrieval.form=turn"], "tag protocol"),
        (["environment.type=scienceworld", "algorithm.retrieval.form=turn"], "retrieval.mode = execute"),
        (["environment.type=scienceworld", "algorithm.retrieval.form=turn"], 'with protocol = "inline"'),
        (["algorithm.num_hybrid=0", "buffer.evolve=true"], "num_hybrid of at least 1"),
        (["rollout.max_turn_tokens=100000"], "max_turn_tokens exceeds"),
        (["rollout.max_turns=0"], "rollout.max_turns"),
        (["rollout.max_observation_tokens=-1"], "rollout.max_observation_tokens"),
        (["update.num_mini_batches=1000"], "num_mini_batches exceeds"),
        (["seed=none"], "seed"),
    ],
)
def test_invalid_settings_are_refused(overrides: list[str], message: str) -> None:
    base = ["environment.type=factbook", "algorithm.type=rapo"]
    with pytest.raises(ConfigError) as caught:
        load_settings(RunSettings, file=None, overrides=[*base, *overrides])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_sampler_correction_can_be_disabled_in_a_file(tmp_path: Path) -> None:
    text = "[environment]\ntype = 'factbook'\n[algorithm]\ntype = 'grpo'\nsampler_correction = 'none'\n"
    loaded = load_settings(RunSettings, file=write(tmp_path, text))
    assert loaded.algorithm.sampler_correction is None
    again = load_settings(RunSettings, file=write(tmp_path, to_toml(loaded.model_dump(mode="json"))))
    assert again == loaded


def test_concurrent_episodes_are_limited_by_simulators() -> None:
    base = ["environment.type=scienceworld", "algorithm.type=grpo", "train.max_concurrent=8"]
    assert (
        load_settings(RunSettings, file=None, overrides=[*base, "environment.num_workers=3"]).num_concurrent
        == 3
    )
    assert (
        load_settings(RunSettings, file=None, overrides=[*base, "environment.num_workers=30"]).num_concurrent
        == 8
    )


class Weighed(Settings):
    """Its weight follows from its preset."""

    preset: str = "plain"
    weight: float = 1.0
    size: int = 2

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return {"weight": 10.0, **given} if given.get("preset") == "heavy" else given


class Left(Settings):
    left: int = 0


class Right(Settings):
    right: int = 0


class Sections(Settings):
    """Defaults of fields that differ from those of their classes."""

    inner: Weighed = Weighed(size=5)
    heavy: Weighed = Weighed(preset="heavy")
    either: Left | Right = Left(left=3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"inner": {"weight": 2.0}}, {"inner": {"preset": "plain", "weight": 2.0, "size": 5}}),
        ({"inner": {"preset": "heavy"}}, {"inner": {"preset": "heavy", "weight": 10.0, "size": 2}}),
        ({"heavy": {"size": 7}}, {"heavy": {"preset": "heavy", "weight": 10.0, "size": 7}}),
        ({"heavy": {"preset": "plain"}}, {"heavy": {"preset": "plain", "weight": 1.0, "size": 2}}),
        ({"either": {"right": 4}}, {"either": {"right": 4}}),
    ],
)
def test_a_section_keeps_the_defaults_of_its_field(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = validate(Sections, given).model_dump()
    assert {key: found[key] for key in expected} == expected
