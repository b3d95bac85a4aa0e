"""A pytest plugin: the backend `cuda` computes on the CPU, for every test of the repository that takes a backend.

PYTHONPATH=plugins/ds4-cuda/tests/sim pytest -p pytest_sim --ds4-backend cuda tests/backend/test_laws.py

DS4_SIM_INEXACT=1: engines open with exact=False unless they ask for something. DS4_SIM_ORDER: see sim_driver.SimCuda.
"""

from __future__ import annotations

import functools
import os

import sim_driver
from ds4_cuda import backend, device
from sim_open import patched

import ds4

_patches = patched(checks=True)
_patches.__enter__()  # for the life of the process
_order = int(os.environ.get("DS4_SIM_ORDER", "0"))
device.load_driver = backend.load_driver = lambda: sim_driver.SimCuda(_order)  # type: ignore[assignment]
if os.environ.get("DS4_SIM_INEXACT"):
    ds4.Engine.open = functools.partial(ds4.Engine.open, exact=False)  # type: ignore[method-assign]
