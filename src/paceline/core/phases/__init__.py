"""Training phases without a framework: their lengths, the position among them, and the objects that they name."""
