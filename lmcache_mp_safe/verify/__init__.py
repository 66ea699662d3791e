"""Is what a live server says with the connector what it says without? Traffic, client, checks, judge, report."""
