"""Two devices on the CPU, one thread each; set before TensorFlow starts, which only the first use of a device does."""

import pytest

pytest.importorskip("tensorflow", reason="needs tensorflow")

from paceline.tf.framework import tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
