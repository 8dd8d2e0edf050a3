"""A run on token ids that another tool wrote learns what a run on rows with the same ids does."""

import json
import struct

import numpy as np
import pytest

from tests.distributed.launching import forked, run  # noqa: F401
