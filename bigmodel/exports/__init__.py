"""Files, commands and objects for other tools, which say what a plan says."""
