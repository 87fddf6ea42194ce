"""Two devices on the CPU, one thread each; set before TensorFlow starts, which only the first use of a device does.

Without TensorFlow these tests are left out, but in CI, where that is an error.
"""

import os
from typing import Any

import pytest

from paceline.core.optional import is_installed

collect_ignore_glob: list[str] = []

if is_installed("tensorflow"):
    from paceline.tensorflow.framework import tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
elif os.environ.get("CI") == "true":
    raise pytest.UsageError("tensorflow is missing: the extra `dev` installs it")
else:
    collect_ignore_glob.append("*test_*.py")  # in the folders below too: the star stands for any path


@pytest.fixture(scope="session")
def mirrored() -> Any:
    """One for all tests: two in one process would take each other's exchanges for their own."""
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
