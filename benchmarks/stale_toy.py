"""The cost of tokens of older weights: RAPO on the lock (tests/toys.py) with an engine some versions behind.

    python -m benchmarks.stale_toy [--seeds 10] [--tokens 6000]

Every row has the same number of policy tokens; the expected return is exact, at temperature 1 and without
retrieval. Age 1 is that of rollouts during an update (cluster.max_staleness = 1). With mixed versions, as for
cluster.max_staleness above 1, an episode starts with weights that are so many versions old and may use newer
ones at each turn.
"""

import argparse

from tests.toys import MAX_POLICY_TOKENS, TABLE_HEAD, rapo, table_row
from tests.toys_stale import play

from outrider.training.policy import set_threads

ROWS = ((0, False), (1, False), (2, False), (1, True), (2, True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="RAPO on a combination lock with older weights.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=MAX_POLICY_TOKENS)
    arguments = parser.parse_args()
    set_threads(1)
    print(TABLE_HEAD)
    for age, is_mixed in ROWS:
        results = [
            play(rapo(), seed=seed, staleness=age, is_mixed=is_mixed, max_policy_tokens=arguments.tokens)
            for seed in range(arguments.seeds)
        ]
        print(table_row(f"mixed, up to age {age}" if is_mixed else f"age {age}", results), flush=True)


if __name__ == "__main__":
    main()
