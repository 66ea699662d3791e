"""The deterministic simulator: one seed drives the whole connector, faults included, and every step is checked.

Real: both halves of the connector with its hooks, its wire layer, its copier and streamed backend; vLLM's Scheduler,
KVCacheManager, BlockPool and output aggregation. In place of the rest:

 settings.py    what a world is like, from its seed          script.py   what happens in it, from its seed
 tokens.py      tokens, and the tags that pages carry        host.py     vLLM's configuration and scheduler
 runner.py      what a step of the model reads and writes    device.py   a rank: pages, streams, worker half
 engine.py      vLLM's loop                                  network.py  between clients and the model of the server
 faults.py      what goes wrong                              watch.py    what was seen
 invariants.py  what must hold                               world.py    all of it, moved by commands
 trace.py       a world as a script                          run.py      many seeds

python -m lmcache_mp_safe.testing.sim --seeds 0:100 --steps 200 --jobs 2
"""
