"""Downloads a folder of a bucket, or the newest state of a run's working directory there, and prints the path of the local copy.

python -m sharding.bucket s3://BUCKET/PATH [PATTERN...]
"""

import sys

from sharding.system import cli
from sharding.weights.bucket import folder, storage


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = cli.Parser(prog="python -m sharding.bucket", description=__doc__)
    parser.add_argument("url", help="gs:// or s3:// URL of a folder of files, or of a run's working directory")
    parser.add_argument(
        "names", nargs="*", default=["*"], metavar="PATTERN", help='such as "checkpoints/*"; default: all'
    )
    return cli.run(parser, argv, _download)


def _download(args) -> int:
    if not storage.is_url(args.url):
        raise ValueError(f"{args.url} is a path, not the URL of a bucket; write gs://BUCKET/PATH or s3://BUCKET/PATH")
    print(folder.downloaded(args.url, args.names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
