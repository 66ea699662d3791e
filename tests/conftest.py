"""What has to hold before anything is imported."""

from __future__ import annotations

import os

import hypothesis

from lmcache_mp_safe.testing.engine import ENVIRONMENT

# LMCache brings in numba, which reads its number of threads on import and does not let an engine change it later.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# How long one example takes says how busy the machine is. Whole tests have a time limit.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
