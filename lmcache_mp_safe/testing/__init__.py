"""Shipped aids for tests, benchmarks and the demo: fakes, a server harness, small models."""
