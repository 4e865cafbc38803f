"""The public functions, each a few lines over the packages below."""
