"""Plan, estimate and train models that do not fit on one device."""

__version__ = "0.1.0"
