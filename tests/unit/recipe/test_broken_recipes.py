"""Invalid recipes: which key and rule each breaks, and in messages.txt the words."""

import itertools
import random
import re
from pathlib import Path

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.recipe.decode import decode, default_of, dotted, keys, merged
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.rules import NEEDS, excluded_by
from tests import REPOSITORY
from tests.unit.small_recipe import SMALL, says

# ruff: noqa: E501
# fmt: off
IN_A_FILE = r"""
14 | optimiser: {} | 14:optimiser/unknown
3 |   max_stepz: 10 | 3:run.max_stepz/unknown
13 |   micro_batchsize: 8 | 13:batch.micro_batchsize/unknown
11 | bach: | 11:bach/unknown
14 | strategy: {mixed_precision: {x: 1}} | 14:strategy.mixed_precision.x/unknown
3 |   learning_rate: 1 | 1:run.max_steps/missing 3:run.learning_rate/unknown
14 | schedule: {betas: [0.9, 0.95]} | 14:schedule.betas/unknown
14 | 3: x | 14:3/unknown
14 | on: x | 14:on/unknown
14 | [a]: x | 14:not-yaml
2 |  | 1:run.name/missing
9 |  | 8:data.train/missing
13 |  | 11:batch.micro_batch_size/missing
3 |  | 1:run.max_steps/missing
3 |   max_steps: true | 3:run.max_steps/type
3 |   max_steps: "10" | 3:run.max_steps/type
3 |   max_steps: 0 | 3:run.max_steps/range
3 |   max_steps: 10\n  hang_timeout: 10000000000 | 4:run.hang_timeout/range
3 |   max_steps: 10\n  deterministic: 1 | 4:run.deterministic/type
3 |   max_steps: 10\n  epochs: 1 | 4:run.epochs/not-with-run.max_steps
3 |   max_steps: 10\n  seed: 1\n  seed: 2 | 5:not-yaml
2 |   name: 3 | 2:run.name/type
2 |   name: a/b | 2:run.name/form
2 |   name: .. | 2:run.name/form
9 |   train: 3 | 9:data.train/type
9 |   train: [data.txt, 3] | 9:data.train[1]/type
9 |   train: [] | 9:data.train/empty
9 |   train: [data.txt, ""] | 9:data.train[1]/form
9 |   train: [dat.txt] | 9:data.train[0]/no-such-path
10 |   tokenizer: gone | 10:data.tokenizer/no-such-path
10 |  | 8:data.tokenizer/missing
14 | strategy: {mixed_precision: {float8: tensorwise}} | 14:strategy.mixed_precision.float8/form
14 | strategy: {mixed_precision: {float8: row}} | 14:strategy.mixed_precision.float8/choice
14 | strategy: {mixed_precision: {float8: true}} | 14:strategy.mixed_precision.float8/choice
14 | strategy: {mixed_precision: {float8: rowwise, param_dtype: float16}} | 14:strategy.mixed_precision.float8/needs-strategy.mixed_precision.param_dtype
14 | strategy: {tensor_parallel_size: 2, mixed_precision: {float8: rowwise}} | 14:strategy.mixed_precision.float8/needs-strategy.tensor_parallel_size
14 | lora: {rank: 4}\nstrategy: {mixed_precision: {float8: rowwise}} | 15:strategy.mixed_precision.float8/not-with-lora
14 | strategy: ddp | 14:strategy/type
14 | strategy: | 14:strategy/type
14 | strategy: {kind: dpp} | 14:strategy.kind/choice
14 | optimizer: {name: sgd, eps: 1.0e-6} | 14:optimizer.eps/needs-optimizer.name
14 | strategy:\n  kind: ddp\n  replicate: 2 | 16:strategy.replicate/needs-strategy.kind
14 | strategy:\n  kind: ddp\n  mixed_precision: {reduce_dtype: bfloat16} | 16:strategy.mixed_precision.reduce_dtype/needs-strategy.kind
6 |  | 5:model.config.model_type/choice
7 |     vocab_size: 200 | 7:model.config.vocab_size/too-small-for-bytes
7 |     attn_implementation: eager | 7:model.config.attn_implementation/set-elsewhere
4 | model:\n  path: owner/name | 7:model.config.model_type/not-with-model.path
3 |   max_steps: ${run.nme} | 3:run.max_steps/interpolation
3 |   max_steps: ${oc.env:NO_SUCH} | 3:run.max_steps/interpolation
3 |   max_steps: ${x:1} | 3:run.max_steps/interpolation
2 |   name: a${b | 2:run.name/interpolation
2 |   name: ${run.dir}\n  dir: ${run.name} | 2:run.name/interpolation 3:run.dir/interpolation
7 |     x: {a: '${model.config.y}'}\n    y: {b: '${model.config.x}'} | 7:model.config.x.a/interpolation 8:model.config.y.b/interpolation
6 | 	model_type: llama | 6:not-yaml
14 | strategy: {kind: ddp | 15:not-yaml
14 | strategy: kind: ddp | 14:not-yaml
9 |   train: *.txt | 9:not-yaml
14 | ---\nrun: {} | 14:not-yaml
14 | strategy: &a {kind: *a} | 14:not-yaml
14 | "run\\0": 1 | 14:not-yaml
2 |   name: "\\ud800" | 2:run.name/not-text
2 |   name: ${nope} | 2:run.name/interpolation
3 |   max_steps: 0100 | 3:run.max_steps/type
3 |   max_steps: 1:30 | 3:run.max_steps/type
14 | lora: !!set {a} | 14:not-yaml
3 |   max_steps: !!int x | :not-yaml
"""
"""A line of SMALL, which has 13, the text in its place, and for each problem its line, key and rule."""
SHORT = {
    "@prefer": "data.kind=preference & preference.loss=dpo",
    "@teach": "distillation={teacher: a/b}",
    "@round": "distillation={teacher: a/b, answers: student} & data.kind=chat & data.packing=false",
    "@masked": "data.kind=text & model.task=masked_lm & data.packing=false",
    "@reward": "data.kind=preference & model.task=reward",
    "@vectors": "data.kind=retrieval & model.task=embedding",
    "@classify": "data.kind=classification & model.task=sequence_classification",
    "@base": "model.config=null & model.path=owner/name",
    "@long": "é" * 128,
}
IN_ARGUMENTS = r"""
| rum.max_steps=3 | rum/unknown
| seed=3 | /unknown
| learning_rate=1e-4 | /unknown
| optimizer.lr=1e-4 | /unknown
| lora.r=8 | /unknown
| batch.gradient_accumulation_steps=4 | /unknown
| data.validation_split=-1 | /range
| data.validation_split=false | /type
| data.validation_split=1 | /range
| data.validation_split=2% | /type
| data.validation_split=0.1 & data.builder=a.b:c & data.train=null | data.validation_split/not-with-data.builder
| model.config.eos_token_id=[2,300] | /beyond-vocab_size
| model.config=null & model.path=gpt3 | /no-such-path
| profile.start_step=3 | profile.steps/missing
| activation_checkpointing=full | /type
| strategy.cpu_offload=true | /type
| optimizer.learning_rate=fast | /type
| optimizer.learning_rate="1e-4" | /type
| optimizer.betas=[0.9] | optimizer.betas[1]/missing
| optimizer.betas=[0.9,0.95,0.99] | /length
| optimizer.betas=[0.9,x] | optimizer.betas[1]/type
| run.seed.x=3 | run.seed/type
| data.workers=-1 | /range
| data.workers=2000 | /range
| run.name=??? | /form
| run.name=@long | /form
| run.dir=a/@long | /form
| run.name="\u202e\u2066" | /form
| run.dir="runs/a\u202eb" | /form
| run.dir="a\0b" | /not-text
| data.train="a\0b" | /not-text
| data.train="a\e[31m" | data.train[0]/no-such-path
| run.timeout=10000000000000000 | /range
| run.init_timeout=2592001 | /range
| run.init_timeout=1e30 | /type
| slurm.lead=2592001 | /range
| run.max_steps=9223372036854775808 | /range
| run.max_steps=１２ | /type
| optimizer.learning_rate=1e300 | /range
| slurm.nodes=1-1000000 | /type
| slurm.time="１２" | /form
| slurm.host_memory="１２G" | /form
| activation_checkpointing={mode: selective, budget: 0GiB} | activation_checkpointing.budget/form
| activation_checkpointing={mode: selective, budget: １２GiB} | activation_checkpointing.budget/form
| schedule.min_ratio=1.5 | /range
| optimizer.betas=[0.9,1] | optimizer.betas[1]/range
| optimizer.eps=0 | /range
| optimizer.learning_rate=.nan | /range
| run.dir=~/runs | /form
| data.train=[data.txt,b*.txt] | data.train[1]/no-such-path
| data.train=[data.txt,s4://bucket/a.jsonl] | data.train[1]/store
| data.train=s3:// | data.train[0]/store
| data.train=s3://me:word@bucket/a.jsonl | data.train[0]/store
| data.validation=https://host/a.jsonl?sig=word | data.validation[0]/store
| data.validation={a: file:///a.jsonl} | data.validation.a[0]/store
| data.train=https://host/*.jsonl | data.train[0]/store
| model.config=null & model.path=s4://bucket/model | model.path/store
| model.config=null & model.path=hf://owner/model | model.path/no-such-path
| model.config=null & model.path=s3://bucket/model?token=secret | model.path/store
| checkpoint.copy_to=s3://bucket | checkpoint.copy_to/store
| checkpoint.copy_to=hf://owner/name/runs/x | checkpoint.copy_to/store
| checkpoint.copy_to=s3://bucket/*/x | checkpoint.copy_to/store
| checkpoint.copy_to=runs/small/checkpoints | checkpoint.copy_to/copy-in-run
| checkpoint.copy_to=copies/x & checkpoint.every_steps=null | checkpoint.copy_to/needs-checkpoint.every_steps
| checkpoint.copy_bandwidth=200MB | checkpoint.copy_bandwidth/needs-checkpoint.copy_to
| checkpoint.copy_to=copies/x & checkpoint.copy_bandwidth=200 | checkpoint.copy_bandwidth/form
2 | batch.global_batch_size=60 | /not-a-multiple
1 | batch.global_batch_size=4 | /not-a-multiple
8 | batch.micro_batch_size=auto & batch.global_batch_size=60 | /not-a-multiple
4 | strategy.replicate=3 | /does-not-divide-ranks
4 | strategy.pipeline_parallel_size=0 | /range
4 | strategy.pipeline_parallel_size=3 | /does-not-divide-ranks
4 | strategy.pipeline_parallel_size=3 & batch.global_batch_size=60 | strategy.pipeline_parallel_size/does-not-divide-ranks
4 | strategy.pipeline_parallel_size=2 & strategy.kind=ddp | strategy.pipeline_parallel_size/needs-strategy.kind
4 | strategy.pipeline_parallel_size=2 & strategy.replicate=4 | strategy.replicate/does-not-divide-ranks
4 | strategy.pipeline_parallel_size=2 & batch.global_batch_size=60 | /not-a-multiple
2 | strategy.pipeline_parallel_size=2 & model.chunked_loss=false | strategy.pipeline_parallel_size/needs-model.chunked_loss
2 | strategy.pipeline_parallel_size=2 & model.builder=a.b:c & model.config=null | strategy.pipeline_parallel_size/not-with-model.builder
2 | strategy.pipeline_schedule=interleaved_1f1b | /needs-strategy.pipeline_parallel_size
2 | strategy.pipeline_blocks=[1, 3] | /needs-strategy.pipeline_parallel_size
2 | strategy.pipeline_parallel_size=2 & strategy.pipeline_blocks=[1, 2, 1] | /one-for-each-stage
4 | strategy.pipeline_parallel_size=2 & strategy.pipeline_schedule=interleaved_1f1b & strategy.pipeline_blocks=[1, 3] | /one-for-each-stage
2 | strategy.pipeline_parallel_size=2 & strategy.pipeline_blocks=[0, 4] | strategy.pipeline_blocks[0]/range
2 | strategy.pipeline_parallel_size=2 & strategy.pipeline_schedule=zero_bubble | strategy.pipeline_schedule/choice
4 | strategy.context_parallel_size=-2 | /range
4 | strategy.context_parallel_size=3 | /does-not-divide-ranks
4 | strategy.context_parallel_size=3 & batch.global_batch_size=60 | strategy.context_parallel_size/does-not-divide-ranks
4 | strategy.context_parallel_size=4 & strategy.context_parallel_ring=3 | strategy.context_parallel_ring/does-not-divide
4 | strategy.context_parallel_ring=2 | /needs-strategy.context_parallel_size
4 | strategy.context_parallel_ring=0 | /range
| strategy.tensor_parallel_size=two | /type
| strategy.expert_parallel_size=null | /type
2 | strategy.context_parallel_size=2 & data.sequence_length=127 | /not-a-multiple
4 | strategy.context_parallel_size=2 & batch.global_batch_size=60 | /not-a-multiple
| strategy.cp_size=2 | /unknown
| strategy.ep_size=2 | /unknown
4 | strategy.expert_parallel_size=3 | /does-not-divide-ranks
4 | strategy.expert_parallel_size=4 & strategy.replicate=2 | strategy.expert_parallel_size/does-not-divide-ranks
| strategy.kind=ddp & strategy.expert_parallel_size=2 | /needs-strategy.kind
| strategy.expert_parallel_size=2 & optimizer.name=adafactor | strategy.expert_parallel_size/needs-optimizer.name
| strategy.expert_parallel_size=2 & activation_checkpointing={mode: selective, budget: 0.5} | activation_checkpointing.budget/needs-strategy.expert_parallel_size
| strategy.expert_parallel_size=0 | /range
| strategy.tp_size=2 | /unknown
4 | strategy.tensor_parallel_size=3 | /does-not-divide-ranks
4 | strategy.tensor_parallel_size=4 & strategy.replicate=2 | strategy.tensor_parallel_size/does-not-divide-ranks
4 | strategy.tensor_parallel_size=4 & strategy.context_parallel_size=2 | strategy.tensor_parallel_size/does-not-divide-ranks
4 | strategy.tensor_parallel_size=2 & strategy.context_parallel_size=2 & batch.global_batch_size=60 | /not-a-multiple
| strategy.kind=ddp & strategy.tensor_parallel_size=2 | /needs-strategy.kind
| strategy.tensor_parallel_size=2 & optimizer.name=muon & optimizer.momentum=0.95 | strategy.tensor_parallel_size/needs-optimizer.name
| strategy.tensor_parallel_size=2 & optimizer.state_dtype=int8 | strategy.tensor_parallel_size/needs-optimizer.state_dtype
| strategy.tensor_parallel_size=2 & strategy.expert_parallel_size=2 | strategy.tensor_parallel_size/needs-strategy.expert_parallel_size
| strategy.tensor_parallel_size=2 & model.mlp_tile=8 | model.mlp_tile/needs-strategy.tensor_parallel_size
| strategy.mixed_precision={param_dtype: bfloat16, float8: rowwise} & model.mlp_tile=8 | model.mlp_tile/not-with-strategy.mixed_precision.float8
| lora={rank: 4} & model.router_bias_update_rate=0.001 | model.router_bias_update_rate/not-with-lora
| strategy.tensor_parallel_size=2 & lora={dora: true} | strategy.tensor_parallel_size/not-with-lora.dora
| strategy.tensor_parallel_size=2 & activation_checkpointing={mode: selective, budget: 0.5} | activation_checkpointing.budget/needs-strategy.tensor_parallel_size
4 | strategy={kind: auto, replicate: 3} | strategy.replicate/does-not-divide-ranks
4 | profile={start_step: 1, steps: 1, ranks: [0, 4]} | profile.ranks/no-such-rank
| batch.global_batch_size=60 | /not-a-multiple
| profile={start_step: 9, steps: 3} | profile.steps/beyond-run.max_steps
| model.init=pretrained | /needs-model.path
| model.config.num_attention_heads=0 | /range
| model.config.model_type=[llama] | /choice
| model.config.num_attention_heads=4 & model.config.num_key_value_heads=3 | /does-not-divide
| model.config.attention_dropout=7 | /range
| model.config.rope_theta=x | /range
| model.config.rope_scaling={rope_type: yarn, factor: 0.5} | model.config.rope_scaling.factor/range
| model.config.rms_norm_eps=.nan | /finite
| model.config.num_hidden_layers=4611686018427387904 | /range
| model.config.dtype=float16 | /set-elsewhere
| data={builder: 'a:b', train: null} & model.builder=a.b:c | /not-with-model.config
| model.config={model_type:llama} | /joined-key
| lora={rank:8, alpha: 16} | /joined-key
| data.columns.text={prompt:a} | /joined-key
| model={config: null, path: gone} | model.path/no-such-path
| model={config: null, path: owner/name:train} | model.path/no-such-path
| model.trust_remote_code=true | /needs-model.path
| strategy.mixed_precision=null & model.attention=flash_attention_2 | /needs-16-bits
| model.new_tokens=[a, a, ' b'] | model.new_tokens[1]/twice & model.new_tokens[2]/white-space
| model.new_tokens=[a, '', 3, {b: 1}] | model.new_tokens[1]/form & model.new_tokens[2]/type & model.new_tokens[3]/type
| model.new_tokens=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx | model.new_tokens[0]/too-long
2 | model.new_tokens=[a] & lora={rank: 4} & strategy={kind: fsdp, tensor_parallel_size: 2} | model.new_tokens/needs-strategy.tensor_parallel_size
| data.train=null & data.builder=mine | /form
| data.train=null & data.builder=a.b:c & data.text_column=body | /not-with-data.builder
| data.train=null & data.builder=a.b:c & model.num_labels=3 | /needs-model.task
| data.arguments={x: 1} | /needs-data.builder
| model={config: null, builder: 'a:b'} & data={train: data.txt, tokenizer: null} | data.tokenizer/missing
| model={config: null, builder: 'a:b'} & data.packing=true | /not-with-model
| @prefer & model={config: null, builder: 'a:b'} & data.packing=false | preference/not-with-model.builder
| model={config: null, builder: 'a:b', init: random} & data={builder: 'a:b', train: null} | model.init/not-with-model.builder
| data.kind=classification | /not-for-model.task
| @classify & data.labels=[a,b] & model.num_labels=3 | /not-as-data.labels
| @classify & data.labels=[a,b,a] | /two-classes
| @classify & data.labels=a | /two-classes
| @classify & data.train={a: {files: data.txt, kind: text}} | data.train.a.kind/mixed-losses
| data.labels=[a,b] | /needs-data.kind
| data.token_dtype=uint16 | /needs-data.kind
| data.end_token=1 | /needs-data.kind
| data.message_weights=true | /needs-data.kind
| data.kind=chat & data.message_weights=true & data.loss_on=all | data.message_weights/needs-data.loss_on
| data.loss_weights={answer: 0.5} | /needs-data.kind
| model.qat=int3 | /choice
| model.qat=int4 & lora={rank: 4} | model.qat/not-with-lora
| model.qat=int4 & model.compile=true | model.qat/not-with-model.compile
2 | model.qat=int8 & strategy={kind: fsdp, tensor_parallel_size: 2} | model.qat/needs-strategy.tensor_parallel_size
| model.qat=int8 & strategy.mixed_precision={param_dtype: bfloat16, float8: rowwise} | model.qat/not-with-strategy.mixed_precision.float8
| @teach & model.qat=int8 | model.qat/not-with-distillation
| optimizer={name: lion, eps: 1.0e-6} | optimizer.eps/needs-optimizer.name
| optimizer={name: lion, state_dtype: int8} | optimizer.state_dtype/needs-optimizer.name
| optimizer.name=schedule_free_adamw | /needs-schedule.kind
| optimizer={name: schedule_free_adamw, ema: 0.9} & schedule.kind=constant | optimizer.name/not-with-optimizer.ema
| optimizer.name=schedule_free_adamw & schedule.kind=constant & strategy={kind: ddp, shard_optimizer: true} | optimizer.name/not-with-strategy.shard_optimizer
| optimizer.name=schedule_free_adamw & schedule.kind=constant & strategy.cpu_offload={what: optimizer} | strategy.cpu_offload.what/needs-optimizer.name
| @prefer & data.loss_weights={answer: 0.5} | data.loss_weights/needs-data.kind
| data.kind=chat & data.loss_weights={answer: 0.5} & data.loss_on=all | data.loss_weights/needs-data.loss_on
| data.kind=chat & data.loss_weights={answers: 0.5} | data.loss_weights.answers/choice
| data.kind=chat & data.loss_weights={answer: -1} | data.loss_weights.answer/range
| data.kind=chat & data.loss_weights={} | /empty
| data.kind=chat & data.loss_weights={reasoning: 0, calls: 0, answer: 0} | data.loss_weights/all-zero
| objective.loss=smoothing | /form
| objective.loss=label_smoothing | objective.arguments/missing
| objective={loss: label_smoothing, arguments: {amount: 1}} | objective.arguments.amount/range
| objective={loss: label_smoothing, arguments: {amount: 0.1, power: 2}} | objective.arguments.power/unknown
| data.mixture_unit=tokens | data.mixture_unit/needs-mixture
| data.mixture_stages=[{until_step: 2, weights: {a: 1}}] | data.mixture_stages/needs-mixture
| data.train={a: {files: [data.txt]}} & data.mixture_unit=tokens | data.mixture_unit/needs-weights
| data.train={a: {files: [data.txt], max_epochs: 2}} | data.train.a.max_epochs/needs-weights
| data.train={a: {files: [data.txt], max_epochs: 0}} | data.train.a.max_epochs/range
| data.train={a: {files: [data.txt], loss_weight: 0}} | data.train.a.loss_weight/range
| data.train={a: {files: [data.txt], weight: 1}} & data.mixture_stages=[{until_step: 2, weights: {b: 1}}] | data.mixture_stages.0.weights/other-sources
| data.train={a: {files: [data.txt], weight: 1}} & data.mixture_stages=[{until_step: 2, weights: {a: 0}}] | data.mixture_stages.0.weights/no-source
| data.train={a: {files: [data.txt], weight: 1}} & data.mixture_stages=[{until_step: 2, weights: {a: 1}}, {until_step: 2, weights: {a: 1}}] | data.mixture_stages.1.until_step/order
| data.train={a: {files: [data.txt], weight: 1}} & data.mixture_stages=[{until_step: 2, weights: {a: 1}}] & data.streaming=true | data.mixture_stages/not-with-data.streaming
| data.train={a: {files: [data.txt], loss_weight: 2}} & data.streaming=true | data.train.a.loss_weight/not-with-data.streaming
| distillation={} | distillation.teacher/one-of
| @teach & distillation.teachers={a: c/d} | distillation.teacher/one-of
| distillation={teachers: {a: c/d}} | distillation.teachers/needs-teacher_column
| distillation={teachers: {}} | distillation.teachers/empty
| distillation={teachers: {a b: c/d}} | distillation.teachers.a b/form
| distillation={teachers: {b: c/d}} & data.train={a: {files: [data.txt]}} | distillation.teachers.b/no-source & data.train.a/no-teacher
| distillation={teachers: {a: nowhere}, teacher_column: by} | distillation.teachers.a/no-such-path
| @teach & distillation.teacher_column=by | distillation.teacher_column/needs-distillation.teachers
| @round & distillation.teacher=null & distillation.teachers={a: c/d} & distillation.teacher_column=labels | distillation.teacher_column/of-rounds
| distillation.teacher=nowhere | /no-such-path
| @teach & distillation.top_k=0 | /range
| @teach & distillation.temperature=0 | /range
| @teach & distillation.temperature=1.0e-40 | /range
| @teach & distillation.temperature=1.0e+9 | /range
| @teach & distillation.weight=1.5 | /range
| @teach & distillation.kd_temperature=2 | /unknown
| @teach & data.kind=preference & preference.loss=dpo | distillation/needs-data.kind
| @teach & data.kind=text & data.streaming=true | distillation/pass-not-with-data.streaming
| @teach & data.kind=text & model.task=masked_lm & data.packing=false | distillation/needs-model.task
| @teach & model.chunked_loss=false | distillation/needs-model.chunked_loss
| @teach & distillation.rounds=0 | /range
| @teach & distillation.rounds=2 | distillation.rounds/needs-distillation.answers
| @teach & distillation.answers=teacher | /choice
| @teach & distillation.answers=student & data.packing=false & data.kind=text | distillation.answers/needs-data.kind
| @teach & distillation.answers=student & data.kind=chat & data.packing=true | distillation.answers/needs-data.packing
| @teach & distillation.max_new_tokens=8 | distillation.max_new_tokens/needs-distillation.answers
| @teach & distillation.endpoint=http://a/v1 | distillation.endpoint/needs-distillation.answers
| @round & data.train={a: {files: [data.txt]}} | distillation.answers/not-with-data.train
| @round & data.loss_on=all | distillation.answers/needs-data.loss_on
| @round & data.message_weights=true | distillation.answers/not-with-data.message_weights
| @round & run.on_divergence=rewind | distillation.answers/needs-run.on_divergence
| @round & distillation.answer_temperature=-1 | /range
| @round & distillation.answers=endpoint | distillation.answers/needs-distillation.endpoint
| @round & distillation.answers=folder | distillation.answers/needs-distillation.folder
| @round & distillation.endpoint_model=m | distillation.endpoint_model/needs-distillation.answers
| @round & distillation.answers=endpoint & distillation.endpoint=host:8000 | distillation.endpoint/no-url
| @round & distillation.answers=endpoint & distillation.endpoint=http://me:word@host/v1 | distillation.endpoint/secret
| model.chunked_loss=false & model.keep_logits=true | /needs-model.chunked_loss
| @teach & model.keep_logits=true | /not-with-distillation
| model.keep_logits=maybe | /type
| model.neftune_noise_alpha=-1 | /range
| @prefer & model.neftune_noise_alpha=5 | /not-with-preference
2 | model.neftune_noise_alpha=5 & strategy={kind: fsdp, tensor_parallel_size: 2} | model.neftune_noise_alpha/needs-strategy.tensor_parallel_size
| model.mtp.weight=0 | /range
| model.mtp={depth: 2} | model.mtp.depth/unknown
| model.mtp={} & model.chunked_loss=false | model.mtp/needs-model.chunked_loss
| model.mtp={} & evaluation.generate={} & data={kind: chat, validation: data.txt} | model.mtp/not-with-evaluation.generate
| @teach & model.mtp={} | model.mtp/not-with-distillation
| @prefer & model.mtp={} | model.mtp/needs-data.kind
| @classify & model.mtp={} | model.mtp/needs-model.task & model.mtp/needs-data.kind
| model={config: null, builder: 'a:b', mtp: {}} & data.builder=a.b:c & data.train=null | model.mtp/not-with-model.builder
| model.mtp={only: true, train: false} | model.mtp.only/needs-model.mtp.train
| model.mtp.only=true & model.freeze=[a] | model.mtp.only/not-with-model.freeze
| model.mtp.only=true & model.router_bias_update_rate=0.1 | model.mtp.only/not-with-model.router_bias_update_rate
| model.mtp.only=true & lora={rank: 4} & checkpoint={export: at_end, export_merged: true} | model.mtp.only/not-with-lora
| model.mtp={} & lora={rank: 4} & checkpoint.export=at_end | checkpoint.export_merged/needed-with-model.mtp
| model.mtp={} & lora={rank: 4, quantize: nf4} | model.mtp/not-with-lora.quantize
| model.mtp={} & strategy.tensor_parallel_size=2 | model.mtp/needs-strategy.tensor_parallel_size
| model.mtp={} & strategy.expert_parallel_size=2 | model.mtp/needs-strategy.expert_parallel_size
| model.mtp={} & strategy.pipeline_parallel_size=2 | model.mtp/needs-strategy.pipeline_parallel_size
| @teach & strategy.context_parallel_size=2 | distillation/needs-strategy.context_parallel_size
| @teach & strategy.tensor_parallel_size=2 | distillation/needs-strategy.tensor_parallel_size
| data.kind=preference | /needs-preference
| @prefer & data.builder=a.b:c & data.train=null | preference/not-with-data.builder
| preference.loss=dpo | preference/needs-data.kind
| @prefer & preference.loss=dop | /choice
| @prefer & preference.beta=0 | /range
| @prefer & preference.label_smoothing=0.1 | /needs-preference.loss
| @prefer & preference.margin=1 | /needs-preference.loss
| data.kind=preference & preference.loss=robust | /needs-preference.label_smoothing
| data.kind=preference & preference={loss: robust, label_smoothing: 0.5} | preference.label_smoothing/range
| @masked & data.packing=true | /not-with-model
| @masked & data.mask_probability=0 | /range
| @masked & data.mask_probability=-1 | /range
| @masked & data.mask_probability=1 | /range
| data.similar_lengths=true | /needs-data.packing
| data.mask_probability=0.2 | /needs-model.task
2 | @masked & strategy.context_parallel_size=2 | /needs-model.task
| @masked & data.train={a: {files: data.txt}} | /mixture-not-with-model.task
| @masked & strategy.tensor_parallel_size=2 | /needs-model.task
| @masked & lora.rank=4 | lora/needs-model.task
| @masked & model={path: null, config: {model_type: bert, is_decoder: true}} | model.config.is_decoder/not-with-model.task
| @masked & data.kind=chat | /not-for-model.task
| optimizer.ema=1.0 | /range
| optimizer.layer_decay=1.5 | /range
| optimizer.groups=[] | /empty
| optimizer.groups=[{patterns: a}] | optimizer.groups[0]/no-change
| @base & data.tokenizer=null & data.kind=chat & images={} & videos={train: all} | videos.train/one-tower
| @base & data.tokenizer=null & data.kind=chat & videos={fps: 0} | videos.fps/range
| @base & data.tokenizer=null & data.kind=chat & videos={learning_rate_ratio: 2} | videos.learning_rate_ratio/needs-videos.train
| optimizer.groups=[{patterns: a, learning_rate_ratio: 0}] | optimizer.groups[0].learning_rate_ratio/range
| optimizer.groups=[{patterns: a, rate: 2}] | optimizer.groups[0].rate/unknown
| optimizer.groups=[{weight_decay: 0}] | optimizer.groups[0].patterns/missing
| optimizer.ema=0 | /range
| checkpoint.every_steps=0 | /range
| optimizer.ema=-1 | /range
| optimizer.ema=0.9 & checkpoint.every_steps=null | optimizer.ema/needs-checkpoint.every_steps
| optimizer.ema=0.9 & strategy.cpu_offload.what=optimizer | /not-with-optimizer.ema
| evaluation.ema=true | /needs-optimizer.ema
| optimizer.ema=0.9 & evaluation.ema=true & strategy={kind: ddp, shard_optimizer: true} | evaluation.ema/not-with-strategy.shard_optimizer
| data.kind=text & model.task=reward | data.kind/not-for-model.task
| @prefer & model.task=reward | preference/needs-model.task
| @reward & model.num_labels=2 | /needs-model.task
| @reward & strategy.tensor_parallel_size=2 | /needs-model.task
| @reward & data.margin_column=3 | /type
| @prefer & data.margin_column=x | /needs-model.task
| @reward & data.validation=data.txt & checkpoint.keep_best=eval_f1 | /no-such-metric
| @prefer & lora.dropout=0.1 | /not-with-preference
| @prefer & data.streaming=true | preference.loss/pass-not-with-data.streaming
| data.kind=unpaired & kto={beta: 0.1} & data.streaming=true | kto/pass-not-with-data.streaming
| @prefer & strategy.context_parallel_size=2 | /needs-data.kind
| @prefer & data.train={a: {files: data.txt, kind: chat}} | data.train.a.kind/mixed-losses
| data.train={a: {files: data.txt, kind: preference}} | data.train.a.kind/mixed-losses
| @prefer & data.validation=data.txt & evaluation.generate={} | /needs-data.kind
| data.response_column=x | /needs-data.kind
| data.chosen_column=x | /needs-data.kind
| @prefer & data.validation=data.txt & checkpoint.keep_best=eval_f1 | /no-such-metric
| data.kind=chat & data.text_column=x | /needs-data.kind
| data.kind=chat & data.chat_template=gone.jinja | /no-such-path
| data.train={a: {}} | data.train.a.files/missing
| data.train={a: {files: data.txt, wieght: 1}} | data.train.a.wieght/unknown
| data.train={a: {path: data.txt}} | data.train.a.path/unknown
| data.train={a: {data_files: data.txt, weight: 2}} | data.train.a.data_files/unknown
| data.train={a: {files: [data.txt, b.txt]}} | data.train.a.files[1]/no-such-path
| data.train={a.b: {files: data.txt}} | data.train.a.b/form
| data.validation={a: b.txt} | data.validation.a[0]/no-such-path
| data.packing=false & batch.micro_batch_tokens=4096 & batch.micro_batch_size=8 | batch.micro_batch_tokens/not-with-batch.micro_batch_size
| run.epochs=2 & run.max_steps=3 | run.epochs/not-with-run.max_steps
| batch.micro_batch_size=null & batch.micro_batch_tokens=4096 | /needs-data.packing
| batch.micro_batch_size=null & data.packing=false & batch.micro_batch_tokens=40 | /too-small
| data.streaming=true & run.max_steps=null & run.epochs=1 | /not-with-data.streaming
| data.shard_size=1GiB | /needs-data.streaming
| data.shuffle_buffer=10 | /unknown
| data.streaming=true & data.shard_size=many | /form
| data.streaming=true & data.shard_size=268435456 | /form
| data.train={a: {files: data.txt, weight: 1.0e308}} | data.train.a.weight/range
| data.train={a: {files: data.txt, weight: most}} | data.train.a.weight/type
| data.train={a: {files: data.txt, weight: 3}, b: {files: data.txt}} | data.train.b.weight/mixed-weights
| data.train={a: {files: data.txt, limit: 0}} | data.train.a.limit/range
| data.train={a: {files: data.txt, messages_column: x, kind: text}} | data.train.a.messages_column/needs-kind
| data.train={a: {files: data.txt, text_column: x, kind: chat}} | data.train.a.text_column/needs-kind
| data.limit=-1 | /range
| data.train=me/set:train[:5] & data.streaming=true | data.train/slice-of-stream
| data.train=me/set:train[5] | data.train[0]/no-such-path
| data.system=x | /needs-data.kind
| data.kind=chat & data.system=' ' | /form
| data.columns=3 | /type
| data.columns={} | /empty
| data.kind=instruct & data.columns={colour: a} | data.columns.colour/no-such-role
| data.kind=chat & data.columns={prompt: a} | data.columns.prompt/needs-data.kind
| data.kind=tokens & data.columns={weights: a} | data.columns.weights/no-such-role
| data.kind=instruct & data.columns={answer: a, output: b} | data.columns.output/role-twice
| data.kind=instruct & data.columns={response: a} & data.response_column=b | data.columns.response/role-twice
| data.train={a: {files: data.txt, columns: {messages: x}, kind: text}} | data.train.a.columns.messages/needs-data.kind
| data.ignore_columns=3 | /type
| data.prompt_format=chat | /needs-data.kind
| data.overlong=split | /choice
| @prefer & data.overlong=cut | /not-for-kind
| @classify & model.num_labels=2 & data.overlong=drop | /not-for-kind
| data.system_column=x | /needs-data.kind
| data.loss_on=all | /needs-data.kind
| data.kind=chat & data.loss_on=first | /choice
| data.kind=chat & data.loss_on=all & data.validation=data.txt & evaluation.generate={} | /needs-data.loss_on
| data.chat_template_kwargs={enable_thinking: false} | /needs-data.kind
| data.kind=chat & data.chat_template_kwargs={add_generation_prompt: true, eos_token: x} | data.chat_template_kwargs.add_generation_prompt/set-by-launcher & data.chat_template_kwargs.eos_token/set-by-launcher
| data.kind=chat & data.chat_template_kwargs=x | /type
| data.train=/proc | data.train[0]/file-of-system
| data.validation=[data.txt, /sys/*] | data.validation[1]/file-of-system
| activation_checkpointing={mode: selective, budget: 40} | activation_checkpointing.budget/type
| activation_checkpointing={mode: selective, budget: 40G} | activation_checkpointing.budget/form
| activation_checkpointing={mode: full, budget: 0.5} | activation_checkpointing.budget/needs-activation_checkpointing.mode
| activation_checkpointing={mode: selective, budget: 0.5, every_n_blocks: 2} | activation_checkpointing.budget/needs-activation_checkpointing.every_n_blocks
| optimizer.momentum=0.5 | /needs-optimizer.name
| optimizer.name=adafactor & strategy.cpu_offload.what=optimizer | /needs-optimizer.name
| optimizer={name: sgd, momentum: 0} & strategy.cpu_offload.optimizer_path=/a | /needs-optimizer.momentum
| model.compile=maybe | /type
| strategy.kind=ddp & strategy.reshard_after_forward=false | /needs-strategy.kind
| strategy.shard_optimizer=true | /needs-strategy.kind
| schedule.decay_steps=4 | /needs-schedule.kind
| schedule.warmup_ratio=0.1 & schedule.warmup_steps=4 | /not-with-schedule.warmup_ratio
| schedule.warmup_ratio=0 | /range
| checkpoint.keep_best=eval_loss | /needs-data.validation
| data.validation=data.txt & checkpoint.keep_best=eval_f1 | /no-such-metric
| data.validation=data.txt & evaluation.generate={} | /needs-data.kind
| data.train={a: {files: data.txt, kind: chat}} & data.validation=data.txt & evaluation.generate={} | /needs-data.kind
| data.kind=chat & data.validation=data.txt & evaluation.generate.max_new_tokens=4096 | /too-large
| data.kind=chat & data.validation=data.txt & evaluation.generate={metrics: [exact]} | evaluation.generate.metrics[0]/form
| checkpoint.resume=runs/a | /no-such-path
| checkpoint.every_steps=null & run.on_divergence=rewind | /needs-checkpoint.every_steps
| checkpoint.export_dtype=bfloat16 | /needs-checkpoint.export
| checkpoint={export: at_end, export_merged: true} | checkpoint.export_merged/needs-lora
| checkpoint.export=best | /needs-checkpoint.keep_best
| checkpoint={every_steps: 100, every_epochs: 0.5} | checkpoint.every_steps/not-with-checkpoint.every_epochs
| evaluation.every_epochs=0 | /range
| data.kind=retrieval | data.kind/not-for-model.task
| model.task=embedding & data.kind=chat | data.kind/not-for-model.task
| embedding={} | embedding/needs-model.task
| model.bidirectional=true | /needs-model.task
| @vectors & embedding.loss=mnrl | /choice
| @vectors & embedding.matryoshka=[] | /empty
| @vectors & embedding.triplet_margin=1.0 | /needs-embedding.loss
| @vectors & embedding={loss: cosine, false_negative_margin: 0.1} | embedding.false_negative_margin/needs-embedding.loss
| @vectors & data.streaming=true | /needs-model.task
| @vectors & strategy.context_parallel_size=2 | /needs-data.kind & /needs-model.task
| @vectors & model.bidirectional=true & data.packing=true | /not-with-model
| @vectors & data.packing=false & batch={global_batch_size: 4, micro_batch_tokens: 4096} | batch.micro_batch_tokens/needs-data.packing
| @vectors & data.pair_template=qwen3 | /needs-data.kind
| @vectors & data.validation=data.txt & checkpoint.keep_best=accuracy | /no-such-metric
| data.query_prompt=a | /needs-data.kind
| data.kind=reranking & data.pair_template=qwen4 | /lacks-a-part
| data.kind=reranking & data.pair_template='{document}?' | /lacks-a-part
| data.kind=reranking & data.document_prompt=a | /needs-data.kind
| data.kind=reranking & model.task=reranker & reranker.positive_answer=ja | /needs-model.task
| lora={} & model.freeze=a.* | /not-with-lora
| lora={quantize: int4} | lora.quantize/choice
| lora={dora: 1} | lora.dora/type
| lora={init: svd} | lora.init/choice
| lora={init: pissa, dora: true} | lora.init/not-with-lora.dora
| lora={init: olora} & checkpoint.export=at_end | checkpoint.export_merged/needed-with-lora.init
| lora={b_ratio: 0} | lora.b_ratio/range
| lora={rank_stabilised: true} | lora.rank_stabilised/unknown
| lora={target_modules: []} | lora.target_modules/empty
| lora={target_parameters: 3} | lora.target_parameters/type
| lora={target_parameters: [down_proj], dropout: 0.1} | lora.dropout/not-with-lora.target_parameters
| lora={target_parameters: down_proj, dora: true} | lora.dora/not-with-lora.target_parameters
| lora={modules_to_save: {a: b}} | lora.modules_to_save/type
| lora.path=gone | /no-adapter
| lora.path=data.txt | /no-adapter
| lora.path=[a] | /type
| lora={dora: true} & strategy.tensor_parallel_size=2 | /not-with-lora.dora
| checkpoint={export: at_end, export_merged: true, export_base: quantized} & lora={} | checkpoint.export_base/needs-lora.quantize
| checkpoint={export: at_end, export_base: quantized} & lora={quantize: nf4} | checkpoint.export_base/needs-checkpoint.export_merged
| slurm.time=soon | /form
| slurm.nodes=4-2 | /form
| slurm={nodes: 2, train_nodes: 3} | slurm.train_nodes/too-large
| slurm={nodes: 2-4, train_nodes: 3} | slurm.train_nodes/too-large
| slurm.train_nodes=0 | /range
| slurm.train_nodes=all | /type
| slurm.environment={A B: x} | slurm.environment.A B/form
| model.config=${model.config} | /interpolation
| data.cache=None & run.dir=None | data.cache/form & /form
| run.seed | /not-key=value
| data.txt | /not-key=value
| owner/name | /not-key=value
| model={path: null, config: null} & data.tokenizer=null | model.path/missing
| =3 | /not-key=value
| run.seed=[1 | /not-yaml
| @base & model.config={vision_config: {attention_dropout: 7}} | model.config.vision_config.attention_dropout/range
| @base & model.config={hidden_size: 8} | model.config.hidden_size/not-with-model.path
| @base & model.config={text_config: {vocab_size: 9}} | model.config.text_config.vocab_size/not-with-model.path
| @base & model.config={num_labels: 3} | model.config.num_labels/set-elsewhere
| @base & model.config={dtype: float16} | model.config.dtype/set-elsewhere
| @base & model.config={attention_dropout: 7} | model.config.attention_dropout/range
| @base & model.config={rope_theta: .inf, x_dropout: 2} | model.config.x_dropout/range & model.config.rope_theta/range
| @base & model.config={rope_theta: null} | model.config.rope_theta/range
| @base & model.config={rope_theta: x} | model.config.rope_theta/range
| @base & model.config={rope_scaling: {rope_type: linear, factor: -1}} | model.config.rope_scaling.factor/range
| @base & model.config={text_config: {rope_scaling: {factor: '2'}}} | model.config.text_config.rope_scaling.factor/range
| @base & model.config={rope_parameters: {full_attention: {rope_type: yarn, factor: .nan, rope_theta: 0}}} | model.config.rope_parameters.full_attention.factor/range & model.config.rope_parameters.full_attention.rope_theta/range
| @base & model.config={rope_scaling: {type: other, factor: 0.5}, rope_theta: 1, x: {factor: -1}, y_dropout: 2} | model.config.y_dropout/range
| model.config={model_type: qwen3_vl, text_config: {vocab_size: 256, num_hidden_layers: 0, num_attention_heads: 4, num_key_value_heads: 3, eos_token_id: 300, attention_dropout: 2}} | model.config.text_config.attention_dropout/range & model.config.text_config.num_key_value_heads/does-not-divide & model.config.text_config.num_hidden_layers/range & model.config.text_config.eos_token_id/beyond-vocab_size & model.config.text_config.vocab_size/too-small-for-bytes
| @base & model.config={rope_theta: 1.0e+6} & lora={} & checkpoint.export=at_end | checkpoint.export_merged/needed-with-model.config
"""
"""Ranks, arguments, and for each problem its key and rule; without a key: that of the last argument."""
# fmt: on
KNOWN = ", ".join(sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")))
NO_RECIPE = f"no recipe given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml"
RECIPES = {
    "": NO_RECIPE,
    "recipe= run.seed=3": NO_RECIPE,
    "quickstart": "no recipe given; write recipe=quickstart",
    "quickstart run.seed=3 data.txt": "no recipe given; write recipe=quickstart data.train=data.txt",
    "data.txt run.seed=3": "no recipe given; write recipe=sft data.train=data.txt",
    "owner/name data.txt": "no recipe given; write recipe=sft model.path=owner/name data.train=data.txt",
    "base data.txt": "no recipe given; write recipe=sft model.path=base data.train=data.txt",
    "recipe=ddp recipe=fsdp": "2 recipes given; give recipe=NAME (...) or ...",
    "recipe=quikstart": "recipe=quikstart: no recipe of that name; did you mean quickstart?...",
    "recipe=zzz": f"recipe=zzz: no recipe of that name; known: {KNOWN}; or give the path of a .yaml file",
    "recipe=y.yaml": "recipe=y.yaml: no such file",
    f"recipe={'a' * 300}.yaml": "recipe=aaa...: no such file",
    "recipe=./": "recipe=./: a folder, not a file",
}


def refused(arguments, ranks=None):
    with pytest.raises(RecipeError) as error:
        load_recipe(arguments, ranks=ranks)
    return error.value


def problems_of(arguments, ranks=None):
    return refused(arguments, ranks).problems


def check(expected, problems):
    expected = [line.replace("CWD", str(Path.cwd())) for line in expected]
    assert len(problems) == len(expected), problems
    for pattern, line in zip(expected, problems, strict=True):
        assert says(pattern, line), f"\nexpected: {pattern}\nmessage:  {line}"


def of_file(case):
    """The rules that a case of IN_A_FILE should break, those that it breaks, and the messages. A
    mistake of YAML is found before there are keys."""
    line, text, expected = case.split(" | ")
    lines = SMALL.splitlines()
    text = text.replace("\\n", "\n").replace("\\\\", "\\")
    lines[int(line) - 1 : int(line)] = text.split("\n")
    Path("x.yaml").write_text("\n".join(lines) + "\n")
    error = refused(["recipe=x.yaml"])
    places = [re.match(r"x\.yaml:?(\d*)", problem)[1] for problem in error.problems]
    rules = error.rules or ["not-yaml"]
    found = [f"{at}:{rule}" for at, rule in zip(places, rules, strict=True)]
    return expected.split(), found, error.problems


def of_arguments(case):
    """The same of a case of IN_ARGUMENTS."""
    ranks, words, expected = f" {case}".split(" | ")
    for short, text in SHORT.items():
        words = words.replace(short, text)
    words = words.split(" & ")
    Path("x.yaml").write_text(SMALL)
    error = refused(["recipe=x.yaml", *words], int(ranks or 0) or None)
    assert all(problem.startswith("command line: ") for problem in error.problems), error
    last = words[-1].partition("=")[0]
    expected = [last * rule.startswith("/") + rule for rule in expected.split(" & ")]
    messages = [problem.removeprefix("command line: ") for problem in error.problems]
    return expected, error.rules, messages


CASES = [(of_file, case) for case in IN_A_FILE.strip().splitlines()]
CASES += [(of_arguments, case) for case in IN_ARGUMENTS.strip().splitlines()]
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_mistakes_are_reported(folder, words, part):
    differences = []
    for report, case in CASES[part::PARTS]:
        expected, found, messages = report(case)
        known = [words.has(message) for message in messages]
        if found != expected or not all(known):
            differences += [case, f"  rules: {' & '.join(found)}", *messages]
    assert not differences, "\n".join(differences)


def test_rules_name_keys_of_a_recipe():
    for rule in NEEDS:
        for key in re.split("[ +]", f"{rule.keys} {rule.other}"):
            default_of(key.partition("=")[0])


def test_keys_that_exclude_a_value_of_another():
    expert, context = "strategy.expert_parallel_size", "strategy.context_parallel_size"
    for key, value, by, words in (
        ("strategy.kind", "ddp", expert, [f"{expert}=2"]),
        ("model.compile", "true", None, [f"{expert}=2"]),
        ("model.compile", "true", "lora.quantize", ["lora.quantize=nf4"]),
        ("strategy.kind", "ddp", None, [f"{context}=2"]),
        ("model.compile", "true", None, [f"{context}=2"]),
    ):
        recipe = load_recipe(["recipe=fsdp", *words], ranks=None, files=False).recipe
        assert excluded_by(recipe, key, value) == by, (key, words)


def test_missing_or_unknown_recipe_is_refused(folder):
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    for arguments, expected in RECIPES.items():
        check([f"command line: {expected}"], problems_of(arguments.split()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "must be sections (run:, model:, ...)..."),
        (b"- run\n", "must be sections (run:, model:, ...)..."),
        (b"# no recipe\n" * 100_000, "larger than 1 MiB, so it is no recipe"),
        (b"[" * 1000, "not YAML: more than 50 levels of keys in one section or list"),
        (SMALL.encode() + b"# \xff\n", "not YAML: unacceptable character ..."),
        (SMALL.encode() + b"# \0\n", "not YAML: unacceptable character ..."),
    ],
)
def test_files_without_sections_are_refused(folder, text, expected):
    (folder / "x.yaml").write_bytes(text)
    check([f"x.yaml: {expected}"], problems_of(["recipe=x.yaml"]))


