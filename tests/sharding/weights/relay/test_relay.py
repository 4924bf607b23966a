"""A relay serves verified objects as soon as they are verified, to allowed clients, and survives the faults around it."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import blake3
import pytest

from sharding.system import atomic_file, signed_message, sockets
from sharding.weights.download import range_get, source
from sharding.weights.format import journal
from sharding.weights.relay import server as relay_lib
from sharding.weights.relay import store, throttle
from tests.support import commands, proxy

TRUSTED = proxy.public(proxy.KEY)
FAST = range_get.Options(patience_s=2.0, connect_s=1.0, stall_s=1.0, seed=0)


@pytest.fixture
def pub(tmp_path):
    return tmp_path / "pub"


def get(relay, path, headers=None, method="GET"):
    connection = http.client.HTTPConnection(relay.url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def connect(relay):
    host, port = relay.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def received(connection):
    """Returns all bytes until the relay closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):  # it closed while more of ours was on the way
        while part := connection.recv(10_000):
            data += part
    return data


def finish(root, version, objects):
    directory = root / f"v{version:08d}"
    (directory / "tmp").write_bytes(proxy.manifest(version, objects))
    os.rename(directory / "tmp", directory / "manifest.json")


def assert_readable(place, objects, number, trusted_key=None):
    """Version `number` at `place` is the newest, and has these objects."""
    with contextlib.closing(source.open(place, trusted_key=trusted_key)) as opened:
        assert opened.versions()[-1:] == [number] and proxy.read_all(opened, number, objects) == objects


# ---- mirroring -------------------------------------------------------------------------------------------------------


def test_objects_flow_down_the_tree_before_the_manifest_exists(pub, tmp_path):
    objects = proxy.contents(0)
    first, rest = dict(list(objects.items())[:6]), dict(list(objects.items())[6:])
    pub.mkdir()
    with (
        proxy.running(pub, options=FAST) as origin,
        proxy.running(origin.url, tmp_path / "a", options=FAST) as a,
        proxy.running(a.url, tmp_path / "b", options=FAST) as b,
        proxy.running(b.url, tmp_path / "c", options=FAST, trusted_key=TRUSTED) as c,
    ):
        proxy.begin(pub, 4, first)
        proxy.sign(pub, writing=4)
        proxy.wait_until(lambda: 4 in c.store.versions and len(c.store.versions[4].objects) == 6)
        assert get(c, "/v00000004/tensors/t2/c.0")[1] == objects["tensors/t2/c.0"]
        assert get(c, "/v00000004/manifest.json")[0] == 404
        listing = json.loads(get(c, "/versions")[1])
        assert (listing["complete"], listing["partial"]) == ([], [4])
        proxy.begin(pub, 4, rest)
        proxy.wait_until(lambda: len(c.store.versions[4].objects) == 10)
        assert not (tmp_path / "c" / "v00000004" / "manifest.json").exists()
        finish(pub, 4, objects)
        proxy.sign(pub)
        proxy.wait_until(proxy.holds(c, 4))
        assert_readable(c.url, objects, 4, trusted_key=TRUSTED)
    assert_readable(tmp_path / "c", objects, 4, trusted_key=TRUSTED)  # as good a directory as a publisher's


@pytest.mark.parametrize("begins_anew", [False, True])
def test_the_manifest_decides_over_the_journal(pub, tmp_path, begins_anew):
    """Objects that a publisher replaced or gave up are dropped or fetched again; so they are if it died and began anew."""
    objects = proxy.contents(0)
    old = {**objects, "tensors/t3/c.0": b"given up", "extra": b"not in the manifest"}
    pub.mkdir()
    with proxy.running(pub) as origin, proxy.running(origin.url, tmp_path / "a", options=FAST) as relay:
        proxy.begin(pub, 1, old)
        proxy.wait_until(lambda: 1 in relay.store.versions and len(relay.store.versions[1].objects) == 11)
        if begins_anew:
            shutil.rmtree(pub / "v00000001")
            proxy.begin(pub, 1, objects)
        else:
            proxy.begin(pub, 1, {"tensors/t3/c.0": objects["tensors/t3/c.0"]})
        finish(pub, 1, objects)
        proxy.wait_until(proxy.holds(relay, 1))
        assert relay.store.num_bytes == sum(map(len, objects.values())) + len(proxy.manifest(1, objects))
        assert get(relay, "/v00000001/extra")[0] == 404
        assert get(relay, "/v00000001/tensors/t3/c.0")[1] == objects["tensors/t3/c.0"]
    files = {p.relative_to(tmp_path / "a/v00000001").as_posix() for p in (tmp_path / "a/v00000001").rglob("*")}
    assert "extra" not in files and not [f for f in files if ".part" in f]


