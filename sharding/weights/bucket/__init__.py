"""Working directories in buckets (gs://, s3://): a local folder that is mirrored into the bucket, and restored from it elsewhere."""

from sharding.weights.bucket.folder import downloaded
from sharding.weights.bucket.mirror import check, fetched, local_folder, mirrored, pace
from sharding.weights.bucket.storage import is_url, open_store

__all__ = ["check", "downloaded", "fetched", "is_url", "local_folder", "mirrored", "open_store", "pace"]
