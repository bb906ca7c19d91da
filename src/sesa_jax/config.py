"""The run as one tree of frozen dataclasses. Methods, presets and sizes are functions that `replace` a few fields.

Read `Run` first, then `METHODS` (the 2x2 of the methods), then `lab_preset` (every value of the embedded world that
differs from the paper's, with the reason). Defaults are the paper's, or SSP's where the paper is silent; the code never
asks for a method's name, only for fields. What cannot work is refused in `door.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

Method = Literal['sesa', 'ssp', 'skillrl', 'search-r1']
WorldName = Literal['lab', 'wiki', 'files']
Advantage = Literal['group', 'batch', 'raw', 'reinforce++-baseline', 'rloo']
Projection = Literal['query', 'key', 'value', 'output', 'gate', 'up', 'down']


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up, then constant. Counts optimizer steps, per role."""

    learning_rate: float = 1e-6
    warmup_steps: int = 5
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Grpo:
    """The policy-gradient objective, the same for both roles."""

    loss: Literal['ppo', 'gspo', 'cispo'] = 'ppo'
    """ppo: clipped ratio a token. gspo: a row (mean log-ratio). cispo: the clipped ratio as weight of the log-prob."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Ratios are clipped to 1 - low, 1 + high; None: ppo 0.2, 0.285; gspo 3e-4, 4e-4; cispo 1 (no lower clip), 4."""
    clip_dual: float = 3.0
    """ppo: rows with a negative advantage never count more than that many times."""
    kl: float = 0.01
    """Weight of the KL term against the frozen initial weights."""
    kl_estimator: Literal['k1', 'k2', 'k3'] = 'k3'
    """k1 is no anchor: as a loss, its gradient does not depend on the initial weights."""
    entropy: float = 0.0
    aggregation: Literal['token', 'sequence', 'constant'] = 'token'
    drop_dead_groups: bool = False
    """Take groups without any difference in reward out of the token denominator."""
    importance_cap: float = 2.0
    """Cap of the truncated importance weights between sampler and learner."""
    importance_weights: Literal['auto', 'off', 'token', 'sequence'] = 'auto'
    """Of each token, or the product over a row. auto: token with bfloat16 compute, off with float32."""
    mini_batch: int = 128
    """Problems per optimizer step of the solver."""
    remat: Literal['none', 'nothing', 'projections'] = 'nothing'
    """What the backward pass keeps of a layer and need not compute again; none: no remat, which keeps everything."""
    micro_batch_tokens: int = 16384
    """Padded tokens per forward and backward pass, over all devices."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, in place of all parameters: for cards with less memory (policy/lora.py)."""

    rank: int = 0
    """0: off."""
    alpha: float = 32.0
    """Adapters count alpha / rank times."""
    projections: tuple[Projection, ...] = typing.get_args(Projection)
    """The matrices of each layer that have one."""


@dataclass(frozen=True)
class Challenger:
    temperature: float = 1.0
    advantage: Advantage = 'batch'
    """Its groups have one member, so: batch, over the rows of the whole step, or SSP's raw reward."""
    penalty: float = 0.1
    """lambda: paid (negative) for p in {0, 1} and for an invalid question."""
    max_turns: int = 10
    verifier: Literal['judge', 'off'] = 'judge'
    noise_blocks: int = 4
    min_words: int = 10
    min_characters: int = 10
    max_characters: int = 1000
    min_searches: int = 2
    answer_in_search: bool = True
    """False rejects a question whose challenger searched for the target answer itself."""
    reuse: bool = True
    """Fill an invalid slot with an earlier valid problem."""
    pool_clear_every: int = 10


@dataclass(frozen=True)
class Solver:
    rollouts: int = 5
    """G, rollouts per problem."""
    advantage: Advantage = 'group'
    """How rewards become advantages; the rules stand in grpo/advantage.py."""
    temperature: float = 1.0
    max_turns: int = 10


@dataclass(frozen=True)
class Lengths:
    """Token budgets. A row holds at most prompt + response tokens; observations count into the response."""

    prompt: int = 4096
    response: int = 8192
    observation: int = 500
    turn: int = 2048
    """Sampled tokens of one turn."""
    documents: int = 3


@dataclass(frozen=True)
class Rollout:
    """How many rows decode together, and in what memory (rollout/cache.py)."""

    rows: int = 128
    """Rows in groups that share a prompt: the solver's."""
    single: int = 64
    """Rows with a prompt of their own: the challenger's, an evaluation's, and the last ones of the groups."""
    long: int = 16
    """Rows that outgrew a short place; 0: every place holds a whole response."""
    short: int = 2048
    """Tokens behind the prompt that a short place holds."""
    blocks: int = 2
    """Pieces of a short place, each as long as all before it; those behind the longest row are not read. A program each."""
    chunk: int = 8
    """Decode steps between two looks by the host."""
    batch: int = 8
    """Prompts, or observations, that are computed together."""
    ahead: bool = True
    """Compile every program before the first step; else each when it is first needed."""
    deterministic: Annotated[bool, tyro.conf.arg(aliases=['--deterministic'])] = True
    """Take in what searches found at fixed boundaries, so that equal runs have equal bits; else as it comes."""


