"""The command line: `paceline demo`, `train`, `launch`, `verify`, `export`, `replay`."""
