"""Any module's outputs and losses, and the edits made to a model before it trains."""
