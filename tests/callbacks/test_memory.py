import builtins
import sys

import pytest

from paceline.callbacks import memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_bytes_grows_with_what_is_held():
    before = memory.process_bytes()
    held = bytearray(64 << 20)
    assert memory.process_bytes() - before > 48 << 20
    assert len(held)


def test_without_proc_and_psutil(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", missing)
    monkeypatch.setattr(memory, "is_installed", lambda module: False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert memory.process_bytes() is None
    assert memory.accelerator_bytes() is None
    assert memory.describe_memory() == ""
