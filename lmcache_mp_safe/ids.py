"""Names for the integers and strings that travel through the package."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
JobId = NewType("JobId", int)
BlockId = NewType("BlockId", int)
GroupId = NewType("GroupId", int)
ServerEpoch = NewType("ServerEpoch", int)

# vLLM's placeholder block: it holds nothing, is never copied and never a target.
NULL_BLOCK = BlockId(0)
