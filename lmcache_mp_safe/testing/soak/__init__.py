"""A long run of a real engine under everything that may happen to it: `python -m lmcache_mp_safe.testing.soak`."""
