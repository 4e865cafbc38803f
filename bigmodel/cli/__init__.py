"""The command `bigmodel`."""
