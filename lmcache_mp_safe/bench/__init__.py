"""Measurements: a runner, and the cases that need no GPU. docs/bench.md says how to run and how to read them."""
