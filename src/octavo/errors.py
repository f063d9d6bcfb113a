"""The base of every error that Octavo raises on purpose, so that a front end can tell it from a bug."""


class OctavoError(Exception):
    """Bad input or an impossible configuration, told in a sentence: field, value, limit, remedy."""
