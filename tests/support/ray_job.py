"""launch/ray_train.py on a Ray of this machine: two workers on the CPU, nothing listening but on loopback."""

from __future__ import annotations

import sys
from pathlib import Path

import ray

LAUNCH = Path(__file__).resolve().parent.parent.parent / "launch"


def main() -> None:
    sys.path.insert(0, str(LAUNCH))
    import ray_train

    ray.init(
        num_cpus=3,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": f"{LAUNCH.parent / 'src'}:{LAUNCH}", "OMP_NUM_THREADS": "1"}},
    )
    ray_train.main()
    ray.shutdown()


if __name__ == "__main__":
    main()
