"""What every rank of a test needs, made once in the server that ranks are forked from."""

import gc

import numpy.ma  # noqa: F401
import torch._dynamo
import torch.profiler  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import launcher.objectives.next_token
import launcher.run.run  # noqa: F401
import tests.distributed.launching  # noqa: F401  # with pytest, whose import takes 15 MiB
from launcher.recipe.decode import decode

get_checkpoint_conversion_mapping("llama")  # compiles about 900 regular expressions
decode({})  # pydantic builds its validators
gc.collect()
gc.freeze()  # collections in the ranks do not scan what is imported
