"""The step of fairscale's Pipe: all forwards, then all backwards, on every device.

Source: fairscale 0.4.13, `fairscale/nn/pipe/pipeline.py`. See `dealt_stages.py`. Pipe's
threads allocate where torch's CPU profiler records nothing, so memory was not measured.
"""

from __future__ import annotations

from bigmodel.backends.dealt_stages import programs as programs