def test_a_number_published_again_with_other_weights_replaces_the_old(pub, tmp_path):
    with proxy.running(pub, options=FAST) as origin, proxy.running(origin.url, tmp_path / "a", options=FAST) as relay:
        for number in (0, 1, 2):
            proxy.publish(pub, number, proxy.contents(number))
        proxy.wait_until(proxy.holds(relay, 0, 1, 2))
        for number in (1, 2):  # the learner resumes from step 0
            shutil.rmtree(pub / f"v{number:08d}")
        proxy.wait_until(proxy.holds(origin, 0))
        assert relay.store.listing()["complete"] == [0, 1, 2]  # a loss upstream does not delete our copy
        proxy.publish(pub, 1, proxy.contents(11))
        expected = proxy.contents(11)["tensors/t4/c.0"]
        proxy.wait_until(lambda: get(relay, "/v00000001/tensors/t4/c.0")[1] == expected)
        proxy.wait_until(lambda: relay.store.is_complete(1))
        assert relay.mirror.log.counters["replaced_versions"] == 1
        proxy.sign(pub)  # a head that nobody verifies, and that does not list version 2
        proxy.wait_until(proxy.holds(relay, 0, 1))


def test_the_disk_is_bounded_and_bases_stay(pub, tmp_path):
    bases = {0: None, 1: 0, 2: 1, 3: None, 4: 3, 5: 4, 6: 5}
    with proxy.running(pub) as origin, proxy.running(origin.url, tmp_path / "a", keep=2, options=FAST) as relay:
        for number, base in bases.items():
            objects = proxy.contents(number) if base is None else proxy.deltas(number)
            proxy.publish(pub, number, objects, base=base)
            proxy.wait_until(lambda number=number: relay.store.is_complete(number))
            if number == 2:
                proxy.wait_until(proxy.holds(relay, 0, 1, 2))  # 2 and 1, and 0 for both
            if number == 3:
                proxy.wait_until(proxy.holds(relay, 0, 1, 2, 3))
            if number == 4:
                proxy.wait_until(proxy.holds(relay, 3, 4))
        proxy.wait_until(proxy.holds(relay, 3, 4, 5, 6))
        on_disk = sorted(p.name for p in (tmp_path / "a").iterdir())
        assert on_disk == [f"v{n:08d}" for n in (3, 4, 5, 6)]
        with proxy.running(relay.url, tmp_path / "late", keep=1, options=FAST) as late:  # needs 6, hence 5, 4 and 3
            proxy.wait_until(proxy.holds(late, 3, 4, 5, 6))


def test_a_full_disk_deletes_old_versions_and_never_the_newest(pub, tmp_path):
    """`max_bytes` is the double of a full disk here: the same error number as a quota's."""
    size = sum(map(len, proxy.contents(0).values()))
    with (
        proxy.running(pub, options=FAST) as origin,
        proxy.running(origin.url, tmp_path / "a", keep=5, max_bytes=int(2.5 * size), options=FAST) as relay,
    ):
        for number in range(4):
            proxy.publish(pub, number, proxy.contents(number))
            proxy.wait_until(lambda number=number: relay.store.is_complete(number))
        assert relay.store.num_bytes <= 2.5 * size and relay.mirror.log.counters["evicted_for_room"] >= 2
        proxy.publish(pub, 4, proxy.contents(4, (3 * size,)))  # cannot fit at all
        proxy.wait_until(lambda: relay.mirror.log.counters["failed_objects"] >= 2)
        assert relay.store.is_complete(3) and not relay.store.is_complete(4)
        assert not (tmp_path / "a" / "v00000004" / "manifest.json").exists()
        proxy.publish(pub, 5, proxy.contents(5))
        proxy.wait_until(lambda: relay.store.is_complete(5))
        assert_readable(relay.url, proxy.contents(5), 5)


