"""The only place that knows how vLLM looks from the outside, and how versions of it differ."""
