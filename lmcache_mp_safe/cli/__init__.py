"""The command `lmcache-mp-safe`."""
