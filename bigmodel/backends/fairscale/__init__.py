"""ZeRO-1 and ZeRO-2 by fairscale, which is no longer developed."""
