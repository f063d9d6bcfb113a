"""The error of everything that can go wrong while a model is found, read or checked."""

from octavo.errors import OctavoError


class ModelError(OctavoError):
    """A model that cannot be used: the sentence names what was found, what is needed and the remedy."""
