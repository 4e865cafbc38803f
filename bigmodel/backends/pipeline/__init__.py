"""Pipeline stages by torch's schedules, with DDP, FSDP2 or HSDP inside each."""
