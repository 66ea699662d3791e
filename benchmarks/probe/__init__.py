"""One vLLM engine with an LMCache server of its own: is what the connector delivers what would have been computed?

    python -m benchmarks.probe --connector safe --spec mtp --batch-invariant --phases ref,apc,ext,audit,multi
    python -m benchmarks.probe.matrix --jobs 6 --out DIR          # many of them, and a table

Phases, in the order in which they are named:

    ref      every prompt of the conversations recomputed, each with a salt of its own; some of them twice
    apc      on top of vLLM's own prefix cache
    ext      with that cache emptied before each request, so that the prefix comes from the connector
    control  all sessions at once with fresh salts: what company alone does to the bits
    multi    all sessions at once on the connector; then every boundary they stored, one at a time
    race     long prompts at once in a small pool, the server stopped again and again; then every boundary
    decode   long answers, asked again as prompts: from the local cache, then from the connector
    audit    from here on, page bytes are compared when certified, when copied, in the slot, and when loaded

The prompts of a batch are computed with other kernels than a single one's, so outputs of concurrent requests are not
comparable bit for bit (`control` says how often they differ without any hit). Entries are: a prefill at block
boundaries gives the same bits in any company, if the block size is a multiple of 64, the chunk of the recurrent
layers' kernels.
"""
