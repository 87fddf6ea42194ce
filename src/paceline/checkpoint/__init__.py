"""Checkpoint storage: folders, manifests, retention, locks and remote stores. Framework-independent."""
