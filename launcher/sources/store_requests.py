"""Requests to object stores and web servers through fsspec: made again if they fail for a passing reason,
and errors that say what to do."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from launcher.errors import RecipeError, first_line
from launcher.sources.store_names import (
    CREDENTIALS,
    WEB,
    require_store,
    rest_of,
    scheme_of,
    without_secrets,
)

logger = logging.getLogger(__name__)

ATTEMPTS = 8
"""Of a request that fails for a passing reason, with pauses of a minute together. Libraries of stores have
their own attempts inside each."""
_OWN_ATTEMPTS = {"gs": 2, "az": 2, "abfs": 2}
"""Of libraries that try for a minute themselves."""
LONGEST = 90.0
"""Seconds after which a request is not made again, also if there were fewer attempts: a server that is
silent takes a minute for each."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts. Each pause is twice the one before."""


class StoreError(OSError):
    """A store does not answer, or refuses. `filename` is the name of the object, `strerror` what the store
    said and what to do."""


def _options(scheme: str) -> dict[str, Any]:
    if scheme == "s3" and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        limits = {"connect_timeout": 10, "read_timeout": 30}
        return {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": 2}, **limits}}
    if scheme in WEB:
        import aiohttp

        # By default a whole answer has five minutes, and a silent server as long
        limit = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        return {"client_kwargs": {"timeout": limit}}
    return {}


@functools.lru_cache(maxsize=64)
def _of_process(scheme: str, process: int) -> Any:
    """The file system of a process: its threads and connections do not survive a fork."""
    import fsspec

    made = fsspec.filesystem(
        scheme, skip_instance_cache=True, use_listings_cache=False, **_options(scheme)
    )
    if scheme == "s3":
        made.retries = 1  # botocore tries several times inside, and `ask` around
    return made


def filesystem(name: str) -> Any:
    """The file system of fsspec that has the name. Raises RecipeError."""
    require_store(name)
    return _of_process(str(scheme_of(name)), os.getpid())


def key_of(name: str) -> str:
    """A name as its file system has it."""
    return name if scheme_of(name) in WEB else rest_of(name).rstrip("/")


_T = TypeVar("_T")


class ShortError(Exception):
    """A store sent fewer bytes than were asked for."""


def ask(name: str, request: Callable[[], _T], *, writes: bool = False) -> _T:
    """The result of a request about `name`, made again if it fails for a passing reason. writes: what it
    asks a right for. Raises FileNotFoundError and StoreError."""
    started = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return request()
        except RecipeError:
            raise
        except Exception as error:  # of libraries of stores: many classes
            cause = _cause(error)
            passing = _passes(cause)
            most = _OWN_ATTEMPTS.get(str(scheme_of(name)), ATTEMPTS)
            silent = attempt > 1 and time.monotonic() - started > LONGEST
            if not passing or silent or attempt >= most:
                raise _explained(name, cause, attempt if passing else 0, writes) from None
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * random.uniform(0.75, 1)
            level = logging.INFO if attempt == 1 else logging.WARNING
            logger.log(level, f"{name}: {_said(cause)}; asking again in {pause:.1f} s")
            time.sleep(pause)
    raise AssertionError


def _cause(error: BaseException) -> BaseException:
    """Of an error and those that libraries have wrapped in it, the one that says most."""
    chain, following = [error], error.__cause__
    if isinstance(error, IndexError):  # s3fs 2026.9 fails so while it handles a timeout
        following = error.__context__
    while following is not None:
        chain.append(following)
        following = following.__cause__
    with_status = (each for each in chain if _status(each) is not None)
    passing = (each for each in chain if _passes(each))
    return next(passing, next(with_status, chain[-1]))


def _status(error: BaseException) -> int | None:
    """The status of HTTP; None: there is none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:  # huggingface_hub, aiohttp, azure, gcsfs
        found = getattr(response, "status_code", None)
        for name in ("status", "status_code", "code"):
            found = getattr(error, name, None) if found is None else found
    return int(found) if isinstance(found, int | str) and str(found).isdigit() else None


def _code(error: BaseException) -> str:
    """A store's name for an error, such as NoSuchKey; empty: there is none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "error_code", "") or "")


_PASSING = {
    *("HTTPClientError", "ClientConnectionError", "ClientPayloadError", "IncompleteReadError"),
    *("ResponseParserError", "TransportError", "ServiceRequestError", "ServiceResponseError"),
    *("ConnectionError", "TimeoutError", "Timeout", "IncompleteRead", "ShortError"),
}
"""Classes of libraries for a connection that failed or broke."""
_PASSING_CODES = ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttl")


def _passes(error: BaseException) -> bool:
    status = _status(error)
    if status is not None and ((status >= 500 and status != 501) or status in (408, 429)):
        return True
    if any(code in _code(error) for code in _PASSING_CODES):
        return True
    return any(cls.__name__ in _PASSING for cls in type(error).__mro__)


def _said(error: BaseException) -> str:
    """What a store said, in one line."""
    if isinstance(error, ShortError):
        return str(error)
    status, code = _status(error), _code(error)
    about = " ".join(filter(None, (str(status or ""), code if not code.isdigit() else "")))
    response = getattr(error, "response", None)
    text = first_line(error)
    if isinstance(response, dict):
        text = str(response.get("Error", {}).get("Message") or "")
        text = "" if text in ("Forbidden", "Bad Request", "Not Found") and not code else text
    elif status is not None:
        text = str(getattr(error, "message", "") or text)
    text = without_secrets(text).strip().rstrip(".")
    return ": ".join(filter(None, (about, text))) or type(error).__name__


_NO_CREDENTIALS = ("ProfileNotFound", "TokenRetrievalError", "SSOTokenLoadError")
"""Classes of libraries, beside those with "Credential" in their names."""
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_WRONG = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken")


def _explained(name: str, error: BaseException, attempts: int, writes: bool) -> Exception:
    """An error that names the object, what the store said, and what to do."""
    status, code, kind, said = _status(error), _code(error), type(error).__name__, _said(error)
    if isinstance(error, StoreError):
        return error
    if status == 412 or kind in ("FileExpired", "ResourceModifiedError"):
        return changed(name)
    scheme = str(scheme_of(name))
    where = CREDENTIALS.get("az" if scheme == "abfs" else scheme, "")
    places = f"; the credentials come from {where}" if where else ""
    number, why = errno.EACCES, said
    if "Credential" in kind or kind in _NO_CREDENTIALS:
        places = f" in one of their places: {where}" if where else ""
        why = f"no credentials: {said}; give them{places}"
    elif code in _EXPIRED:
        why = f"the credentials have expired ({said}); renew them, and start the run again"
    elif code in _WRONG:
        why = f"the credentials are wrong ({said}){places}"
    elif code == "NoSuchBucket":
        number, bucket = errno.ENOENT, rest_of(name).partition("/")[0]
        why = f"there is no bucket {bucket} ({said}); check its name, and AWS_ENDPOINT_URL if it is of "
        why += "another server than Amazon's"
    elif status in (401, 403) or isinstance(error, PermissionError):
        verb, rights = "read", "to list the bucket and to read its objects"
        if writes:
            verb, rights = "write", "to list the bucket, and to read, write and delete objects"
        why = f"no right to {verb} it ({said}); ask the owner for the right {rights}{places}"
    elif status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "it is not there", name)
    elif attempts:
        kept = "what is on this machine is kept"
        if not writes:
            kept = f"start the run again when it works; {kept}"
        number, why = errno.EIO, f"the store failed {attempts} times, last with: {said}; {kept}"
    else:
        number = errno.EIO
    return StoreError(number, why, name)


def changed(name: str) -> StoreError:
    """The error about an object that is not the one that was listed."""
    what = "it has changed while it was read; start the run again, which reads all of it anew"
    return StoreError(errno.ESTALE, what, name)
