"""torch.nn.DataParallel: one process copies its model to its devices every forward."""
