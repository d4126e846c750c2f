"""Rewards that the learner makes itself: --explorer, see method.py."""
