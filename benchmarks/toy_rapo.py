"""What retrieval does for exploration, on a lock that on-policy exploration does not open (tests/toys.py).

    python -m benchmarks.toy_rapo [--seeds 10] [--tokens 6000]

Every row has the same number of policy tokens, learning rate, clip and aggregation; the expected return is
exact, at temperature 1 and without retrieval. "on-policy" and "hybrid" count rewarded training rollouts over
all seeds.
"""

import argparse

from tests.toys import MAX_POLICY_TOKENS, TABLE_HEAD, grpo, play, rapo, table_row

from outrider.algorithms.exploration import RapoSettings
from outrider.algorithms.grpo import GrpoSettings
from outrider.training.policy import set_threads


def rows() -> dict[str, GrpoSettings | RapoSettings]:
    """Name -> settings; the ablations are the paper's (arXiv 2603.03078, section 4)."""
    return {
        "GRPO": grpo(),
        "RAPO (9 of 12 hybrid)": rapo(),
        "  a = m = 0": rapo(advantage_weight=0.0, ratio_weight=0.0),
        "  noise = 1.0": rapo(noise=1.0),
        "  6 of 12 hybrid": rapo(num_hybrid=6),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="RAPO and GRPO on a combination lock.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=MAX_POLICY_TOKENS)
    arguments = parser.parse_args()
    set_threads(1)
    print(TABLE_HEAD)
    for name, settings in rows().items():
        results = [
            play(settings, seed=seed, max_policy_tokens=arguments.tokens) for seed in range(arguments.seeds)
        ]
        print(table_row(name, results), flush=True)


if __name__ == "__main__":
    main()
