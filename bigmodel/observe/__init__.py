"""The real world as data: models, machines, measured memory."""
