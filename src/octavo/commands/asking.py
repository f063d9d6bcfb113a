"""Asks a running server over HTTP; what goes wrong is one sentence."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from octavo.errors import OctavoError

ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="OCTAVO_API_KEY", help="API key of the server, if it asks for one.")
]
TIMEOUT = 10.0


class Server:
    """A server's explain API. Raises OctavoError when it does not answer or refuses."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            good = False
        if not good:
            raise OctavoError(f"the server is {url!r}; it must be a URL such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise OctavoError(f"{self.url}{path} answers {error.code}: {_message(error)}") from None
        except (OSError, ValueError) as error:  # ValueError: a URL that is none, or an answer that is no JSON
            reason = getattr(error, "reason", error)
            raise OctavoError(
                f"{self.url} cannot be asked: {reason}. Is it an Octavo server, and does it run? (`octavo serve MODEL` "
                "prints its address.)"
            ) from None

    def request(self, name: str) -> Any:
        """One request by its id or label."""
        return self.get(f"/kv/requests/{quote(name, safe='')}")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.reason} (is it an Octavo server?)"
