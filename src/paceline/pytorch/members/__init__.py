"""Several models of one architecture, trained at once: stacked parameters, and the parts that keep members apart."""
