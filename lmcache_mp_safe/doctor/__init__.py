"""What is installed, configured and running, and what that leads to.

facts.py     what was measured; what could not be measured says so
gather.py    measures: this machine, the server (server_probe.py), vLLM in a process of its own (host_probe.py)
checks/      facts -> findings, one file for each part; pure
findings.py  a finding: ok, warning or problem, what it means and what to do
render.py    findings as a page or as JSON
"""
