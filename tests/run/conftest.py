"""A small made-up run folder, with everything a run leaves behind and with text that means harm in it."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from sesa_jax.config import Bank as BankConfig
from sesa_jax.config import Run, lab_preset, to_json
from sesa_jax.evals.dual_path import evaluate
from sesa_jax.records import Document, Failure, Outcome, Problem, Question, Search, Target, Trajectory, Turn
from sesa_jax.rollout.trajectory import write_trajectories
from sesa_jax.run.clock import Clock
from sesa_jax.run.folder import RunFolder
from sesa_jax.run.metrics import MetricsLog
from sesa_jax.run.questions import question_row, write_questions
from sesa_jax.skills.bank import Bank
from sesa_jax.skills.card import DraftCard

HARM = '<script>alert("x")</script> \x1b[31m\u202e <img src=http://evil.example/a.png onerror=alert(1)>'
STEPS = 6


def metrics_line(step):
    return {
        'step': step,
        'challenger': {'issued': 16, 'valid': 12, 'rejected': {'leak': 3, HARM: 1}, 'reward_mean': 0.4},
        'solver': {
            'p_histogram': [4, 3, 2, 1, 1, 1], 'reward_mean': 0.1 * step, 'correct': 20, 'wrong': 35, 'malformed': 5,
            'outage': 0, 'unjudged': 0, 'frontier': 7, 'dead': 5,
        },
        'update': {'solver': {'loss': 0.1, 'sampler_difference_max': 1e-6}, 'challenger': {'loss': 0.2}},
        'bank': {'active': 15 + step, 'admitted': 1, 'version': step},
        'validation': {'solve_rate': 0.3 + 0.05 * step, 'easy': 0.5, 'hard': 0.1, 'n': 48} if step % 2 else None,
        'tokens': {'action': 900},
        'time': {'total': 6.5},
    }  # fmt: skip


def tokenizer(texts):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return made


def trajectory(encode, role, sample, answer, *, cards=(), stop='answer'):
    """A search that brings harmful documents, then an answer."""
    parts = [
        (f'PROMPT of {role}', False),
        ('I think of Velmar. <search>Velmar founder</search>', True),
        (f'\n<information>\nDoc 1 (Title: Velmar)\n{HARM}\n</information>\n', False),
        (f'THOUGHT {sample} {HARM} <answer>{answer}</answer>', True),
    ]
    pieces = [(encode(text), flag) for text, flag in parts]
    ids = np.array([i for piece, _ in pieces for i in piece], np.int32)
    is_action = np.array([flag for piece, flag in pieces for _ in piece])
    final = 'question' if role == 'challenger' else 'answer'
    return Trajectory(
        role=role, problem_id='s6-p0', sample=sample, ids=ids, is_action=is_action,
        logprobs=np.where(is_action, -0.5, 0).astype(np.float32), prompt_length=len(pieces[0][0]),
        turns=(Turn('search', 'Velmar founder', 0, 1), Turn(final, answer, 2, 3)),
        searches=(Search('Velmar founder', (Document('d1', 'Velmar', HARM),), 'ok', 0.1),),
        card_ids=tuple(cards), stop_reason=stop, weights_version=5, bank_version=5,
    )  # fmt: skip


def fill(folder, *, with_tokenizer=True):
    """Metrics, rollouts, questions and the evaluation of a made-up run of six steps."""
    clock = Clock(monotonic=lambda: 0.0, wall=lambda: 1_700_000_000.0)
    log = MetricsLog(folder, clock)
    for step in range(1, STEPS + 1):
        log.append(metrics_line(step))
    log.close()
    made = tokenizer([HARM, 'PROMPT THOUGHT Velmar founder'])
    if with_tokenizer:
        made.save(str(folder.tokenizer))
    rows = [
        trajectory(lambda text: made.encode(text).ids, 'solver', 0, 'Ossa', cards=('c00002',)),
        trajectory(lambda text: made.encode(text).ids, 'solver', 1, HARM, cards=('c00002',)),
        trajectory(lambda text: made.encode(text).ids, 'challenger', 0, 'Who was it?', stop='question'),
    ]
    write_trajectories(folder.rollouts_file(STEPS), rows)
    problem = Problem('s6-p0', 0, f'Who founded Velmar? {HARM}', Target('Ossa', (HARM,)))
    outcomes = [Outcome('correct', 1.0, 'Ossa'), Outcome('wrong', 0.0, HARM)]
    write_questions(folder.questions_file(STEPS), [question_row(problem, outcomes, ['c00002'], 5)])
    questions = [
        Question(f'{k}{h}-{i}', 'q', ('a',), k, h) for k in ('easy', 'hard') for h in (1, 2) for i in range(20)
    ]
    answers = {
        arm: {q.id: int(q.id.split('-')[1]) < count for q in questions}
        for arm, count in (('base', 6), ('off', 7), ('on', 15))
    }
    result = evaluate(questions, answers, step=STEPS, resamples=200)
    folder.evaluation.write_text(json.dumps(result.to_json()))
    return result


def fill_bank(folder):
    """One seed and one card distilled from a failure of step 3, which the rollouts of step 6 were shown."""
    seed = DraftCard(description='Look twice.', trigger='a fact is not found', queries=('{entity} again',))
    config = BankConfig(every=3, at_least=1, at_most=5, commit_lag=1)
    failure = Failure(
        rollout_id='solver:s3-p1:0', step=3, question=f'Who founded Velmar? {HARM}', target=Target('Ossa'), prediction=HARM,
        evidence=(Document('d1', 'Velmar', HARM),), queries=('Velmar founder', HARM), card_ids=('c00001',), bank_version=2,
    )  # fmt: skip
    learned = DraftCard(
        description='Founders stand in the charter roll.', trigger='a founder is asked for',
        queries=('charter roll {entity}',), rollout_ids=(failure.rollout_id,), distiller='rules',
        source_question_hash=failure.question_hash, source_target_hash=failure.target.hash,
    )  # fmt: skip
    with Bank.create(folder.bank, [seed], config) as bank:
        for step in range(1, STEPS + 1):
            used = {'c00002': step} if step > 4 else {'c00001': 1}
            bank.commit_step(step, used, used, {}, [failure] if step == 3 else [])
            if step == 4:
                assert len(bank.finish_consolidation(4, [learned])['admitted']) == 1
            bank.start_consolidation(step)


@pytest.fixture
def made_up_memory(tmp_path):
    """A finished run with a skill memory."""
    config = to_json(lab_preset(Run(seed=3)))
    with RunFolder.create(tmp_path / 'run', {**config, 'steps': STEPS}) as folder:
        fill(folder)
        fill_bank(folder)
        yield folder


@pytest.fixture
def made_up_run(tmp_path):
    """A finished run without a skill memory."""
    config = to_json(lab_preset(Run(seed=3)))
    with RunFolder.create(tmp_path / 'run', {**config, 'steps': STEPS, 'skill_memory': False}) as folder:
        fill(folder)
        yield folder
