"""What a step plays with: the run's config and its long-lived parts, none of which a step changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from sesa_jax.config import ConfigError, Run
from sesa_jax.host.client import HostClient
from sesa_jax.policy.lora import Policy
from sesa_jax.policy.tokenizer import Tokenizer
from sesa_jax.policy.transformer import Params
from sesa_jax.records import Question, Role, Target, Trajectory
from sesa_jax.rollout.engine import Engine
from sesa_jax.rollout.row import Request
from sesa_jax.selfplay import prompts
from sesa_jax.worlds import World


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


def check_room(run: Run, tokenizer: Tokenizer, cards: Sequence[str], questions: Sequence[str] = ()) -> None:
    """ConfigError unless the longest cards and the longest known question fit into a solver's prompt.

    cards: shown text of the cards that may be retrieved. questions: those that are known before play.
    """

    def size(text: str) -> int:
        return len(tokenizer.encode(text))

    longest = sorted(cards, key=size)[-run.bank.retrieved :] if run.bank.retrieved else []
    question = max(questions, key=size, default='')
    needed = len(tokenizer.chat(None, prompts.solver(question, longest, run.prompt_style)))
    if needed > run.lengths.prompt:
        raise ConfigError(
            f'--bank.retrieved {run.bank.retrieved}: a question with the longest cards needs {needed} tokens, but '
            f'--lengths.prompt is {run.lengths.prompt}; retrieve fewer cards or raise it'
        )
