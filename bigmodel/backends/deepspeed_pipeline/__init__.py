"""DeepSpeed's own pipeline engine, alone and with ZeRO-1."""
