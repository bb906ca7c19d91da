"""Run by test_engine.py on eight fake devices: the same requests on one device, on eight by rows, and on
four by rows times two by heads, as one JSON line."""

import json

import jax
import numpy as np
from rollout_toy import ARCH, engine, play, policy, requests

from sesa_jax.policy import sharding
from sesa_jax.policy.arch import abstract
from sesa_jax.rollout.engine import Engine


def main():
    rows = requests(4, 2) + requests(3, temperature=0.0, role='challenger')
    places, launch = [], Engine.decode

    def spy(self, params, pool, rows):
        places.append(pool.slots.own[0].k[0].sharding)
        return launch(self, params, pool, rows)

    Engine.decode = spy
    seen = {}
    for name, devices, model in (('one', 1, 1), ('many', 8, 1), ('split', 8, 2)):
        sampler = engine(devices=devices, model=model)
        place = sharding.shardings(abstract(ARCH), sharding.DECODE, sampler.mesh)
        seen[name] = play(rows, params=jax.device_put(policy(), place), on=sampler)
    result = {name: [[row.ids.tolist(), row.stop_reason] for row in found] for name, found in seen.items()}
    result['devices'] = jax.device_count()
    result['cache'] = list(places[-1].spec)
    result['largest_logprob_difference'] = max(
        float(np.abs(a.logprobs - b.logprobs).max())
        for other in ('many', 'split')
        for a, b in zip(seen['one'], seen[other], strict=True)
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
