"""Arithmetic on tokens, blocks and bytes. Pure: nothing here touches a device, a file or a clock."""
