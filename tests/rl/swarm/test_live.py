"""The live page: the newest data, nothing that runs but its own script, and no access from elsewhere without the token."""

import base64
import collections
import contextlib
import dataclasses
import hashlib
import html.parser
import json
import re
import threading
from concurrent import futures

import httpx
import numpy as np
import pytest

from inference.rollouts import parquet
from inference.server import metrics_routes
from rl.experiment.reporting import rollouts_page
from rl.learning.batch import credit
from rl.swarm import live
from rl.trust.verification import checks
from tests.support import browser, proxy, recorded_run
from tests.support import rollouts as rollout_files

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> " onmouseover="alert(3) \' {{ 7*7 }} \x1b[31m \u202e'
PRINTABLE = HOSTILE.partition(" \x1b")[0]  # as the name of a part of a reward must be
WAIT_S = 120.0


class Page(html.parser.HTMLParser):
    """The tags of a page, and all its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.names, self.links = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href"]


def is_harmless(text, num_scripts):
    page = Page(text)
    assert page.tags.count("script") == num_scripts
    assert not {"img", "iframe", "object", "embed", "base", "form", "link"} & {*page.tags}
    assert not [name for name in page.names if name.startswith("on")] and "src" not in page.names
    assert "<script>alert" not in text and "\x1b" not in text and "\u202e" not in text
    assert all(re.fullmatch(r"(run|rollouts)(\?[\w=&-]*)?", link) for link in page.links), page.links


@pytest.fixture
def workdir(tmp_path):
    """A run whose every text of strangers is hostile."""
    lines = [{"phase": "rl", "step": n, "rollout/reward": n / 40, f"env/{HOSTILE}/reward": 0.5} for n in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0}
    evaluation = {"step": 0, "scores": {HOSTILE: 0.5}, "samples": [sample]}
    (tmp_path / "evaluations.json").write_text(json.dumps([evaluation]))
    (tmp_path / "config.json").write_text(json.dumps({"config": {"env": HOSTILE}, "command": HOSTILE}))
    for step in (1, 2):
        rollouts = [dataclasses.replace(one, rewards=one.rewards | {PRINTABLE: 1.0}) for one in group(step)]
        parquet.write(tmp_path / "rollouts" / f"step_{step}" / "accepted.parquet", rollouts)
    return tmp_path


def group(step):
    return [rollout_files.make(number, step=step) for number in range(2)]


def node(**fields):
    row = {"role": "worker", "key": HOSTILE, "state": "healthy", "url": HOSTILE, "policy": HOSTILE, "problem": HOSTILE}
    return row | {"tokens_per_s": 3.0, "running": 1, "finished": 2} | fields


@pytest.fixture
def serve(workdir):
    """Returns (URL, path of the page) of a server whose listener claims to be at `host`."""
    with contextlib.ExitStack() as stack:

        def start(host="127.0.0.1", num_nodes=1):
            paths, nodes, decode = [], lambda: [node()] * num_nodes, lambda ids: HOSTILE
            lines = (lambda task: HOSTILE), (lambda: f"the evaluation {HOSTILE}")
            more = lambda app: paths.append(live.add(app, workdir, host, nodes, decode, credit.Credit(), *lines))  # noqa: E731
            url = stack.enter_context(metrics_routes.serving("0", dict, add_more=more))
            return url, paths[0]

        yield start


def test_the_page_shows_new_steps_and_runs_nothing_of_strangers(serve, workdir, monkeypatch):
    monkeypatch.setattr(live, "CACHE_S", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    url, path = serve()
    reply = httpx.get(url + path)
    assert reply.status_code == 200 and path == "/run"
    is_harmless(reply.text, num_scripts=1)
    policy = reply.headers["content-security-policy"]
    (script,) = re.findall("<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"
    assert reply.headers["cache-control"] == "no-store" and "30 RL steps" in reply.text and "Nodes" in reply.text
    assert "<b>Now:</b> the evaluation " in reply.text
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "rl", "step": 31, "rollout/reward": 0.9}) + "\n")
    assert "31 RL steps" in httpx.get(url + path).text


def test_rewards_of_any_size_have_a_page(workdir):
    """Attack: a claim of 1.7e308 for a sample that the scorer has no time for is accepted as 0, and ended the report of the run by an overflow."""
    claims = [(-1) ** n * (1.7e308 - n * 1e300) for n in range(12)]
    rollouts = [
        dataclasses.replace(rollout_files.make(n, step=3), reward=x, rewards={"reward": x, "part": 1.7e308})
        for n, x in enumerate(claims)
    ]
    parquet.write(workdir / "rollouts" / "step_3" / "accepted.parquet", rollouts)
    page = rollouts_page.of_step(workdir, rollouts_page.Source(lambda ids: ""))
    assert "1e+30" in page and page.count("<article>") == 1


def test_rollouts_are_shown_by_group_and_escaped(serve, workdir):
    url, _ = serve()
    for query in ("", "?step=1", "?step=99", "?step=2&first=1000"):
        page = httpx.get(f"{url}/rollouts{query}").text
        is_harmless(page, num_scripts=0)
        assert f"Rollouts of step {1 if query == '?step=1' else 2}" in page
    assert httpx.get(f"{url}/rollouts").text.count("<article>") == 1
    for method in ("post", "put", "delete"):
        assert getattr(httpx, method)(f"{url}/run").status_code == 405


MALFORMED = (
    "step=x",
    "step=",
    "step=1.5",
    "step=-2",
    f"step={10**20}",
    f"first={'9' * 5000}",
    "first=NaN",
    "color=red",
    "color=",
)


@pytest.mark.parametrize("query", [*MALFORMED, "step=%00", "color=%FF", "step=<script>alert(1)</script>"])
def test_a_malformed_value_is_answered_with_its_rule(serve, query):
    """The reply was status 422 with JSON of a library."""
    url, _ = serve()
    reply = httpx.get(f"{url}/rollouts?{query}")
    name = query.partition("=")[0]
    assert reply.status_code == 400 and reply.text.startswith(f"{name} = ") and reply.text.endswith("or leave it out")
    assert "Input should be" in reply.text or "Unable to parse" in reply.text
    is_harmless(reply.text, num_scripts=0)


def test_from_elsewhere_only_the_token_opens_the_page(serve, workdir):
    url, path = serve("0.0.0.0")
    token = (workdir / "page.token").read_text().strip()
    assert path == f"/run?token={token}" and (workdir / "page.token").stat().st_mode & 0o077 == 0
    assert httpx.get(url + path).status_code == 200
    assert f"token={token}" in httpx.get(f"{url}/rollouts?token={token}").text  # its links go on
    for query in ("", "?token=", "?token=x", f"?token={token[:-1]}"):
        for page in ("run", "rollouts"):
            reply = httpx.get(f"{url}/{page}{query}")
            assert reply.status_code == 403 and HOSTILE not in reply.text and "30 RL" not in reply.text
    assert httpx.get(f"{url}/metrics").status_code == 200


def test_a_name_that_a_stranger_points_at_this_machine_is_refused(serve):
    """DNS rebinding: the browser believes that the page is of the stranger's site."""
    url, path = serve()
    for name, status in (
        ("evil.example", 403),
        ("evil_site.example", 403),  # Starlette replaces names with an underscore by the listener's address
        ("evil.example/127.0.0.1", 403),
        ("[", 403),
        ("", 403),
        ("[::1]:80", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1.evil.example", 403),
        ("localhost", 200),
        ("127.0.0.1", 200),
    ):
        assert httpx.get(url + path, headers={"host": name}).status_code == status


def test_lines_that_were_read_are_not_read_again(serve, workdir, monkeypatch):
    """Each poll parsed all of metrics.jsonl. A first line that is broken later is not seen; a replaced file is."""
    monkeypatch.setattr(live, "CACHE_S", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    (url, path), file = serve(), workdir / "metrics.jsonl"
    assert "30 RL steps" in httpx.get(url + path).text
    with file.open("r+b") as opened:
        opened.write(b"x")
        opened.seek(0, 2)
        opened.write(b'{"phase": "rl", "step": 31}\n')
    assert "31 RL steps" in httpx.get(url + path).text
    file.rename(workdir / "old")
    file.write_text('{"phase": "rl", "step": 7}\n')
    assert "7 RL steps" in httpx.get(url + path).text


def test_viewers_wait_for_one_page_at_a_time_and_hold_up_nothing_else(serve, monkeypatch):
    """60 viewers of /rollouts took all threads: /health answered after 6 s."""
    drawn, may_draw = [], threading.Event()
    monkeypatch.setattr(live, "CACHE_S", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    monkeypatch.setattr(
        rollouts_page, "of_step", lambda *args, **options: drawn.append(may_draw.wait(WAIT_S)) or "drawn"
    )
    url, path = serve()
    page = httpx.get(url + path).text
    with futures.ThreadPoolExecutor(live.MAX_WAITING + 6) as pool, httpx.Client(timeout=WAIT_S) as client:
        asked = [pool.submit(client.get, f"{url}/rollouts") for _ in range(live.MAX_WAITING + 6)]
        try:
            proxy.wait_until(lambda: sum(one.done() for one in asked) == 6)
            assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
            assert httpx.get(url + path, timeout=WAIT_S).text == page  # the last one
        finally:
            may_draw.set()
        codes = collections.Counter(one.result(WAIT_S).status_code for one in asked)
    assert codes == {200: live.MAX_WAITING, 503: 6} and len(drawn) == live.MAX_WAITING


def test_a_broken_file_is_named_on_the_page(serve, workdir):
    url, path = serve()
    (workdir / "rollouts" / "step_2" / "b.parquet").write_bytes(b"PAR1")
    (workdir / "rollouts" / "step_old1").mkdir()
    reply = httpx.get(f"{url}/rollouts")
    assert reply.status_code == 500 and "not readable as Parquet" in reply.text
    for text in ("<script>", "[" * 100_000, '{"phase": "rl", "step": 31, "loss/total": 1%s}' % ("0" * 400)):
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(text + "\n")
        reply = httpx.get(url + path)
        assert reply.status_code == 500 and "metrics.jsonl:31: " in reply.text and "<script>" not in reply.text
        lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
        (workdir / "metrics.jsonl").write_text("".join(lines[:30]))
    assert httpx.get(url + path).status_code == 200


def test_colors_follow_the_log_probabilities():
    (rollout, *_) = group(1)
    start = rollout.prompt_length
    logprobs = rollout.logprobs.copy()
    logprobs[start:] = np.resize([-5.0, -3.0, -1.0, -0.5, -0.01], len(logprobs) - start)
    mask = rollout.sampled_mask.copy()
    mask[start:-1], mask[-1] = True, False
    changed = dataclasses.replace(rollout, logprobs=logprobs, sampled_mask=mask)
    calls = np.array([[start, start + 2], [start + 4, len(logprobs)]], np.int32)
    mask = np.where(np.arange(len(mask)) < start + 2, mask, np.arange(len(mask)) >= start + 4)
    turns = dataclasses.replace(changed, calls=calls, sampled_mask=mask)
    text = "".join(rollouts_page.colored(turns, str, "logprob", logprobs))
    assert re.findall('"who">(.*?)<', text) == ["model, turn 1", "environment", "model, turn 2"]
    found = [
        name
        for piece in rollouts_page.colored(changed, str, "logprob", logprobs)
        for name in re.findall('^<span class="(..?)"', str(piece))
    ]
    expected = [f"p{n % 5}" for n in range(len(logprobs) - start - 1)] + ["t"]
    assert found == expected


def test_a_group_has_its_advantages_its_verdicts_and_the_noise_of_its_tokens(tmp_path):
    """The noise of an honest token is exponential; a claim that the noise cannot have drawn is red, and nothing else changes."""
    recorded_run.write(tmp_path, 2, prompts_per_step=4, samples_per_prompt=2)
    file = recorded_run.path(tmp_path, 2)
    rollouts = parquet.read(file)
    first, *_ = rollouts
    noise = checks.exponential_noise([first])[0]
    logprobs = first.logprobs.copy()
    logprobs[np.flatnonzero(first.sampled_mask)[0]] -= np.log(20 / noise[0])
    parquet.write(file, [dataclasses.replace(first, logprobs=np.minimum(logprobs, 0)), *rollouts[1:]])
    source = rollouts_page.Source(str, lambda task: "the answer", credit.Credit("group_mean").by_token, live.noise)
    page = lambda color: rollouts_page.of_step(tmp_path, source, 2, 0, color)  # noqa: E731
    shown = {color: page(color) for color in rollouts_page.COLORS}
    articles = re.findall("<article>(.*?)</article>", shown["advantage"], re.DOTALL)
    assert len(articles) == 4
    for text in articles:  # the rewards of a group are 0 and 1
        assert re.findall("reward (0|1)<.*?advantage ([-0-9.]+),", text, re.DOTALL) == [("0", "-0.500"), ("1", "0.500")]
        assert {*re.findall('<span class="(..?)"', text)} == {"a1", "a3"}
        assert text.count("expected answer: <b>the answer</b>") == 1
        assert ("verdict ok of validator " in text) != ("no verdict in the ledger" in text)
    assert sum("verdict ok" in text for text in articles) >= 2  # all of the stranger
    bins = re.findall(r'<th scope="row">([01])</th>.*?<td>(\d+)</td>', shown["noise"])
    assert bins == [("0", "4"), ("1", "4")] and shown["noise"].count("<td>0.500</td><td>2</td>") == 4  # by task
    spans = re.findall('<span class="p0" title="1 tokens, claimed noise from -(.*?)">', shown["noise"])
    assert "20.00" in spans and "claimed noise beyond 7" in shown["noise"]
    assert page("logprob") == shown["logprob"] and "bytes of proofs" in shown["logprob"]


@pytest.mark.slow
@pytest.mark.skipif(not browser.PROGRAM, reason="chromium is not installed (Debian: chromium)")
def test_in_a_browser_the_page_updates_itself_and_nothing_else_runs(serve, workdir, tmp_path, monkeypatch):
    """10,000 steps and 500 nodes. A text of strangers that ran would open a dialog."""
    monkeypatch.setattr(live, "CACHE_S", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    lines = [{"phase": "rl", "step": n, "rollout/reward": n % 7 / 7, "time/step_s": 1.0} for n in range(31, 10_001)]
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    url, path = serve(num_nodes=500)
    with browser.Browser(tmp_path / "profile") as page:
        page.open(url + path)
        assert "10000 RL steps" in page.run("document.body.innerText").replace(",", "")
        paint = page.run("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        print(f"first paint after {paint} ms, the server's part included")
        assert page.run("document.querySelectorAll('main table').length") > 0 and "healthy" in page.run(
            "document.body.innerText"
        )
        page.run("document.body.dataset.kept = 1")  # gone if the page were loaded again
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "rl", "step": 10_001, "rollout/reward": 0.9}) + "\n")
        page.wait("document.body.innerText.replace(/,/g, '').includes('10001 RL steps')", 60)
        assert page.run("document.body.dataset.kept") == "1"
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        page.open(f"{url}/rollouts")
        assert page.run("getComputedStyle(document.body).fontFamily") == page.run(
            '\'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif\''
        )
        assert page.run("document.querySelectorAll('article').length") == 1
        assert not page.count("Page.javascriptDialogOpening") and not page.count("Runtime.exceptionThrown")
        assert [event for name, event in page.events if name == "Log.entryAdded" and "favicon" not in str(event)] == []
        asked = [event["request"]["url"] for name, event in page.events if name == "Network.requestWillBeSent"]
        assert {one.rpartition("/")[0] for one in asked} == {url}, asked