@dataclass(frozen=True)
class Bank:
    retrieved: int = 3
    capacity: int = 800
    every: int = 10
    """Steps between consolidations."""
    at_least: int = 20
    at_most: int = 30
    queue: int = 300
    commit_lag: int = 1
    """Boundaries between the start of a consolidation and its commit."""
    grace_steps: int = 0
    mined_are_seeds: bool = True
    bootstrap_steps: int = 4
    """Batches of play before step 1, without updates, whose failures and successes are mined for the seed bank."""
    mined: int = 142
    """Most cards mined in the bootstrap."""
    encoder: Literal['hashing', 'e5-small', 'e5-base-v2'] = 'hashing'
    threshold: float | None = None
    """Largest cosine at which a card still counts as new; None: the encoder's own documented value."""


@dataclass(frozen=True)
class Evaluation:
    per_cell: int = 100
    """Held-out questions per class and number of hops in the final evaluation."""
    validate_per_cell: int = 8
    """The same in the validation during the run."""


@dataclass(frozen=True)
class World:
    name: Annotated[WorldName, tyro.conf.arg(aliases=['--world'])] = 'lab'
    """lab: made up, from the seed. wiki: 10,033 Wikipedia summaries. files: your own corpus, answers and questions."""
    corpus: Annotated[str, tyro.conf.arg(aliases=['--corpus'])] = ''
    """Files: passages to search (`id, contents` or `title, text`; `worlds/files.py` has the formats)."""
    answers: Annotated[str, tyro.conf.arg(aliases=['--answers'])] = ''
    """Files: target answers for self-play."""
    questions: Annotated[str, tyro.conf.arg(aliases=['--questions'])] = ''
    """Files: questions to measure with; the methods without self-play train on a part of them."""
    pointer_share: float = 0.25
    """Lab: share of entity passages that name the key words of their hard relation."""
    digests: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SHA-256 of what the world reads, written when a run begins; a resumed run refuses other files."""


@dataclass(frozen=True)
class Run:
    """One run of the main job."""

    model: str = 'tiny'
    """A backbone's name, a local Hugging Face folder, or OWNER/NAME of a hub."""
    size: Literal['paper', 'small'] = 'paper'
    """small: the whole loop of a real model on real text within a laptop's means; results mean nothing."""
    method: Method = 'sesa'
    """A corner of the 2x2 (questions: data set or self-play; memory: none or skill cards); sets the fields below."""
    steps: int = 1950
    seed: int = 0
    run_dir: str = ''
    """Run folder; empty: runs/<method>-<seed>-<time>."""
    resume: bool = False
    """Go on from the newest commit of --run-dir."""
    checkpoint_every: int = 5
    validate_every: int = 5
    keep_checkpoints: int = 2
    problems: int = 256
    """Questions per step."""
    devices: int = 0
    """Devices of the mesh; 0: all."""
    tensor_parallel: int = 0
    """Devices that share one copy of the weights in rollouts; 0: as many as heads and devices allow."""
    offload: bool = False
    """Keep masters and moments of both roles in host memory while they are not updated, to make room for rollouts."""
    report: bool = True
    """End with the evaluation on held-out questions and the report."""
    prompt_style: Literal['full', 'short'] = 'full'
    """short: the few words that `tiny` was trained on."""
    thinking: bool = False
    """Let a model that has the switch (Qwen3) think first, in its own format; off: it reasons within the turn."""

    # What makes the methods, and the ablations. Each field is asked for by its name, never through `method`.
    self_play: bool = True
    """Questions come from a challenger; otherwise from the world's training questions."""
    skill_memory: bool = True
    """The solver sees cards of the bank."""
    memory_priming: bool = True
    """The bank starts with the handwritten and the mined cards; otherwise empty."""
    frontier_shaping: bool = True
    """The challenger is paid 4p(1-p), and -lambda at the ends; otherwise 1-p for every valid question (SSP)."""
    failure_distillation: bool = True
    """Frontier failures are queued and distilled into cards."""
    verification: bool = True
    """A question is checked against its own search results, mixed with noise."""
    challenger_sees_skills: bool = False
    """The leak that the paper avoids: cards for the target are put before the challenger's message."""
    freeze_challenger: bool = False
    """The challenger plays but is not updated."""
    freeze_bank: bool = False
    """Nothing enters and nothing leaves the bank; counters still count."""

    challenger: Challenger = field(default_factory=Challenger)
    solver: Solver = field(default_factory=Solver)
    lengths: Lengths = field(default_factory=Lengths)
    rollout: Rollout = field(default_factory=Rollout)
    bank: Bank = field(default_factory=Bank)
    grpo: Grpo = field(default_factory=Grpo)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora = field(default_factory=Lora)
    evaluation: Evaluation = field(default_factory=Evaluation)
    world: World = field(default_factory=World)

    base: tyro.conf.Suppress[str] = ''
    """SHA-256 of the model that both policies start from, written when a run begins; a resumed run refuses another."""


class ConfigError(ValueError):
    """A configuration that cannot run, with the reason and the way out."""


