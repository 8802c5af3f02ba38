"""Which GPU Ray gives to whom, by a real Ray that counts GPUs which are not there; no process computes on
one.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="several processes need the extra 'cluster'")

CODE = """
import json, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from outrider.scale.resources import Resources

for left in reversed(range(5)):  # a machine under load starts Ray too slowly for Ray's own limit
    try:
        ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, logging_level="ERROR",
                 object_store_memory=10**8)
        break
    except Exception:
        if not left:
            raise
        ray.shutdown()

class Actor:
    def gpus(self):
        return [int(one) for one in ray.get_gpu_ids()]

def made(places, number, asked):
    placed = PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=number)
    return ray.remote(**asked)(Actor).options(scheduling_strategy=placed).remote()

together = Resources(device="cuda", colocates=True)
places = placement_group([together.rank_place] * 3, strategy="PACK")
assert places.wait(60)
actors = [made(places, number, asked) for asked in (together.rank, together.engine) for number in range(3)]
apart = Resources(device="cuda", tensor_parallel=2)
ranks = placement_group([apart.rank_place], strategy="PACK")
engines = placement_group([apart.engine_place] * 2, strategy="PACK")
assert ranks.wait(60) and engines.wait(60)
actors += [made(ranks, 0, apart.rank), *(made(engines, number, apart.engine) for number in range(2))]
print(json.dumps(ray.get([one.gpus.remote() for one in actors], timeout=120)))
"""


def test_a_rank_shares_its_gpu_with_its_engine_and_with_nobody_else() -> None:
    environ = {name: one for name, one in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], check=True, env=environ, timeout=240, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    ranks, engines = found[:3], found[3:6]
    assert ranks == engines and len({one for [one] in ranks}) == 3
    [rank], first, second = found[6:]
    apart = {rank, *first, *second}
    assert len(first) == len(second) == 2 and len(apart) == 5
    assert not apart & {one for [one] in ranks}
