"""bigmodel's predicted memory beside what other tools predict, against the measured."""
