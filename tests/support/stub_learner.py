"""A learner without a model, as a process: attaches to an orchestrator, and "trains" by hashing the rows of each batch.

    python -m tests.support.stub_learner URL TOKEN_FILE DIRECTORY NUM_STEPS

`DIRECTORY/checkpoint.json` has its state after every second step; `batches.jsonl` has a line per batch that it trained on.
"""

import hashlib
import json
import pathlib
import secrets
import sys

from rl.batch import packing
from rl.orchestrator.remote import client
from rl.protocol import timeline
from sharding.system import atomic_file, secret_file

EVERY = 2  # steps between checkpoints
ROWS, LENGTH = 4, 64


def main(url: str, token_file: str, directory: str, num_steps: int, fields: str) -> None:
    path = pathlib.Path(directory)
    saved = atomic_file.read_json(path / "checkpoint.json", dict)
    step, weights, epoch = saved.get("step", 0), saved.get("weights", ""), saved.get("epochs", 0)
    # An epoch for every start, as the publisher makes it durable before anything is published.
    epochs = path / "epochs"
    epoch = len(epochs.read_text()) if epochs.exists() else 0
    with open(epochs, "a") as file:
        file.write("+")
    layout = packing.Layout(row_length=LENGTH, rows=ROWS, num_micro_batches=16)
    name = secrets.token_hex()
    options = dict(learner=name, layout=layout, patience_s=120, notify=lambda line: print(line, flush=True))
    with client.RemoteOrchestrator(url, secret_file.read(token_file), **options) as orchestrator:
        orchestrator.attach(
            json.loads(pathlib.Path(fields).read_text()), step, saved.get("rollouts", {}), saved.get("ledger")
        )

        def publish():
            digest = hashlib.sha256(f"{epoch}/{step}/{weights}".encode()).hexdigest()
            orchestrator.publish(timeline.Policy(epoch, step, digest))

        publish()
        while step < num_steps:
            orchestrator.next_batch(step + 1)
            rows = orchestrator.rows(step + 1, [(slice(0, ROWS), slice(0, LENGTH))])
            step, weights = step + 1, hashlib.sha256(weights.encode() + rows).hexdigest()
            with open(path / "batches.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "epoch": epoch, "weights": weights}) + "\n")
            publish()
            if step % EVERY == 0 or step == num_steps:
                state = {"rollouts": orchestrator.state(step), "ledger": orchestrator.head()}
                state |= {"step": step, "weights": weights}
                atomic_file.write(path / "checkpoint.json", json.dumps(state).encode(), durable=True)
        orchestrator.end()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
