"""launcher/train.py, whose requests to a store name the rank."""

import os
import runpy

from tests import REPOSITORY

os.environ["AWS_SDK_UA_APP_ID"] = f"rank{os.environ.get('RANK', 0)}"
runpy.run_path(str(REPOSITORY / "launcher/train.py"), run_name="__main__")
