"""Build script. Everything is in pyproject.toml; this file is the seat of the native extension.

The extension is optional: without a compiler or a CUDA toolkit the package installs as pure Python, and
`lmcache_mp_safe.ops` says at run time which backend it took and why.
"""

from setuptools import setup

setup(ext_modules=[])
