"""Training phases (`phases`): what is trained, with which settings and data, and until when."""
