"""The core's parts: which files are changed, and which tests have to notice."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


# Statistical tests of thousands of draws: a quarter of all the time, for changes that faster tests notice.
SLOW = ("test_draws_follow_the_distribution", "test_rare_ids_come", "test_noise_of_the_size_of_rounding")


@dataclass(frozen=True, slots=True)
class Target:
    """A part of the core with its short list of test files."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def source_files(self) -> list[Path]:
        """As absolute paths."""
        return [SOURCE / "outrider" / f"{name}.py" for name in self.sources]

    @property
    def test_files(self) -> list[Path]:
        """As absolute paths, in the order in which they are run."""
        return [_test_file(name) for name in self.tests]


def _test_file(name: str) -> Path:
    folder, file = name.split("/")
    return ROOT / "tests" / folder / f"test_{file}.py"


TARGETS = {
    "credit": Target(
        (
            "algorithms/common/advantages",
            "algorithms/base",
            "algorithms/common/group_settings",
            "train/update/advantage_stage",
        ),
        (
            "algorithms/credit",
            "algorithms/credit_edges",
            "algorithms/setting_bounds",
            "algorithms/credit_family",
            "algorithms/batch_credit",
            "algorithms/presets",
            "algorithms/invariants",
            "algorithms/arpo",
            "train/objective_rules",
            "train/sampling",
        ),
    ),
    "losses": Target(
        ("algorithms/common/losses", "algorithms/common/objectives", "train/update/success_term"),
        (
            "algorithms/surrogate",
            "algorithms/objectives",
            "algorithms/aggregation_and_ratios",
            "algorithms/arpo",
            "train/loss_kinds",
            "algorithms/ratio_inputs",
        ),
    ),
    "ratios": Target(
        ("algorithms/common/ratios", "algorithms/common/sampler_correction"),
        (
            "algorithms/aggregation_and_ratios",
            "algorithms/sampler_correction",
            "algorithms/surrogate",
            "algorithms/ratio_inputs",
        ),
    ),
    "retrieval": Target(
        ("algorithms/rapo/formulas", "algorithms/rapo/hook", "algorithms/rapo/algorithm"),
        (
            "algorithms/retrieval",
            "algorithms/rapo_parts",
            "algorithms/setting_bounds",
            "algorithms/rapo_rollout",
            "algorithms/retrieval_shop",
        ),
    ),
    "branching": Target(
        ("algorithms/arpo/formulas", "algorithms/arpo/hook"),
        (
            "algorithms/arpo",
            "algorithms/branch_edges",
            "algorithms/arpo_scenarios",
            "algorithms/setting_bounds",
        ),
    ),
    "update": Target(
        (
            "train/update/update",
            "train/update/batch_loss",
            "train/update/off_policy",
            "algorithms/common/loss_kinds",
        ),
        ("train/update_metrics", "train/loss_vectors", "train/update_rules", "algorithms/empo2"),
    ),
    "pack": Target(
        ("train/update/pack",),
        (
            "train/pack_edges",
            "train/pack_update",
            "train/loss_vectors",
            "train/update_rules",
            "algorithms/tree_grpo",
        ),
    ),
    "sampling": Target(
        ("engines/local/sampling", "train/data/task_sampling"),
        ("engines/draws", "engines/sampling", "engines/sampling_edges", "train/sampling"),
    ),
    "store": Target(
        ("memory/steps/store", "memory/steps/format", "memory/steps/load", "memory/steps/checksums"),
        ("memory/store_checksums", "memory/steps", "memory/store_faults", "train/buffer_commands"),
    ),
    "steps": Target(
        ("memory/steps/buffer", "memory/steps/selection", "memory/steps/history"),
        (
            "memory/steps",
            "memory/steps_edges",
            "memory/store_faults",
            "memory/sources",
            "train/buffer_commands",
        ),
    ),
}
