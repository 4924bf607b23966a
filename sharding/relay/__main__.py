"""Runs one relay: `python -m sharding.relay --upstream URL_OR_DIR... --dir D --port P`.

A verifying mirror of published weights; sharding/relay/server.py has what it serves and why.
"""

import os
import signal
import sys
import threading

from sharding.relay import server as server_lib
from sharding.relay import throttle
from sharding.system import cli, sockets


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m sharding.relay", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--upstream", nargs="+", required=True, metavar="URL_OR_DIR", help="relays, or one directory or bucket"
    )
    parser.add_argument("--dir", help="where the mirror is kept; without it a directory is served in place")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8200, help="0 takes a free port")
    parser.add_argument("--address_file", help="written with the URL once the relay answers")
    parser.add_argument("--keep", type=int, default=5, help="newest versions held, besides the bases they need")
    parser.add_argument("--max_bytes", type=float, help="most that the mirror may occupy")
    parser.add_argument("--trusted_key", help="hex of the ed25519 key that must have signed every manifest")
    parser.add_argument("--client_bytes_per_s", type=float)
    parser.add_argument("--total_bytes_per_s", type=float)
    parser.add_argument("--client_requests_per_s", type=float)
    parser.add_argument("--max_connections", type=int, default=1024)
    parser.add_argument("--max_connections_per_client", type=int, default=256)
    parser.add_argument(
        "--allow", nargs="*", default=[], metavar="NETWORK", help="such as 10.0.0.0/8; default: everyone"
    )
    parser.add_argument("--exit_with_parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    try:
        if args.max_bytes is not None and not 1 <= args.max_bytes < float("inf"):
            raise ValueError(f"--max_bytes = {args.max_bytes} must be at least 1; leave it out for no limit")
        limits = throttle.Limits(
            args.client_bytes_per_s,
            args.total_bytes_per_s,
            args.client_requests_per_s,
            args.max_connections,
            args.max_connections_per_client,
            tuple(args.allow),
        )
        sock = sockets.listen(args.host, args.port)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        relay = server_lib.Relay(
            args.upstream,
            args.dir,
            sock,
            keep=args.keep,
            max_bytes=None if args.max_bytes is None else int(args.max_bytes),
            trusted_key=args.trusted_key,
            limits=limits,
        )
    except (ValueError, OSError) as error:
        sock.close()
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.server.close())
    if args.exit_with_parent:
        threading.Thread(target=_close_at_eof, args=(relay.server,), daemon=True).start()
    print(f"relaying {' '.join(args.upstream)} on {relay.url}", flush=True)
    if args.address_file:
        sockets.announce(args.address_file, sock)
    relay.run()
    relay.close()
    return 0


def _close_at_eof(server: server_lib.Server) -> None:
    while os.read(0, 4096):
        pass
    server.close()


if __name__ == "__main__":
    sys.exit(main())
