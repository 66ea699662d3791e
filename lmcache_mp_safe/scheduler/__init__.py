"""The half that runs in vLLM's scheduler process: it decides what is stored and loaded, and does nothing itself."""