def test_few_aliases_cannot_stand_for_billions_of_values(folder):
    """Each line names the one before ten times: as lists, and merged into sections."""
    for first, line in (("[x]", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")):
        bomb = f"a0: &a0 {first}\n" + "".join(
            f"a{n + 1}: &a{n + 1} {line.format(', '.join([f'*a{n}'] * 10))}\n" for n in range(12)
        )
        (folder / "x.yaml").write_text(SMALL + bomb)
        expected = "x.yaml:...: not YAML: more than 100,000 values in one section or list"
        check([expected], problems_of(["recipe=x.yaml"]))
    for nested in ("[" * 300 + "]" * 300, "{a: " * 300 + "1" + "}" * 300):
        (folder / "x.yaml").write_text(SMALL + f"lora: {nested}\n")
        expected = "x.yaml:14: not YAML: more than 50 levels of keys in one section or list"
        check([expected], problems_of(["recipe=x.yaml"]))


def test_few_interpolations_cannot_stand_for_billions(folder):
    """Each key names the one after it twice, by its whole name or by its name in the section."""
    for reference in ("${model.config.a%d}", "${.a%d}"):
        lines = [f"    a{n}: {reference % (n + 1)}{reference % (n + 1)}\n" for n in range(40)]
        text = SMALL.replace("    vocab_size", "".join(lines) + "    a40: x\n    vocab_size")
        (folder / "x.yaml").write_text(text)
        expected = "x.yaml:7: model.config.a0: more than 500 interpolations up to here"
        check([expected], problems_of(["recipe=x.yaml"]))


def test_new_run_needs_a_divisible_batch_size(folder):
    """Only a resumed run may have a smaller last micro-batch."""
    (folder / "runs/small/checkpoints").mkdir(parents=True)
    refused = "x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 (micro-batch) x 3 "
    refused += "(ranks) = 24; try 48 or 72"
    assert problems_of(["recipe=x.yaml"], 3) == [refused]
    (folder / "runs/small/checkpoints/step_00000005").mkdir()
    load_recipe(["recipe=x.yaml"], ranks=3)
    load_recipe(["recipe=x.yaml", "run.dir=a", "checkpoint.resume=runs/small"], ranks=3)
    assert "60 is not" in problems_of(["recipe=x.yaml", "batch.global_batch_size=60"], 3)[0]
    for override in ("checkpoint.resume=never", "run.dir=runs/other"):
        assert problems_of(["recipe=x.yaml", override], 3) == [refused]


def test_all_problems_are_reported_in_order(folder):
    text = SMALL.replace("max_steps: 10", "max_stepz: 10")
    text = text.replace("vocab_size: 300", "dtype: float16").replace("64", "65")
    text += "strategy: {kind: dp, replicate: 0}\noptimiser: {}\nschedule: {warmup_steps: -3}\n"
    (folder / "x.yaml").write_text(text)
    wrong = ["foo.bar=3", "run.seed", "run.name=3", "data.train=3", "data.workers=-1"]
    problems = problems_of([wrong[0], "recipe=x.yaml", *wrong[1:]], 2)
    assert [" ".join(problem.split(": ")[:2]) for problem in problems] == [
        "x.yaml:3 run.max_stepz",
        "x.yaml:7 model.config.dtype",
        "x.yaml:12 batch.global_batch_size",
        "x.yaml:14 strategy.kind",
        "x.yaml:14 strategy.replicate",
        "x.yaml:15 optimiser",
        "x.yaml:16 schedule.warmup_steps",
        "command line foo",
        *(f"command line {argument}" for argument in wrong[1:]),
    ]


def test_messages_use_relative_file_names(folder, monkeypatch):
    (folder / "deep").mkdir()
    (folder / "deep" / "x.yaml").write_text(SMALL.replace("64", "63"))
    check(
        ["deep/x.yaml:12: batch.global_batch_size: 63 is not..."],
        problems_of(["recipe=deep/x.yaml"]),
    )
    monkeypatch.chdir(folder / "deep")
    expected = ["x.yaml:12: batch.global_batch_size: ..."]
    check(expected, problems_of(["recipe=../deep/x.yaml", "data.train=../data.txt"]))


# fmt: off
SCRAPS = [
    "null", "???", "${", "${run.name}", "*", "&a ", "*a", "!!int ", "!!binary ", "{", "}",
    "[", "]", ": ", "- ", "\n", "\n  ", "\t", "'", '"', "#", "<<: ",
]
# fmt: on


def test_random_edits_cause_no_traceback(folder):
    """Deletes and inserts text at random positions.

    The recipe is still valid or is refused with a message that names the file.
    """
    generator = random.Random(7)
    refused = []
    for _ in range(80):
        text = SMALL
        for _ in range(generator.choice([1, 2])):
            at = generator.randrange(len(text))
            cut = text[at + generator.randrange(1, 9) :]
            text = text[:at] + generator.choice([cut, generator.choice(SCRAPS) + text[at:]])
        (folder / "x.yaml").write_text(text)
        try:
            load_recipe(["recipe=x.yaml"], ranks=2)
        except RecipeError as error:
            refused.append(error.problems)
    assert len(refused) > 40
    assert all(problem.startswith("x.yaml") for problems in refused for problem in problems)


# fmt: off
HOSTILE = [
    ".nan", "-.inf", "1e400", "-1", str(2**64), "9" * 5000, "0x" + "f" * 5000, '"a\\0b"',
    '"\\ud800"', '"\\e[31m"', "a" * 5000, "/" + "b/" * 3000, "[[[1]]]", "{a: {b: 1}}",
    '{"²": 1}', "!!python/object:os.system {}", "&a [*a]", "=", "2026-01-01", "1:30", "１２",
    "0GiB", "${oc.env:NO_SUCH}", "${run.name", "???", "~", "[]", "{}",
]
DECODED = [
    None, True, -1, 2**64, 10**99, float("nan"), float("inf"), 1e300, "", "a" * 5000, "²", "0GiB",
    [], {}, [[1]], {"a": {"b": 1}}, {"²": 1},
]
# fmt: on


def hostile_values_are_refused_or_usable(arguments):
    """A recipe that is accepted can be written and read again. A message is about the recipe or
    the arguments, has no character that a terminal obeys, and is short."""
    try:
        loaded = load_recipe(arguments, ranks=2)
    except RecipeError as error:
        for problem in error.problems:
            assert problem.startswith(("x.yaml", "command line: ")), problem
            assert problem.isprintable(), problem
            assert len(problem) < 3500, problem
        return
    Path("again.yaml").write_text(to_yaml(loaded.recipe))
    assert load_recipe(["recipe=again.yaml"], ranks=2).recipe == loaded.recipe


@pytest.mark.slow
def test_hostile_values_of_every_key_cause_no_traceback(folder):
    """One value for each key through all of the loading, and all values through the decoding."""
    for path, value in zip(keys(), itertools.cycle(HOSTILE)):
        hostile_values_are_refused_or_usable(["recipe=x.yaml", f"{dotted(path)}={value}"])
    small = yaml.safe_load(SMALL)
    for path in keys():
        for value in DECODED:
            plain = value
            for key in reversed(path):
                plain = {key: plain}
            _, problems, _ = decode(merged(small, plain))
            assert all(dotted(problem.path).isprintable() for problem in problems)