METHODS: dict[str, dict[str, bool]] = {
    #                                          no skill memory                                  skill memory
    'search-r1': {'self_play': False, 'skill_memory': False},
    'skillrl': {'self_play': False, 'skill_memory': True},  # fixed questions
    'ssp': {'self_play': True, 'skill_memory': False, 'frontier_shaping': False},  # paid 1 - p, as in its main run
    'sesa': {'self_play': True, 'skill_memory': True},
}


def with_method(run: Run, method: Method) -> Run:
    """The run in another corner of the 2x2. Without memory there is nothing to prime, to distil or to see."""
    fields = dict(METHODS[method])
    if not fields['skill_memory']:
        fields |= {'memory_priming': False, 'failure_distillation': False}
    return replace(run, method=method, **fields)


def lab_preset(run: Run) -> Run:
    """`tiny` on the embedded world. The one table of values that differ from the paper's, each with its reason."""
    return replace(
        run,
        steps=40,  # five minutes on two cores, and four consolidations
        checkpoint_every=1,  # a step costs seconds, a checkpoint a tenth of one
        validate_every=5,
        problems=16,  # two cores
        prompt_style='short',  # the words that tiny was trained on
        rollout=replace(
            run.rollout,
            rows=80,  # the solver's 16 x 5
            single=16,  # the challenger's; two cores do not work faster on more rows at once
            long=0,  # every place holds a whole response
            blocks=3,  # attention over places that nobody uses is half of a step of tiny
            batch=4,  # as many searches as a chunk has
            ahead=False,  # the first step needs 17 of 20 programs; its line came after 53 s instead of 60, nothing cached
        ),
        challenger=replace(
            run.challenger,
            temperature=0.4,  # at 1 a 0.9M-parameter policy miscopies names in most questions
            max_turns=6,
            min_words=5,  # 'Who is the founder of Velmar?' is a whole question here
            min_searches=1,  # the inverse of a fact is one search away
        ),
        solver=replace(run.solver, max_turns=6),  # three hops, with a second search each
        # A passage has at most some 60 tokens; a turn is one think line and one tag.
        lengths=Lengths(prompt=320, response=832, observation=192, turn=96, documents=2),
        bank=replace(run.bank, mined=40),  # what four batches of 16 can give
        grpo=replace(
            run.grpo,
            mini_batch=16,  # the whole batch: one update a step
            kl=0.02,  # with none, easy questions get worse within 30 steps
            micro_batch_tokens=4096,  # a token of a larger micro-batch takes longer on two cores: their caches are small
        ),
        optimizer=replace(run.optimizer, learning_rate=3e-4),  # 1e-6 is for billions of parameters
    )


def small_preset(run: Run) -> Run:
    """A real model on real text, small: to see that everything works before paying for the paper's sizes."""
    return replace(
        run,
        size='small',
        steps=10,
        checkpoint_every=1,
        problems=4,
        rollout=replace(run.rollout, rows=8, single=4, long=0, ahead=False),  # ten steps need half of the programs
        challenger=replace(run.challenger, max_turns=4),
        solver=replace(run.solver, max_turns=4, rollouts=2),
        lengths=Lengths(prompt=768, response=1024, observation=256, turn=128, documents=2),  # 450 are instruction, cards
        bank=replace(run.bank, bootstrap_steps=1, mined=10, at_least=2),
        grpo=replace(run.grpo, mini_batch=4, micro_batch_tokens=2048),
        evaluation=Evaluation(per_cell=4, validate_per_cell=2),
    )


# --- to JSON and back ------------------------------------------------------------------------------------------------


def paths(world: World) -> dict[str, str]:
    """The files that a world was given, by flag; '' where none was."""
    return {'corpus': world.corpus, 'answers': world.answers, 'questions': world.questions}


def to_json(run: Run) -> dict[str, Any]:
    return dataclasses.asdict(run)


def from_json(data: Mapping[str, Any]) -> Run:
    """Inverse of `to_json`. ConfigError names a field that this version does not know, or lacks."""
    return _read(Run, data, 'config')


def difference(run: Run, other: Run | None = None) -> dict[str, tuple[Any, Any]]:
    """Dotted field -> (value here, value in `other`, by default the paper's `Run()`), where they differ."""
    other = other or Run(base=run.base)  # the paper names no digest
    ours, theirs = flat(to_json(run)), flat(to_json(other))
    return {name: (value, theirs[name]) for name, value in ours.items() if value != theirs[name]}


def flat(data: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Dotted field -> value, of the JSON of a run."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= flat(value, f'{prefix}{name}.') if isinstance(value, Mapping) else {f'{prefix}{name}': value}
    return found


def _read(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f'{where} must be an object, not {type(data).__name__}')
    hints = typing.get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}
    if odd := names ^ set(data):
        raise ConfigError(f'{where}: {min(odd)} is {"missing" if min(odd) in names else "not a field of this version"}')
    values = {}
    for name, value in data.items():
        if dataclasses.is_dataclass(hints[name]):
            value = _read(hints[name], value, f'{where}.{name}')
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
