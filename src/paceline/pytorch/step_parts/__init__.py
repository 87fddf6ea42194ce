"""The optional parts of optimizer steps, which measure or change them: one file for each, and their registry."""
