"""Errors that a user can put right."""


class UserError(Exception):
    """Shown as its message alone, without a traceback: the message says what to do."""
