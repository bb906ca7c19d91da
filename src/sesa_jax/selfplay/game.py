"""What a step plays with: the run's config and its long-lived parts, none of which a step changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from sesa_jax.config import ConfigError, Run
from sesa_jax.host.client import Hit, HostClient
from sesa_jax.policy.lora import Policy
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Question, Role, Target, Trajectory
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request
from sesa_jax.selfplay import prompts
from sesa_jax.worlds import World

COUNTED = 64  # known questions, and targets, whose tokens are counted: the longest in bytes
SHOWN = 60  # characters of a text in a message


@dataclass(frozen=True)
class Game:
    """The parts. `deployed` turns trained parameters into what the engine decodes with."""

    run: Run
    world: World
    tokenizer: Tokenizer
    engine: Engine
    host: HostClient
    mesh: Mesh  # of the train layout; the engine has its own
    deployed: Callable[[Policy], Params]
    training_questions: Sequence[Question]  # for the methods without self-play

    def prompt(self, text: str) -> list[int]:
        """Ids of a user message in the model's chat scaffold."""
        return self.tokenizer.chat(None, text)

    def solver_prompt(self, question: str, cards: Sequence[str]) -> list[int]:
        return self.prompt(prompts.solver(question, cards, self.run.prompt_style))

    def challenger_prompt(self, target: Target, cards: Sequence[str]) -> list[int]:
        return self.prompt(prompts.challenger(target, cards, self.run.prompt_style))

    def fits(self, question: str) -> bool:
        """Whether a solver can be asked this: its prompt has room without cards."""
        return len(self.solver_prompt(question, ())) <= self.run.lengths.prompt

    def fitted(
        self, prompt: Callable[[list[str]], list[int]], hits: Sequence[Hit]
    ) -> tuple[list[int], tuple[Hit, ...]]:
        """A prompt with as many of the best cards as it has room for, and these cards; the others count as not shown.

        A bank grows while a run goes on, so that its longest cards are not known at the door.
        """
        shown = tuple(hits)
        while len(ids := prompt([hit.text for hit in shown])) > self.run.lengths.prompt and shown:
            shown = shown[:-1]
        return ids, shown

    def rollout(
        self, params: Policy, requests: Sequence[Request], role: Role, *, step: int, weights_version: int, purpose: str
    ) -> list[Trajectory]:
        """Roll out requests of one role with frozen weights. `purpose` names the counter of its searches."""
        return self.engine.rollout(
            self.deployed(params),
            requests,
            lambda queries: self.host.submit_search(queries, self.run.lengths.documents, purpose=purpose),
            seed=self.run.seed,
            step=step,
            weights_version=weights_version,
            bank_version=step - 1,
        )


def check_room(
    run: Run,
    tokenizer: Tokenizer,
    cards: Sequence[str],
    questions: Sequence[str] = (),
    targets: Iterable[Target] = (),
) -> None:
    """ConfigError unless what is known before play fits into a prompt. What comes later is `Game.fits` and `fitted`.

    cards: shown text of the cards that a run starts with. questions: of training and measurement; each must have room for
    the longest cards. targets: each must fit into a challenger's prompt without cards.
    """
    room, style, most = run.lengths.prompt, run.prompt_style, run.bank.retrieved
    longest = sorted(cards, key=lambda card: len(tokenizer.encode(card)))[-most:] if most else []
    advice = f'retrieve fewer cards than --bank.retrieved {most}' if longest else 'leave this question out'
    for question in heapq.nlargest(COUNTED, ['', *questions], key=_bytes):
        needed = len(tokenizer.chat(None, prompts.solver(question, longest, style)))
        if needed > room:
            raise ConfigError(
                f'--lengths.prompt {room}: the question {question[:SHOWN]!r} and {len(longest)} cards need {needed} tokens; '
                f'raise it, or {advice}'
            )
    for target in heapq.nlargest(COUNTED, targets, key=lambda target: _bytes(target.answer)):
        needed = len(tokenizer.chat(None, prompts.challenger(target, (), style)))
        if needed > room:
            raise ConfigError(
                f'--lengths.prompt {room}: a challenger with the target {target.answer[:SHOWN]!r} needs {needed} tokens; '
                'raise it, or leave this target out'
            )


def _bytes(text: str) -> int:
    return len(text.encode(errors='replace'))
