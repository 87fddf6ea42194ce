"""A hub for each test that asks for one."""

from collections.abc import Iterator

import pytest
from hub_server import Hub, point_to, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, which huggingface_hub speaks to in this process."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    http = pytest.importorskip("huggingface_hub.utils._http")
    with serving() as served:
        point_to(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(http.time, "sleep", lambda seconds: None)  # between its retries
        yield served
    huggingface_hub.close_session()
