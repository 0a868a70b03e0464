"""The failpoints of wm at which tests kill it."""

PUBLISHING = (
    "write-synced",
    "work-opened",
    "checkpoint",
    "publish-start",
    "publish-file",
    "publish-sealed",
    "publish-manifest",
    "publish-renamed",
    "publish-durable",
    "latest-drafted",
    "publish-linked",
    "discard-renamed",
)
"""Before the end of `Work.publish`, in their order."""
PUBLISHED = "publish-done"
REMOVING = "prune-file"
REPLACING = "write-kept"
"""Between the two renames that keep the checkpoint before the last."""
