"""`Engine.step` against a hand-written loop of the same library, in one run."""
