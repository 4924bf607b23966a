"""Working directories in buckets (gs://, s3://): a local folder that is mirrored into the bucket, and restored from it elsewhere."""

from sharding.bucket.folder import downloaded
from sharding.bucket.mirror import check, fetched, local_folder, mirrored, pace
from sharding.bucket.storage import is_url, open_store

__all__ = ["check", "downloaded", "fetched", "is_url", "local_folder", "mirrored", "open_store", "pace"]
