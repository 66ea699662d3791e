"""Devices for the tests on a GPU. Run them with `tools/gpu_run.sh` or `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest
import torch

from lmcache_mp_safe.ops import make_device
from lmcache_mp_safe.ops.device import Device


@pytest.fixture(params=["csrc", "cupy"])
def device(request: pytest.FixtureRequest) -> Device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return make_device(torch.device("cuda", torch.cuda.current_device()), request.param)
