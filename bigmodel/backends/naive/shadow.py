"""The step of naive model parallel: micro-batch after micro-batch, device after device.

See `dealt_stages.py`: between two micro-batches every device waits for all others.
"""

from __future__ import annotations

from bigmodel.backends.dealt_stages import programs as programs