def test_a_full_disk_deletes_no_base_of_the_newest(pub, tmp_path):
    room = sum(map(len, [*proxy.contents(0).values(), *proxy.deltas(1).values()])) + 10_000
    with (
        proxy.running(pub, options=FAST) as origin,
        proxy.running(origin.url, tmp_path / "a", max_bytes=room, options=FAST) as relay,
    ):
        proxy.publish(pub, 0, proxy.contents(0))
        proxy.publish(pub, 1, proxy.deltas(1), base=0)
        proxy.wait_until(proxy.holds(relay, 0, 1))
        proxy.publish(pub, 2, proxy.deltas(2), base=1)  # does not fit, and needs both
        proxy.wait_until(lambda: relay.mirror.log.counters["failed_objects"] >= 2)
        assert relay.store.complete() == [0, 1] and relay.mirror.log.counters["evicted_for_room"] == 0


def test_a_relay_outlives_its_upstream(pub, tmp_path):
    objects = proxy.contents(0)
    proxy.publish(pub, 0, objects)
    with proxy.running(pub, options=FAST) as origin:
        port = int(origin.url.rpartition(":")[2])
        with proxy.running(origin.url, tmp_path / "a", options=FAST, holding=[0]) as relay:
            origin.close()
            proxy.wait_until(lambda: not relay.mirror.is_upstream_alive)
            assert_readable(relay.url, objects, 0)
            shutil.rmtree(pub / "v00000000")  # meanwhile the number becomes another version
            proxy.publish(pub, 0, proxy.contents(7))
            proxy.publish(pub, 1, proxy.deltas(1), base=0)
            with proxy.running(pub, port=port, options=FAST):
                proxy.wait_until(lambda: relay.mirror.log.counters["replaced_versions"] == 1)
                proxy.wait_until(proxy.holds(relay, 0, 1))
            assert get(relay, "/v00000000/tensors/t4/c.0")[1] == proxy.contents(7)["tensors/t4/c.0"]


def test_a_bucket_is_mirrored(pub, tmp_path):
    proxy.publish(pub, 0, proxy.contents(0))
    proxy.sign(pub)
    with proxy.running(f"file://{pub}", tmp_path / "a", trusted_key=TRUSTED, holding=[0]) as relay:
        proxy.begin(pub, 1, proxy.contents(1))
        proxy.sign(pub, writing=1)
        proxy.wait_until(lambda: 1 in relay.store.versions and len(relay.store.versions[1].objects) == 10)
        finish(pub, 1, proxy.contents(1))
        proxy.sign(pub)
        proxy.wait_until(proxy.holds(relay, 0, 1))
        assert get(relay, "/v00000001/tensors/t4/c.0")[1] == proxy.contents(1)["tensors/t4/c.0"]


