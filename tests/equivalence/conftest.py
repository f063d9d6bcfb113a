"""One thread for tiny models, both cores for real ones."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(2 if request.node.get_closest_marker("real_model") else 1)
