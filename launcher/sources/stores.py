"""Files in object stores and on web servers, through fsspec: what is there, ranges of bytes, writing.

A name is `scheme://bucket/key`. A process asks a store once for each listing. It reads an object only as
long as the object is the one that was listed. A request that fails for a passing reason is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import io
import itertools
import logging
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from launcher.errors import RecipeError, closest, first_line
from launcher.libraries.extras import missing_extra

logger = logging.getLogger(__name__)

_MODULES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "https": "aiohttp",
    "http": "aiohttp",
    "hf": "huggingface_hub",
}
"""What reads the names of a scheme."""
SCHEMES = ", ".join(f"{scheme}://" for scheme in _MODULES)
_WEB = ("https", "http")
_HUB_PAGE = r"(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/]+)"
"""A page of a model or data set, whose files have `/resolve/` in their addresses."""
_SECRETS = {
    *("x-amz-signature", "x-amz-credential", "x-amz-security-token", "x-goog-signature"),
    *("x-goog-credential", "awsaccesskeyid", "signature", "sig", "token", "access_token", "key"),
    *("api_key", "apikey", "auth", "authorization", "password", "secret"),
}
"""Parameters of an address that let whoever has the address read the file."""
_CREDENTIALS = {
    "s3": "AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or `az login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}
"""Where credentials are looked for."""
_VERSIONS = (
    *("generation", "ETag", "etag", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated"),
)
"""What stores say of an object that changes with its content, the most exact first."""

ATTEMPTS = 8
"""Of a request that fails for a passing reason, with pauses of a minute together. Libraries of stores have
their own attempts inside each."""
_OWN_ATTEMPTS = {"gs": 2, "az": 2, "abfs": 2}
"""Of libraries that try for a minute themselves."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts. Each pause is twice the one before."""
_MOST_OF_REQUEST = 16 << 20
"""Bytes of a request: what is read again if a connection breaks."""
AHEAD = 4 << 20
"""Bytes that a reader of a whole file asks for at once."""
_SMALL = 256 << 10
"""Bytes of an object that is read by one request."""
_NEAR = 1000
"""Names that are compared with a mistyped one: those of one request."""


class StoreError(OSError):
    """A store does not answer, or refuses. `filename` is the name of the object, `strerror` what the store
    said and what to do."""


class Known(NamedTuple):
    """What a store says of an object."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content; empty: a web server does not say."""
    ranges: bool = True
    """Whether a range of bytes can be asked for."""


class Entry(NamedTuple):
    """An object of a store, or a folder: names with slashes that begin alike."""

    name: str
    known: Known | None
    """None: a folder."""


# Names