def test_a_killed_relay_resumes_after_a_restart(pub, tmp_path):
    """kill -9 in the midst of a version; one object rots on the disk before the restart."""
    objects = proxy.contents(0, sizes=(100_000,) * 40)
    proxy.publish(pub, 0, objects)
    proxy.sign(pub)

    def start(upstream):
        address = tmp_path / "address"
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "sharding.relay", "--upstream", upstream, "--dir", tmp_path / "a"]
        command += ["--port", "0", "--address_file", address, "--trusted_key", TRUSTED, "--exit_with_parent"]
        command += ["--key", tmp_path / "keys" / "relay.pem"]
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        proxy.wait_until(address.exists, timeout_s=20)
        return process, address.read_text()

    directory = tmp_path / "a" / "v00000000"
    with proxy.running(pub) as origin, proxy.Proxy(origin.url, lambda rng: ("rate", 200_000)) as slow:
        process, _ = start(slow.url)
        try:
            proxy.wait_until(lambda: directory.exists() and len(list(directory.rglob("c.*"))) >= 5, timeout_s=20)
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
        assert not (directory / "manifest.json").exists()
        (directory / ".c.0-0123456789abcdef.tmp").write_bytes(b"half of something")
        kept = sorted(directory.rglob("c.*"))
        kept[0].write_bytes(b"rotten")
        with open(directory / "objects.jsonl", "a") as file:
            file.write('{"path": "tensors/t39')  # cut off in the midst of a line
        made = signed_message.load_key(tmp_path / "keys" / "relay.pem").private_bytes_raw()
        process, url = start(origin.url)
        assert signed_message.load_key(tmp_path / "keys" / "relay.pem").private_bytes_raw() == made
        try:
            opened = source.open(url, trusted_key=TRUSTED)

            def is_there():
                try:
                    return opened.versions() == [0]
                except (journal.Unavailable, FileNotFoundError) as error:  # the response until then
                    assert "still checking" in str(error) or "the signed head lists [0]" in str(error)

            proxy.wait_until(is_there)
            assert proxy.read_all(opened, 0, objects) == objects
            opened.close()
            text = get(types.SimpleNamespace(url=url), "/metrics")[1].decode()
            fetched = int(re.search(r'mirrored_total{name="objects"} (\d+)', text)[1])
            assert fetched <= 80 - 2 * len(kept) + 2
            assert 'mirrored_total{name="bad_recovered"} 1.0\n' in text
        finally:
            process.stdin.close()  # --exit_with_parent
            assert process.wait(10) == 0
    assert not list(directory.rglob(".*.tmp"))


def test_rot_in_a_complete_version_is_found_at_the_start(pub, tmp_path):
    objects = proxy.contents(0)
    proxy.publish(pub, 0, objects)
    with proxy.running(pub) as origin:
        with proxy.running(origin.url, tmp_path / "a", options=FAST, holding=[0]):
            pass
        path = tmp_path / "a/v00000000/tensors/t4/c.0"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with proxy.running(origin.url, tmp_path / "a", options=FAST, holding=[0]) as relay:
            assert get(relay, "/v00000000/tensors/t4/c.0")[1] == objects["tensors/t4/c.0"]
            assert relay.mirror.log.counters["objects"] == 1


# ---- serving ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def relay(pub):
    proxy.publish(pub, 0, proxy.contents(0))
    proxy.begin(pub, 1, proxy.contents(1))
    (pub / "v00000000" / "secret").write_bytes(b"not listed")
    (pub / "secret").write_bytes(b"not listed")
    with proxy.running(
        pub, limits=throttle.Limits(max_connections=20, max_connections_per_client=10), holding=[0]
    ) as running:
        yield running


BODY = proxy.contents(0)["tensors/t2/c.0"]


@pytest.mark.parametrize(
    ("range_", "status", "body"),
    [
        ("", 200, BODY),
        ("bytes=0-299", 206, BODY),
        ("bytes=0-0", 206, BODY[:1]),
        ("bytes=10-19", 206, BODY[10:20]),
        ("bytes=290-", 206, BODY[290:]),
        ("bytes=290-9999", 206, BODY[290:]),
        ("bytes=-5", 206, BODY[-5:]),
        ("bytes=-9999", 206, BODY),
        ("bytes=300-", 416, b""),
        ("bytes=20-10", 416, b""),
        ("bytes=-0", 416, b""),
        ("bytes=-", 200, BODY),
        ("bytes=1-2,5-6", 200, BODY),
        ("lines=1-2", 200, BODY),
        ("bytes=99999999999999999999-", 200, BODY),
    ],
)
def test_ranges(relay, range_, status, body):
    got = get(relay, "/v00000000/tensors/t2/c.0", {"Range": range_} if range_ else {})
    assert got[:2] == (status, body)
    if status == 206:
        first = BODY.index(body) if len(body) > 1 else 0
        assert got[2]["Content-Range"] == f"bytes {first}-{first + len(body) - 1}/300"
    assert got[2].get("ETag", proxy.entry("", BODY)["digest"]).strip('"') == proxy.entry("", BODY)["digest"]


