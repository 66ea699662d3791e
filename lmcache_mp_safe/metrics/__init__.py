"""What is counted, and what others are shown of it.

`counts` names everything that is counted, `tally` counts it, `series` is the one table of what Prometheus is told. The
table in docs/metrics.md, the dashboard, the merging of ranks and steps and the Prometheus objects follow from it.
"""
