"""The commands: `paceline demo`, `paceline demo digits`, `paceline train CONFIG.yaml`."""