@pytest.mark.parametrize(
    "path",
    "/v00000000 /v00000000/ /v00000000/secret /v00000000/tensors /v00000000/../secret /v00000000/%2e%2e/secret /secret "
    "/../../etc/passwd //etc/passwd /v00000000//secret /v00000000/tensors/t2/c.0/ /v0/tensors/t2/c.0 "
    "/v00000001/manifest.json /v00000009/objects.jsonl /v99999999999999999999999999/manifest.json".split(),
)
def test_unlisted_files_are_not_served(relay, path):
    assert get(relay, path)[0] == 404


@pytest.mark.parametrize(
    ("path", "length"), [("/v00000000/tensors/t2/c.0", "300"), ("/versions", "[1-9][0-9]+"), ("/absent", "[1-9][0-9]+")]
)
def test_the_answer_to_a_head_request_has_no_body(relay, path, length):
    """Read from the socket: http.client would discard a body."""
    with connect(relay) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        head = received(connection).decode()
    assert head.startswith("HTTP/1.1 ") and head.endswith("\r\n\r\n") and head.count("\r\n\r\n") == 1
    assert re.search(f"\r\nContent-Length: {length}\r\n", head)


def test_other_methods_are_refused(relay):
    assert get(relay, "/v00000000/tensors/t2/c.0", method="DELETE")[0] == 405


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/2.0\r\n\r\n",
        b"GET health HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /" + b"a" * 10_000,
    ],
)
def test_malformed_requests_are_answered_and_end_the_connection(relay, head):
    with connect(relay) as connection:
        connection.sendall(head)
        assert received(connection).startswith(b"HTTP/1.1 400 ")
    assert get(relay, "/health")[0] == 200


def test_a_head_that_trickles_ends(relay, monkeypatch):
    monkeypatch.setattr(relay_lib, "HEAD_S", 0.3)
    with connect(relay) as connection:
        deadline_s = time.monotonic() + 60
        with pytest.raises(OSError):
            while time.monotonic() < deadline_s:
                connection.sendall(b"G")
                time.sleep(0.05)


def test_requests_in_one_packet_are_all_answered(relay):
    with connect(relay) as connection:
        one = b"GET /v00000000/tensors/t2/c.0 HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(one * 2 + one.replace(b"1.1", b"1.0"))
        replies = received(connection)
        assert replies.count(BODY) == 3 and replies.count(b"HTTP/1.1 200 OK") == 3


