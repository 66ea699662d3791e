"""Measurements. `python -m benchmarks --list` names them; docs/gpu.md says what came out."""
