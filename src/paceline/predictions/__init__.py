"""Methods on predictions, without a framework: weights of ensembles, calibration, decisions and tests."""