def test_a_system_without_threads_costs_a_connection_and_not_the_relay(relay, monkeypatch):
    """The accepting thread died of the first thread that the system refused."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with connect(relay) as connection:
            assert received(connection) == b""
    assert get(relay, "/health")[0] == 200 and relay._throttle.num_connections <= 1


def test_idle_clients_block_no_other_and_are_counted(relay):
    idle = [connect(relay) for _ in range(9)]
    try:
        assert get(relay, "/v00000000/tensors/t4/c.0")[1] == proxy.contents(0)["tensors/t4/c.0"]
        proxy.wait_until(lambda: relay._throttle.num_connections == 9)  # the answered one has left
        idle.append(connect(relay))
        with pytest.raises((OSError, http.client.HTTPException, AssertionError)):  # the eleventh of one client
            assert get(relay, "/health")[0] == 200
    finally:
        for connection in idle:
            connection.close()
    proxy.wait_until(lambda: get(relay, "/health")[0] == 200)
    assert relay.counters["refused_client_connections"] >= 1


def test_waiting_requests_are_answered_at_the_change(relay, pub):
    tag = json.loads(get(relay, "/versions")[1])["tag"]
    begun_s = time.monotonic()
    same = json.loads(get(relay, f"/versions?tag={tag}&wait=0.3")[1])
    assert same["tag"] == tag and time.monotonic() - begun_s >= 0.3
    _, _, headers = get(relay, "/v00000001/objects.jsonl")
    timer = threading.Timer(0.2, proxy.begin, (pub, 1, {"late": b"x"}))
    timer.start()
    path = f"/v00000001/objects.jsonl?epoch={headers['X-Epoch']}&after=10&wait=4"
    status, body, headers = get(relay, path)
    assert status == 200 and json.loads(body)["path"] == "late"
    assert headers["X-Next"] == "11"
    assert len(get(relay, "/v00000001/objects.jsonl?epoch=another&after=5")[1].splitlines()) == 11
    proxy.begin(pub, 1, {"late": b"y"})  # replaced: a new client gets it once
    proxy.wait_until(lambda: get(relay, "/v00000001/objects.jsonl")[2]["X-Next"] == "12")
    lines = [json.loads(line) for line in get(relay, "/v00000001/objects.jsonl")[1].splitlines()]
    assert [o["digest"] for o in lines if o["path"] == "late"] == [blake3.blake3(b"y").hexdigest()]
    timer.join()


def test_metrics_and_health(relay):
    get(relay, "/v00000000/tensors/t2/c.0")
    proxy.wait_until(lambda: relay.counters["sent_bytes"] == 300)  # counted once it is sent
    assert get(relay, "/")[1].startswith(b"a relay of policy versions; its routes are /versions")
    status, body, _ = get(relay, "/metrics")
    text = body.decode()
    assert status == 200
    for line in text.splitlines():
        pattern = r'# (TYPE \w+ (gauge|counter)|HELP .*)|intellax_relay_\w+(\{name="[^"]*"\})? -?[0-9.e+]+'
        assert re.fullmatch(pattern, line), line
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert values["intellax_relay_newest_version"] == "0.0" and values["intellax_relay_upstream_alive"] == "1.0"
    assert values['intellax_relay_served_total{name="sent_bytes"}'] == "300.0"
    health = json.loads(get(relay, "/health")[1])
    assert (health["status"], health["complete"], health["upstream"]) == ("ok", [0], True)
    assert health["waiting_for"] == "a newer version"


def test_only_allowed_clients_are_served(pub):
    proxy.publish(pub, 0, proxy.contents(0))
    with proxy.running(pub, limits=throttle.Limits(allow=("10.0.0.0/8",))) as closed:
        status, body, _ = get(closed, "/health")
        assert (status, body) == (403, b"refused\n") and closed.counters["refused_address"] == 1
    with proxy.running(pub, limits=throttle.Limits(allow=("10.0.0.0/8", "127.0.0.0/8"))) as open_:
        assert get(open_, "/health")[0] == 200


@pytest.mark.parametrize("which", ["client_bytes_per_s", "total_bytes_per_s"])
def test_bandwidth_is_capped(pub, which):
    objects = proxy.contents(0, (1_000_000,))
    proxy.publish(pub, 0, objects)
    with proxy.running(pub, limits=throttle.Limits(**{which: 1_000_000}), holding=[0]) as relay:
        opened = source.open(relay.url)
        begun_s = time.monotonic()
        assert proxy.read_all(opened, 0, objects) == objects
        # a second's worth, less the quarter that may be sent immediately
        assert time.monotonic() - begun_s >= 0.74
        opened.close()


def test_requests_are_capped_and_a_client_waits_its_turn(pub):
    objects = proxy.contents(0, (5,) * 13)
    proxy.publish(pub, 0, objects)
    with proxy.running(pub, limits=throttle.Limits(client_requests_per_s=15), holding=[0]) as relay:
        opened = source.open(relay.url)
        begun_s = time.monotonic()
        assert proxy.read_all(opened, 0, objects) == objects
        assert time.monotonic() - begun_s >= 0.9  # 27 requests, ten immediately, then fifteen a second
        assert relay.counters["requests_429"] >= 1
        opened.close()


# ---- throttle --------------------------------------------------------------------------------------------------------


def test_budgets_follow_the_given_clock():
    now = [100.0]
    limited = throttle.Throttle(throttle.Limits(client_bytes_per_s=1000, total_bytes_per_s=1500), clock=lambda: now[0])
    assert limited.admit("10.0.0.1") is None and limited.admit("10.0.0.2") is None
    assert limited.book_bytes("10.0.0.1", 250) == 0.0  # the burst
    assert limited.book_bytes("10.0.0.1", 1000) == pytest.approx(1.0)
    assert limited.book_bytes("10.0.0.2", 250) == pytest.approx(1500 / 1500 - 0.25)  # the total is used up, not its own
    now[0] += 100
    assert limited.book_bytes("10.0.0.1", 250) == 0.0  # unused budget is not saved beyond the burst
    assert limited.book_bytes("10.0.0.1", 250) == pytest.approx(0.25)
    for address in ("10.0.0.1", "10.0.0.2"):
        limited.leave(address)
    limited.admit("10.0.0.3")
    assert len(limited._clients) == 2  # a client in debt is remembered, so that reconnecting gains nothing
    now[0] += 100
    limited.admit("10.0.0.4")
    assert len(limited._clients) == 2 and limited.num_connections == 2


def test_a_client_above_its_request_rate_gains_nothing_by_reconnecting():
    now = [100.0]
    limited = throttle.Throttle(throttle.Limits(client_requests_per_s=2), clock=lambda: now[0])
    limited.admit("10.0.0.1")
    assert [limited.book_request("10.0.0.1") for _ in range(throttle.BURST_REQUESTS)] == [0.0] * throttle.BURST_REQUESTS
    limited.leave("10.0.0.1")
    limited.admit("10.0.0.2")  # a new client: those without debts are forgotten
    limited.admit("10.0.0.1")
    assert limited.book_request("10.0.0.1") == 0.5  # then it passes
    now[0] += 0.5
    assert limited.book_request("10.0.0.1") == 0.0


def test_a_few_clients_leave_room_for_another():
    limited = throttle.Throttle(throttle.Limits())
    for number in range(8):
        while limited.admit(f"10.0.0.{number}") is None:
            pass
    assert limited.admit("10.0.0.8") is None


def test_addresses_of_one_subscriber_count_as_one():
    limited = throttle.Throttle(throttle.Limits(max_connections=5, max_connections_per_client=2))
    assert limited.admit("2001:db8::1") is None and limited.admit("2001:db8::2") is None
    assert limited.admit("2001:db8::3") == "client_connections"
    assert limited.admit("::ffff:10.0.0.1") is None and limited.admit("10.0.0.1") is None
    assert limited.admit("10.0.0.1") == "client_connections"
    assert limited.admit("10.0.0.2") is None and limited.admit("10.0.0.3") == "connections"
    limited.leave("10.0.0.2")
    assert limited.admit("10.0.0.3") is None


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"client_bytes_per_s": 0}, "must be a positive number"),
        ({"total_bytes_per_s": float("inf")}, "must be a positive number"),
        ({"client_requests_per_s": float("nan")}, "must be a positive number"),
        ({"max_connections": 0}, "max_connections = 0 must be at least 1"),
        ({"allow": ("10.0.0.0/99",)}, "is not an address or network"),
    ],
)
def test_bad_limits_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        throttle.Limits(**limits)


def test_bad_arguments_end_in_one_line(tmp_path, capsys):
    taken = sockets.listen("127.0.0.1", 0)
    port = str(taken.getsockname()[1])
    (tmp_path / "d").mkdir()
    for arguments, message in [
        (["--upstream", "ftp://x", "--dir", str(tmp_path / "a")], "unknown scheme"),
        (["--upstream", "http://x:1"], "cannot be served in place; give --dir"),
        (["--upstream", str(tmp_path / "d"), "--dir", str(tmp_path / "d")], "is the upstream itself"),
        (["--upstream", str(tmp_path / "d"), "--allow", "nonsense"], "not an address or network"),
        (["--upstream", "http://x:1", "--dir", str(tmp_path / "a"), "--keep", "0"], "keep = 0 must be at least 1"),
        (["--upstream", "http://x:1", "--dir", str(tmp_path / "a"), "--trusted_key", "ab"], "64 lowercase hex"),
        (["--upstream", "http://x:1", "--dir", str(tmp_path / "a"), "--port", port], "cannot listen on"),
        (
            ["--upstream", "http://x:1", "http://y:1", "--dir", str(tmp_path / "a")],
            "http://y:1 are given without a key",
        ),
    ]:
        extra = [] if "--port" in arguments else ["--port", "0"]
        assert commands.run("sharding.relay", *arguments, *extra) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    taken.close()


def test_a_directory_has_one_writer(tmp_path):
    first = store.Store(tmp_path)
    with pytest.raises(ValueError, match="another relay writes"):
        store.Store(tmp_path)
    first.close()
    store.Store(tmp_path).close()


def test_an_origin_keeps_a_version_that_it_followed(tmp_path):
    """A version finished between two passes does not disappear and come back: relays would download it again."""
    objects = proxy.contents(0)
    proxy.begin(tmp_path, 0, objects)
    with proxy.running(tmp_path) as origin:
        proxy.wait_until(lambda: origin.store.listing()["partial"] == [0])
        epoch = origin.store.versions[0].epoch
        finish(tmp_path, 0, objects)
        proxy.wait_until(proxy.holds(origin, 0))
        time.sleep(0.1)  # several looks
        proxy.wait_until(proxy.holds(origin, 0))
        assert origin.store.versions[0].epoch == epoch


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (store, "_append")])
def test_half_an_object_is_never_exposed(tmp_path, monkeypatch, module, name):
    """If any call to the disk fails, the object is not exposed, and no file of it remains."""

    def full(*args):
        raise OSError(28, "No space left on device")

    good = store.journal.Object(**proxy.entry("a/b", b"x" * 1000))
    with contextlib.closing(store.Store(tmp_path)) as held:
        held.recover()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space"):
                held.add(3, good, b"x" * 1000, 0)
        assert not held.has(3, good) and held.object(3, "a/b") is None and held.num_bytes == 0
        assert not list(tmp_path.rglob(".*.tmp"))
        held.add(3, good, b"x" * 1000, 0)
        assert held.has(3, good) and held.num_bytes == 1000
        held.remove(3)
        assert held.num_bytes == 0


def test_a_late_object_of_a_withdrawn_version_changes_nothing(tmp_path, monkeypatch):
    """An upstream delivers an object of the old version 3 before the new one has begun, while it grows, or when it is complete."""
    old, new = proxy.contents(22), proxy.contents(3)
    entries = {path: store.journal.Object(**proxy.entry(path, data)) for path, data in new.items()}
    late = "tensors/t4/c.0"
    stale = store.journal.Object(**proxy.entry(late, old[late]))
    data = proxy.manifest(3, new)

    def begin_again(*args):
        patch.undo()
        held.remove(3)
        for path, entry in entries.items():
            held.add(3, entry, new[path], held.num_removals(3))
        return atomic_file.staged(*args)

    with contextlib.closing(store.Store(tmp_path)) as held:
        held.recover()
        held.add(3, stale, old[late], 0)
        held.remove(3)
        with pytest.raises(store.NotNeeded):
            held.add(3, stale, old[late], 0)
        assert not held.versions and not (tmp_path / "v00000003").exists()
        held.add(3, stale, old[late], 1)
        with monkeypatch.context() as patch:
            patch.setattr(atomic_file, "staged", begin_again)
            with pytest.raises(store.NotNeeded):  # removed while it was written
                held.add(3, stale, old[late], 1)
        held.finish(3, store.manifest_lib.parse(data, version=3), data)
        with pytest.raises(store.NotNeeded):
            held.add(3, stale, old[late], 2)
        assert all(held.has(3, entry) for entry in entries.values())
        assert held.num_bytes == sum(map(len, new.values())) + len(data)
    with contextlib.closing(store.Store(tmp_path)) as held:
        assert held.recover() == 0 and held.complete() == [3]


def test_an_object_whose_line_finds_no_room_is_not_exposed(tmp_path, monkeypatch):
    """The file is another's by then, so the entry of the earlier object must not stay."""
    first, second = (store.journal.Object(**proxy.entry("a", data)) for data in (b"one", b"other"))
    with contextlib.closing(store.Store(tmp_path)) as held:
        held.recover()
        held.add(3, first, b"one", 0)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_append", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space"):
                held.add(3, second, b"other", 0)
        assert held.object(3, "a") is None and held.num_bytes == 0


def test_only_what_the_trusted_key_signed_is_mirrored(pub, tmp_path):
    proxy.publish(pub, 0, proxy.contents(0))
    proxy.publish(pub, 2, proxy.contents(2))
    proxy.sign(pub)
    proxy.publish(pub, 1, proxy.contents(1))  # after the head
    with proxy.running(pub) as origin:
        with proxy.running(origin.url, tmp_path / "a", trusted_key=TRUSTED, options=FAST, holding=[0, 2]):
            assert not (tmp_path / "a" / "v00000001").exists()
