"""Runs one relay, a verifying mirror of published weights: `python -m sharding.relay --upstream URL_OR_DIR... --dir D --port P`."""

import contextlib
import dataclasses
import signal
import sys

from sharding.system import cli, sign_in, signed_message, sockets
from sharding.weights.relay import server as server_lib
from sharding.weights.relay import throttle


def main(argv: list[str] | None = None) -> int:
    """Runs the command `python -m sharding.relay`; blocks until a signal. Returns its exit code."""
    parser = cli.Parser(prog="python -m sharding.relay", description=__doc__)
    add = parser.add_argument
    helps = "URL of a relay, or several with --trusted_key; or one directory or bucket"
    add("--upstream", nargs="+", required=True, metavar="URL_OR_DIR", help=helps)
    add("--dir", help="directory of the mirror; without it a directory upstream is served in place")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8200, help="port to listen on; 0 takes a free one (default: 8200)")
    add("--address_file", help="file that gets the relay's URL once it answers")
    add("--keep", type=int, default=5, help="newest versions to keep, in addition to the bases they need (default: 5)")
    add("--max_bytes", type=float, help="most bytes that the mirror may occupy on disk")
    add("--trusted_key", help="the run's public key in hex, or its root file: mirror only versions that it signed")
    add("--client_bytes_per_s", type=float, help="most bytes per second to one client")
    add("--total_bytes_per_s", type=float, help="most bytes per second to all clients together")
    add("--client_requests_per_s", type=float, help="most requests per second of one client")
    add("--max_connections", type=int, default=1024, help="most connections (default: 1024)")
    add("--max_connections_per_client", type=int, default=256, help="most connections of one client (default: 256)")
    add("--allow", nargs="*", default=(), metavar="NETWORK", help="client networks, as in 10.0.0.0/8 (default: all)")
    add("--orchestrator", metavar="URL", help="sign in at this orchestrator with --key, to be on its table of nodes")
    add("--run", default="", help="public key (hex) of the run of --orchestrator (default: the first that answers)")
    add("--key", metavar="FILE", help="file of this relay's key, created if absent; its public half is printed")
    add("--exit_with_parent", action="store_true", help="stop when standard input closes")
    return cli.run(parser, argv, _relay)


def _relay(args) -> int:
    if args.max_bytes is not None and not 1 <= args.max_bytes < float("inf"):
        raise ValueError(f"--max_bytes = {args.max_bytes} must be finite and at least 1; leave it out for no limit")
    if args.orchestrator and not args.key:
        found = f"--orchestrator {args.orchestrator} needs --key, by which this relay signs in"
        raise ValueError(f"{found}; add --key FILE")
    key = signed_message.load_or_create_key(args.key) if args.key else None
    limits = throttle.Limits(**{f.name: getattr(args, f.name) for f in dataclasses.fields(throttle.Limits)})
    with sockets.listen(args.host, args.port) as sock:
        relay = server_lib.Relay(
            args.upstream,
            args.dir,
            sock,
            keep=args.keep,
            max_bytes=None if args.max_bytes is None else int(args.max_bytes),
            trusted_key=args.trusted_key,
            limits=limits,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: relay.stop())
        if args.exit_with_parent:
            cli.stop_at_eof(relay.stop)
        print(f"relaying {' '.join(args.upstream)} on {relay.url}", flush=True)
        if key:
            print(f"key: {key.public_key().public_bytes_raw().hex()}", flush=True)
        if args.address_file:
            sockets.announce(args.address_file, sock)
        node = contextlib.nullcontext()
        if key and args.orchestrator:
            node = sign_in.SignIn(args.orchestrator, key, "relay", relay.report, run=args.run)
        with node, cli.status_line(relay.progress):
            relay.run()
        relay.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