def scheme_of(name: str) -> str | None:
    """What stands before `://`; None: the name is that of a local file."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", name)
    return found[1].lower() if found else None


def problem_of(name: str) -> str | None:
    """What is wrong with a name that has a scheme, without a secret in it; None: nothing."""
    scheme, shown = scheme_of(name), without_secrets(name)
    if scheme == "file":
        return f"{shown}: write the path alone, without file://"
    if scheme not in _MODULES:
        near = closest(str(scheme), _MODULES, similar=0.5)
        meant = f"; did you mean {near}://?" if near else ""
        return f"{shown}: unknown scheme {scheme}://{meant}; known are paths and {SCHEMES}"
    if shown != name or _has_password(name):
        what = "the run records it, so it may hold no secret"
        if scheme in _WEB:
            what += "; download the file, or read it as s3://, gs:// or az:// with credentials"
        elif scheme in _CREDENTIALS:
            what += f"; credentials come from {_CREDENTIALS[scheme]}"
        return f"{shown}: {what}"
    if name != f"{scheme}://{_rest(name)}" or not _rest(name).strip("/"):
        return f"{shown}: must be {scheme}://BUCKET/KEY, in small letters before ://"
    if scheme in _WEB and (page := re.match(_HUB_PAGE, _rest(name))) and "/resolve/" not in name:
        return f"no such file: {shown}: that is an address of the hub; write {page[1]}"
    if scheme in _WEB and _is_pattern(urlsplit(name).path):
        return f"{shown}: a web server lists no files; name each one"
    return None


def _has_password(name: str) -> bool:
    authority = _rest(name).partition("/")[0]
    return ":" in authority.rpartition("@")[0]


def _rest(name: str) -> str:
    return name.partition("://")[2]


def without_secrets(text: str) -> str:
    """A text with stars in place of passwords and signatures of addresses."""
    if "://" not in text:
        return text
    text = re.sub(r"(://)[^/\s@'\"]*:[^/\s@'\"]*@", r"\1***@", text)
    names = "|".join(map(re.escape, sorted(_SECRETS)))
    return re.sub(
        rf"([?&;](?:{names})=)(?!\*\*\*)[^&\s'\"\],;]+", r"\1***", text, flags=re.IGNORECASE
    )


def path_of(name: str) -> str:
    """The part of a name that ends in the suffix of the file: without the parameters of an address."""
    return urlsplit(name).path if scheme_of(name) in _WEB else name


def refusal(name: str) -> str | None:
    """What is wrong with a name that has a scheme, or what must be installed to read it; None: nothing."""
    if (problem := problem_of(name)) is not None:
        return problem
    missing = missing_extra(_MODULES[str(scheme_of(name))])
    return None if missing is None else f"{name}: {missing}"


def require_store(name: str) -> None:
    """Raises RecipeError if the name cannot be read (`refusal`)."""
    if (problem := refusal(name)) is not None:
        raise RecipeError(problem)


def _is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


# Requests


def _options(scheme: str) -> dict[str, Any]:
    if scheme == "s3" and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        return {"config_kwargs": {"retries": {"mode": "standard"}}}
    if scheme in _WEB:
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
        made.retries = 1  # botocore tries several times inside, and `_ask` around
    return made


def _filesystem(name: str) -> Any:
    require_store(name)
    return _of_process(str(scheme_of(name)), os.getpid())


def _key(name: str) -> str:
    """A name as its file system has it."""
    return name if scheme_of(name) in _WEB else _rest(name).rstrip("/")


_T = TypeVar("_T")


class _ShortError(Exception):
    """A store sent fewer bytes than were asked for."""


def _ask(name: str, request: Callable[[], _T], *, writes: bool = False) -> _T:
    """The result of a request about `name`, made again if it fails for a passing reason. writes: what it
    asks a right for. Raises FileNotFoundError and StoreError."""
    for attempt in itertools.count(1):
        try:
            return request()
        except RecipeError:
            raise
        except Exception as error:  # of libraries of stores: many classes
            cause = _cause(error)
            passing = _passes(cause)
            if not passing or attempt >= _OWN_ATTEMPTS.get(str(scheme_of(name)), ATTEMPTS):
                raise _explained(name, cause, attempt if passing else 0, writes) from None
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1)) * random.uniform(0.75, 1)
            logger.info(f"{name}: {_said(cause)}; asking again in {pause:.1f} s")
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
    *("ConnectionError", "TimeoutError", "Timeout", "IncompleteRead", "_ShortError"),
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
    if isinstance(error, _ShortError):
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


def _explained(name: str, error: BaseException, attempts: int, writes: bool) -> Exception:
    """An error that names the object, what the store said, and what to do."""
    status, code, kind = _status(error), _code(error), type(error).__name__
    scheme = str(scheme_of(name))
    where = _CREDENTIALS.get("az" if scheme == "abfs" else scheme, "")
    said, number = _said(error), errno.EACCES
    if isinstance(error, StoreError):
        return error
    if "Credential" in kind or kind in (
        "ProfileNotFound",
        "TokenRetrievalError",
        "SSOTokenLoadError",
    ):
        why = f"no credentials: {said}"
        hint = f"give them in one of their places: {where}" if where else "give credentials"
    elif code in (
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "TokenRefreshRequired",
    ):
        why, hint = f"the credentials have expired ({said})", "renew them, and start the run again"
    elif code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        why, hint = f"the credentials are wrong ({said})", f"they come from {where}"
    elif code == "NoSuchBucket":
        bucket, number = _rest(name).partition("/")[0], errno.ENOENT
        why = f"there is no bucket {bucket} ({said})"
        hint = "check its name, and AWS_ENDPOINT_URL if it is of another server than Amazon's"
    elif status in (401, 403) or isinstance(error, PermissionError):
        why = f"no right to {'write' if writes else 'read'} it ({said})"
        hint = "ask the owner for the right to list the bucket and to read its objects"
        if writes:
            hint = "ask the owner for the right to list the bucket, and to read, write and delete objects"
        hint += f"; the credentials come from {where}" if where else ""
    elif status == 412 or kind in ("FileExpired", "ResourceModifiedError"):
        return changed(name)
    elif status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "it is not there", name)
    elif attempts:
        number = errno.EIO
        why = f"the store failed {attempts} times, last with: {said}"
        hint = "start the run again when it works; what was tokenized is kept"
        if writes:
            hint = "what is on this machine is kept"
    else:
        return StoreError(errno.EIO, said, name)
    return StoreError(number, f"{why}; {hint}", name)


def changed(name: str) -> StoreError:
    """The error about an object that is not the one that was listed."""
    what = "it has changed while it was read; start the run again, which reads all of it anew"
    return StoreError(errno.ESTALE, what, name)


def _known(info: dict[str, Any]) -> Known:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Known(int(info.get("size") or 0), version)


def _entry(scheme: str, info: dict[str, Any]) -> Entry:
    name = f"{scheme}://{info['name'].removeprefix(f'{scheme}://').rstrip('/')}"
    return Entry(name, None if info["type"] == "directory" else _known(info))


# What is there


@functools.lru_cache(maxsize=1 << 14)
def look(name: str) -> Entry | None:
    """The object or folder of this name; None: there is none. Raises StoreError."""
    fs = _filesystem(name)
    try:
        info = _ask(name, lambda: fs.info(_key(name)))
    except FileNotFoundError:
        return None
    except StoreError as error:
        raise _of_listing(fs, name) or error from None
    if scheme_of(name) in _WEB:
        return Entry(name, _of_web(fs, name, info))
    return _entry(str(scheme_of(name)), {**info, "name": _key(name)})


def _of_listing(fs: Any, name: str) -> StoreError | None:
    """The error of a listing beside an object: an answer about one object says only 400 or 403."""
    if scheme_of(name) != "s3":
        return None
    bucket, _, key = _key(name).partition("/")
    first = {"Bucket": bucket, "Prefix": key, "MaxKeys": 1}
    try:
        _ask(name, lambda: fs.call_s3("list_objects_v2", **first))
    except (StoreError, FileNotFoundError) as error:
        return error if isinstance(error, StoreError) else None
    return None


def _of_web(fs: Any, name: str, info: dict[str, Any]) -> Known:
    if info.get("size") is None:
        what = "the server does not say how large it is; download the file, and name its path"
        raise StoreError(errno.EINVAL, what, name)
    known = _known(info)
    if known.size < 2:
        return known

    def second_byte() -> bool:
        try:
            with fs.open(name, size=known.size, cache_type="none") as file:
                file.seek(1)
                return len(file.read(1)) == 1
        except ValueError:  # the server sent the whole file
            return False

    return known._replace(ranges=bool(info.get("partial", True)) and _ask(name, second_byte))


@functools.lru_cache(maxsize=1 << 10)
def inside(folder: str) -> tuple[Entry, ...]:
    """The objects and folders in a folder, sorted by name. Raises StoreError."""
    fs, scheme = _filesystem(folder), str(scheme_of(folder))
    try:
        infos = _ask(folder, lambda: fs.ls(_key(folder), detail=True))
    except FileNotFoundError:
        return ()
    return _listed(scheme, folder, infos)


def below_now(folder: str) -> tuple[Entry, ...]:
    """The objects below a folder at any depth, sorted by name. Raises StoreError."""
    fs, scheme = _filesystem(folder), str(scheme_of(folder))
    try:
        infos = _ask(folder, lambda: fs.find(_key(folder), detail=True)).values()
    except FileNotFoundError:
        return ()
    return tuple(entry for entry in _listed(scheme, folder, infos) if entry.known is not None)


below = functools.lru_cache(maxsize=1 << 10)(below_now)
"""The same, asked once."""


def _listed(scheme: str, folder: str, infos: Iterable[dict[str, Any]]) -> tuple[Entry, ...]:
    """Without the empty objects that some programs make for folders."""
    real = (each for each in infos if each["type"] == "directory" or each["name"][-1:] != "/")
    entries = {entry.name: entry for entry in (_entry(scheme, info) for info in real)}
    start = f"{folder.rstrip('/')}/"
    return tuple(entries[name] for name in sorted(entries) if name.startswith(start))


def forget() -> None:
    """Lets the next listings be asked of the stores again."""
    for each in (look, inside, below):
        each.cache_clear()


def matching(pattern: str) -> list[Entry]:
    """The objects and folders that a pattern names, sorted by name, as `glob.glob` would for files: `*`,
    `?` and `[` match in a name, `**` stands for any number of folders, and none of them for a name that
    begins with a dot. Raises StoreError, and RecipeError if the name is wrong."""
    require_store(pattern)
    scheme, pattern = str(scheme_of(pattern)), pattern.rstrip("/")
    if scheme in _WEB or not _is_pattern(_rest(pattern)):
        found = look(pattern)
        return [] if found is None else [found]
    bucket, *parts = _rest(pattern).split("/")
    matches = sorted(_matching(f"{scheme}://{bucket}", parts), key=lambda entry: entry.name)
    if parts and parts[-1] == "**":  # in the order of a folder, which glob names first
        matches.sort(key=lambda entry: entry.name.split("/"))
    if not matches and (literal := look(pattern)) is not None:
        return [literal]
    return matches


def _matching(base: str, parts: list[str]) -> Iterator[Entry]:
    literal = list(itertools.takewhile(lambda part: not _is_pattern(part), parts))
    base, parts = "/".join([base, *literal]), parts[len(literal) :]
    if not parts:
        if (found := look(base)) is not None:
            yield found
        return
    if "**" in parts:
        expression, entries = re.compile("".join(_expression(parts))), below(base)
        # What is in the folders is matched by a last ** itself
        for entry in entries if parts[-1] == "**" else _with_folders(base, entries):
            if expression.fullmatch(entry.name[len(base) + 1 :]):
                yield entry
        return
    mask, *rest = parts
    for entry in inside(base):
        last = entry.name.rpartition("/")[2]
        if not fnmatch.fnmatchcase(last, mask) or (last[0] == "." and mask[0] != "."):
            continue
        if not rest:
            yield entry
        elif entry.known is None:
            yield from _matching(entry.name, rest)


def _expression(parts: list[str]) -> Iterator[str]:
    """Regular expressions of names below a folder."""
    for at, part in enumerate(parts, start=1):
        if part == "**":
            yield r"(?:[^/.][^/]*/)*" if at < len(parts) else r"(?:[^/.][^/]*/)*[^/.][^/]*"
            continue
        yield "" if part[0] == "." else r"(?!\.)"
        yield (
            fnmatch.translate(part).removeprefix("(?s:").removesuffix(")\\Z").replace(".*", "[^/]*")
        )
        yield "/" if at < len(parts) else ""


def _with_folders(base: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    folders = set[str]()
    for entry in entries:
        yield entry
        above = entry.name.rpartition("/")[0]
        while len(above) > len(base) and above not in folders:
            folders.add(above)
            yield Entry(above, None)
            above = above.rpartition("/")[0]


def nearest(name: str) -> str | None:
    """The object that `name`, which does not exist, is probably a misspelling of; None: none is known."""
    if scheme_of(name) != "s3" or _is_pattern(name):
        return None
    bucket, _, key = _key(name).partition("/")
    folder, slash, last = key.rpartition("/")
    request = {"Bucket": bucket, "Prefix": folder + slash, "Delimiter": "/", "MaxKeys": _NEAR}
    try:
        found = _ask(name, lambda: _filesystem(name).call_s3("list_objects_v2", **request))
    except OSError:
        return None
    keys = [each["Key"] for each in found.get("Contents", ())]
    keys += [each["Prefix"].rstrip("/") for each in found.get("CommonPrefixes", ())]
    near = closest(last, [each.rpartition("/")[2] for each in keys])
    return None if near is None else f"s3://{bucket}/{folder}{slash}{near}"


# Reading


class _Reader(io.RawIOBase):
    """The bytes of an object, a request for each read; all bytes come from the same version. Raises
    StoreError."""

    def __init__(self, name: str, known: Known) -> None:
        self._name, self._known = name, known
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._known.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._known.size - self._at))
        done = 0
        while done < wanted:
            end = self._at + min(_MOST_OF_REQUEST, wanted - done)
            data = _ask(self._name, functools.partial(self._fetch, self._at, end))
            view[done : done + len(data)] = data
            done += len(data)
            self._at += len(data)
        return done

    def readall(self) -> bytes:
        return self.read(max(0, self._known.size - self._at)) or b""

    def _fetch(self, start: int, end: int) -> bytes:
        if self._file is None:
            self._file = self._opened()
        try:
            self._file.seek(start)
            data = bytes(self._file.read(end - start))
            if len(data) != end - start:
                raise _ShortError(f"{len(data):,} of {end - start:,} bytes came")
            return data
        except BaseException:
            self._file = None  # a new connection for the next attempt
            raise

    def _opened(self) -> Any:
        fs, (size, version, _) = _filesystem(self._name), self._known
        key, scheme = _key(self._name), scheme_of(self._name)
        if scheme in _WEB:
            # The parameter has a strong version only; a weak one never matches
            strong = version.startswith('"')
            headers = {"headers": {"If-Match": version}} if strong else {}
            return fs.open(self._name, size=size, cache_type="none", **headers)
        if scheme == "s3":  # without a request for what is known
            file = fs.open(key, size=size, cache_type="none")
            file.details = {"name": key, "size": size, "ETag": version, "type": "file"}
            file.read_kw = {"IfMatch": version}
            return file
        file = fs.open(key, cache_type="none")
        if _known(file.details) != self._known:
            raise changed(self._name)
        return file


def open_object(name: str, known: Known | None, *, ahead: int) -> BinaryIO:
    """The bytes of an object, from the beginning; `seek` reads a range. known: as it was listed; None: as
    it is. ahead: bytes that are asked for at once; 0: those of each read. Raises StoreError or
    FileNotFoundError."""
    if known is None:
        found = look(name)
        if found is None or found.known is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there", name)
        known = found.known
    if known.ranges and known.size <= _SMALL:
        return io.BytesIO(_content(name, known))
    reader = _Reader(name, known) if known.ranges else _CopyReader(name, known)
    return cast(BinaryIO, io.BufferedReader(reader, ahead) if ahead else reader)


@functools.lru_cache(maxsize=4)
def _content(name: str, known: Known) -> bytes:
    """A small object, whose beginning is looked at before it is read."""
    return _Reader(name, known).readall()


class _CopyReader(_Reader):
    """The bytes of a file whose server sends whole files only, which is read from a copy."""

    def _fetch(self, start: int, end: int) -> bytes:
        return os.pread(_copy(self._name, self._known).fileno(), end - start, start)


@functools.lru_cache(maxsize=1)
def _copy(name: str, known: Known) -> Any:
    """A copy that has no name. The file is looked at before it is read."""
    fs, copy = _filesystem(name), tempfile.TemporaryFile()  # noqa: SIM115 (closed with the cache)

    def download() -> None:
        copy.seek(0)
        copy.truncate()
        fs.get_file(name, copy)
        copy.flush()
        if copy.tell() != known.size:
            raise _ShortError(f"{copy.tell():,} of {known.size:,} bytes came")

    _ask(name, download)
    return copy


# Writing

READ_ONLY = (*_WEB, "hf")
"""Schemes of what is only read: a web server takes no files, and the hub makes a commit of each."""
_PART = 32 << 20
"""Bytes of a request that writes."""
_MOST_PARTS = 9_000
"""Of an object; stores take 10,000."""


def write_object(name: str, content: Callable[[], Iterable[bytes]], size: int) -> None:
    """Writes an object, which readers see whole or not at all.

    content: begins the bytes anew for each attempt. size: how many they are. Raises StoreError, and
    what `content` raises.
    """
    fs, part = _filesystem(name), max(_PART, -(-size // _MOST_PARTS))

    def attempt() -> None:
        file = fs.open(_key(name), "wb", block_size=part)
        try:
            for piece in content():
                file.write(piece)
        except BaseException:  # `close` would write what there is
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    _ask(name, attempt, writes=True)


def read_object(name: str) -> bytes:
    """The content of a small object as it is now, whatever was listed. Raises StoreError and
    FileNotFoundError."""
    return _ask(name, lambda: bytes(_filesystem(name).cat_file(_key(name))))


def remove_object(name: str) -> None:
    """Removes an object, if it is there. Raises StoreError."""
    with contextlib.suppress(FileNotFoundError):
        _ask(name, lambda: _filesystem(name).rm_file(_key(name)), writes=True)
