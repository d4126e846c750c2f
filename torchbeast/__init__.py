"""IMPALA in PyTorch: MonoBeast, one script for one machine."""
