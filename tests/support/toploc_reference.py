"""Runs the published toploc package in an interpreter that has it: its proofs, its times, and its results on our proofs."""

import json
import pathlib
import subprocess
import tempfile

import numpy as np

# Runs under the reference's interpreter: activations and our proofs in, times, its proofs and its view of ours out.
REFERENCE = r"""
import json, sys, time
import numpy as np, torch
from toploc import build_proofs_bytes, verify_proofs_bytes
torch.set_num_threads(2)
folder, repeat = sys.argv[1], int(sys.argv[2])
bits = np.load(folder + "/bits.npy")
rows = list(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
ours = [bytes.fromhex(p) for p in json.load(open(folder + "/ours.json"))]
chunk, topk = 32, 128
def timed(f):
    out, times = None, []
    for _ in range(repeat):
        begun = time.perf_counter(); out = f(); times.append(time.perf_counter() - begun)
    return out, times
stacked = torch.stack(rows)
proofs, build = timed(lambda: build_proofs_bytes(stacked, decode_batching_size=chunk, topk=topk, skip_prefill=True))
_, verify = timed(lambda: verify_proofs_bytes(stacked, proofs, decode_batching_size=chunk, topk=topk, skip_prefill=True))
theirs = verify_proofs_bytes(stacked, ours, decode_batching_size=chunk, topk=topk, skip_prefill=True)
view = [[r.exp_mismatches, float(r.mant_err_mean)] for r in theirs]
json.dump({"build": build, "verify": verify, "proofs": [p.hex() for p in proofs], "view": view}, sys.stdout)
"""


def run(python: str, hidden_TD: np.ndarray, proofs: list[bytes], repeat: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        np.save(pathlib.Path(folder) / "bits.npy", hidden_TD.view(np.uint16))
        (pathlib.Path(folder) / "ours.json").write_text(json.dumps([proof.hex() for proof in proofs]))
        done = subprocess.run([python, "-c", REFERENCE, folder, str(repeat)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{python} could not run the reference: {done.stderr.strip()[-400:]}; install toploc==0.1.6")
    return json.loads(done.stdout)
