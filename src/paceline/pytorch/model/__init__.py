"""Outputs and losses of any module, and edits of a model before it trains."""
